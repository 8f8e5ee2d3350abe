// Checkpoints: windows that end at named tokens of a sequence, written to slots of their own. Sequence i names those
// numbered checkpoint_offsets[i] up to checkpoint_offsets[i + 1], each by its count of tokens in this call.
//
// A checkpoint after at least W-1 tokens holds rows alone, so any block can write it: each has a block behind those
// of the rows. An earlier one needs the old window, which the block of the sequence's first row alone may read.

// Whether a checkpoint may be written; the fault that it leaves otherwise, or 0.
DEVICE bool is_checkpoint(const Parameters &p, int checkpoint, int sequence_tokens, int &tokens, int &slot, int &fault) {
  tokens = p.checkpoint_tokens[checkpoint];
  slot = p.checkpoint_slots[checkpoint];
  const bool bad_tokens = tokens < 1 || tokens > sequence_tokens, bad_slot = slot < 0 || slot >= p.slot_count;
  const bool padding = slot == p.pad_slot_id;
  fault = padding ? 0 : bad_tokens ? FAULT_CHECKPOINT : bad_slot ? FAULT_SLOT : 0;
  return !padding && !fault;
}

// Those of a sequence after fewer than W-1 tokens. They are few, so each reads the old window for itself.
DEVICE void store_early_checkpoints(const Parameters &p, int sequence, i64 channel) {
  const int first = p.checkpoint_offsets[sequence], last = p.checkpoint_offsets[sequence + 1];
  if (first >= last) return;
  const Sequence s = read_sequence(p, sequence, false);
  if (!s.live) return;
  NO_UNROLL for (int i = first < 0 ? 0 : first; i < last && i < p.checkpoints; ++i) {
    int tokens, slot, fault;
    if (!is_checkpoint(p, i, s.end - s.begin, tokens, slot, fault) || tokens >= WIDTH - 1) continue;
    Window window;
    clear(window);
    if (s.has_history) {
      SlotWindow fetched;
      fetch_window(p, s.slot, channel, s.window_start, fetched);
      unpack_window(p, channel, fetched, s.window_start, window);
    }
    NO_UNROLL for (int t = 0; t < tokens; ++t) {
      const Raw<X, VEC> raw = load_row(p, s.begin + t, channel);
      float input[VEC];
      UNROLL for (int i = 0; i < VEC; ++i) input[i] = element(raw, i);
      push(window, input);
    }
    store_window(p, slot, channel, window);
  }
}

// Those of all sequences whose first row is a block's, before the block computes: a second window held through its
// work would cost registers in every step. `sequence` owns the first row, or is -1.
DEVICE void store_early_checkpoints_of_rows(const Parameters &p, int sequence, int row0, int row1, i64 channel) {
  const int named = p.checkpoint_offsets[p.sequences];  // none are left behind it: the end of a padded step is skipped
  for (int i = sequence < 0 ? 0 : sequence;
       i < p.sequences && p.cu_seqlens[i] < row1 && p.checkpoint_offsets[i] < named; ++i)
    if (p.cu_seqlens[i] >= row0) store_early_checkpoints(p, i, channel);
}

// One checkpoint after W-1 tokens or more; `report`: leave its fault too, whatever its count.
DEVICE void store_checkpoint(const Parameters &p, int checkpoint, i64 channel, bool active, bool report) {
  const int sequence = first_above(p.checkpoint_offsets, p.sequences + 1, checkpoint) - 1;
  if (sequence < 0 || sequence >= p.sequences || !active) return;  // nobody's, as behind the last of a padded step
  const Sequence s = read_sequence(p, sequence, false);
  if (!s.live) return;
  int tokens, slot, fault;
  const bool sound = is_checkpoint(p, checkpoint, s.end - s.begin, tokens, slot, fault);
  if (report && fault) raise_fault(p.fault_flag, fault);
  if (!sound || tokens < WIDTH - 1) return;
  Window window;
  UNROLL for (int tap = 0; tap < WIDTH - 1; ++tap)
    set_input(window, tap, load_row(p, s.begin + tokens - (WIDTH - 1) + tap, channel));
  store_window(p, slot, channel, window);
}
