// The window of W taps: the one accumulation order that every entry shares, and how windows come from and go to
// slots. WIDTH, HAS_BIAS and SILU are defined by the variant's header, as is STATE_LAYOUT:
//   0  channels contiguous          element (position, channel) at position * position_stride + channel
//   1  positions contiguous, dense  element at channel * POSITIONS + position, a thread's channels in one run
//   2  any strides                  one element at a time

struct Taps {
  float weight[WIDTH][VEC];
  float bias[VEC];
};

struct Window {
  float past[WIDTH - 1][VEC];  // oldest first
};

// Taps as they lie in memory. Unpacking waits for the loads, so what else a thread needs is asked for in between.
struct RawTaps {
  Raw<Weight, VEC * WIDTH> weight;
  Raw<Bias, VEC> bias;
};

DEVICE RawTaps fetch_taps(const Parameters &p, i64 channel) {
  RawTaps raw;
  raw.weight = load<Weight, VEC * WIDTH, false>((const char *)p.weight + channel * (WIDTH * Weight::SIZE));
  if constexpr (HAS_BIAS) raw.bias = load<Bias, VEC, false>((const char *)p.bias + channel * Bias::SIZE);
  return raw;
}

DEVICE Taps unpack_taps(const RawTaps &raw) {
  Taps taps;
  UNROLL for (int i = 0; i < VEC; ++i) {
    UNROLL for (int tap = 0; tap < WIDTH; ++tap) taps.weight[tap][i] = element(raw.weight, i * WIDTH + tap);
    taps.bias[i] = 0.0f;
    if constexpr (HAS_BIAS) taps.bias[i] = element(raw.bias, i);
  }
  return taps;
}

DEVICE const char *row_address(const Parameters &p, int row, i64 channel) {
  return (const char *)p.x + (row * p.x_row_stride + channel) * X::SIZE;
}

DEVICE Raw<X, VEC> load_row(const Parameters &p, int row, i64 channel) {
  return load<X, VEC, true>(row_address(p, row, channel));
}

DEVICE char *result_address(const Parameters &p, int row, i64 channel) {
  return (char *)p.out + (row * p.out_row_stride + channel) * X::SIZE;
}

DEVICE void store_row(const Parameters &p, int row, i64 channel, const Raw<X, VEC> &raw) {
  store<X, VEC, true>(result_address(p, row, channel), raw);
}

DEVICE void clear(Window &window) {
  UNROLL for (int tap = 0; tap < WIDTH - 1; ++tap)
    UNROLL for (int i = 0; i < VEC; ++i) window.past[tap][i] = 0.0f;
}

template <class T>
DEVICE void set_input(Window &window, int tap, const Raw<T, VEC> &raw) {
  UNROLL for (int i = 0; i < VEC; ++i) window.past[tap][i] = element(raw, i);
}

// Put one input behind the window; the oldest falls out.
DEVICE void push(Window &window, const float (&input)[VEC]) {
  UNROLL for (int i = 0; i < VEC; ++i) {
    UNROLL for (int tap = 0; tap + 1 < WIDTH - 1; ++tap) window.past[tap][i] = window.past[tap + 1][i];
    window.past[WIDTH - 2][i] = input[i];
  }
}

// The sum of one row before its activation: bias, then tap 0 (oldest) to tap W-1 (this row), fused, in fp32.
DEVICE void sum_taps(const Window &window, const Taps &taps, const float (&input)[VEC], float (&sum)[VEC]) {
  UNROLL for (int i = 0; i < VEC; ++i) {
    sum[i] = taps.bias[i];
    UNROLL for (int tap = 0; tap < WIDTH - 1; ++tap)
      sum[i] = fused_multiply_add(window.past[tap][i], taps.weight[tap][i], sum[i]);
    sum[i] = fused_multiply_add(input[i], taps.weight[WIDTH - 1][i], sum[i]);
  }
}

// The convolution of one row: the sum, then SiLU; one rounding.
DEVICE Raw<X, VEC> convolve(Window &window, const Taps &taps, const Raw<X, VEC> &raw) {
  float input[VEC], sum[VEC];
  UNROLL for (int i = 0; i < VEC; ++i) input[i] = element(raw, i);
  sum_taps(window, taps, input, sum);
  if constexpr (SILU) UNROLL for (int i = 0; i < VEC; ++i) sum[i] = silu(sum[i]);
  push(window, input);
  return round_to<X, VEC>(sum);
}

DEVICE i64 slot_offset(const Parameters &p, int slot, i64 channel) {
  const i64 stride = STATE_LAYOUT == 0 ? 1 : STATE_LAYOUT == 1 ? POSITIONS : p.channel_stride;
  return slot * p.slot_stride + channel * stride;
}

