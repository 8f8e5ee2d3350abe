// A thread's channels: raw vectors as they lie in memory, and their values. X, Weight, State and Bias are defined by
// the variant's header; VEC is the number of neighbouring channels a thread owns.

struct BFloat16 { static constexpr int SIZE = 2; static constexpr bool BRAIN = true; };
struct Float16 { static constexpr int SIZE = 2; static constexpr bool BRAIN = false; };
struct Float32 { static constexpr int SIZE = 4; static constexpr bool BRAIN = false; };

// N raw elements of type T, packed as in memory.
template <class T, int N>
struct Raw {
  static constexpr int BYTES = N * T::SIZE;
  u32 words[(BYTES + 3) / 4];
};

// A thread's channels in shared memory.
template <int BYTES>
struct alignas(BYTES < 16 ? BYTES : 16) Shared {
  unsigned char bytes[BYTES];
};

// Largest word that divides a run of bytes. With one channel a thread nothing is known about alignment beyond the
// element's own; with more, the host has checked the base addresses and strides.
template <class T, int N>
DEVICE constexpr int word_bytes() {
  if (VEC == 1) return T::SIZE;
  int word = 16;
  while (N * T::SIZE % word) word /= 2;
  return word;
}

template <class T, int N, bool STREAM>
DEVICE Raw<T, N> load(const void *from) {
  constexpr int WORD = word_bytes<T, N>();
  Raw<T, N> raw;
  if constexpr (WORD == 2 && N > 1) {
    UNROLL for (int i = 0; i < N; ++i) {
      u32 half;
      load_word<2, STREAM>((const char *)from + 2 * i, &half);
      raw.words[i / 2] = i % 2 ? raw.words[i / 2] | half << 16 : half;
    }
  } else {
    UNROLL for (int i = 0; i < N * T::SIZE / WORD; ++i)
      load_word<WORD, STREAM>((const char *)from + WORD * i, raw.words + i * WORD / 4);
  }
  return raw;
}

template <class T, int N, bool STREAM>
DEVICE void store(void *to, const Raw<T, N> &raw) {
  constexpr int WORD = word_bytes<T, N>();
  if constexpr (WORD == 2 && N > 1) {
    UNROLL for (int i = 0; i < N; ++i) {
      const u32 half = raw.words[i / 2] >> (i % 2 * 16);
      store_word<2, STREAM>((char *)to + 2 * i, &half);
    }
  } else {
    UNROLL for (int i = 0; i < N * T::SIZE / WORD; ++i)
      store_word<WORD, STREAM>((char *)to + WORD * i, raw.words + i * WORD / 4);
  }
}

// Runs of several words, side by side in memory, one for each thread of a warp. Word by word they are far apart, and a
// sector is touched again with every word; so a whole warp moves its runs as one stretch, each word of all threads in
// one piece, and its threads swap words through shared memory.
template <class T, int N>
DEVICE constexpr bool runs_of_words() {
  return WARPS_SWAP && VEC > 1 && word_bytes<T, N>() >= 8 && N * T::SIZE > word_bytes<T, N>();
}

template <class T, int N>
DEVICE Raw<T, N> load_stretch(const void *own) {
  constexpr int BYTES = N * T::SIZE, WORD = word_bytes<T, N>();
  const char *stretch = (const char *)own - lane() * BYTES + lane() * WORD;
  Raw<T, N> raw;
  UNROLL for (int i = 0; i < BYTES / WORD; ++i) load_word<WORD, true>(stretch + i * 32 * WORD, raw.words + i * WORD / 4);
  return raw;
}

template <class T, int N>
DEVICE void store_stretch(void *own, const Raw<T, N> &raw) {
  constexpr int BYTES = N * T::SIZE, WORD = word_bytes<T, N>();
  char *stretch = (char *)own - lane() * BYTES + lane() * WORD;
  UNROLL for (int i = 0; i < BYTES / WORD; ++i) store_word<WORD, true>(stretch + i * 32 * WORD, raw.words + i * WORD / 4);
}

