// The names of platform_cuda.cuh in plain C++: the same kernels then run on a CPU, thread after thread, under
// AddressSanitizer and UndefinedBehaviorSanitizer. A stand-in replaces an instruction, never a part of a kernel.
#include <math.h>
#include <stdint.h>
#include <string.h>

#define DEVICE static inline
#define KERNEL(threads, blocks) static void
#define PARAMETER const
#define UNROLL
#define NO_UNROLL

typedef uint16_t u16;
typedef uint32_t u32;
typedef uint64_t u64;
typedef long long i64;

struct Index { unsigned x, y, z; };
static thread_local Index threadIdx, blockIdx, gridDim;

DEVICE float bits_as_float(u32 bits) { float value; memcpy(&value, &bits, 4); return value; }
DEVICE u32 float_as_bits(float value) { u32 bits; memcpy(&bits, &value, 4); return bits; }
DEVICE float fused_multiply_add(float a, float b, float c) { return fmaf(a, b, c); }
DEVICE float exp2_approximate(float value) { return exp2f(value); }
DEVICE float reciprocal_approximate(float value) { return 1.0f / value; }

DEVICE u16 float_to_bfloat(float value) {
  const u32 bits = float_as_bits(value);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return 0x7fff;  // as the instruction: every NaN becomes this one
  return (u16)((bits + 0x7fffu + (bits >> 16 & 1)) >> 16);
}
DEVICE u32 floats_to_bfloats(float low, float high) { return float_to_bfloat(low) | (u32)float_to_bfloat(high) << 16; }

DEVICE float half_as_float(u16 bits) {
  const u32 sign = (u32)(bits & 0x8000) << 16, exponent = bits >> 10 & 31, mantissa = bits & 1023;
  if (exponent == 31) return bits_as_float(sign | 0x7f800000u | mantissa << 13 | (mantissa ? 0x400000u : 0));
  if (exponent) return bits_as_float(sign | (exponent + 112) << 23 | mantissa << 13);
  const float small = (float)mantissa * 0x1p-24f;
  return sign ? -small : small;
}
DEVICE u16 float_to_half(float value) {
  const u32 bits = float_as_bits(value), sign = bits >> 16 & 0x8000, magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return 0x7fff;
  if (magnitude >= 0x477ff000u) return (u16)(sign | 0x7c00);           // rounds to infinity
  if (magnitude < 0x38800000u) {                                        // subnormal: adding 0.5 leaves the bits
    return (u16)(sign | (float_as_bits(bits_as_float(magnitude) + 0.5f) - 0x3f000000u));
  }
  return (u16)(sign | ((magnitude + 0xfffu + (magnitude >> 13 & 1) - 0x38000000u) >> 13));
}
DEVICE u32 floats_to_halves(float low, float high) { return float_to_half(low) | (u32)float_to_half(high) << 16; }

template <int BYTES, bool STREAM>
DEVICE void load_word(const void *from, u32 *to) {
  if ((uintptr_t)from % BYTES) __builtin_trap();  // a misaligned access faults on the device too
  *to = 0;
  memcpy(to, from, BYTES);
}
template <int BYTES, bool STREAM>
DEVICE void store_word(void *to, const u32 *from) {
  if ((uintptr_t)to % BYTES) __builtin_trap();
  memcpy(to, from, BYTES);
}

DEVICE void wait_for_earlier_grids() {}
DEVICE void let_later_grids_start() {}
template <class T>
DEVICE void hold(T *&) {}
DEVICE void raise_fault(int *flag, int code) { *flag |= code; }

DEVICE int first_above(const int *values, int count, int key) {
  int low = 0, high = count;
  while (low < high) {
    const int step = (high - low + 31) / 32;
    int below = 0;
    while (below < 32 && low + below * step < high && values[low + below * step] <= key) ++below;
    const int next = low + below * step;
    high = below == 0 ? low : (next < high ? next : high);
    low = below == 0 ? low : next - step + 1;
  }
  return low;
}

#define SHARED alignas(128) static thread_local

constexpr bool WARPS_SWAP = false;  // threads run one after the other
DEVICE int lane() { return threadIdx.x & 31; }
DEVICE void synchronize_warp() {}
template <int BYTES>
DEVICE void load_shared_word(const void *from, u32 *to) { memcpy(to, from, BYTES); }
template <int BYTES>
DEVICE void store_shared_word(void *to, const u32 *from) { memcpy(to, from, BYTES); }

template <int BYTES>
DEVICE void copy_ahead(void *to_shared, const void *from) {
  if ((uintptr_t)from % BYTES) __builtin_trap();
  memcpy(to_shared, from, BYTES);
}
DEVICE void close_stage_of_copies() {}
DEVICE void wait_for_copies_but(int) {}

DEVICE void add_to(float *sum, float value) { *sum += value; }
