// The parameters of the backward's kernels. Generated from serving_conv/native/abi.py.
struct BackwardParameters {
  Parameters forward;  // the call that is differentiated
  const void *dout;  // [batches, rows_per_batch, channels], any strides
  void *dx;  // [batches, rows_per_batch, channels], channels contiguous, or null: not wanted
  const float *dfinal;  // [final_count, WIDTH - 1, channels], or null: zeros
  float *dinitial;  // [initial_count, WIDTH - 1, channels], or null: not wanted
  float *partials;  // [runs, or 1 without ORDERED; taps, then bias; channels], or null: not wanted
  void *dweight;  // [channels, WIDTH]
  void *dbias;  // [channels], if HAS_BIAS
  i64 x_batch_stride;  // elements
  i64 x_channel_stride;  // elements; 1 where a thread owns more than one channel
  i64 dout_batch_stride;  // elements
  i64 dout_row_stride;  // elements
  i64 dout_channel_stride;  // elements; 1 where a thread owns more than one channel
  i64 dx_batch_stride;  // elements
  i64 dx_row_stride;  // elements
  int rows_per_batch;
  int rows_of_run;
  int runs_per_batch;
  int runs;  // of all batches
  int initial_count;  // sequences with a place in dinitial
  int final_count;  // sequences with a place in dfinal
};
