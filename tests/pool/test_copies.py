"""Owns the tests of copies between slots: layouts, chains, cycles, overlap, adopted memory, and what is left behind."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from serving_conv import ContractError
from serving_conv.pool import LayerState, PoolLayout, SlotMove, StatePool
from serving_conv.pool.copies import move_slots

pytestmark = pytest.mark.usefixtures("copies_by")

LAYOUTS: list[PoolLayout] = ["channels", "positions"]


def _expected(states: tuple[torch.Tensor, ...], moves: list[SlotMove]) -> list[torch.Tensor]:
    """All moves at once, value by value."""
    results = []
    for state in states:
        old, new = state.tolist(), state.tolist()
        for source, destination, shift in moves:
            for channel, values in enumerate(old[source]):
                for position, value in enumerate(values[shift:]):
                    new[destination][channel][position] = value
        results.append(torch.tensor(new, dtype=state.dtype))
    return results


def _all_live(pool: StatePool) -> None:
    while pool.take() is not None:
        pass


def _check(pool: StatePool, moves: list[SlotMove]) -> None:
    expected = _expected(pool.states, moves)
    counts = pool.counts()
    pool.move(moves)
    assert all(torch.equal(state, wanted) for state, wanted in zip(pool.states, expected, strict=True))
    assert pool.counts() == counts


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    "moves",
    [
        [],
        [SlotMove(1, 2)],
        [SlotMove(1, 2), SlotMove(2, 3), SlotMove(3, 4)],
        [SlotMove(3, 4), SlotMove(2, 3), SlotMove(1, 2)],
        [SlotMove(1, 2), SlotMove(2, 1)],
        [SlotMove(1, 2, 1), SlotMove(2, 3, 2), SlotMove(3, 1)],
        [SlotMove(1, 1)],
        [SlotMove(1, 1, 1)],
        [SlotMove(1, 1, 4), SlotMove(1, 2, 1), SlotMove(1, 3)],
    ],
    ids=["none", "one", "chain", "backward", "swap", "shifted cycle", "itself", "overlap", "fan out"],
)
def test_moves_keep_every_value(make_pool: Any, layout: PoolLayout, moves: list[SlotMove]) -> None:
    pool, _ = make_pool(layout=layout)
    _all_live(pool)
    _check(pool, moves)


_moves = st.lists(
    st.builds(SlotMove, st.integers(1, 5), st.integers(1, 5), st.integers(0, 4)),
    unique_by=lambda move: move.destination,
    max_size=5,
)


@given(moves=_moves, layout=st.sampled_from(LAYOUTS), dtype=st.sampled_from([torch.float32, torch.bfloat16]))
def test_any_moves_keep_every_value(moves: list[SlotMove], layout: PoolLayout, dtype: torch.dtype) -> None:
    pool = StatePool(6, [LayerState(3, 4, dtype), LayerState(1, 2, dtype)], draft_tokens=2, layout=layout)
    for state in pool.states:
        state.copy_(torch.arange(state.numel()).view(state.shape))
    _all_live(pool)
    _check(pool, moves)


def test_moves_keep_every_bit_of_nan_and_infinity() -> None:
    pool = StatePool(4, [LayerState(2, 4)])
    bits = torch.tensor([0x7FC00001, 0x7F800000, -0x400000, 1, -0x80000000, 0x7F800001], dtype=torch.int32)
    pool.states[0][1] = bits.view(torch.float32).view(2, 3)
    _all_live(pool)
    pool.move([SlotMove(1, 2), SlotMove(2, 1)])
    copied = pool.states[0][2].contiguous().view(torch.int32).flatten()
    assert torch.equal(copied, bits)


@pytest.mark.parametrize(
    ("moves", "argument"),
    [
        ([SlotMove(1, 2), SlotMove(3, 2)], "moves"),
        ([SlotMove(1, 2), SlotMove(1, 3, 5)], "shift"),
        ([SlotMove(1, 2), SlotMove(1, 3, -1)], "shift"),
        ([SlotMove(1, 2), SlotMove(1, 0)], "slot"),
        ([SlotMove(1, 2), SlotMove(1, 5)], "slot"),
        ([SlotMove(1, 2), SlotMove(5, 1)], "slot"),
    ],
)
def test_moves_that_cannot_be_are_refused_whole(make_pool: Any, moves: list[SlotMove], argument: str) -> None:
    pool, page = make_pool()
    for _ in range(4):
        pool.take()
    before = [memory.clone() for memory in page.pages]
    with pytest.raises(ContractError) as raised:
        pool.move(moves)
    assert raised.value.argument == argument
    assert all(torch.equal(now, then) for now, then in zip(page.pages, before, strict=True))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("stride", [31, 600_000])
def test_operations_in_engine_memory_touch_their_slots_only(make_pool: Any, layout: PoolLayout, stride: int) -> None:
    pool, page = make_pool(layout=layout, stride=stride)
    slot = pool.take()
    pool.commit(slot, 2, accepted=2)
    before = [state.clone() for state in pool.states]
    fork = pool.fork(slot)
    assert pool.publish(slot, "key", 2)
    cached = pool._prefixes["key"].slot
    package = pool.export([slot])
    (imported,) = pool.import_(package)
    for state, old, window in zip(pool.states, before, package.windows(), strict=True):
        width = window.shape[2]
        expected = old.clone()
        expected[fork] = old[slot]
        expected[cached, :, :4] = old[slot, :, 1:]
        expected[imported, :, :width] = old[slot, :, 1 : 1 + width]
        assert torch.equal(state, expected)
    page.check_guards()


def _adopt(slots: int, tensors: list[torch.Tensor], layout: PoolLayout = "channels", **options: Any) -> StatePool:
    return StatePool(slots, [LayerState(4, 4)] * len(tensors), layout=layout, tensors=tensors, **options)


def _page(*strides: int, offset: int = 0, slots: int = 3, memory: torch.Tensor | None = None) -> torch.Tensor:
    memory = torch.zeros(1000) if memory is None else memory
    return memory.as_strided((slots, 4, 3), strides, offset)


@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        (_page(12, 1, 4, slots=2), "shape"),
        (_page(12, 1, 4).double(), "dtype"),
        (_page(12, 1, 4).to("meta"), "device"),
        (_page(12, 1, 4).clone().requires_grad_(), "requires_grad"),
        (_page(12, 3, 1), "channels contiguous"),
        (_page(24, 2, 8), "channels contiguous"),
        (_page(12, 1, 3), "channels contiguous"),
        (_page(11, 1, 4), "slots that do not overlap"),
        (_page(0, 1, 4), "slots that do not overlap"),
    ],
)
def test_unfit_engine_memory_is_refused(tensor: torch.Tensor, message: str) -> None:
    with pytest.raises(ContractError, match=message) as raised:
        _adopt(3, [tensor])
    assert raised.value.argument == "tensors[0]"


def test_layers_may_share_a_page_but_not_a_byte() -> None:
    memory = torch.zeros(1000)
    first = _page(30, 1, 4, memory=memory)
    for good in (
        _page(30, 1, 4, offset=12, memory=memory),  # beside it in each slot
        _page(30, 1, 4, offset=90, memory=memory),  # behind it
        _page(24, 1, 8, offset=204, memory=memory),
    ):
        _adopt(3, [first, good])
    interleaved = [_page(48, 1, 8, offset=offset, memory=memory) for offset in (0, 4)]
    _adopt(3, interleaved)
    for bad in (first, _page(30, 1, 4, offset=11, memory=memory), _page(30, 1, 4, offset=20, memory=memory)):
        with pytest.raises(ContractError, match=r"memory of tensors\[0\]"):
            _adopt(3, [first, bad])
    with pytest.raises(ContractError, match=r"memory of tensors\[0\]"):
        _adopt(3, [interleaved[0], _page(48, 1, 8, offset=3, memory=memory)])


def _memory_of(thing: object) -> int | None:
    """The address of a tensor's memory. Tensors that a compiler left behind have none, and say so by an error."""
    if not issubclass(type(thing), torch.Tensor):
        return None
    assert isinstance(thing, torch.Tensor)
    try:
        return thing.untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError):
        return None


