// The second half of the backward's reduction: adds the sums of all runs, in one fixed order, and rounds once to the
// parameters' types. A thread owns one channel of one tap (the last row of taps is the bias).
// partials: fp32 [runs, WIDTH + HAS_BIAS, channels]. Grid: all of x, y and z count threads.

constexpr int CHAINS = 16;  // sums that grow side by side, so that their loads overlap; then added pairwise

KERNEL(THREADS, MIN_BLOCKS) sum_partials(PARAMETER BackwardParameters b) {
  let_later_grids_start();
  wait_for_earlier_grids();
  const i64 block = ((i64)blockIdx.z * gridDim.y + blockIdx.y) * gridDim.x + blockIdx.x;
  const i64 channels = b.forward.channels, place = block * THREADS + threadIdx.x;
  if (place >= (WIDTH + HAS_BIAS) * channels) return;
  float chains[CHAINS] = {};
  const float *from = b.partials + place;
  const i64 pitch = (WIDTH + HAS_BIAS) * channels;
  NO_UNROLL for (int run = 0; run < b.runs; run += CHAINS)
    UNROLL for (int chain = 0; chain < CHAINS; ++chain)
      if (run + chain < b.runs) {
        u32 bits;
        load_word<4, true>(from + (run + chain) * pitch, &bits);
        chains[chain] += bits_as_float(bits);
      }
  UNROLL for (int level = 1; (1 << level) <= CHAINS; ++level)
    UNROLL for (int chain = 0; chain < CHAINS; ++chain)
      if (chain < CHAINS >> level) chains[chain] += chains[chain + (CHAINS >> level)];
  const float total[1] = {chains[0]};
  const i64 tap = place / channels, channel = place % channels;
  if (tap < WIDTH)
    store<Weight, 1, false>((char *)b.dweight + (channel * WIDTH + tap) * Weight::SIZE, round_to<Weight, 1>(total));
  else
    store<Bias, 1, false>((char *)b.dbias + channel * Bias::SIZE, round_to<Bias, 1>(total));
}
