"""The probe kit: inputs whose answers are read off by eye.

fp32, no activation, weights 1, 10, 100, 1000: every output spells the window it read, newest digit first. Channel c
carries the digits times c+1, so swapped channels show too.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
import torch
from support.cases import LAYOUTS
from support.memory import POISONS, Guarded, pool_strides
from torch import Tensor

from serving_conv import causal_conv1d_fn, causal_conv1d_step, causal_conv1d_update

CHANNELS = 130
STREAM = tuple(range(1, 10))
SPELLED = (1000, 2100, 3210, 4321, 5432, 6543, 7654, 8765, 9876)


class Probe:
    """A pool with poison wherever no window was written, and the digit filter over it."""

    def __init__(
        self,
        device: torch.device,
        *,
        slots: int,
        positions: int = 3,
        poison: str = "nan",
        layout: str = "channels",
        channels: int = CHANNELS,
    ) -> None:
        self.device, self.channels = device, channels
        self.guarded = Guarded(
            (slots, channels, positions),
            dtype=torch.float32,
            device=device,
            poison=poison,
            strides=pool_strides(layout, channels, positions, slot_gap=11),
        )
        self.pool = self.guarded.view
        self.factor = torch.arange(1.0, channels + 1, device=device)
        taps = torch.tensor([1.0, 10.0, 100.0, 1000.0], device=device)
        self.common = {
            "weight": taps.repeat(channels, 1),
            "conv_state": self.pool,
            "activation": None,
        }

    def rows(self, digits: Sequence[int]) -> Tensor:
        return torch.tensor(list(digits), dtype=torch.float32, device=self.device)[:, None] * self.factor

    def int32(self, values: Sequence[int]) -> Tensor:
        return torch.tensor(list(values), dtype=torch.int32, device=self.device)

    def spell(self, out: Tensor) -> list[int]:
        """The outputs as numbers; every channel must say the same."""
        digits = out.cpu() / self.factor.cpu()
        assert torch.equal(digits, digits[:, :1].expand_as(digits)), "channels disagree"
        return [int(v) for v in digits[:, 0].tolist()]

    def window(self, slot: int, start: int = 0) -> list[int]:
        return self.spell(self.pool[slot, :, start : start + 3].T)

    def set_window(self, slot: int, digits: Sequence[int], start: int = 0) -> None:
        self.pool[slot, :, start : start + 3] = self.rows(digits).T

    def prefill(
        self,
        pieces: Sequence[Sequence[int]],
        slots: Sequence[int],
        history: Sequence[bool] | None,
        counts: Sequence[int] | None = None,
    ) -> list[list[int]]:
        out = causal_conv1d_fn(
            self.rows(list(itertools.chain(*pieces))),
            cu_seqlens=self.int32([0, *itertools.accumulate(map(len, pieces))]),
            cache_indices=self.int32(slots),
            has_initial_state=None if history is None else torch.tensor(list(history), device=self.device),
            num_accepted_tokens=None if counts is None else self.int32(counts),
            **self.common,
        )
        return self._split(out, pieces)

    def update(
        self,
        pieces: Sequence[Sequence[int]],
        slots: Sequence[int],
        history: Sequence[bool] | None = None,
        counts: Sequence[int] | None = None,
    ) -> list[list[int]]:
        single = all(len(piece) == 1 for piece in pieces)
        out = causal_conv1d_update(
            self.rows(list(itertools.chain(*pieces))),
            state_indices=self.int32(slots),
            cu_seqlens=None if single else self.int32([0, *itertools.accumulate(map(len, pieces))]),
            has_initial_state=None if history is None else torch.tensor(list(history), device=self.device),
            num_accepted_tokens=None if counts is None else self.int32(counts),
            **self.common,
        )
        return self._split(out, pieces)

    def step(
        self,
        pieces: Sequence[Sequence[int]],
        slots: Sequence[int],
        history: Sequence[bool],
        counts: Sequence[int],
        drafts: Sequence[bool],
        checkpoints: Sequence[Sequence[tuple[int, int]]],
    ) -> list[list[int]]:
        """One call for all pieces; `checkpoints` are (tokens, slot) of each piece."""
        named = list(itertools.chain(*checkpoints))
        out = causal_conv1d_step(
            self.rows(list(itertools.chain(*pieces))),
            cu_seqlens=self.int32([0, *itertools.accumulate(map(len, pieces))]),
            cache_indices=self.int32(slots),
            has_initial_state=torch.tensor(list(history), device=self.device),
            num_accepted_tokens=self.int32(counts),
            speculative=torch.tensor(list(drafts), device=self.device),
            checkpoint_offsets=self.int32([0, *itertools.accumulate(map(len, checkpoints))]),
            checkpoint_tokens=self.int32([tokens for tokens, _ in named]),
            checkpoint_slots=self.int32([slot for _, slot in named]),
            **self.common,
        )
        return self._split(out, pieces)

    def _split(self, out: Tensor, pieces: Sequence[Sequence[int]]) -> list[list[int]]:
        spelled = self.spell(out)
        bounds = [0, *itertools.accumulate(map(len, pieces))]
        return [spelled[a:b] for a, b in itertools.pairwise(bounds)]


def split(mask: int) -> list[tuple[int, ...]]:
    """The nine tokens cut behind token i wherever bit i is set."""
    cuts = [0, *(i + 1 for i in range(8) if mask >> i & 1), 9]
    return [STREAM[a:b] for a, b in itertools.pairwise(cuts)]


# --- KIT-1 ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("path", ["prefill", "update", "mixed", "speculative", "any"])
def test_kit1_all_256_splits_side_by_side(path: str, layout: str, device: torch.device) -> None:
    # Each split is a sequence of one batch, which goes on piece by piece; those that are done stay as empty ones.
    probe = Probe(device, slots=258, positions=11, layout=layout)
    plans = [split(mask) for mask in range(256)]
    slots = [int(n) + 1 for n in torch.randperm(256)]
    outputs: list[list[int]] = [[] for _ in plans]
    counts = [1] * 256
    for step in range(9):
        pieces = [plan[step] if step < len(plan) else () for plan in plans]
        history = [step > 0] * 256
        way = {"mixed": ("prefill", "update"), "any": ("speculative", "prefill", "update")}.get(path, (path,))
        entry = way[step % len(way)]
        if entry == "prefill":
            got = probe.prefill(pieces, slots, history, counts if path == "any" else None)
        elif entry == "update" and set(counts) == {1}:
            got = probe.update(pieces, slots, history)
        else:
            got = probe.update(pieces, slots, history, counts)
        for sequence, (before, now) in enumerate(zip(outputs, got, strict=True)):
            before.extend(now)
            if now:
                plain = entry == "prefill" or (entry == "update" and path != "any")
                counts[sequence] = 1 if plain else len(now)
    assert outputs == [list(SPELLED)] * 256
    assert [probe.window(slot, count - 1) for slot, count in zip(slots, counts, strict=True)] == [[7, 8, 9]] * 256
    assert bool(probe.pool[0].isnan().all())
    assert bool(probe.pool[257].isnan().all())


@pytest.mark.parametrize("path", ["prefill", "update", "mixed"])
def test_kit1_all_256_splits_alone(path: str, device: torch.device) -> None:
    probe = Probe(device, slots=1, channels=7)
    for mask in range(256):
        probe.pool.fill_(torch.nan)
        spelled: list[int] = []
        for step, piece in enumerate(split(mask)):
            by_prefill = path == "prefill" or (path == "mixed" and (mask + step) % 2 == 0)
            call = probe.prefill if by_prefill else probe.update
            spelled += call([piece], [0], [step > 0])[0]
        assert spelled == list(SPELLED)
        assert probe.window(0) == [7, 8, 9]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_kit1_in_16_bits(dtype: torch.dtype, device: torch.device) -> None:
    # Weights 1, 2, 4, 8 over zeros and ones: the output is the window as a binary number.
    channels, length = 65, 40
    bits = torch.randint(0, 2, (length, channels))
    padded = torch.cat([torch.zeros(3, channels, dtype=torch.int64), bits])
    spelled = sum(padded[tap : tap + length] << tap for tap in range(4))
    weight = torch.tensor([1.0, 2.0, 4.0, 8.0], dtype=dtype, device=device).repeat(channels, 1)
    pool = torch.full((1, channels, 3), torch.nan, dtype=dtype, device=device)
    slot = torch.zeros(1, dtype=torch.int32, device=device)
    x = bits.to(dtype).to(device)
    out = causal_conv1d_fn(
        x, weight, pool, torch.tensor([0, length], dtype=torch.int32, device=device), slot, activation=None
    )
    assert torch.equal(out.cpu().long(), spelled)
    assert torch.equal(pool[0].T.cpu().long(), bits[-3:])
    pool.fill_(torch.nan)
    for token in range(length):
        flag = torch.tensor([token > 0], device=device)
        row = causal_conv1d_update(x[token : token + 1], weight, pool, slot, has_initial_state=flag, activation=None)
        assert torch.equal(row[0].cpu().long(), spelled[token])


# --- KIT-2, under each poison (KIT-5) -----------------------------------------------------------------------------

KIT2 = (
    ((1,), True, [1987], [8, 9, 1]),
    ((1, 2), True, [1987, 2198], [9, 1, 2]),
    ((1,), False, [1000], [0, 0, 1]),
    ((1, 2), False, [1000, 2100], [0, 1, 2]),
)


@pytest.mark.parametrize("poison", POISONS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("entry", ["prefill", "update", "speculative"])
@pytest.mark.parametrize(("digits", "history", "spelled", "window"), KIT2)
def test_kit2_history(
    digits: tuple[int, ...],
    history: bool,
    spelled: list[int],
    window: list[int],
    entry: str,
    layout: str,
    poison: str,
    device: torch.device,
) -> None:
    probe = Probe(device, slots=4, positions=5, poison=poison, layout=layout)
    if history:
        probe.set_window(2, (7, 8, 9))
    probe.guarded.arm()
    if entry == "prefill":
        got = probe.prefill([digits], [2], [history])
    else:
        got = probe.update([digits], [2], [history], [1] if entry == "speculative" else None)
    assert got == [spelled]
    assert probe.window(2, len(digits) - 1 if entry == "speculative" else 0) == window
    kept = 3 if entry != "speculative" else len(digits) + 2
    owned = torch.zeros(4, CHANNELS, 5, dtype=torch.bool)
    owned[2, :, :kept] = True
    probe.guarded.assert_untouched(except_for=owned, name="pool")


def test_kit2_a_slot_that_changes_hands(device: torch.device) -> None:
    # The next owner of a slot, a first chunk of one token as decode, sees nothing of the last owner.
    probe = Probe(device, slots=1)
    probe.prefill([(7, 8, 9)], [0], None)
    assert probe.update([(1,)], [0], [False]) == [[1000]]
    probe.prefill([(7, 8, 9)], [0], None)
    assert probe.prefill([(1,)], [0], [False]) == [[1000]]
    probe.prefill([(7, 8, 9)], [0], None)
    assert probe.prefill([(1,)], [0], None) == [[1000]]


# --- KIT-3: a speculative step, then every way on -----------------------------------------------------------------

KIT3 = {
    1: ([8, 9, 1], [5198, 6519]),
    2: ([9, 1, 2], [5219, 6521]),
    3: ([1, 2, 3], [5321, 6532]),
    4: ([2, 3, 4], [5432, 6543]),
}
BEFORE = ("written", "prefill", "chunks", "decode", "rows", "speculative", "rejected")
AFTER = (
    "prefill",
    "speculative",
    "speculative singles",
    "prefill then decode",
    "prefill then speculative",
    "speculative then prefill",
    "plain",
    "plain singles",
    "prefill without counts",
)


def bring_in(probe: Probe, how: str, slot: int) -> int:
    """Leave the window 7, 8, 9 in a slot by one of the entries; returns the count that the next step passes."""
    if how == "written":
        probe.set_window(slot, (7, 8, 9))
    elif how == "prefill":
        probe.prefill([(6, 7, 8, 9)], [slot], None)
    elif how == "chunks":
        probe.prefill([(5, 6)], [slot], [False])
        probe.prefill([(7, 8, 9)], [slot], [True])
    elif how == "decode":
        for n, digit in enumerate((6, 7, 8, 9)):
            probe.update([(digit,)], [slot], [n > 0])
    elif how == "rows":
        probe.update([(6, 7, 8, 9)], [slot], [False])
    elif how == "speculative":
        probe.update([(6, 7, 8, 9)], [slot], [False], [1])
        return 4
    elif how == "rejected":
        probe.update([(6, 7, 8)], [slot], [False], [1])
        probe.update([(9, 4, 4)], [slot], [True], [3])
    return 1


def go_on(probe: Probe, how: str, slot: int, count: int) -> list[int]:
    """Run the tokens 5 and 6 behind a speculative step of which `count` were accepted."""
    yes = [True]
    if how == "prefill":
        return probe.prefill([(5, 6)], [slot], yes, [count])[0]
    if how == "speculative":
        return probe.update([(5, 6)], [slot], None, [count])[0]
    if how == "speculative singles":
        return [probe.update([(5,)], [slot], None, [count])[0][0], probe.update([(6,)], [slot], None, [1])[0][0]]
    if how == "prefill then decode":
        return [probe.prefill([(5,)], [slot], yes, [count])[0][0], probe.update([(6,)], [slot])[0][0]]
    if how == "prefill then speculative":
        return [probe.prefill([(5,)], [slot], yes, [count])[0][0], probe.update([(6, 3)], [slot], None, [1])[0][0]]
    if how == "speculative then prefill":
        first = probe.update([(5, 3, 3)], [slot], None, [count])[0][0]
        return [first, probe.prefill([(6,)], [slot], yes, [1])[0][0]]
    # The rest know no counts: only right where the window starts at 0.
    assert count == 1
    if how == "plain":
        return probe.update([(5, 6)], [slot])[0]
    if how == "plain singles":
        return [probe.update([(5,)], [slot])[0][0], probe.update([(6,)], [slot])[0][0]]
    return probe.prefill([(5, 6)], [slot], yes)[0]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("after", AFTER)
@pytest.mark.parametrize("before", BEFORE)
def test_kit3_every_pair_of_entries(before: str, after: str, layout: str, device: torch.device) -> None:
    for accepted, (window, spelled) in KIT3.items():
        if accepted > 1 and after.startswith("plain"):
            continue
        if accepted > 1 and after == "prefill without counts":
            continue
        probe = Probe(device, slots=3, positions=6, layout=layout, channels=9)
        count = bring_in(probe, before, 1)
        assert probe.window(1, count - 1) == [7, 8, 9]
        assert probe.update([(1, 2, 3, 4)], [1], None, [count]) == [[1987, 2198, 3219, 4321]]
        assert probe.window(1, accepted - 1) == window
        assert go_on(probe, after, 1, accepted) == spelled
        assert bool(probe.pool[[0, 2]].isnan().all())


def test_kit3_four_counts_in_one_batch(device: torch.device) -> None:
    for consume in ("prefill", "update"):
        probe = Probe(device, slots=6, positions=6)
        for slot in range(1, 5):
            probe.set_window(slot, (7, 8, 9))
        probe.update([(1, 2, 3, 4)] * 4, [4, 2, 1, 3], None, [1] * 4)
        pieces = [(5, 6)] * 4
        if consume == "prefill":
            got = probe.prefill(pieces, [4, 2, 1, 3], [True] * 4, [1, 2, 3, 4])
        else:
            got = probe.update(pieces, [4, 2, 1, 3], None, [1, 2, 3, 4])
        assert got == [spelled for _, spelled in KIT3.values()]


def test_kit3_prefill_with_counts_normalises_the_window(device: torch.device) -> None:
    # After a prefill the window is at position 0 again and the first count is 1, whatever count it took.
    for accepted in KIT3:
        probe = Probe(device, slots=1, positions=6)
        probe.set_window(0, (7, 8, 9))
        probe.update([(1, 2, 3, 4)], [0], None, [1])
        tail = probe.pool[0, :, 3:].clone()
        probe.prefill([(5, 6)], [0], [True], [accepted])
        assert probe.window(0) == [accepted, 5, 6]
        assert torch.equal(probe.pool[0, :, 3:], tail), "the rest of the slot keeps its bytes"


# --- A mixed step with checkpoints --------------------------------------------------------------------------------


@pytest.mark.parametrize("poison", POISONS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_mixed_step_with_checkpoints(layout: str, poison: str, device: torch.device) -> None:
    probe = Probe(device, slots=14, positions=6, poison=poison, layout=layout)
    probe.set_window(1, (7, 8, 9))
    probe.set_window(2, (7, 8, 9), start=1)  # of the drafts before, two were accepted
    probe.set_window(3, (7, 8, 9))
    probe.guarded.arm()
    got = probe.step(
        # A later chunk, drafts, a decode row, a first chunk, padding.
        pieces=[(1, 2, 3, 4, 5), (1, 2, 3, 4), (1,), (1, 2, 3, 4, 5, 6, 7, 8, 9), (6, 6)],
        slots=[1, 2, 3, 4, -1],
        history=[True, True, True, False, True],
        counts=[1, 2, 1, 1, 1],
        drafts=[False, True, False, False, True],
        checkpoints=[
            [(1, 5), (2, 6), (3, 7), (4, 8)],  # windows that reach back into the slot, then of the chunk alone
            [(2, 9)],  # of drafts, as a rollback point
            [(1, 10)],
            [(1, 11), (8, 12), (9, -1)],  # the last is padding
            [(1, 13)],  # of padding: not written
        ],
    )
    assert got == [
        [1987, 2198, 3219, 4321, 5432],
        [1987, 2198, 3219, 4321],
        [1987],
        list(SPELLED),
        [0, 0],
    ]
    assert probe.window(1) == [3, 4, 5]
    # Drafts keep (8, 9 | 1, 2, 3, 4): the next step finds its window at the accepted count.
    assert [probe.window(2, accepted - 1) for accepted in KIT3] == [window for window, _ in KIT3.values()]
    assert probe.window(3) == [8, 9, 1]
    assert probe.window(4) == [7, 8, 9]
    assert [probe.window(slot) for slot in range(5, 13)] == [
        [8, 9, 1],
        [9, 1, 2],
        [1, 2, 3],
        [2, 3, 4],
        [9, 1, 2],
        [8, 9, 1],
        [0, 0, 1],
        [6, 7, 8],
    ]
    owned = torch.zeros(14, CHANNELS, 6, dtype=torch.bool)
    owned[1:13, :, :3] = True
    owned[2] = True
    probe.guarded.assert_untouched(except_for=owned, name="pool")
    # A prompt that shares six or eight tokens goes on from the checkpoint as if it had computed them.
    assert probe.prefill([(9, 1), (3, 4)], [12, 6], [True, True]) == [[9876, 1987], [3219, 4321]]


# --- KIT-5: what nobody owns ----------------------------------------------------------------------------------


@pytest.mark.parametrize("poison", POISONS)
@pytest.mark.parametrize("sentinel", [-1, 0])
def test_kit5_padding_rows_have_zero_output_and_no_slot(poison: str, sentinel: int, device: torch.device) -> None:
    # A captured graph of eight sequences replayed for three: five rows of padding.
    probe = Probe(device, slots=9, poison=poison)
    for slot in (1, 5, 8):
        probe.set_window(slot, (7, 8, 9))
    probe.guarded.arm()
    slots = [5, sentinel, sentinel, 8, sentinel, 1, sentinel, sentinel]
    out = torch.full((8, CHANNELS), float(poison), device=device)
    x = probe.rows([1, 4, 4, 2, 4, 3, 4, 4])
    x[[1, 2, 4, 6, 7]] = float(poison)
    causal_conv1d_update(x, state_indices=probe.int32(slots), out=out, pad_slot_id=sentinel, **probe.common)
    assert probe.spell(out) == [1987, 0, 0, 2987, 0, 3987, 0, 0]
    owned = torch.zeros(9, CHANNELS, 3, dtype=torch.bool)
    owned[[1, 5, 8]] = True
    probe.guarded.assert_untouched(except_for=owned, name="pool")