// Whether this thread's whole warp moves its slots as one stretch of runs; `channels.cuh` says why that matters.
// Prefill reads few slots beside its rows, and keeps the registers.
DEVICE bool in_stretch(const Parameters &p, i64 channel) {
  if constexpr (STATE_LAYOUT == 1 && (PACKED || SEQUENCES > 0) && runs_of_words<State, VEC * POSITIONS>())
    return channel + (32 - lane()) * VEC <= p.channels;
  return false;
}

// A window as it lies in its slot: loaded ahead, unpacked when it is needed, since unpacking waits for the load.
struct SlotWindow {
#if STATE_LAYOUT == 0
  Raw<State, VEC> positions[WIDTH - 1];
#elif STATE_LAYOUT == 1
  Raw<State, VEC * POSITIONS> run;  // all positions of the thread's channels, in wide words
#else
  Raw<State, 1> elements[WIDTH - 1][VEC];
#endif
};

// Positions start .. start+W-2 of a slot.
DEVICE void fetch_window(const Parameters &p, int slot, i64 channel, int start, SlotWindow &fetched) {
  const char *from = (const char *)p.conv_state + slot_offset(p, slot, channel) * State::SIZE;
#if STATE_LAYOUT == 0
  UNROLL for (int tap = 0; tap < WIDTH - 1; ++tap)
    fetched.positions[tap] = load<State, VEC, true>(from + (start + tap) * p.position_stride * State::SIZE);
#elif STATE_LAYOUT == 1
  if (in_stretch(p, channel)) fetched.run = load_stretch<State, VEC * POSITIONS>(from);
  else fetched.run = load<State, VEC * POSITIONS, false>(from);
#else
  UNROLL for (int tap = 0; tap < WIDTH - 1; ++tap)
    UNROLL for (int i = 0; i < VEC; ++i)
      fetched.elements[tap][i] = load<State, 1, false>(
          from + ((start + tap) * p.position_stride + i * p.channel_stride) * State::SIZE);
#endif
}

DEVICE void unpack_window(const Parameters &p, i64 channel, const SlotWindow &fetched, int start, Window &window) {
#if STATE_LAYOUT == 1
  Raw<State, VEC * POSITIONS> run = fetched.run;
  if (in_stretch(p, channel)) run = swap_words<State, VEC * POSITIONS, true>(run);
#endif
  UNROLL for (int tap = 0; tap < WIDTH - 1; ++tap)
    UNROLL for (int i = 0; i < VEC; ++i) {
#if STATE_LAYOUT == 0
      window.past[tap][i] = element(fetched.positions[tap], i);
#elif STATE_LAYOUT == 1
      // Registers have no index, so a moving start is a selection.
      window.past[tap][i] = element(run, i * POSITIONS + tap);
      UNROLL for (int skip = 1; skip <= POSITIONS - (WIDTH - 1); ++skip)
        if (skip == start) window.past[tap][i] = element(run, i * POSITIONS + tap + skip);
#else
      window.past[tap][i] = element(fetched.elements[tap][i], 0);
#endif
    }
}

// A whole slot of the dense layout, all positions of the thread's channels.
DEVICE void store_run(const Parameters &p, i64 offset, i64 channel, const float (&run)[VEC * POSITIONS]) {
  char *to = (char *)p.conv_state + offset * State::SIZE;
  const Raw<State, VEC * POSITIONS> raw = kept<State, VEC * POSITIONS>(run);
  if (in_stretch(p, channel)) store_stretch(to, swap_words<State, VEC * POSITIONS, false>(raw));
  else store<State, VEC * POSITIONS, false>(to, raw);
}

DEVICE void store_position(const Parameters &p, i64 offset, int position, const float (&values)[VEC]) {
  const i64 position_stride = STATE_LAYOUT == 1 ? 1 : p.position_stride;
  const i64 channel_stride = STATE_LAYOUT == 1 ? POSITIONS : p.channel_stride;
  char *to = (char *)p.conv_state + (offset + position * position_stride) * State::SIZE;
  if constexpr (STATE_LAYOUT == 0) {
    store<State, VEC, false>(to, kept<State, VEC>(values));
  } else {
    UNROLL for (int i = 0; i < VEC; ++i) {
      const float one[1] = {values[i]};
      store<State, 1, false>(to + i * channel_stride * State::SIZE, kept<State, 1>(one));
    }
  }
}

// Window into positions 0 .. W-2 of a slot; the rest of the slot keeps its bytes.
DEVICE void store_window(const Parameters &p, int slot, i64 channel, const Window &window) {
  const i64 offset = slot_offset(p, slot, channel);
  if constexpr (STATE_LAYOUT == 1 && POSITIONS == WIDTH - 1) {
    float run[VEC * POSITIONS];
    UNROLL for (int i = 0; i < VEC; ++i)
      UNROLL for (int tap = 0; tap < WIDTH - 1; ++tap) run[i * POSITIONS + tap] = window.past[tap][i];
    store_run(p, offset, channel, run);
  } else {
    UNROLL for (int tap = 0; tap < WIDTH - 1; ++tap) store_position(p, offset, tap, window.past[tap]);
  }
}
