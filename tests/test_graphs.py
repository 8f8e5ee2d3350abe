"""Buckets and captured graphs: the right bucket, and replays with the bits of eager steps whatever came between."""

from __future__ import annotations

import gc
from itertools import accumulate
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import serving_conv
from serving_conv import BackendError, CaptureError, Checkpoint, ContractError, StatePool, StepMetadata
from serving_conv.graphs import Bucket, StepGraphs, choose_bucket, powers_of_two
from serving_conv.native import cuda
from serving_conv.pool import LayerState

sizes = st.integers(1, 40)


@pytest.mark.parametrize(
    ("least", "most", "wanted"),
    [(1, 1, (1,)), (8, 64, (8, 16, 32, 64)), (8, 65, (8, 16, 32, 64, 65)), (3, 4, (3, 4)), (7, 7, (7,))],
)
def test_powers_of_two(least: int, most: int, wanted: tuple[int, ...]) -> None:
    assert powers_of_two(least, most) == wanted


@pytest.mark.parametrize(("least", "most"), [(0, 4), (5, 4), (-1, 1)])
def test_sizes_out_of_range(least: int, most: int) -> None:
    with pytest.raises(ContractError, match="least"):
        powers_of_two(least, most)


@given(buckets=st.sets(st.tuples(sizes, sizes), min_size=1, max_size=8), rows=sizes, sequences=sizes)
def test_the_smallest_bucket_with_room(buckets: set[tuple[int, int]], rows: int, sequences: int) -> None:
    all_buckets = [Bucket(*one) for one in buckets]
    fitting = [one for one in all_buckets if one.rows >= rows and one.sequences >= sequences]
    chosen = choose_bucket(all_buckets, rows, sequences)
    assert chosen == (sorted(fitting)[0] if fitting else None)
    graphs = StepGraphs(lambda bucket: None, all_buckets)
    assert graphs.bucket_for(rows, sequences) == chosen


def test_refusals() -> None:
    with pytest.raises(ContractError, match="buckets"):
        StepGraphs(lambda bucket: None, [])
    with pytest.raises(ContractError, match="buckets"):
        StepGraphs(lambda bucket: None, [Bucket(0, 1)])
    with pytest.raises(BackendError, match="cpu"):
        StepGraphs(lambda bucket: None, [Bucket(1, 1)], "cpu")
    graphs = StepGraphs(lambda bucket: None, [Bucket(1, 1)])
    assert not graphs.captured
    with pytest.raises(CaptureError, match=r"capture\(\)"):
        graphs.replay(Bucket(1, 1))


CHANNELS, SLOTS, LAYERS, ROWS, SEQUENCES = 256, 24, 3, 64, 8


class Engine:
    """Two groups of layers with slot tables of their own, one metadata, mixed steps with drafts and checkpoints."""

    def __init__(self) -> None:
        generator = torch.Generator("cuda").manual_seed(3)
        self.pools = self.new_pools()
        self.x = torch.randn(ROWS, CHANNELS, device="cuda", generator=generator).bfloat16()
        self.weights = [torch.randn(CHANNELS, 4, device="cuda", generator=generator).bfloat16() for _ in range(LAYERS)]
        self.out = [torch.empty_like(self.x) for _ in range(LAYERS)]
        self.metadata = StepMetadata(SEQUENCES, "cuda", groups=2, drafts=True, max_checkpoints=4)
        self.graphs = StepGraphs(
            lambda bucket: self.run(bucket.rows, self.metadata.view(bucket.sequences, bucket.rows)),
            [Bucket(rows, SEQUENCES) for rows in powers_of_two(8, ROWS)],
        )

    def new_pools(self) -> list[StatePool]:
        pools = [
            StatePool(SLOTS, [LayerState(CHANNELS, 4, torch.bfloat16)] * LAYERS, draft_tokens=3, device="cuda")
            for _ in range(2)
        ]
        for pool in pools:
            for state in pool.states:
                state.fill_(float("nan"))
        return pools

    def run(self, rows: int, step: Any) -> None:
        for index in range(LAYERS):
            group = index % 2
            serving_conv.causal_conv1d_step(
                self.x[:rows],
                self.weights[index],
                self.pools[group].states[index],
                **step.keywords(group),
                out=self.out[index][:rows],
            )

    def states(self) -> list[Tensor]:
        return [state.clone() for pool in self.pools for state in pool.states]


