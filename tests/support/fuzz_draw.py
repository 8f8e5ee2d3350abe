"""Owns the choices of the fuzz: sizes, hostile metadata, and what the contract says they mean."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from support.fuzz_memory import Array
from support.fuzz_specs import Spec

from serving_conv.contract import accepted_limit
from serving_conv.faults import DeviceFault

__all__ = ["Meaning", "Metadata", "Sizes", "claims", "draw_metadata", "draw_sizes", "interpret"]

LOW, HIGH = -(2**31), 2**31 - 1


@dataclass(slots=True)
class Sizes:
    """Sizes and strides that the cases of a batch share."""

    cases: int
    rows: int
    channels: int
    sequences: int
    slots: int
    x_pitch: int
    out_pitch: int
    pool_strides: tuple[int, int, int]
    slots_stride: int
    shifts: dict[str, int]
    in_place: bool
    flags: bool
    counts: bool
    pad_slot_id: int
    poison: float
    checkpoints: int


def draw_sizes(spec: Spec, dice: np.random.Generator, cases: int) -> Sizes:
    vec, positions = spec.config.vec, spec.positions
    if spec.prefills:
        many = dice.random() < 0.3  # enough sequences of one row for blocks made of them
        sequences = int(dice.integers(17, 40)) if many else int(dice.integers(1, 8))
        rows = int(dice.integers(16, 52)) if many else int(dice.integers(1, 52))
    elif spec.entry == "decode":
        rows = sequences = int(dice.integers(1, 10))
    else:
        sequences = int(dice.integers(1, 7))
        rows = int(dice.integers(1, 24))
    tile = spec.config.threads * vec
    channels = int(dice.integers(1, min(3 * tile, 14 // vec * vec) + 1))
    shifts = dict.fromkeys(("x", "out", "weight", "bias", "state"), 0)
    align = 1
    if spec.aligned:
        align = 16  # elements: more than any word needs
        channels = max(vec, channels // vec * vec)
    elif channels % 2 == 0:
        channels += int(dice.integers(0, 2))
    x_pitch, out_pitch, gap, pitch = (
        int(-(-n // align) * align + align * dice.integers(0, 3)) for n in (channels, channels, 0, channels)
    )
    if spec.layout == "channels":
        strides = (positions * pitch + gap, 1, pitch)
    elif spec.layout == "positions":
        strides = (channels * positions + (-channels * positions) % align + gap, positions, 1)
    else:
        run = positions + int(dice.integers(1, 4))
        strides = (channels * run + gap, run, 1)
    in_place = not spec.prefills and dice.random() < 0.3
    if not spec.aligned:
        for name in shifts:
            shifts[name] = int(dice.integers(0, 4))
        if channels % 2 == 0:
            shifts[str(dice.choice(["x", "weight"]))] = 1  # whatever else is aligned, this is not
    checkpoints = int(dice.integers(1, 2 * sequences + 2)) if spec.checkpoints else 0
    slots = sequences + checkpoints + int(dice.integers(-min(2, sequences - 1), 4))
    return Sizes(
        cases=cases,
        rows=rows,
        channels=channels,
        sequences=sequences,
        slots=max(1, slots),
        x_pitch=x_pitch,
        out_pitch=x_pitch if in_place else out_pitch,
        pool_strides=strides,
        slots_stride=int(dice.integers(1, 4)),
        shifts=shifts,
        in_place=in_place,
        flags=dice.random() < 0.7,
        counts=spec.entry == "speculative" or (spec.entry != "rows" and dice.random() < 0.5),
        pad_slot_id=int(dice.choice([-1, -1, 0, 0, -7, LOW, HIGH, max(1, slots), 1])),
        poison=float(dice.choice([np.nan, 777.0])),
        checkpoints=checkpoints,
    )


@dataclass(slots=True)
class Metadata:
    """Device values of every case: `[cases, ...]` int64."""

    offsets: Array
    slots: Array
    flags: Array
    counts: Array
    drafts: Array  # any byte
    checkpoint_offsets: Array
    checkpoint_tokens: Array
    checkpoint_slots: Array


def _pick(dice: np.random.Generator, choices: Sequence[int], shape: tuple[int, ...]) -> Array:
    return np.asarray(choices, dtype=np.int64)[dice.integers(0, len(choices), shape)]


def draw_metadata(spec: Spec, sizes: Sizes, dice: np.random.Generator, near: bool) -> Metadata:
    cases, rows, sequences, slots = sizes.cases, sizes.rows, sizes.sequences, sizes.slots
    far = [] if near else [LOW, LOW + 1, HIGH, HIGH - 1, 1 << 20, -(1 << 20)]
    # Offsets: short, long or single-row sequences, then some are made hostile.
    kind = dice.integers(0, 4, (cases, 1))
    shape = (cases, sequences)
    lengths = np.select(
        [kind == 0, kind == 1, kind == 2],
        [
            dice.integers(0, spec.width + 2, shape),
            dice.integers(0, 2 * rows // sequences + 3, shape),
            np.where(dice.random(shape) < 0.04, dice.integers(0, 4, shape), 1),
        ],
        default=np.where(dice.random(shape) < 0.6, 0, dice.integers(0, rows + 1, shape)),
    )
    offsets = np.zeros((cases, sequences + 1), dtype=np.int64)
    offsets[:, 1:] = np.minimum(np.cumsum(lengths, 1), rows)
    hostile = dice.random((cases, 1)) < 0.35
    strike = hostile & (dice.random(offsets.shape) < dice.choice([0.1, 0.3, 1.0], (cases, 1)))
    wild = np.where(
        dice.random(offsets.shape) < 0.5,
        dice.integers(-2, rows + 3, offsets.shape),
        _pick(dice, [-1, -2, rows, rows + 1, rows + 5, 0, *far], offsets.shape),
    )
    offsets = np.where(strike, wild, offsets)
    # Monotone but from a later start, below zero, or past R.
    moved = (dice.random((cases, 1)) < 0.08) * _pick(dice, [1, 2, -1, -2, rows], (cases, 1))
    offsets = np.clip(offsets + moved, LOW, HIGH)

    # Slots: unique; numbers from S up are out of range already.
    numbers = np.tile(np.arange(max(slots, sequences + sizes.checkpoints)), (cases, 1))
    permuted = dice.permuted(numbers, axis=1)
    chosen, further = permuted[:, :sequences], permuted[:, sequences : sequences + sizes.checkpoints]
    bad = _pick(dice, [-1, -2, slots, slots + 1, *far], shape)
    chosen = np.where(dice.random(shape) < 0.08, bad, chosen)
    chosen = np.where(dice.random(shape) < 0.1, sizes.pad_slot_id, chosen)
    twice = (dice.random((cases, 1)) < 0.03) & (dice.random(shape) < 0.5)
    chosen = np.where(twice, chosen[:, :1], chosen)

    limit = accepted_limit(spec.width, spec.positions)
    counts = dice.integers(1, limit + 1, shape)
    wrong = _pick(dice, [0, -1, limit + 1, limit + 2, *far], shape)
    counts = np.where(dice.random(shape) < 0.06, wrong, counts)
    if spec.entry == "decode":
        offsets = np.tile(np.arange(sequences + 1), (cases, 1))
    flags = dice.random(shape) < 0.6
    drafts = np.zeros(shape, dtype=np.int64)
    if spec.drafts:
        drafts = (dice.random(shape) < 0.5) * _pick(dice, [1, 1, 2, 4, 128, 254, 255], shape)
    return Metadata(offsets, chosen, flags, counts, drafts, *_draw_checkpoints(sizes, dice, far, offsets, further))


def _draw_checkpoints(
    sizes: Sizes, dice: np.random.Generator, far: Sequence[int], cu_seqlens: Array, further: Array
) -> tuple[Array, Array, Array]:
    """Offsets, tokens and slots; `further` are slots that no sequence owns."""
    cases, sequences, number = sizes.cases, sizes.sequences, sizes.checkpoints
    # Nondecreasing first, from 0 or not, up to the last checkpoint or not; then some are made hostile.
    offsets = np.sort(dice.integers(0, number + 1, (cases, sequences + 1)), 1)
    offsets[:, 0] = np.where(dice.random(cases) < 0.8, 0, offsets[:, 0])
    offsets[:, -1] = np.where(dice.random(cases) < 0.8, number, offsets[:, -1])
    low, high = _pick(dice, [-1, -2, *far[:2]], (cases,)), _pick(dice, [number + 1, number + 2, *far[2:4]], (cases,))
    offsets[:, 0] = np.where(dice.random(cases) < 0.06, low, offsets[:, 0])
    offsets[:, -1] = np.where(dice.random(cases) < 0.06, high, offsets[:, -1])
    strike = (dice.random((cases, 1)) < 0.15) & (dice.random(offsets.shape) < 0.4)
    wild = _pick(dice, [-1, -2, *range(number + 3), *far], offsets.shape)
    offsets = np.where(strike, wild, offsets)

    # Tokens of the sequence that names the checkpoint, mostly.
    shape = (cases, number)
    owner = np.clip((offsets[:, None, :] <= np.arange(number)[:, None]).sum(2) - 1, 0, sequences - 1)
    lengths = np.clip(np.diff(cu_seqlens, axis=1), 1, sizes.rows)
    length = np.take_along_axis(lengths, owner, 1)
    tokens = np.where(
        dice.random(shape) < 0.5, 1 + (dice.random(shape) * length).astype(np.int64), dice.integers(1, 10, shape)
    )
    tokens = np.where(dice.random(shape) < 0.8, np.minimum(tokens, length), tokens)
    wrong = np.where(dice.random(shape) < 0.5, length + 1, _pick(dice, [0, -1, -2, *far], shape))
    tokens = np.where(dice.random(shape) < 0.05, wrong, tokens)

    slots = np.where(
        dice.random(shape) < 0.05, _pick(dice, [-1, -2, sizes.slots, sizes.slots + 1, *far], shape), further
    )
    slots = np.where(dice.random(shape) < 0.1, sizes.pad_slot_id, slots)
    # A slot that is live too, or of another checkpoint.
    clash = (dice.random((cases, 1)) < 0.05) & (dice.random(shape) < 0.5)
    slots = np.where(clash, dice.integers(0, sizes.slots, shape), slots)
    return offsets, tokens, slots


@dataclass(slots=True)
class Meaning:
    """What the metadata mean, by the rules of the contract: `[cases, sequences]`, and by case."""

    begin: Array
    end: Array
    live: Array
    history: Array
    start: Array  # of the window in the slot
    fault: Array  # [cases]
    open_fault: Array  # [cases]: codes that may be left or not
    strict: Array  # [cases] bool: every result is determined
    drafts: Array
    checkpoint_owner: Array  # [cases, checkpoints]: the sequence that names it, or -1
    checkpoint_written: Array  # [cases, checkpoints] bool: for sure if strict, else perhaps


def interpret(spec: Spec, sizes: Sizes, m: Metadata) -> Meaning:
    begin, end = m.offsets[:, :-1], m.offsets[:, 1:]
    limit = accepted_limit(spec.width, spec.positions)
    counts = m.counts if sizes.counts else np.ones_like(m.counts)
    padding = m.slots == sizes.pad_slot_id
    bad_offsets = (begin < 0) | (end < begin) | (end > sizes.rows)
    touched = ~padding & ~bad_offsets & (begin != end)
    bad_slot = touched & ((m.slots < 0) | (m.slots >= sizes.slots))
    bad_count = touched & ~bad_slot & ((counts < 1) | (counts > limit))
    live = touched & ~bad_slot & ~bad_count
    drafts = np.full_like(live, spec.entry == "speculative") | (m.drafts != 0)
    truncated = live & drafts & (end - begin > limit)
    fault = np.zeros(sizes.cases, dtype=np.int64)
    for code, where in (
        (DeviceFault.OFFSETS, (bad_offsets & ~padding) | (end < begin)),
        (DeviceFault.SLOT, bad_slot),
        (DeviceFault.ACCEPTED_COUNT, bad_count),
        (DeviceFault.STATE_TRUNCATED, truncated),
    ):
        fault |= where.any(1) * int(code)
    # In a decode step without offsets they start at 0 by construction.
    fault |= (m.offsets[:, 0] != 0) * int(DeviceFault.OFFSETS)
    history = m.flags if sizes.flags else np.full_like(m.flags, not spec.prefills)
    # Checkpoints: offsets that go backwards leave open whose each is, so also whether it is written or a fault.
    sorted_offsets = (np.diff(m.checkpoint_offsets, axis=1) >= 0).all(1)
    number = np.arange(sizes.checkpoints)
    owner = (m.checkpoint_offsets[:, None, :] <= number[:, None]).sum(2) - 1
    owner = np.where((owner >= 0) & (owner < sizes.sequences), owner, -1)
    owned = (owner >= 0) & np.take_along_axis(live, np.maximum(owner, 0), 1)
    most = np.take_along_axis(end - begin, np.maximum(owner, 0), 1)
    to_nobody = m.checkpoint_slots == sizes.pad_slot_id
    bad_tokens = (m.checkpoint_tokens < 1) | (m.checkpoint_tokens > most)
    outside = (m.checkpoint_slots < 0) | (m.checkpoint_slots >= sizes.slots)
    for code, where in (
        (DeviceFault.CHECKPOINT, owned & ~to_nobody & bad_tokens),
        (DeviceFault.SLOT, owned & ~to_nobody & ~bad_tokens & outside),
    ):
        fault |= (where.any(1) & sorted_offsets) * int(code)
    open_fault = ~sorted_offsets * int(DeviceFault.CHECKPOINT | DeviceFault.SLOT)
    written = ~to_nobody & ~outside & np.where(sorted_offsets[:, None], owned & ~bad_tokens, True)
    named = np.concatenate(
        [
            np.where(live, m.slots, -1 - np.arange(sizes.sequences)),
            np.where(written, m.checkpoint_slots, -1 - sizes.sequences - number),
        ],
        1,
    )
    duplicate = (np.sort(named, 1)[:, 1:] == np.sort(named, 1)[:, :-1]).any(1)
    overlap = (end < begin).any(1) if spec.prefills else (claims(sizes, begin, end) > 1).any(1)
    strict = ~duplicate & ~overlap & sorted_offsets
    return Meaning(begin, end, live, history & live, counts - 1, fault, open_fault, strict, drafts, owner, written)


def claims(sizes: Sizes, begin: Array, end: Array, where: Array | bool = True) -> Array:
    """How many sequences claim each row: `[cases, rows]`."""
    row = np.arange(sizes.rows)
    counts: Array = ((begin[:, :, None] <= row) & (row < end[:, :, None]) & np.asarray(where)[..., None]).sum(1)
    return counts
