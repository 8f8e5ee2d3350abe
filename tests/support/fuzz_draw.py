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


def draw_sizes(spec: Spec, dice: np.random.Generator, cases: int) -> Sizes:
    vec, positions = spec.config.vec, spec.positions
    if spec.entry == "prefill":
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
    in_place = spec.entry != "prefill" and dice.random() < 0.3
    if not spec.aligned:
        for name in shifts:
            shifts[name] = int(dice.integers(0, 4))
        if channels % 2 == 0:
            shifts[str(dice.choice(["x", "weight"]))] = 1  # whatever else is aligned, this is not
    slots = sequences + int(dice.integers(-min(2, sequences - 1), 4))
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
    )


@dataclass(slots=True)
class Metadata:
    """Device values of every case: `[cases, ...]` int64."""

    offsets: Array
    slots: Array
    flags: Array
    counts: Array


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
    numbers = np.tile(np.arange(max(slots, sequences)), (cases, 1))
    chosen = dice.permuted(numbers, axis=1)[:, :sequences]
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
    return Metadata(offsets, chosen, dice.random(shape) < 0.6, counts)


@dataclass(slots=True)
class Meaning:
    """What the metadata mean, by the rules of the contract: `[cases, sequences]`, and by case."""

    begin: Array
    end: Array
    live: Array
    history: Array
    start: Array  # of the window in the slot
    fault: Array  # [cases]
    strict: Array  # [cases] bool: every result is determined


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
    truncated = live & (end - begin > limit) if spec.entry == "speculative" else np.zeros_like(live)
    fault = np.zeros(sizes.cases, dtype=np.int64)
    for code, where in (
        (DeviceFault.OFFSETS, bad_offsets & ~padding),
        (DeviceFault.SLOT, bad_slot),
        (DeviceFault.ACCEPTED_COUNT, bad_count),
        (DeviceFault.STATE_TRUNCATED, truncated),
    ):
        fault |= where.any(1) * int(code)
    # In a decode step without offsets they start at 0 by construction.
    fault |= (m.offsets[:, 0] != 0) * int(DeviceFault.OFFSETS)
    history = m.flags if sizes.flags else np.full_like(m.flags, spec.entry != "prefill")
    named = np.where(live, m.slots, -1 - np.arange(sizes.sequences))
    duplicate = (np.sort(named, 1)[:, 1:] == np.sort(named, 1)[:, :-1]).any(1)
    overlap = (end < begin).any(1) if spec.entry == "prefill" else (claims(sizes, begin, end) > 1).any(1)
    return Meaning(begin, end, live, history & live, counts - 1, fault, ~duplicate & ~overlap)


def claims(sizes: Sizes, begin: Array, end: Array, where: Array | bool = True) -> Array:
    """How many sequences claim each row: `[cases, rows]`."""
    row = np.arange(sizes.rows)
    counts: Array = ((begin[:, :, None] <= row) & (row < end[:, :, None]) & np.asarray(where)[..., None]).sum(1)
    return counts