def draw(generator: torch.Generator, step: int) -> dict[str, Any]:
    """A random step: lengths that fit, slots apart in each group, counts and flags."""

    def numbers(low: int, high: int, count: int) -> list[int]:
        return torch.randint(low, high + 1, (count,), generator=generator).tolist()

    count = numbers(1, SEQUENCES, 1)[0]
    drafts = [bool(one) for one in numbers(0, 1, count)]
    lengths = [numbers(1, 4, 1)[0] if draft else numbers(0, 8, 1)[0] for draft in drafts]
    slots = [torch.randperm(SLOTS - 6, generator=generator)[:count].tolist() for _ in range(2)]
    checkpoints = [
        Checkpoint(i, numbers(1, n, 1)[0], (SLOTS - 6 + i % 4, SLOTS - 3 - i % 3))
        for i, n in enumerate(lengths[:1])
        if n
    ]
    return {
        "lengths": lengths,
        "slots": slots,
        "has_initial_state": [step > 0 and bool(one) for one in numbers(0, 1, count)],
        "num_accepted_tokens": numbers(1, 4, count),
        "speculative": drafts,
        "checkpoints": checkpoints,
    }


@pytest.mark.gpu
def test_replays_are_the_eager_steps() -> None:
    serving_conv.clear_device_fault("cuda")
    eager, captured = Engine(), Engine()
    captured.graphs.capture()
    assert len(list(captured.graphs.buckets)) == 4
    generator = torch.Generator().manual_seed(5)
    for state in (s for pool in (*eager.pools, *captured.pools) for s in pool.states):
        state.zero_()  # any window may be read below
    for number in range(41):  # odd, between buckets in any order
        step = draw(generator, number)
        rows = sum(step["lengths"])
        eager.run(max(rows, 1), eager.metadata.fill(**step))
        bucket = captured.graphs.bucket_for(max(rows, 1), len(step["lengths"]))
        assert bucket is not None
        captured.metadata.fill(**step, bucket=bucket.sequences)
        captured.graphs.replay(bucket)
        for got, want in zip(captured.out, eager.out, strict=True):
            assert torch.equal(got[:rows], want[:rows]), number
        assert all(torch.equal(a, b) for a, b in zip(captured.states(), eager.states(), strict=True)), number
    assert serving_conv.device_fault("cuda") == 0


@pytest.mark.gpu
def test_a_pool_at_a_new_address_needs_new_graphs() -> None:
    engine = Engine()
    engine.graphs.capture()
    engine.pools = engine.new_pools()
    gc.collect()
    step: dict[str, Any] = {
        "lengths": [3, 1],
        "slots": [[1, 2], [3, 4]],
        "has_initial_state": [False, False],
    }
    engine.graphs.capture()
    engine.metadata.fill(**step, bucket=SEQUENCES)
    engine.graphs.replay(Bucket(8, SEQUENCES))
    torch.cuda.synchronize()
    for group, pool in enumerate(engine.pools):
        for index, state in enumerate(pool.states):
            written = index % 2 == group
            slots = step["slots"][group]
            assert bool(state[slots, :, :3].isnan().any()) is not written


@pytest.mark.gpu
def test_a_cold_capture_raises() -> None:
    engine = Engine()
    cuda._kernels.clear()
    serving_conv.ops._PLANS["causal_conv1d_step"].clear()
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(CaptureError, match="warmup"), torch.cuda.graph(graph):
        engine.run(8, engine.metadata.view(SEQUENCES, 8))


@pytest.mark.gpu
def test_a_step_after_warm_up_neither_allocates_nor_compiles_nor_waits() -> None:
    engine = Engine()
    engine.graphs.capture()
    step: dict[str, Any] = {
        "lengths": [3, 1, 30],
        "slots": [[1, 2, 5], [3, 4, 5]],
        "has_initial_state": [False] * 3,
        "speculative": [True, False, False],
        "checkpoints": [Checkpoint(2, 16, (20, 21))],
    }
    engine.metadata.fill(**step, bucket=SEQUENCES)
    engine.graphs.replay(Bucket(64, SEQUENCES))
    torch.cuda.synchronize()
    kernels = len(cuda._kernels)
    allocated = torch.cuda.memory_stats()["allocation.all.allocated"]
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(20):
            engine.metadata.fill(**step, bucket=SEQUENCES)
            engine.graphs.replay(Bucket(64, SEQUENCES))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == allocated
    assert len(cuda._kernels) == kernels
    assert list(accumulate(step["lengths"]))[-1] == 34


@pytest.mark.gpu
def test_one_memory_pool_for_all_graphs() -> None:
    held = torch.empty(0)

    def run(bucket: Bucket) -> None:
        nonlocal held
        held = torch.empty(bucket.rows << 20, dtype=torch.uint8, device="cuda").zero_()

    graphs = StepGraphs(run, [Bucket(rows, 1) for rows in (2, 4, 8, 16, 32)])
    torch.cuda.synchronize()
    before = torch.cuda.memory_reserved()
    graphs.capture()
    # The largest bucket's memory serves the others: their sum is 62 MiB.
    assert torch.cuda.memory_reserved() - before < 2 * 64 << 20
