// Appended to a kernel compiled for the host: the launch, thread after thread. `reverse` runs the blocks from the last
// to the first, since no result may depend on their order.
extern "C" void launch(const KERNEL_PARAMETERS *parameters, unsigned x, unsigned y, unsigned z, int reverse) {
  const i64 blocks = (i64)x * y * z;
  gridDim = {x, y, z};
  for (i64 i = 0; i < blocks; ++i) {
    const i64 block = reverse ? blocks - 1 - i : i;
    blockIdx = {(unsigned)(block % x), (unsigned)(block / x % y), (unsigned)(block / x / y)};
    for (unsigned thread = 0; thread < THREADS; ++thread) {
      threadIdx = {thread, 0, 0};
      KERNEL_NAME(*parameters);
    }
  }
}
