"""Slot copies on a GPU: the bytes of the torch copies, one launch each without waiting, and capture."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from support.slot_copies import Pages, Shape, copy_everything

from serving_conv import CaptureError
from serving_conv.pool import LayerState, PoolLayout, SlotMove, SlotPackage, StatePool
from serving_conv.pool.copies import KernelCopies, TorchCopies, copies_of

pytestmark = pytest.mark.gpu

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
MIXED = (LayerState(8192, 4, BF16), LayerState(5, 2, FP32), LayerState(300, 3, FP16), LayerState(1, 8, BF16))
PLAIN = Shape(MIXED)
SHAPES = {
    "base": PLAIN,
    "positions": replace(PLAIN, layout="positions"),
    "positions, no drafts": Shape((LayerState(8192, 4, BF16),) * 3, layout="positions", draft_tokens=0),
    "slot gap": replace(PLAIN, slot_gap=3),
    "pitch gap": replace(PLAIN, pitch_gap=8),
    "positions, pitch gap": replace(PLAIN, layout="positions", pitch_gap=2),
    "odd address": replace(PLAIN, shift=1),
    "positions, odd address": replace(PLAIN, layout="positions", shift=3),
    "many drafts": replace(PLAIN, draft_tokens=9),
}


@contextmanager
def no_waiting() -> Iterator[None]:
    """Any call that waits for the device is an error."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("name", SHAPES)
def test_the_bytes_of_the_torch_copies(name: str) -> None:
    shape = SHAPES[name]
    for seed in range(4):
        ours, theirs = Pages(shape, seed, "cuda"), Pages(shape, seed)
        copies = copies_of(ours.states, shape.layers)
        assert type(copies) is KernelCopies
        packages = copy_everything(copies, shape, "cuda", seed)
        expected = copy_everything(TorchCopies(theirs.states), shape, seed=seed)
        assert all(torch.equal(a.cpu(), b) for a, b in zip(packages, expected, strict=True))
        assert ours.same(theirs)


@pytest.mark.parametrize("slots", [64, 65, 2000])
def test_long_lists_cycles_and_chains(slots: int) -> None:
    shape = Shape((LayerState(512, 4, BF16), LayerState(3, 2, FP32)), slots=slots)
    shifted = [SlotMove(slot, (slot * 7 + 3) % slots, slot % 2) for slot in range(slots)]
    cycle = [SlotMove(slot, (slot + 1) % slots) for slot in range(slots)]
    for moves in (shifted, shifted[1:], cycle, cycle[1:]):
        ours, theirs = Pages(shape, device="cuda"), Pages(shape)
        copies_of(ours.states, shape.layers).move(moves)
        TorchCopies(theirs.states).move(moves)
        assert ours.same(theirs)


def test_staged_lists_do_not_wait_and_keep_their_own_memory() -> None:
    shape = Shape((LayerState(256, 4, BF16),), slots=400)
    ours, theirs = Pages(shape, device="cuda"), Pages(shape)
    copies, wanted = copies_of(ours.states, shape.layers), TorchCopies(theirs.states)
    torch.cuda._sleep(50_000_000)  # the device is far behind: no list may be written over while it waits
    for turn in range(20):
        moves = [SlotMove(slot, (slot + turn + 1) % 400, slot % 3) for slot in range(400)]
        with no_waiting():
            copies.move(moves)
        wanted.move(moves)
    assert ours.same(theirs)


def busy(operation: Callable[[], Any]) -> list[str]:
    """What the device does for an operation."""
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        operation()
        torch.cuda.synchronize()
    return [event.name for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA]


@pytest.mark.parametrize("layout", ["channels", "positions"])
def test_every_copy_of_48_layers_is_one_launch(layout: PoolLayout) -> None:
    pool = StatePool(16, [LayerState(1024, 4, BF16)] * 48, draft_tokens=2, layout=layout, device="cuda")
    slot, other = pool.take(), pool.take()
    assert slot is not None and other is not None
    pool.commit(slot, 3, accepted=2)
    pool.export([slot])  # the first buffer of its size
    kept: list[Any] = []
    one = ["copy_slots"]
    assert busy(lambda: kept.append(pool.fork(slot))) == one
    assert busy(lambda: pool.roll_back(slot, kept[0])) == one
    assert busy(lambda: pool.publish(slot, "key", 2)) == one
    assert busy(lambda: pool.take_prefix([("key", 2)])) == one
    assert busy(lambda: pool.move([SlotMove(slot, other, 1), SlotMove(other, slot)])) == one
    assert busy(lambda: kept.append(pool.export([slot, other]))) == one
    assert busy(lambda: pool.import_(kept[1])) == one


def test_no_copy_waits() -> None:
    pool = StatePool(250, [LayerState(1024, 4, BF16)] * 48, device="cuda")
    slot, other = pool.take(), pool.take()
    assert slot is not None and other is not None
    pool.commit(slot, 3)
    with no_waiting():
        fork = pool.fork(slot)
        assert fork is not None
        pool.roll_back(slot, fork)
        pool.publish(slot, "key", 3)
        assert pool.take_prefix([("key", 3)])
        pool.move([SlotMove(slot, other), SlotMove(other, slot)])
        package = pool.export([slot] * 100)
        assert pool.import_(package)


def test_a_captured_copy_repeats_its_slots() -> None:
    pool = StatePool(80, [LayerState(1024, 4, BF16)] * 4, device="cuda")
    for state in pool.states:
        state.normal_()
    live = [pool.take() for _ in range(70)]
    first, second, third = (slot for slot in live[:3] if slot is not None)
    pool.commit(first, 1)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        pool.move([SlotMove(first, second), SlotMove(second, third)])
        fork = pool.fork(first)
    for _ in range(3):
        before = [state.clone() for state in pool.states]
        for state in pool.states:
            state[first].normal_()
        graph.replay()
        for state, old in zip(pool.states, before, strict=True):
            assert torch.equal(state[second], state[first])
            assert torch.equal(state[third], old[second])
            assert torch.equal(state[fork], state[first])
    with pytest.raises(CaptureError, match="70 moves"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        pool.export([slot for slot in live if slot is not None])


def test_copies_run_on_the_current_stream() -> None:
    pool = StatePool(4, [LayerState(8192, 4, BF16)] * 4, device="cuda")
    slot = pool.take()
    assert slot is not None
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)
        for state in pool.states:
            state[slot] = 5.0
        fork = pool.fork(slot)
    stream.synchronize()
    assert all(bool((state[fork] == 5).all()) for state in pool.states)


def test_a_package_crosses_between_devices() -> None:
    layers = [LayerState(40, 4, BF16), LayerState(7, 2, FP32)]
    gpu, cpu = (StatePool(4, layers, draft_tokens=1, device=device) for device in ("cuda", "cpu"))
    slot = gpu.take()
    assert slot is not None
    for state in gpu.states:
        state[slot].normal_()
    gpu.commit(slot, 2, accepted=2)
    package = gpu.export([slot])
    (on_cpu,) = cpu.import_(package.to("cpu")) or []
    (back,) = gpu.import_(cpu.export([on_cpu])) or []
    again: SlotPackage = gpu.export([back])
    assert torch.equal(again.buffer, package.buffer)
