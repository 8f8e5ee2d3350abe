// Decode and linear speculative steps: one thread owns VEC channels of a sequence, from reading its window to writing
// it back, so no other thread ever sees a half-written slot. PACKED: offsets are given and a sequence may have several
// rows; else each has one, and a thread takes SEQUENCES of them.
// Grid: x sequences, or groups of SEQUENCES; y and z (a high digit) channel tiles: neighbouring blocks share their taps
// in the cache.

#if PACKED
// AHEAD rows are loaded before the first is needed.
DEVICE void update(const Parameters &p, int index, i64 channel, const Taps &taps, bool report) {
  const Sequence s = read_sequence(p, index, true);
  const int fault = s.fault | (index == 0 && s.begin != 0 ? FAULT_OFFSETS : 0);
  if (report && fault) raise_fault(p.fault_flag, fault);
  if (!s.live) {
    Raw<X, VEC> zero = {};
    const int first = s.begin < 0 ? 0 : s.begin, last = s.end < p.rows ? s.end : p.rows;
    for (int row = first; row < last; ++row) store_row(p, row, channel, zero);
    return;
  }
  const int tokens = s.end - s.begin;
  Raw<X, VEC> rows[AHEAD];
  UNROLL for (int u = 0; u < AHEAD; ++u)
    if (u < tokens) rows[u] = load_row(p, s.begin + u, channel);
  Window window;
  clear(window);
  if (s.has_history) {
    SlotWindow fetched;
    fetch_window(p, s.slot, channel, s.window_start, fetched);
    unpack_window(p, channel, fetched, s.window_start, window);
  }

  const i64 offset = slot_offset(p, s.slot, channel);
  bool stored = false;
  if constexpr (SPECULATIVE) {
    if (report && tokens > p.positions - WIDTH + 2) raise_fault(p.fault_flag, FAULT_STATE_TRUNCATED);
    if constexpr (STATE_LAYOUT == 1 && AHEAD == POSITIONS - WIDTH + 2) {
      if (tokens == AHEAD) {
        // The step fills the slot: (last W-2 of the window, all tokens), one run of wide words.
        float run[VEC * POSITIONS];
        UNROLL for (int i = 0; i < VEC; ++i) {
          UNROLL for (int tap = 1; tap < WIDTH - 1; ++tap) run[i * POSITIONS + tap - 1] = window.past[tap][i];
          UNROLL for (int u = 0; u < AHEAD; ++u) run[i * POSITIONS + WIDTH - 2 + u] = element(rows[u], i);
        }
        store_run(p, offset, channel, run);
        stored = true;
      }
    }
    if (!stored) {
      UNROLL for (int tap = 1; tap < WIDTH - 1; ++tap) store_position(p, offset, tap - 1, window.past[tap]);
    }
  }
  NO_UNROLL for (int t = 0; t < tokens; t += AHEAD) {
    UNROLL for (int u = 0; u < AHEAD; ++u)
      if (t + u < tokens) {
        const Raw<X, VEC> input = rows[u];
        if (t + u + AHEAD < tokens) rows[u] = load_row(p, s.begin + t + u + AHEAD, channel);
        store_row(p, s.begin + t + u, channel, convolve(window, taps, input));
        if constexpr (SPECULATIVE)
          if (!stored && WIDTH - 2 + t + u < p.positions)
            store_position(p, offset, WIDTH - 2 + t + u, window.past[WIDTH - 2]);
      }
  }
  if constexpr (!SPECULATIVE) store_window(p, s.slot, channel, window);
}

#endif

KERNEL(THREADS, MIN_BLOCKS) conv_update(PARAMETER Parameters p) {
  let_later_grids_start();
  const i64 channel = ((i64)(blockIdx.z * gridDim.y + blockIdx.y) * THREADS + threadIdx.x) * VEC;
  const bool active = channel < p.channels;
  // Weights and bias are constants of the model: no earlier kernel of the step writes them.
  const RawTaps raw_taps = fetch_taps(p, active ? channel : 0);
#if PACKED
  const Taps taps = unpack_taps(raw_taps);
  wait_for_earlier_grids();
  if (!active) return;
  update(p, (int)blockIdx.x, channel, taps, channel == 0);
#elif SEQUENCES == 1
  // The chain that decides a small step is: earlier grid, slot number, window, result. So whatever does not hang on the
  // earlier grid is done in front of the wait, addresses included.
  const int index = (int)blockIdx.x;
  SequencePlace place = place_of(p, index);
  const char *row = row_address(p, index, channel);
  hold(place);
  hold(row);
  char *out = result_address(p, index, channel);
  hold(out);
  wait_for_earlier_grids();
  if (!active) return;
  const Sequence s[1] = {read_single(p, place, index, true)};
  const Raw<X, VEC> inputs[1] = {load<X, VEC, true>(row)};
  convolve_singles<1>(p, unpack_taps(raw_taps), channel, s, 1, channel == 0, inputs, out, 0);
#else
  // Many sequences: what decides is how many loads are under way.
  const Taps taps = unpack_taps(raw_taps);
  wait_for_earlier_grids();
  if (!active) return;
  const int first = (int)blockIdx.x * SEQUENCES, left = p.rows - first;
  Raw<X, VEC> inputs[SEQUENCES];
  Sequence s[SEQUENCES];
  UNROLL for (int i = 0; i < SEQUENCES; ++i)
    if (i < left) inputs[i] = load_row(p, first + i, channel);
  UNROLL for (int i = 0; i < SEQUENCES; ++i)
    if (i < left) s[i] = read_sequence(p, first + i, true);
  convolve_singles<SEQUENCES>(p, taps, channel, s, left, channel == 0, inputs, result_address(p, first, channel),
                              p.out_row_stride * X::SIZE);
#endif
}
