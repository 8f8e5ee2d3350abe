"""The kernel that copies slots: the bytes of the torch copies, whatever the memory; one launch each; planted bugs."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.fuzz_specs import function_of
from support.slot_copies import CountingLauncher, Pages, Shape, copy_everything

from serving_conv.native import copy_slots
from serving_conv.native.variant import CopyVariant
from serving_conv.pool import LayerState, PoolLayout, SlotMove, SlotPackage, StatePool, state_pool
from serving_conv.pool.copies import KernelCopies, SlotCopies, TorchCopies, copies_of

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
MIXED = (LayerState(24, 4, BF16), LayerState(5, 2, FP32), LayerState(300, 3, FP16), LayerState(1, 8, BF16))
PLAIN = Shape(MIXED)
SHAPES = {
    "base": PLAIN,
    "positions": replace(PLAIN, layout="positions"),
    "positions, no drafts": Shape((LayerState(24, 4, BF16),) * 2, layout="positions", draft_tokens=0),
    "one position": Shape((LayerState(24, 2, BF16), LayerState(7, 2, FP32)), draft_tokens=0),
    "one position, positions": Shape((LayerState(24, 2, BF16),), layout="positions", draft_tokens=0, pitch_gap=1),
    "slot gap": replace(PLAIN, slot_gap=3),
    "aligned slot gap": replace(PLAIN, slot_gap=16, layout="positions"),
    "pitch gap": replace(PLAIN, pitch_gap=5),
    "aligned pitch gap": replace(PLAIN, pitch_gap=8),
    "positions, pitch gap": replace(PLAIN, layout="positions", pitch_gap=2),
    "odd address": replace(PLAIN, shift=1),
    "half address": replace(PLAIN, shift=4),
    "positions, odd address": replace(PLAIN, layout="positions", shift=3),
    "one layer of one value": Shape((LayerState(1, 2, BF16),), draft_tokens=0),
    "many drafts": replace(PLAIN, draft_tokens=9),
}


def check(shape: Shape, launcher: CountingLauncher, seed: int = 0) -> None:
    """All kinds of copies, by torch on one pool and by kernel on its twin."""
    ours, theirs = Pages(shape, seed), Pages(shape, seed)
    packages = copy_everything(KernelCopies(ours.states, shape.layers, launcher), shape, seed=seed)
    expected = copy_everything(TorchCopies(theirs.states), shape, seed=seed)
    for package, wanted in zip(packages, expected, strict=True):
        assert torch.equal(package, wanted)
    assert ours.same(theirs)
    assert not ours.same(Pages(shape, seed))
    assert launcher.launches


def check_seeds(shape: Shape, launcher: CountingLauncher) -> None:
    """A few of each kind."""
    for seed in range(4):
        check(shape, launcher, seed)


@pytest.mark.parametrize("reverse", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize("name", SHAPES)
def test_the_bytes_of_the_torch_copies(name: str, reverse: bool) -> None:
    check_seeds(SHAPES[name], CountingLauncher(reverse))


_layers = st.lists(
    st.builds(
        LayerState,
        st.sampled_from([1, 2, 3, 7, 8, 16, 64, 130, 264]),
        st.integers(2, 8),
        st.sampled_from([BF16, FP16, FP32]),
    ),
    min_size=1,
    max_size=4,
)


@given(
    shape=st.builds(
        Shape,
        _layers.map(tuple),
        slots=st.integers(4, 12),
        layout=st.sampled_from(["channels", "positions"]),
        draft_tokens=st.integers(0, 5),
        slot_gap=st.sampled_from([0, 1, 8, 16]),
        pitch_gap=st.sampled_from([0, 1, 2, 8]),
        shift=st.sampled_from([0, 0, 1, 2, 4, 8]),
    ),
    seed=st.integers(0, 2**32),
    reverse=st.booleans(),
)
def test_any_pool_any_copies(shape: Shape, seed: int, reverse: bool) -> None:
    check(shape, CountingLauncher(reverse), seed)


@pytest.mark.parametrize("shift", [0, 1])
@pytest.mark.parametrize("slots", [64, 65, 200])
def test_cycles_and_chains_of_any_length_are_one_launch(slots: int, shift: int) -> None:
    # A cycle of no shifts keeps a word, which is one more entry of the list.
    shape = Shape((LayerState(6, 4, BF16), LayerState(3, 2, FP32)), slots=slots)
    order = list(range(slots))
    random.Random(slots).shuffle(order)
    cycle = [SlotMove(of, to, shift * (to % 2)) for of, to in zip(order, order[1:] + order[:1], strict=True)]
    for moves in (cycle, cycle[1:]):
        ours, theirs, launcher = Pages(shape), Pages(shape), CountingLauncher()
        KernelCopies(ours.states, shape.layers, launcher).move(moves)
        TorchCopies(theirs.states).move(moves)
        assert ours.same(theirs)
        assert launcher.launches == [(2, 1)]
        assert launcher.staged == (len(moves) + (moves is cycle and shift == 0) > CopyVariant().moves)


@pytest.mark.parametrize("count", [63, 64, 65, 300])
def test_long_lists_go_another_way_to_the_same_bytes(count: int) -> None:
    shape = Shape((LayerState(6, 4, BF16),), slots=2 * count)
    moves = [SlotMove(2 * pair, 2 * pair + 1, pair % 3) for pair in range(count)]
    windows = [(slot, slot % 3) for slot in range(count)]
    results = []
    launcher = CountingLauncher()
    for by in ("kernel", "torch"):
        pages = Pages(shape)
        copies: SlotCopies = (
            KernelCopies(pages.states, shape.layers, launcher) if by == "kernel" else TorchCopies(pages.states)
        )
        copies.move(moves)
        package = SlotPackage.empty([1] * count, shape.layers)
        copies.pack(package, windows)
        copies.unpack(package, range(count, 2 * count))
        results.append((package.buffer, *pages.pages))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    assert len(launcher.launches) == 3
    assert launcher.staged == (3 if count > 64 else 0)


def test_more_moves_than_rows_of_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copy_slots, "_GRID_LIMIT", 3)
    check(SHAPES["base"], CountingLauncher())
    test_long_lists_go_another_way_to_the_same_bytes(65)


@pytest.fixture
def launcher(monkeypatch: pytest.MonkeyPatch) -> CountingLauncher:
    """Pools made under it copy by kernel, and are counted."""
    counting = CountingLauncher()
    monkeypatch.setattr(state_pool, "copies_of", lambda states, layers: KernelCopies(states, layers, counting))
    return counting


@pytest.mark.parametrize("layout", ["channels", "positions"])
def test_every_copy_of_48_layers_is_one_launch(launcher: CountingLauncher, layout: PoolLayout) -> None:
    layers = [LayerState(40, 4, BF16), LayerState(24, 2, FP32)] * 24
    pool = StatePool(8, layers, draft_tokens=2, layout=layout)
    slot, other = pool.take(), pool.take()
    assert slot is not None and other is not None
    pool.commit(slot, 3, accepted=2)

    def launches(operation: Callable[[], Any]) -> int:
        before = len(launcher.launches)
        assert operation() is not False
        return len(launcher.launches) - before

    assert launches(lambda: pool.commit(slot, 2, accepted=2)) == 0
    savepoint: list[Any] = []
    assert launches(lambda: savepoint.append(pool.fork(slot))) == 1
    assert launches(lambda: pool.roll_back(slot, savepoint[0])) == 1
    assert launches(lambda: pool.publish(slot, "key", 4)) == 1
    assert launches(lambda: pool.publish(slot, "key", 4)) == 0
    assert launches(lambda: pool.take_prefix([("key", 4)])) == 1
    assert launches(lambda: pool.move([SlotMove(slot, other, 1), SlotMove(other, slot)])) == 1
    packages: list[Any] = []
    assert launches(lambda: packages.append(pool.export([slot, other]))) == 1
    assert launches(lambda: pool.import_(packages[0])) == 1
    assert launches(lambda: pool.move([SlotMove(slot, slot)])) == 0
    assert launches(lambda: pool.export([])) == 0
    assert launcher.staged == 0


def test_every_byte_of_an_export_is_written_and_no_slot_without_history_is_read(
    launcher: CountingLauncher, monkeypatch: pytest.MonkeyPatch
) -> None:
    def poisoned(*arguments: Any) -> SlotPackage:
        package = SlotPackage.zeros(*arguments)
        package.buffer.fill_(0xA5)
        return package

    monkeypatch.setattr(SlotPackage, "empty", poisoned)
    pool = StatePool(4, [LayerState(3, 2, BF16), LayerState(1, 3, FP16), LayerState(2, 2)])
    for state in pool.states:
        state.fill_(float("nan"))
    fresh = pool.take()
    assert fresh is not None
    package = pool.export([fresh])
    assert not package.buffer.any()


def test_a_package_at_an_odd_address_is_imported(launcher: CountingLauncher) -> None:
    layers = [LayerState(8, 4, BF16)]
    pool = StatePool(4, layers, layout="positions")
    values = torch.arange(24, dtype=torch.bfloat16)
    memory = torch.zeros(49 + 48, dtype=torch.uint8)
    begin = 1 - memory.data_ptr() % 2
    memory[begin : begin + 48] = values.view(torch.uint8)
    foreign = torch.frombuffer(memory.numpy(), dtype=torch.uint8, count=48, offset=begin)
    assert foreign.data_ptr() % 2
    slots = pool.import_(SlotPackage(foreign, (7,), tuple(layers)))
    assert slots is not None
    assert torch.equal(pool.states[0][slots[0]].flatten(), values)


def test_slots_beyond_two_to_the_31_elements() -> None:
    stride, slots = 600_000, 3_600
    page = torch.empty(stride * slots, dtype=BF16)
    state = page.as_strided((slots, 8, 3), (stride, 1, 8))
    layers = (LayerState(8, 4, BF16),)
    copies = KernelCopies([state], layers, CountingLauncher())
    values = torch.arange(24, dtype=BF16).view(8, 3)
    state[1] = values
    copies.copy(1, slots - 1)
    assert torch.equal(state[slots - 1], values)
    copies.copy(slots - 1, 2, 1)
    assert torch.equal(state[2, :, :2], values[:, 1:])
    copies.move([SlotMove(slots - 1, slots - 2), SlotMove(slots - 2, slots - 1)])
    assert torch.equal(state[slots - 2], values)
    package = SlotPackage.empty([1], layers)
    copies.pack(package, [(slots - 2, 0)])
    assert torch.equal(package.window(0)[0], values)
    copies.unpack(package, [slots - 3])
    assert torch.equal(state[slots - 3], values)


def test_the_backend_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    layers = [LayerState(8, 4)]
    states = Pages(Shape(tuple(layers))).states
    assert type(copies_of([state.to("meta") for state in states], layers)) is TorchCopies
    for backend, wanted in (("reference", TorchCopies), ("cuda", TorchCopies), ("host", KernelCopies)):
        settings = replace(copy_slots.SETTINGS, backend=backend)
        monkeypatch.setattr(copy_slots, "SETTINGS", settings)
        monkeypatch.setattr(copy_slots.host, "SETTINGS", settings)
        assert type(copies_of(states, layers)) is wanted, backend


# Bugs of one line each, none of which strays out of the pages. The first shape shows all but those with their own.
MUTANTS: dict[str, tuple[str, str, str]] = {
    "the shift is not read": ("base", " + move.shift * source.step", ""),
    "a shifted copy is too long": ("base", "left < layer.steps ? left : layer.steps", "layer.steps"),
    "nothing is read as a slot": ("base", "move.source < 0 ? nullptr : from", "from"),
    "one lane too many": ("odd address", "if (lane >= layer.lanes)", "if (lane > layer.lanes)"),
    "one tile alone": ("odd address", "(i64)tile * THREADS", "(i64)0 * THREADS"),
    "one layer alone": ("base", "p.layers[index]", "p.layers[0]"),
    "positions after the first four are lost": ("base", "first < steps; first += TOGETHER", "first < 1; ++first"),
    "one move alone": ("base", "i += (int)gridDim.y", "i += 1 << 30"),
    "the kept word is lost": ("base", "kept[part] = word[part];", ";"),
    "a list with an order ignores it": ("base", "if (p.ordered)", "if (p.ordered && !p.count)"),
    "a shifted move in order reads too early": (
        "base",
        "(step + move.shift) * layer.source.step",
        "step * layer.source.step",
    ),
    "a shifted move in order is too long": ("base", "if (step + move.shift >= layer.source_steps) continue;", ""),
    "gaps of a package keep their bytes": ("base", "if (place < aligned(end))", "if (place < end)"),
    "gaps of a package are those of its first layer": ("base", "p.package + offset + place", "p.package + place"),
    "rows of runs are dense": ("positions, pitch gap", "row * side.row", "0"),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_a_planted_bug_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copy_slots, "_GRID_LIMIT", 3)
    shape, old, new = MUTANTS[name]
    launcher = CountingLauncher(function=function_of(CopyVariant(), ((old, new),)))
    with pytest.raises(AssertionError):
        check_seeds(SHAPES[shape], launcher)