// From pieces of the stretch to runs, or back. Every thread of the warp takes part.
template <class T, int N, bool TO_RUNS>
DEVICE Raw<T, N> swap_words(const Raw<T, N> &raw) {
  constexpr int BYTES = N * T::SIZE, WORD = word_bytes<T, N>(), WORDS = BYTES / WORD;
  SHARED unsigned char scratch[THREADS * BYTES];
  unsigned char *stretch = scratch + (threadIdx.x - lane()) * BYTES;
  Raw<T, N> swapped;
  UNROLL for (int i = 0; i < WORDS; ++i)
    store_shared_word<WORD>(stretch + (TO_RUNS ? i * 32 + lane() : lane() * WORDS + i) * WORD, raw.words + i * WORD / 4);
  synchronize_warp();
  UNROLL for (int i = 0; i < WORDS; ++i)
    load_shared_word<WORD>(stretch + (TO_RUNS ? lane() * WORDS + i : i * 32 + lane()) * WORD,
                           swapped.words + i * WORD / 4);
  synchronize_warp();
  return swapped;
}

template <class T, int N>
DEVICE Raw<T, N> read_shared(const Shared<N * T::SIZE> &from) {
  Raw<T, N> raw;
  constexpr int BYTES = N * T::SIZE;
  if constexpr (BYTES == 2) raw.words[0] = *(const u16 *)&from;
  else if constexpr (BYTES == 4) raw.words[0] = *(const u32 *)&from;
  else UNROLL for (int i = 0; i < BYTES / 8; ++i) {
    const u64 word = ((const u64 *)&from)[i];
    raw.words[2 * i] = (u32)word, raw.words[2 * i + 1] = (u32)(word >> 32);
  }
  return raw;
}

template <int N>
DEVICE float element(const Raw<Float32, N> &raw, int i) { return bits_as_float(raw.words[i]); }
template <int N>
DEVICE float element(const Raw<BFloat16, N> &raw, int i) {
  return bits_as_float(i % 2 ? raw.words[i / 2] & 0xffff0000u : raw.words[i / 2] << 16);
}
template <int N>
DEVICE float element(const Raw<Float16, N> &raw, int i) {
  return half_as_float((u16)(raw.words[i / 2] >> (i % 2 * 16)));
}

// The one rounding at the end.
template <class T, int N>
DEVICE Raw<T, N> round_to(const float (&values)[N]) {
  Raw<T, N> raw;
  if constexpr (T::SIZE == 4) {
    UNROLL for (int i = 0; i < N; ++i) raw.words[i] = float_as_bits(values[i]);
  } else {
    UNROLL for (int i = 0; i < N; i += 2) {
      const bool pair = i + 1 < N;
      if constexpr (T::BRAIN)
        raw.words[i / 2] = pair ? floats_to_bfloats(values[i], values[pair ? i + 1 : i]) : float_to_bfloat(values[i]);
      else
        raw.words[i / 2] = pair ? floats_to_halves(values[i], values[pair ? i + 1 : i]) : float_to_half(values[i]);
    }
  }
  return raw;
}

// What a slot keeps of an input. Between equal 16-bit brain floats the bits pass through, NaN payloads included.
template <class T, int N>
DEVICE Raw<T, N> kept(const float (&values)[N]) {
  if constexpr (T::BRAIN && X::BRAIN) {
    Raw<T, N> raw;
    UNROLL for (int i = 0; i < N; i += 2) {
      raw.words[i / 2] = float_as_bits(values[i]) >> 16;
      if (i + 1 < N) raw.words[i / 2] |= float_as_bits(values[i + 1 < N ? i + 1 : i]) & 0xffff0000u;
    }
    return raw;
  } else {
    return round_to<T, N>(values);
  }
}

DEVICE float sigmoid(float value) {
  return reciprocal_approximate(1.0f + exp2_approximate(-1.44269504088896341f * value));
}
DEVICE float silu(float value) { return value * sigmoid(value); }