def test_operations_leave_no_cycles_and_no_views() -> None:
    pool = StatePool(8, [LayerState(3, 4), LayerState(2, 3)], draft_tokens=2, max_tokens=4)
    memory = {state.untyped_storage().data_ptr() for state in pool.states}
    gc.collect()
    gc.disable()
    try:
        slot = pool.take()
        assert slot is not None
        pool.commit(slot, 3)
        pool.commit(slot, 2, accepted=2)
        savepoint = pool.fork(slot)
        assert savepoint is not None
        pool.roll_back(slot, savepoint)
        pool.publish(slot, "key", 5)
        found = pool.take_prefix([("key", 5)])
        assert found is not None
        pool.hold("key")
        pool.release("key")
        pool.move([SlotMove(slot, found[0], 1), SlotMove(found[0], slot)])
        package = pool.export([slot, found[0]])
        assert pool.import_(package)
        pool.drop("key")
        for wrong in (lambda: pool.free(7), lambda: pool.publish(slot, "other", 4), lambda: pool.drop("key")):
            with pytest.raises(ContractError):
                wrong()
        pool.free(slot)
        del wrong
        views = [thing for thing in gc.get_objects() if _memory_of(thing) in memory]
        assert len(views) == len(pool.states)
        del views
        assert gc.collect() == 0
    finally:
        gc.enable()


def test_moves_need_no_tensors_to_do_nothing() -> None:
    move_slots([], [])
