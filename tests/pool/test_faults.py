"""Owns the fault injection: an exception before every line of every operation, with and without free slots."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from serving_conv.pool import LayerState, Slot, SlotMove, SlotPackage, StatePool

pytestmark = pytest.mark.usefixtures("copies_by")

CHAIN = [("old", 3), ("middle", 5), ("missing", 7)]


@dataclass
class Scene:
    """A pool with two live slots and three checkpoints, one of them held."""

    pool: StatePool
    slot: Slot
    other: Slot
    package: SlotPackage


def _taken(slot: Slot | None) -> Slot:
    assert slot is not None
    return slot


def _scene(room: bool) -> Scene:
    pool = StatePool(9 if room else 6, [LayerState(2, 4), LayerState(1, 2)], draft_tokens=2)
    for index, state in enumerate(pool.states):
        state.copy_(torch.arange(state.numel()).view(state.shape) + 1000 * index)
    slot = _taken(pool.take())
    for key, tokens in (("held", 1), ("old", 3), ("middle", 5)):
        pool.commit(slot, tokens - pool.tokens(slot))
        assert pool.publish(slot, key, tokens)
    pool.hold("held")
    pool.commit(slot, 3, accepted=2)
    other = _taken(pool.fork(slot))
    pool.commit(other, 4)
    assert pool.counts().free == (3 if room else 0)
    return Scene(pool, slot, other, pool.export([slot, other]))


OPERATIONS: dict[str, Callable[[Scene], object]] = {
    "take": lambda s: s.pool.take(),
    "free": lambda s: s.pool.free(s.slot),
    "fork": lambda s: s.pool.fork(s.slot),
    "commit": lambda s: s.pool.commit(s.slot, 5),
    "speculative commit": lambda s: s.pool.commit(s.slot, 3, accepted=1),
    "roll back": lambda s: s.pool.roll_back(s.slot, s.other),
    "publish": lambda s: s.pool.publish(s.slot, "new", 7),
    "publish again": lambda s: s.pool.publish(s.other, "new", 11),
    "longest prefix": lambda s: s.pool.longest_prefix(CHAIN),
    "take prefix": lambda s: s.pool.take_prefix(CHAIN),
    "hold": lambda s: s.pool.hold("old"),
    "release": lambda s: s.pool.release("held"),
    "drop": lambda s: s.pool.drop("old"),
    "move": lambda s: s.pool.move([SlotMove(s.slot, s.other, 1), SlotMove(s.other, s.slot)]),
    "export": lambda s: s.pool.export([s.slot, s.other]).buffer.sum().item(),
    "import": lambda s: s.pool.import_(s.package),
}


def _books(pool: StatePool) -> dict[str, Any]:
    live, prefixes = pool._ledger._live, pool._prefixes
    return {"live": dict(live), "holds": dict(prefixes._holds), "high water": pool.high_water}


def _contents(pool: StatePool, slots: list[int]) -> list[torch.Tensor]:
    return [state[slots].clone() for state in pool.states]


def _same(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def _check_nothing_is_lost(pool: StatePool) -> None:
    """Drain the pool: every slot that is free or can be evicted comes out once, and no other."""
    counts = pool.counts()
    assert sum(counts) == pool.slots
    out = set(pool._ledger._live)
    assert len(out) == counts.live
    assert out.isdisjoint(pool._prefixes.slots())
    stuck = {pool._prefixes[key].slot for key in pool._prefixes._holds}
    while (slot := pool.take()) is not None:
        assert slot not in out
        out.add(int(slot))
        assert sum(pool.counts()) == pool.slots
    assert out | stuck == set(range(1, pool.slots))
    assert out.isdisjoint(stuck)


@pytest.mark.parametrize("room", [True, False], ids=["room", "full"])
@pytest.mark.parametrize("name", OPERATIONS)
def test_a_fault_at_any_line_changes_nothing(lines: Any, name: str, room: bool) -> None:
    operation = OPERATIONS[name]
    undisturbed = _scene(room)
    expected = operation(undisturbed)
    reached = 0
    while True:
        scene = _scene(room)
        pool = scene.pool
        books, prefixes = _books(pool), dict(pool._prefixes._entries)
        # A roll back or a move may be caught half way in the slots it writes; books and sources stay.
        kept = [] if name == "move" else [scene.other] if name == "roll back" else [scene.slot, scene.other]
        before = _contents(pool, [0, *kept])
        try:
            result = lines.run(lambda scene=scene: operation(scene), fail_at=reached + 1)
        except lines.Fault:
            reached += 1
        else:
            assert result == expected
            break
        assert _books(pool) == books
        assert _same(_contents(pool, [0, *kept]), before)
        left = dict(pool._prefixes._entries)
        assert left.items() <= prefixes.items()
        assert len(prefixes) - len(left) <= pool.prefix_statistics.evictions
        assert "held" in left
        cached = [checkpoint.slot for checkpoint in left.values()]
        assert _same(_contents(pool, cached), _contents(_scene(room).pool, cached))
        if name != "move":  # a second move would begin from other contents
            assert _retried(operation(scene)) == _retried(expected)
            assert pool.counts()[1] == undisturbed.pool.counts()[1]
        _check_nothing_is_lost(pool)
    assert reached >= 3


def _retried(result: object) -> object:
    """The result of a second attempt: as good, but perhaps in another slot."""
    if isinstance(result, list):
        return len(result)
    return type(result) if isinstance(result, Slot | tuple) else result


def test_the_free_list_heals_without_evicting() -> None:
    scene = _scene(room=True)
    pool = scene.pool
    pool._ledger._free.clear()  # the worst that lost hints can come to
    counts = pool.counts()
    for _ in range(counts.free):
        assert pool.take() is not None
    assert pool.prefix_statistics.evictions == 0
    assert pool.counts().cached == counts.cached


def test_faults_during_construction_leave_engine_memory_alone(lines: Any, make_pool: Any) -> None:
    _, page = make_pool(slots=4)
    before = [memory.clone() for memory in page.pages]
    layers = [LayerState(3, 4), LayerState(2, 2)]
    reached = 0
    while True:
        try:
            lines.run(lambda: StatePool(4, layers, draft_tokens=2, tensors=page.tensors), fail_at=reached + 1)
        except lines.Fault:
            reached += 1
            assert all(torch.equal(now, then) for now, then in zip(page.pages, before, strict=True))
        else:
            break
    assert reached > 20
