// What the kernels need from the machine, for CUDA: PTX and built-ins, no header. platform_host.h gives the same
// names in plain C++, so that the very same kernels run on a CPU under sanitizers.
#define DEVICE static __device__ __forceinline__
#define KERNEL(threads, blocks) extern "C" __global__ void __launch_bounds__(threads, blocks)
#define PARAMETER const __grid_constant__
#define UNROLL _Pragma("unroll")
#define NO_UNROLL _Pragma("unroll 1")

typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

DEVICE float bits_as_float(u32 bits) { return __uint_as_float(bits); }
DEVICE u32 float_as_bits(float value) { return __float_as_uint(value); }
DEVICE float fused_multiply_add(float a, float b, float c) { return __fmaf_rn(a, b, c); }

DEVICE float exp2_approximate(float value) {
  float result;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(value));
  return result;
}
DEVICE float reciprocal_approximate(float value) {
  float result;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(value));
  return result;
}

DEVICE float half_as_float(u16 bits) {
  float result;
  asm("cvt.f32.f16 %0, %1;" : "=f"(result) : "h"(bits));
  return result;
}
DEVICE u16 float_to_half(float value) {
  u16 result;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(result) : "f"(value));
  return result;
}
DEVICE u32 floats_to_halves(float low, float high) {
  u32 result;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(result) : "f"(high), "f"(low));
  return result;
}
DEVICE u16 float_to_bfloat(float value) {
  u16 result;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(result) : "f"(value));
  return result;
}
DEVICE u32 floats_to_bfloats(float low, float high) {
  u32 result;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(result) : "f"(high), "f"(low));
  return result;
}

// One word of 2, 4, 8 or 16 bytes. STREAM: this thread alone touches the bytes, once, so keep them out of L1.
template <int BYTES, bool STREAM>
DEVICE void load_word(const void *from, u32 *to) {
  if constexpr (BYTES == 2) {
    u16 half;
    asm volatile("ld.global.u16 %0, [%1];" : "=h"(half) : "l"(from) : "memory");
    to[0] = half;
  } else if constexpr (BYTES == 4) {
    if constexpr (STREAM)
      asm volatile("ld.global.L1::no_allocate.u32 %0, [%1];" : "=r"(to[0]) : "l"(from) : "memory");
    else
      asm volatile("ld.global.u32 %0, [%1];" : "=r"(to[0]) : "l"(from) : "memory");
  } else if constexpr (BYTES == 8) {
    if constexpr (STREAM)
      asm volatile("ld.global.L1::no_allocate.v2.u32 {%0,%1}, [%2];" : "=r"(to[0]), "=r"(to[1]) : "l"(from) : "memory");
    else
      asm volatile("ld.global.v2.u32 {%0,%1}, [%2];" : "=r"(to[0]), "=r"(to[1]) : "l"(from) : "memory");
  } else {
    static_assert(BYTES == 16, "a word is 2, 4, 8 or 16 bytes");
    if constexpr (STREAM)
      asm volatile("ld.global.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];"
                   : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                   : "l"(from)
                   : "memory");
    else
      asm volatile("ld.global.v4.u32 {%0,%1,%2,%3}, [%4];"
                   : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                   : "l"(from)
                   : "memory");
  }
}

template <int BYTES, bool STREAM>
DEVICE void store_word(void *to, const u32 *from) {
  if constexpr (BYTES == 2) {
    asm volatile("st.global.u16 [%0], %1;" ::"l"(to), "h"((u16)from[0]) : "memory");
  } else if constexpr (BYTES == 4) {
    if constexpr (STREAM)
      asm volatile("st.global.cs.u32 [%0], %1;" ::"l"(to), "r"(from[0]) : "memory");
    else
      asm volatile("st.global.u32 [%0], %1;" ::"l"(to), "r"(from[0]) : "memory");
  } else if constexpr (BYTES == 8) {
    if constexpr (STREAM)
      asm volatile("st.global.cs.v2.u32 [%0], {%1,%2};" ::"l"(to), "r"(from[0]), "r"(from[1]) : "memory");
    else
      asm volatile("st.global.v2.u32 [%0], {%1,%2};" ::"l"(to), "r"(from[0]), "r"(from[1]) : "memory");
  } else {
    static_assert(BYTES == 16, "a word is 2, 4, 8 or 16 bytes");
    if constexpr (STREAM)
      asm volatile("st.global.cs.v4.u32 [%0], {%1,%2,%3,%4};" ::"l"(to), "r"(from[0]), "r"(from[1]), "r"(from[2]),
                   "r"(from[3])
                   : "memory");
    else
      asm volatile("st.global.v4.u32 [%0], {%1,%2,%3,%4};" ::"l"(to), "r"(from[0]), "r"(from[1]), "r"(from[2]),
                   "r"(from[3])
                   : "memory");
  }
}

