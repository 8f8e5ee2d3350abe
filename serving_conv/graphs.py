"""Owns captured graphs of an engine's steps: one for each bucket, all in one memory pool, found by what a step needs.

A graph holds launches with fixed sizes and addresses. What changes from step to step (lengths, slots, counts, flags)
lies in `StepMetadata`, refilled in place; a step that is smaller than its bucket is padded by empty sequences, and
rows past the last offset are not touched.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch

from serving_conv.errors import BackendError, CaptureError, ContractError

__all__ = ["Bucket", "StepGraphs", "choose_bucket", "powers_of_two"]


class Bucket(NamedTuple):
    """What a captured step has room for.

    Attributes:
        rows: packed rows.
        sequences: sequences.
    """

    rows: int
    sequences: int


def powers_of_two(least: int, most: int) -> tuple[int, ...]:
    """Sizes from `least`, each twice the last one, up to `most`, which is always the last.

    Raises:
        ContractError: not 1 <= least <= most.
    """
    if not 1 <= least <= most:
        raise ContractError("least", got=f"{least} to {most}", wanted="1 or more, and no more than the largest size")
    sizes = []
    while least < most:
        sizes.append(least)
        least *= 2
    return (*sizes, most)


def choose_bucket(buckets: Iterable[Bucket], rows: int, sequences: int) -> Bucket | None:
    """The smallest bucket with room for a step, by rows, then by sequences; None if none has."""
    return min((b for b in buckets if b.rows >= rows and b.sequences >= sequences), default=None)


class StepGraphs:
    """Captured graphs of one kind of step.

    Args:
        run: launches the step of a bucket on the current stream, from tensors at fixed addresses; called twice for
            each bucket, once to load its kernels and once under capture. What it allocates under capture belongs to
            the graph.
        buckets: what to capture.
        device: a CUDA device.

    Raises:
        ContractError: no bucket, or one without a row or a sequence.
        BackendError: the device is no CUDA device.
    """

    def __init__(
        self, run: Callable[[Bucket], object], buckets: Iterable[Bucket], device: torch.device | str = "cuda"
    ) -> None:
        self._run = run
        self.buckets = tuple(sorted(set(buckets)))
        if not self.buckets or min(min(bucket) for bucket in self.buckets) < 1:
            raise ContractError("buckets", got=list(self.buckets), wanted="one or more, each with rows and sequences")
        self.device = torch.device(device)
        if self.device.type != "cuda":
            raise BackendError("device", got=str(device), wanted="a CUDA device", remedy="run the steps eagerly")
        self._graphs: dict[Bucket, torch.cuda.CUDAGraph] = {}

    @property
    def captured(self) -> bool:
        """Whether `capture` has been called."""
        return bool(self._graphs)

    def capture(self) -> None:
        """Capture every bucket, the largest first, so that the smaller ones find their memory in the pool.

        Waits for the device. Tensors that the step reads and writes must exist, and keep their addresses until the
        graphs are dropped; a pool that moves needs graphs of its own.
        """
        memory = torch.cuda.graph_pool_handle()
        with torch.cuda.device(self.device):
            stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
            graphs = {}
            for bucket in reversed(self.buckets):
                stream.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(stream):
                    self._run(bucket)
                torch.cuda.current_stream().wait_stream(stream)
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph, pool=memory, stream=stream):
                    self._run(bucket)
                graphs[bucket] = graph
        self._graphs = graphs

    def bucket_for(self, rows: int, sequences: int) -> Bucket | None:
        """The bucket that a step of this size runs in; None if it is larger than all."""
        return choose_bucket(self.buckets, rows, sequences)

    def replay(self, bucket: Bucket) -> None:
        """Launch a bucket's graph on the current stream; its metadata must have been filled for it.

        Raises:
            CaptureError: the bucket was not captured.
        """
        graph = self._graphs.get(bucket)
        if graph is None:
            raise CaptureError(
                "bucket", got=str(bucket), wanted="a captured bucket", remedy="call capture() once after warm-up"
            )
        graph.replay()
