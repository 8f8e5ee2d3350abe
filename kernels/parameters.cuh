// The parameters of the convolutions. Generated from serving_conv/native/abi.py.
struct Parameters {
  const void *weight;  // [channels, WIDTH]
  const void *bias;  // [channels], if HAS_BIAS
  void *conv_state;  // [slot_count, channels, positions]
  const void *x;  // [rows, channels]
  void *out;  // [rows, channels]
  const int *cu_seqlens;  // [sequences + 1], or null: one row a sequence
  const int *slots;  // [sequences]
  const unsigned char *has_initial_state;  // [sequences], or null
  const int *num_accepted_tokens;  // [sequences], or null
  const unsigned char *speculative;  // [sequences], if SPECULATIVE: the tokens are drafts
  const int *checkpoint_offsets;  // [sequences + 1], if CHECKPOINTS
  const int *checkpoint_tokens;  // [checkpoints]
  const int *checkpoint_slots;  // [checkpoints]
  int *fault_flag;  // [1], sticky
  i64 x_row_stride;  // elements
  i64 out_row_stride;  // elements
  i64 slot_stride;  // elements
  i64 channel_stride;  // elements, in a slot
  i64 position_stride;  // elements, in a slot
  i64 slots_stride;  // elements of slots
  int channels;
  int slot_count;
  int positions;  // in a slot
  int pad_slot_id;
  int rows;
  int sequences;
  int checkpoints;
  int unused;  // the size is a multiple of eight bytes
};