// Programmatic dependent launch: this grid may start while the one before it drains. Nothing that an earlier kernel
// can write may be read before the wait, and every thread must wait, or the grid after this one could overtake it.
DEVICE void wait_for_earlier_grids() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
DEVICE void let_later_grids_start() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// Let an address in global memory be computed here and not where it is first used.
template <class T>
DEVICE void hold(T *&pointer) {
  u64 address = __cvta_generic_to_global(pointer);  // so that the compiler still knows the memory behind the asm
  asm volatile("" : "+l"(address));
  pointer = (T *)__cvta_global_to_generic(address);
}

DEVICE void raise_fault(int *flag, int code) { atomicOr(flag, code); }

// Place of the first of the ascending values that is above key; count if none is. A warp probes 32 places at a time:
// two rounds for 1,000 values. Every thread of the warp must call it with the same arguments. Up to 32 values the
// answer is exact even where they do not ascend, as behind the last sequence of a padded step.
DEVICE int first_above(const int *values, int count, int key) {
  const int lane = threadIdx.x & 31;
  int low = 0, high = count;  // the answer lies in [low, high]
  while (low < high) {
    const int step = (high - low + 31) / 32;
    const int place = low + lane * step;
    const bool above = place >= high || values[place] > key;
    const u32 lanes_above = __ballot_sync(0xffffffffu, above);
    const int below = lanes_above ? __ffs(lanes_above) - 1 : 32;  // probes before the first one above
    const int next = low + below * step;
    high = below == 0 ? low : (next < high ? next : high);
    low = below == 0 ? low : next - step + 1;
  }
  return low;
}

// Shared memory, here a thread's own or a warp's: no kernel has a barrier of a whole block.
#define SHARED __shared__ __align__(128)

DEVICE u32 shared_address(const void *in_shared) { return (u32)__cvta_generic_to_shared(in_shared); }

// The threads of a warp may swap words through shared memory.
constexpr bool WARPS_SWAP = true;
DEVICE int lane() { return threadIdx.x & 31; }
DEVICE void synchronize_warp() { __syncwarp(); }

// One word of 8 or 16 bytes.
template <int BYTES>
DEVICE void load_shared_word(const void *from, u32 *to) {
  if constexpr (BYTES == 8)
    asm volatile("ld.shared.v2.u32 {%0,%1}, [%2];" : "=r"(to[0]), "=r"(to[1]) : "r"(shared_address(from)) : "memory");
  else
    asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "r"(shared_address(from))
                 : "memory");
}
template <int BYTES>
DEVICE void store_shared_word(void *to, const u32 *from) {
  if constexpr (BYTES == 8)
    asm volatile("st.shared.v2.u32 [%0], {%1,%2};" ::"r"(shared_address(to)), "r"(from[0]), "r"(from[1]) : "memory");
  else
    asm volatile("st.shared.v4.u32 [%0], {%1,%2,%3,%4};" ::"r"(shared_address(to)), "r"(from[0]), "r"(from[1]),
                 "r"(from[2]), "r"(from[3])
                 : "memory");
}

// A thread's own bytes, on their way to shared memory without registers; the same thread waits for them.
template <int BYTES>
DEVICE void copy_ahead(void *to_shared, const void *from) {
  if constexpr (BYTES == 2) {
    u16 half;
    asm volatile("ld.global.u16 %0, [%1];" : "=h"(half) : "l"(from) : "memory");
    *(u16 *)to_shared = half;
  } else if constexpr (BYTES == 16) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared_address(to_shared)), "l"(from) : "memory");
  } else {
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(shared_address(to_shared)), "l"(from), "n"(BYTES)
                 : "memory");
  }
}
// Copies asked for since the last call form a stage; stages arrive in order, and a wait may leave the last few out.
DEVICE void close_stage_of_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
DEVICE void wait_for_copies_but(int stages) {  // at most 3, a constant where this is inlined
  switch (stages) {
    case 0: asm volatile("cp.async.wait_group 0;" ::: "memory"); break;
    case 1: asm volatile("cp.async.wait_group 1;" ::: "memory"); break;
    case 2: asm volatile("cp.async.wait_group 2;" ::: "memory"); break;
    default: asm volatile("cp.async.wait_group 3;" ::: "memory");
  }
}

DEVICE void add_to(float *sum, float value) { atomicAdd(sum, value); }
