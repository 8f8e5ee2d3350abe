"""Owns the tests of slot life: states, counts, stale handles, history counts, and the price of bookkeeping."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch

from serving_conv import ContractError
from serving_conv.contract import prefill_workspace_size
from serving_conv.pool import LayerState, Slot, SlotCounts, StatePool, pool_positions, slot_bytes
from serving_conv.pool.layout import workspace_elements

LAYERS = [LayerState(3, 4), LayerState(2, 2)]


def _pool(slots: int = 5, **options: Any) -> StatePool:
    return StatePool(slots, LAYERS, **{"draft_tokens": 3, **options})


def _taken(slot: Slot | None) -> Slot:
    assert slot is not None
    return slot


def test_running_out_is_an_answer_and_all_but_the_reserved_slot_can_be_had() -> None:
    pool = _pool()
    assert pool.counts() == (4, 0, 0, 1)
    slots = [_taken(pool.take()) for _ in range(4)]
    assert slots == [1, 2, 3, 4]
    assert pool.take() is None
    assert pool.fork(slots[0]) is None
    assert pool.counts() == SlotCounts(free=0, live=4, cached=0, reserved=1)
    for slot in slots:
        pool.free(slot)
    assert pool.counts() == (4, 0, 0, 1)
    assert pool.high_water == 4


def test_double_free_and_use_after_free_are_errors() -> None:
    pool = _pool()
    slot = _taken(pool.take())
    pool.free(slot)
    uses: list[Callable[[], object]] = [
        lambda: pool.free(slot),
        lambda: pool.fork(slot),
        lambda: pool.commit(slot, 1),
        lambda: pool.tokens(slot),
        lambda: pool.accepted(slot),
        lambda: pool.has_history(slot),
        lambda: pool.publish(slot, "key", 0),
        lambda: pool.export([slot]),
    ]
    for use in uses:
        with pytest.raises(ContractError, match=r"slot 1, free; wanted a live slot"):
            use()
    again = _taken(pool.take())
    assert again == slot
    for use in uses:
        with pytest.raises(ContractError, match="freed and taken again"):
            use()
    assert pool.tokens(again) == pool.tokens(1) == 0
    assert pool.counts() == (3, 1, 0, 1)


@pytest.mark.parametrize(
    ("slot", "state"), [(0, "reserved"), (-1, "outside"), (5, "outside"), (3, "free"), (1, "cached")]
)
def test_slots_that_are_not_live_are_refused(slot: int, state: str) -> None:
    pool = _pool()
    published = _taken(pool.take())
    pool.commit(published, 4)
    live = _taken(pool.fork(published))
    pool.free(published)
    assert pool.publish(live, "key", 4)  # the vacant slot is the one just freed
    with pytest.raises(ContractError, match=f"slot {slot}, {state}"):
        pool.free(slot)


def test_a_handle_is_a_plain_number_that_survives_copies() -> None:
    slot = Slot(7, 3)
    assert (f"{slot}", str(slot), repr(slot), slot + 1) == ("7", "7", "Slot(7, generation=3)", 8)
    for twin in (copy.copy(slot), copy.deepcopy(slot), pickle.loads(pickle.dumps(slot))):
        assert (twin, twin.generation, type(twin)) == (7, 3, Slot)
    assert torch.tensor([slot], dtype=torch.int32).tolist() == [7]


def test_commit_counts_plain_and_speculative_steps() -> None:
    pool = _pool()
    slot = _taken(pool.take())
    assert (pool.has_history(slot), pool.accepted(slot)) == (False, 1)
    pool.commit(slot, 0)
    assert not pool.has_history(slot)
    pool.commit(slot, 100)
    assert (pool.tokens(slot), pool.accepted(slot), pool.has_history(slot)) == (100, 1, True)
    pool.commit(slot, 4, accepted=3)
    assert (pool.tokens(slot), pool.accepted(slot)) == (103, 3)
    pool.commit(slot, 0)  # an empty sequence leaves the slot alone, so the window is still at position 2
    assert (pool.tokens(slot), pool.accepted(slot)) == (103, 3)
    pool.commit(slot, 1, accepted=1)
    pool.commit(slot, 1)
    assert (pool.tokens(slot), pool.accepted(slot)) == (105, 1)


@pytest.mark.parametrize(("tokens", "accepted"), [(4, 0), (4, -1), (4, 5), (2, 3), (5, 1), (0, 0), (-1, None)])
def test_commit_refuses_impossible_counts(tokens: int, accepted: int | None) -> None:
    pool = _pool()
    slot = _taken(pool.take())
    with pytest.raises(ContractError):
        pool.commit(slot, tokens, accepted)
    assert (pool.tokens(slot), pool.accepted(slot)) == (0, 1)


def test_fork_and_roll_back_restore_window_and_counts() -> None:
    pool = _pool()
    slot = _taken(pool.take())
    for state in pool.states:
        state[slot] = torch.randn(state.shape[1:])
    pool.commit(slot, 9)
    pool.commit(slot, 4, accepted=2)
    before = [state[slot].clone() for state in pool.states]
    savepoint = _taken(pool.fork(slot))
    for state in pool.states:
        state[slot] = -1.0
    pool.commit(slot, 30)
    pool.roll_back(slot, savepoint)
    assert (pool.tokens(slot), pool.accepted(slot)) == (11, 2)
    assert all(torch.equal(state[slot], kept) for state, kept in zip(pool.states, before, strict=True))
    assert pool.counts() == (3, 1, 0, 1)
    with pytest.raises(ContractError):
        pool.roll_back(slot, savepoint)
    with pytest.raises(ContractError, match="itself"):
        pool.roll_back(slot, slot)


def test_high_water_is_the_most_live_at_once() -> None:
    pool = _pool(9)
    first = [_taken(pool.take()) for _ in range(3)]
    for slot in first:
        pool.free(slot)
    slot = _taken(pool.take())
    assert pool.high_water == 3
    savepoint = _taken(pool.fork(slot))
    for _ in range(2):
        _taken(pool.take())
    pool.roll_back(slot, savepoint)
    assert pool.high_water == 4


def test_freed_slots_are_not_cleaned_and_a_taken_one_has_no_history() -> None:
    pool = _pool()
    slot = _taken(pool.take())
    pool.states[0][slot] = 5.0
    pool.commit(slot, 3)
    pool.free(slot)
    again = _taken(pool.take())
    assert again == slot
    assert not pool.has_history(again)
    assert torch.equal(pool.states[0][again], torch.full((3, pool.positions), 5.0))


def test_bookkeeping_runs_the_same_lines_whatever_the_size(lines: Any) -> None:
    seen = []
    for slots in (10, 10_000):
        pool = StatePool(slots, [LayerState(1, 2)])
        row = []
        slot = lines.run(pool.take)
        row.append(lines.seen)
        lines.run(lambda slot=slot, pool=pool: pool.commit(slot, 1))
        row.append(lines.seen)
        for key in range(slots - 3):  # one free slot left
            assert pool.publish(slot, key, 1)
        fork = lines.run(lambda slot=slot, pool=pool: pool.fork(slot))
        row.append(lines.seen)
        lines.run(lambda slot=slot, pool=pool: pool.publish(slot, "new", 1))  # evicts
        row.append(lines.seen)
        lines.run(lambda pool=pool: pool.take_prefix([("new", 1)]))  # evicts
        row.append(lines.seen)
        lines.run(lambda fork=fork, pool=pool: pool.free(fork))
        seen.append([*row, lines.seen])
    assert seen[0] == seen[1]


@pytest.mark.parametrize(
    ("change", "argument"),
    [
        ({"slots": 1}, "slots"),
        ({"layers": []}, "layers"),
        ({"positions": 5}, "positions"),
        ({"draft_tokens": -1}, "draft_tokens"),
        ({"layout": "rows"}, "layout"),
        ({"pad_slot_id": 3}, "pad_slot_id"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_sequences": -1}, "max_sequences"),
        ({"tensors": []}, "tensors"),
    ],
)
def test_construction_refuses(change: dict[str, Any], argument: str) -> None:
    with pytest.raises(ContractError) as raised:
        StatePool(**{"slots": 4, "layers": LAYERS, "draft_tokens": 3, **change})
    assert raised.value.argument == argument


@pytest.mark.parametrize(
    "arguments", [(0, 4, torch.float32), (8, 1, torch.float32), (8, 9, torch.float32), (8, 4, torch.float64)]
)
def test_a_layer_out_of_range_is_refused(arguments: tuple[int, int, torch.dtype]) -> None:
    with pytest.raises(ContractError):
        LayerState(*arguments)


def test_sizes_come_from_width_and_drafts() -> None:
    layers = [LayerState(6, 4, torch.bfloat16), LayerState(5, 8, torch.float32)]
    assert pool_positions(layers, 3) == 10
    assert slot_bytes(layers, 3) == 6 * 10 * 2 + 5 * 10 * 4
    pool = StatePool(4, layers, draft_tokens=3, max_tokens=16)
    assert pool.nbytes == 4 * slot_bytes(layers, 3) == sum(state.nbytes for state in pool.states)
    assert [tuple(state.shape) for state in pool.states] == [(4, 6, 10), (4, 5, 10)]
    assert [(tuple(out.shape), out.dtype) for out in pool.outputs] == [
        ((16, 6), torch.bfloat16),
        ((16, 5), torch.float32),
    ]
    assert StatePool(4, layers, draft_tokens=3, positions=12).positions == 12
    assert (pool.reserved_slot, pool.pad_slot_id, pool.workspace.dtype) == (0, 0, torch.int32)


def test_layouts_lie_as_they_say() -> None:
    assert _pool().states[0].stride() == (18, 1, 3)
    assert _pool(layout="positions").states[0].stride() == (18, 6, 1)


@pytest.mark.parametrize(("tokens", "sequences"), [(0, 40), (300, 32), (300, 33), (5000, 40), (2700, 40)])
def test_the_workspace_serves_every_smaller_call(tokens: int, sequences: int) -> None:
    most = max(prefill_workspace_size(r, n) for r in range(tokens + 1) for n in range(1, sequences + 1))
    assert workspace_elements(tokens, sequences) == most
