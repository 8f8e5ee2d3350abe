"""Owns the random walk: Hypothesis drives the pool and a plain model of it, tensor contents included."""

from __future__ import annotations

from collections import Counter, OrderedDict
from dataclasses import dataclass

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from torch import Tensor

from serving_conv import ContractError
from serving_conv.pool import LayerState, PoolLayout, Slot, SlotCounts, SlotMove, StatePool

SLOTS, DRAFTS = 7, 2
LAYERS = (LayerState(3, 4), LayerState(2, 2))
KEYS = "abcd"
PICK = st.integers(0, 1000)
GUARD = 777.0


@dataclass
class Sequence:
    """What the model knows of a live slot; NaN marks a value that nobody promised."""

    tokens: int
    accepted: int
    contents: list[Tensor]

    def windows(self) -> list[Tensor]:
        first = self.accepted - 1
        return [c[:, first : first + lay.width - 1] for c, lay in zip(self.contents, LAYERS, strict=True)]


def _unknown(positions: int) -> list[Tensor]:
    return [torch.full((layer.channels, positions), torch.nan) for layer in LAYERS]


def _shifted(contents: list[Tensor], onto: list[Tensor], shift: int) -> list[Tensor]:
    return [torch.cat([c[:, shift:], o[:, c.shape[1] - shift :]], dim=1) for c, o in zip(contents, onto, strict=True)]


def _agrees(actual: Tensor, expected: Tensor) -> bool:
    return torch.equal(torch.where(expected.isnan(), expected.new_zeros(()), actual), expected.nan_to_num())


class PoolMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.live: dict[Slot, Sequence] = {}
        self.cached: OrderedDict[str, Sequence] = OrderedDict()  # least recently used first
        self.holds: Counter[str] = Counter()
        self.dead: list[Slot] = []
        self.value = 0.0
        self.most_live = 0

    @initialize(layout=st.sampled_from(["channels", "positions"]), stride=st.sampled_from([15, 41]))
    def build(self, layout: PoolLayout, stride: int) -> None:
        self.positions = 3 + DRAFTS
        self.pages = [torch.full((SLOTS * stride + 9,), GUARD) for _ in LAYERS]
        tensors, self.guards = [], []
        for page, layer in zip(self.pages, LAYERS, strict=True):
            inner = (1, layer.channels) if layout == "channels" else (self.positions, 1)
            view = ((SLOTS, layer.channels, self.positions), (stride, *inner), 4)
            guard = torch.ones(page.shape, dtype=torch.bool)
            guard.as_strided(*view).fill_(False)
            self.guards.append(guard)
            tensors.append(page.as_strided(*view))
        self.pool = StatePool(SLOTS, LAYERS, draft_tokens=DRAFTS, layout=layout, tensors=tensors)

    # The model's own bookkeeping.

    def _free(self) -> int:
        return SLOTS - 1 - len(self.live) - len(self.cached)

    def _make_room(self, wanted: int = 1, keep: str | None = None) -> bool:
        victims = [key for key in self.cached if not self.holds[key] and key != keep]
        missing = wanted - self._free()
        if missing > len(victims):
            return False
        for key in victims[: max(missing, 0)]:
            del self.cached[key]
        return True

    def _pick(self, index: int) -> Slot:
        return list(self.live)[index % len(self.live)]

    def _add(self, slot: Slot | None, sequence: Sequence) -> None:
        assert slot is not None
        assert slot not in self.live
        self.live[slot] = sequence
        self.most_live = max(self.most_live, len(self.live))

    def _fresh(self, channels: int, tokens: int) -> Tensor:
        values = torch.arange(1.0, channels * tokens + 1).view(channels, tokens) + self.value
        self.value += channels * tokens
        return values

    # Slots.

    @rule()
    def take(self) -> None:
        room, slot = self._make_room(), self.pool.take()
        assert (slot is not None) == room
        if room:
            self._add(slot, Sequence(0, 1, _unknown(self.positions)))

    @precondition(lambda self: self.live)
    @rule(index=PICK)
    def free(self, index: int) -> None:
        slot = self._pick(index)
        self.pool.free(slot)
        del self.live[slot]
        self.dead.append(slot)

    @precondition(lambda self: self.dead)
    @rule(index=PICK)
    def use_after_free(self, index: int) -> None:
        slot = self.dead[index % len(self.dead)]
        for use in (self.pool.free, self.pool.fork, self.pool.tokens):
            with pytest.raises(ContractError):
                use(slot)

    @precondition(lambda self: self.live)
    @rule(index=PICK)
    def fork(self, index: int) -> None:
        slot = self._pick(index)
        room, fork = self._make_room(), self.pool.fork(slot)
        assert (fork is not None) == room
        if room:
            old = self.live[slot]
            self._add(fork, Sequence(old.tokens, old.accepted, [c.clone() for c in old.contents]))

    @precondition(lambda self: len(self.live) > 1)
    @rule(index=PICK, other=PICK)
    def roll_back(self, index: int, other: int) -> None:
        slot, savepoint = self._pick(index), self._pick(other)
        if slot == savepoint:
            with pytest.raises(ContractError):
                self.pool.roll_back(slot, savepoint)
            return
        self.pool.roll_back(slot, savepoint)
        self.live[slot] = self.live.pop(savepoint)
        self.dead.append(savepoint)

    @precondition(lambda self: self.live)
    @rule(index=PICK, tokens=st.integers(0, DRAFTS + 1), accepted=st.none() | st.integers(1, DRAFTS + 1))
    def step(self, index: int, tokens: int, accepted: int | None) -> None:
        """Write to the slot what the operator would, then commit."""
        slot = self._pick(index)
        sequence = self.live[slot]
        if accepted is not None and accepted > tokens:
            with pytest.raises(ContractError):
                self.pool.commit(slot, tokens, accepted)
            return
        if tokens:
            for window, contents, state, layer in zip(
                sequence.windows(), sequence.contents, self.pool.states, LAYERS, strict=True
            ):
                window = window if sequence.tokens else torch.zeros_like(window)
                inputs = torch.cat([window, self._fresh(layer.channels, tokens)], dim=1)
                stored = inputs[:, tokens:] if accepted is None else inputs[:, 1:]
                contents[:, : stored.shape[1]] = stored
                state[slot, :, : stored.shape[1]] = stored
            sequence.accepted = accepted or 1
            sequence.tokens += accepted or tokens
        self.pool.commit(slot, tokens, accepted)

    # Prefix checkpoints.

    @precondition(lambda self: self.live)
    @rule(index=PICK, key=st.sampled_from(KEYS), wrong=st.sampled_from([0, 0, 0, 1, -1]))
    def publish(self, index: int, key: str, wrong: int) -> None:
        slot = self._pick(index)
        sequence = self.live[slot]
        tokens = sequence.tokens + wrong
        if wrong or not tokens or (key in self.cached and self.cached[key].tokens != tokens):
            with pytest.raises(ContractError):
                self.pool.publish(slot, key, tokens)
            return
        done = key in self.cached or self._make_room()
        assert self.pool.publish(slot, key, tokens) == done
        if done:
            contents = _shifted(sequence.contents, _unknown(self.positions), sequence.accepted - 1)
            self.cached.setdefault(key, Sequence(tokens, 1, contents))
            self.cached.move_to_end(key)

    @rule(keys=st.permutations(KEYS), number=st.integers(0, len(KEYS)), take=st.booleans())
    def look_up(self, keys: list[str], number: int, take: bool) -> None:
        asked = [(key, self.cached[key].tokens if key in self.cached else 9999) for key in keys[:number]]
        hits = [pair for pair in asked if pair[0] in self.cached]
        if not hits:
            assert (self.pool.take_prefix if take else self.pool.longest_prefix)(asked) is None
            return
        best = max(hits, key=lambda pair: pair[1])
        self.cached.move_to_end(best[0])
        if not take:
            assert self.pool.longest_prefix(asked) == best
            return
        room, found = self._make_room(1, best[0]), self.pool.take_prefix(asked)
        assert (found is not None) == room
        if found is not None:
            assert found[1] == best[1]
            self._add(found[0], Sequence(best[1], 1, [c.clone() for c in self.cached[best[0]].contents]))

    @rule(key=st.sampled_from(KEYS), action=st.sampled_from(["hold", "release", "drop"]))
    def pin(self, key: str, action: str) -> None:
        act = getattr(self.pool, action)
        legal = {
            "hold": key in self.cached,
            "release": self.holds[key] > 0,
            "drop": key in self.cached and not self.holds[key],
        }
        if not legal[action]:
            with pytest.raises(ContractError):
                act(key)
            return
        act(key)
        if action == "drop":
            del self.cached[key]
        else:
            self.holds[key] += 1 if action == "hold" else -1
        if action == "release":
            self.cached.move_to_end(key)

    # Contents.

    @precondition(lambda self: self.live)
    @rule(picks=st.lists(st.tuples(PICK, PICK, st.integers(0, 4)), max_size=4))
    def move(self, picks: list[tuple[int, int, int]]) -> None:
        by_destination = {self._pick(to): SlotMove(self._pick(of), self._pick(to), by) for of, to, by in picks}
        self.pool.move(list(by_destination.values()))
        moved = {
            to: _shifted(self.live[self._handle(of)].contents, self.live[to].contents, by)
            for to, (of, _, by) in by_destination.items()
        }
        for slot, contents in moved.items():
            self.live[slot].contents = contents

    def _handle(self, slot: int) -> Slot:
        return next(handle for handle in self.live if handle == slot)

    @precondition(lambda self: self.live)
    @rule(picks=st.lists(PICK, max_size=3))
    def export_and_import(self, picks: list[int]) -> None:
        chosen = [self._pick(index) for index in picks]
        package = self.pool.export(chosen)
        assert package.tokens == tuple(self.live[slot].tokens for slot in chosen)
        copies = []
        for index, slot in enumerate(chosen):
            sequence = self.live[slot]
            contents = _unknown(self.positions)
            for known, window, exported in zip(contents, sequence.windows(), package.windows(), strict=True):
                expected = window if sequence.tokens else torch.zeros_like(window)
                assert _agrees(exported[index], expected)
                known[:, : window.shape[1]] = expected
            copies.append(Sequence(sequence.tokens, 1, contents))
        room, slots = self._make_room(len(chosen)), self.pool.import_(package)
        assert (slots is not None) == room
        for slot, copied in zip(slots or [], copies if room else [], strict=True):
            self._add(slot, copied)

    # What holds after every rule.

    @invariant()
    def counts_add_up(self) -> None:
        expected = SlotCounts(self._free(), len(self.live), len(self.cached), 1)
        assert self.pool.counts() == expected
        assert sum(expected) == SLOTS
        assert self.pool.high_water == self.most_live

    @invariant()
    def books_agree(self) -> None:
        for slot, sequence in self.live.items():
            assert self.pool.tokens(slot) == sequence.tokens
            assert self.pool.accepted(slot) == sequence.accepted
            assert self.pool.has_history(slot) == (sequence.tokens > 0)
        assert {key: c.tokens for key, c in self.pool._prefixes._entries.items()} == {
            key: c.tokens for key, c in self.cached.items()
        }
        used = [*self.live, *self.pool._prefixes.slots()]
        assert len(set(used)) == len(used)

    @invariant()
    def contents_agree(self) -> None:
        for index, state in enumerate(self.pool.states):
            for slot, sequence in self.live.items():
                assert _agrees(state[slot], sequence.contents[index])
            for key, sequence in self.cached.items():
                assert _agrees(state[self.pool._prefixes[key].slot], sequence.contents[index])
            assert torch.equal(state[0], torch.full_like(state[0], GUARD))

    @invariant()
    def guards_are_unchanged(self) -> None:
        for page, guard in zip(self.pages, self.guards, strict=True):
            assert bool((page[guard] == GUARD).all())


TestPool = PoolMachine.TestCase
TestPool.settings = settings(settings(), max_examples=150, stateful_step_count=50, deadline=None)
