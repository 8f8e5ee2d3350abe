"""Owns the clock: CUDA graph replay over a rotation of calls, and the copy kernel that every row is held against."""

from __future__ import annotations

import ctypes
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol

import torch
from torch import Tensor

__all__ = ["COPY_VARIANTS", "Call", "CopyTimer", "GraphTimer", "Timer", "Timing"]

Call = Callable[[], Tensor]

REPLAYS, REPETITIONS = 20, 7
LEAST_NODES = 8  # of a graph: what a replay costs beside its nodes is spread over them
LONGEST = 0.6  # seconds for all replays of one figure; slower calls are replayed less often


@dataclass(frozen=True)
class Timing:
    """One figure.

    Attributes:
        us: microseconds a call, the median of the repetitions.
        spread: (slowest - fastest) / median.
        nodes: calls in the graph.
        replays: of the graph in each repetition.
    """

    us: float
    spread: float
    nodes: int
    replays: int


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


class Timer(Protocol):
    """Times a rotation of calls."""

    def time(self, calls: Sequence[Call], before: Call | None = None, least_nodes: int = LEAST_NODES) -> Timing:
        """Microseconds a call of a rotation that is repeated to `least_nodes`; with `before`, of the pair."""


class GraphTimer:
    """Captures the calls once, replays the graph, reads events.

    Args:
        repetitions: of each figure; the median counts.
    """

    def __init__(self, repetitions: int = REPETITIONS) -> None:
        self._repetitions = repetitions

    def time(self, calls: Sequence[Call], before: Call | None = None, least_nodes: int = LEAST_NODES) -> Timing:
        """See `Timer`.

        Raises:
            RuntimeError: the replayed graph did not write a call's result, so it does not hold the kernel.
        """
        repeats = -(-max(least_nodes, len(calls)) // len(calls))
        graph = torch.cuda.CUDAGraph()
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        # Results are kept until the end: a method that allocates its output gets a new, cold one in each call.
        results: list[Tensor] = []
        with torch.cuda.stream(stream):
            for call in calls[:2]:
                if before is not None:
                    before()
                call()
            torch.cuda.synchronize()
            with torch.cuda.graph(graph, stream=stream):
                for _ in range(repeats):
                    for call in calls:
                        if before is not None:
                            before()
                        results.append(call())
        for result in results[:2]:
            if result.is_floating_point():
                result.fill_(float("nan"))
        begin, end = _event(), _event()
        graph.replay()
        torch.cuda.synchronize()
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        if any(bool(result.isnan().any()) for result in results[:2]):
            raise RuntimeError("the captured graph left NaN where the kernel should have written its result")
        one = begin.elapsed_time(end) / 1e3  # seconds
        replays = min(REPLAYS, max(2, int(LONGEST / self._repetitions / one)))
        times = []
        for _ in range(self._repetitions):
            begin.record()
            for _ in range(replays):
                graph.replay()
            end.record()
            torch.cuda.synchronize()
            times.append(begin.elapsed_time(end) * 1e3 / replays / len(results))
        middle = statistics.median(times)
        return Timing(middle, (max(times) - min(times)) / middle, len(results), replays)


_COPY = """
struct alignas(16) Word { unsigned a, b, c, d; };
static __device__ __forceinline__ Word load(const Word *at) {
  Word v;
  asm volatile("ld.global.cs.v4.u32 {%0,%1,%2,%3},[%4];" : "=r"(v.a), "=r"(v.b), "=r"(v.c), "=r"(v.d) : "l"(at));
  return v;
}
static __device__ __forceinline__ void store(Word *at, Word v) {
  asm volatile("st.global.cs.v4.u32 [%0],{%1,%2,%3,%4};" ::"l"(at), "r"(v.a), "r"(v.b), "r"(v.c), "r"(v.d) : "memory");
}
template <int THREADS, int EACH> static __device__ __forceinline__ void copy(const Word *from, Word *to, long long n) {
  long long first = (long long)blockIdx.x * THREADS * EACH + threadIdx.x;
  Word v[EACH];
#pragma unroll
  for (int i = 0; i < EACH; i++)
    if (first + i * THREADS < n) v[i] = load(from + first + i * THREADS);
#pragma unroll
  for (int i = 0; i < EACH; i++)
    if (first + i * THREADS < n) store(to + first + i * THREADS, v[i]);
}
#define COPY(THREADS, EACH)                                                                                   \\
  extern "C" __global__ void __launch_bounds__(THREADS)                                                       \\
      copy_##THREADS##_##EACH(const Word *from, Word *to, long long n) {                                      \\
    copy<THREADS, EACH>(from, to, n);                                                                         \\
  }
"""

# (threads of a block, 16-byte words of a thread). The first is the plain one that ratios are taken from.
COPY_VARIANTS = ((256, 4), (128, 4), (256, 1), (512, 2))


def copy_source() -> str:
    """The copy kernels, one translation unit."""
    return _COPY + "".join(f"COPY({threads}, {each})\n" for threads, each in COPY_VARIANTS)


@cache
def _copy_functions() -> tuple[Any, dict[tuple[int, int], Any]]:
    from cuda.bindings import driver
    from cuda.core import Program, ProgramOptions

    major, minor = torch.cuda.get_device_capability()
    options = ProgramOptions(arch=f"sm_{major}{minor}", std="c++17")
    module = Program(copy_source(), "c++", options).compile("cubin")
    functions = {}
    for threads, each in COPY_VARIANTS:
        kernel = module.get_kernel(f"copy_{threads}_{each}")
        functions[threads, each] = _checked(driver.cuKernelGetFunction(driver.CUkernel(int(kernel.handle))))
    return module, functions  # the module must outlive the functions


def _checked(result: tuple[Any, ...]) -> Any:
    status, *values = result
    if int(status) != 0:
        raise RuntimeError(f"CUDA: {status}")
    return values[0] if values else None


class CopyTimer:
    """Microseconds to copy as many bytes as a row moves: half of them read, half written; kept by size.

    Args:
        timer: of the plain kernel, which ratios are taken from.
        quick_timer: of the other variants.
    """

    def __init__(self, timer: Timer, quick_timer: Timer) -> None:
        self._timer, self._quick_timer = timer, quick_timer
        self._known: dict[tuple[int, int], tuple[Timing, float]] = {}

    def time(self, moved_bytes: int, calls: int, least_nodes: int, device: torch.device) -> tuple[Timing, float]:
        """Time the copy over a rotation of `calls` buffers.

        Returns:
            The plain kernel's timing, and the microseconds of the best variant.
        """
        if (moved_bytes, calls) not in self._known:
            self._known[moved_bytes, calls] = self._time(moved_bytes, calls, least_nodes, device)
        return self._known[moved_bytes, calls]

    def _time(self, moved_bytes: int, calls: int, least_nodes: int, device: torch.device) -> tuple[Timing, float]:
        words = moved_bytes // 2 // 16
        source = torch.randint(1 << 30, (calls, words * 4), dtype=torch.int32, device=device)
        target = torch.zeros_like(source)
        timings: list[Timing] = []
        for variant in COPY_VARIANTS:
            timer = self._quick_timer if timings else self._timer
            rotation = [self._call(variant, source[i], target[i]) for i in range(calls)]
            timings.append(timer.time(rotation, least_nodes=least_nodes))
        if not torch.equal(source, target):
            raise RuntimeError("the copy kernel did not copy")
        return timings[0], min(timing.us for timing in timings)

    @staticmethod
    def _call(variant: tuple[int, int], source: Tensor, target: Tensor) -> Call:
        from cuda.bindings import driver

        function = _copy_functions()[1][variant]
        threads, each = variant
        words = source.numel() // 4
        blocks = -(-words // (threads * each))
        values = (
            ctypes.c_void_p(source.data_ptr()),
            ctypes.c_void_p(target.data_ptr()),
            ctypes.c_longlong(words),
        )
        addresses = (ctypes.c_void_p * 3)(*[ctypes.addressof(value) for value in values])
        device_index = source.get_device()

        def call() -> Tensor:
            assert values, "the arguments live as long as the call"
            stream = torch._C._cuda_getCurrentRawStream(device_index)
            _checked(
                driver.cuLaunchKernel(function, blocks, 1, 1, threads, 1, 1, 0, stream, ctypes.addressof(addresses), 0)
            )
            return target

        return call
