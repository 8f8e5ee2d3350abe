"""Owns the fuzz of the kernels' source under g++: hostile metadata, guarded memory, every result compared.

A *spec* fixes one compiled kernel. A *batch* fixes the sizes, strides and alignments of one spec and holds many
*cases*, each with its own values, metadata and memory, so that filling and checking are vectorised and a case costs
little more than its launch. Each buffer of each case lies in its own guarded piece of memory or, for
AddressSanitizer, in its own allocation that ends with its last element.

Whatever a call does not own holds NaN or 777: guards, padding of rows, gaps between slots, unowned slots, slots
without history, positions outside the window. So no foreign byte may change, and none may be read either: owned
results are compared with `serving_conv.reference`, whose inputs are clean.

`python -m support.fuzz --cases 20000 --exact` runs it alone; see `main`.
"""

from __future__ import annotations

import argparse
import ctypes
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from serving_conv import reference
from serving_conv.contract import accepted_limit
from serving_conv.faults import DeviceFault, clear_device_fault, device_fault
from serving_conv.native import call, host
from serving_conv.native.config import LaunchConfig
from serving_conv.native.variant import Variant, source

__all__ = ["MUTANTS", "SPECS", "FuzzFailure", "Mutant", "Spec", "run"]

Array = NDArray[Any]
LOW, HIGH = -(2**31), 2**31 - 1
LIMIT = 12.0  # no output and no state of clean inputs is larger: |x|, |w|, |b| <= 1 and at most 8 taps
_TORCH = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
_RAW = {"bf16": np.int16, "fp16": np.int16, "fp32": np.int32}
_RAW_TORCH = {"bf16": torch.int16, "fp16": torch.int16, "fp32": torch.int32}


class FuzzFailure(AssertionError):
    """A case went wrong; the text says which and how to run it again."""


# --- specs ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Spec:
    """One compiled kernel.

    Attributes:
        entry: prefill, decode (one row a sequence), rows or speculative (both with offsets).
        types: of x, weight, state and bias; bias may be "-", absent.
        width: taps.
        layout: channels, positions or strided.
        extra: positions of a slot beyond W-1.
        config: the launch choice; `vec` is what the wide path takes.
        aligned: whether sizes and addresses let `vec` stand; else it falls to 1.
        silu: the activation.
    """

    entry: str
    types: tuple[str, str, str, str]
    width: int
    layout: str
    extra: int
    config: LaunchConfig
    aligned: bool = True
    silu: bool = False

    @property
    def positions(self) -> int:
        """Positions of a slot."""
        return self.width - 1 + self.extra

    def __str__(self) -> str:
        return (
            f"{self.entry} {'/'.join(self.types)} width={self.width} {self.layout} extra={self.extra} "
            f"vec={self.config.vec} threads={self.config.threads} {'aligned' if self.aligned else 'odd'} "
            f"{'silu' if self.silu else 'plain'}"
        )


def _prefill(vec: int, threads: int = 2) -> LaunchConfig:
    return LaunchConfig(vec=vec, threads=threads, min_blocks=1, rows=16)


def _update(vec: int, threads: int = 2, sequences: int = 1) -> LaunchConfig:
    return LaunchConfig(vec=vec, threads=threads, min_blocks=1, sequences=sequences)


_BF16, _FP16, _FP32 = (("bf16",) * 4, ("fp16",) * 4, ("fp32",) * 4)
# Few threads a block: tiny rows then have several channel tiles, and no time goes to idle threads. The last ones of
# each entry have the sizes that engines get.
SPECS: tuple[Spec, ...] = (
    Spec("prefill", _BF16, 4, "channels", 0, _prefill(4), silu=True),
    Spec("prefill", _BF16, 4, "channels", 2, _prefill(4)),
    Spec("prefill", ("bf16", "fp32", "bf16", "-"), 4, "positions", 0, _prefill(4)),
    Spec("prefill", _FP16, 4, "positions", 3, _prefill(2)),
    Spec("prefill", ("bf16", "bf16", "fp32", "fp32"), 3, "strided", 1, _prefill(4)),
    Spec("prefill", _BF16, 4, "channels", 1, _prefill(4), aligned=False),
    Spec("prefill", _BF16, 4, "positions", 0, _prefill(4), aligned=False),
    Spec("prefill", _FP32, 4, "channels", 0, _prefill(2)),
    Spec("prefill", ("fp32", "bf16", "bf16", "-"), 2, "channels", 2, _prefill(2)),
    Spec("prefill", _FP32, 2, "positions", 1, _prefill(1), silu=True),
    Spec("prefill", ("fp16", "fp32", "fp32", "bf16"), 8, "channels", 0, _prefill(2)),
    Spec("prefill", _BF16, 8, "positions", 4, _prefill(2)),
    Spec("prefill", _BF16, 5, "strided", 0, _prefill(2), aligned=False),
    Spec("prefill", _BF16, 3, "positions", 5, _prefill(4, threads=128)),
    Spec("decode", _BF16, 4, "channels", 0, _update(4, sequences=2), silu=True),
    Spec("decode", _BF16, 4, "channels", 3, _update(2)),
    Spec("decode", ("fp16", "fp32", "fp16", "-"), 4, "positions", 0, _update(4, sequences=2)),
    Spec("decode", _BF16, 4, "positions", 2, _update(2), aligned=False),
    Spec("decode", ("fp32", "fp32", "bf16", "fp16"), 3, "strided", 2, _update(2, sequences=2)),
    Spec("decode", _FP32, 8, "channels", 1, _update(2), aligned=False),
    Spec("decode", _FP32, 2, "positions", 1, _update(1, threads=64)),
    Spec("rows", _BF16, 4, "channels", 0, _update(4)),
    Spec("rows", _BF16, 4, "positions", 0, _update(4)),
    Spec("rows", ("fp32", "bf16", "fp16", "-"), 3, "strided", 2, _update(2)),
    Spec("rows", _FP16, 8, "positions", 1, _update(2), aligned=False, silu=True),
    Spec("rows", _FP32, 2, "channels", 3, _update(2, threads=128)),
    Spec("speculative", _BF16, 4, "channels", 3, _update(4)),
    Spec("speculative", _BF16, 4, "positions", 3, _update(4), silu=True),
    Spec("speculative", ("bf16", "fp32", "bf16", "-"), 4, "positions", 1, _update(4)),
    Spec("speculative", _BF16, 4, "channels", 7, _update(2), aligned=False),
    Spec("speculative", ("fp16", "fp16", "fp32", "fp32"), 3, "strided", 4, _update(2)),
    Spec("speculative", _FP32, 2, "positions", 2, _update(2)),
    Spec("speculative", ("fp32", "fp32", "bf16", "-"), 8, "positions", 7, _update(1)),
    Spec("speculative", _FP32, 2, "channels", 0, _update(2)),
    Spec("speculative", _BF16, 5, "positions", 9, _update(2, threads=64), aligned=False),
)


@dataclass(frozen=True, slots=True)
class Mutant:
    """A planted bug: places of the source, replaced.

    Attributes:
        spec: number of the spec that shows it.
        edits: text that occurs once, and what stands there instead.
    """

    spec: int
    edits: tuple[tuple[str, str], ...]


# Strays stay inside the guards as long as the metadata do, so a run without AddressSanitizer survives them.
MUTANTS: dict[str, Mutant] = {
    "slot bound dropped": Mutant(0, (("s.slot < 0 || s.slot >= p.slot_count", "s.slot < 0"),)),
    "offsets may pass the rows by one": Mutant(21, (("s.end > p.rows)", "s.end > p.rows + 1)"),)),
    "count bound off by one": Mutant(
        27, (("accepted > p.positions - WIDTH + 2", "accepted > p.positions - WIDTH + 3"),)
    ),
    "padding is not told apart": Mutant(0, (("s.live = !padding && ", "s.live = "),)),
    "the slot is read without history": Mutant(
        14, (("if (s[i].live && s[i].has_history) unpack_window", "if (s[i].live) unpack_window"),)
    ),
    # Right while blocks run in order: the first one has read the slot before the last one writes it.
    "the slot is written by the sequence's last block": Mutant(
        0,
        (
            ("end >= tile.row1 && end <= p.rows", "end > tile.row1 && end <= p.rows"),
            ("begins && g.end > tile.row1 && g.end > g.begin + WIDTH - 1", "false"),
            ("if (begins && row == g.end)", "if (row == g.end && (begins || g.end - g.begin >= WIDTH - 1))"),
        ),
    ),
    # Reads without consequence, which AddressSanitizer alone sees.
    "rows are copied past the last one": Mutant(0, (("if (r < tile.row1 - tile.row0)", "if (true)"),)),
}
SILENT_MUTANT = "rows are copied past the last one"
ORDER_MUTANT = "the slot is written by the sequence's last block"


@cache
def _function(variant: Variant, edits: tuple[tuple[str, str], ...]) -> Any:
    text = source(variant, "host")
    for old, new in edits:
        if text.count(old) != 1:
            raise ValueError(f"the planted bug fits {text.count(old)} places: {old!r}")
        text = text.replace(old, new)
    function = ctypes.CDLL(str(host._compiled(text))).launch
    function.argtypes = [ctypes.c_char_p, ctypes.c_uint, ctypes.c_uint, ctypes.c_uint, ctypes.c_int]
    function.restype = None
    return function


@contextmanager
def _launch_choice(config: LaunchConfig) -> Iterator[None]:
    """Let `prepare_*` take the spec's choice instead of the one for a GPU-sized call."""
    kept = call.choose_prefill, call.choose_update
    call.choose_prefill = call.choose_update = lambda **sizes: config  # type: ignore[assignment]
    try:
        yield
    finally:
        call.choose_prefill, call.choose_update = kept


# --- memory --------------------------------------------------------------------------------------------------


class Memory:
    """One buffer of every case: a strided view between guards, or at the very end of its own allocation.

    Attributes:
        index: element number of each element of the view, of the view's shape.
        width: elements of a case's piece of memory.
    """

    def __init__(
        self,
        cases: int,
        shape: Sequence[int],
        strides: Sequence[int],
        *,
        raw: Any,
        kind: torch.dtype,
        shift: int = 0,
        guard: int = 0,
        exact: bool,
    ) -> None:
        self.shape, self.strides, self._kind = tuple(shape), tuple(strides), kind
        self._item = np.dtype(raw).itemsize
        extent = 0 if 0 in shape else 1 + sum((n - 1) * s for n, s in zip(shape, strides, strict=True))
        # Guards are whole cache lines, so that the view's alignment is the shift's.
        line = 64 // self._item
        guard = 0 if exact else line * -(-max(guard, line) // line)
        self.start = guard + shift
        self.width = self.start + extent if exact else line * -(-(self.start + extent + guard) // line)
        self.index = np.full(self.shape, self.start, dtype=np.int64)
        for axis, (n, s) in enumerate(zip(self.shape, self.strides, strict=True)):
            self.index += (np.arange(n) * s).reshape([-1 if a == axis else 1 for a in range(len(self.shape))])
        if exact:
            self._pieces = [np.empty(self.width, dtype=raw) for _ in range(cases)]
        else:
            block = np.empty((cases * self.width + line), dtype=raw)
            skip = -block.ctypes.data % 64 // self._item
            self._block = block[skip : skip + cases * self.width].reshape(cases, self.width)
            self._pieces = list(self._block)
        self._exact = exact
        self._tensors = [
            torch.from_numpy(piece).view(kind).as_strided(self.shape, self.strides, self.start)
            for piece in self._pieces
        ]

    def __getitem__(self, case: int) -> Tensor:
        return self._tensors[case]

    def write(self, content: Array) -> None:
        """Fill every case: `[cases, width]`."""
        if self._exact:
            for piece, values in zip(self._pieces, content, strict=True):
                piece[:] = values
        else:
            self._block[:] = content

    def read(self) -> Array:
        """What every case holds: `[cases, width]`."""
        return np.stack(self._pieces) if self._exact else self._block.copy()


def _bits(values: Array, kind: str) -> Array:
    """Float32 values in the raw bits of a type."""
    tensor = torch.from_numpy(np.ascontiguousarray(values, dtype=np.float32)).to(_TORCH[kind])
    return tensor.view(_RAW_TORCH[kind]).numpy()


def _floats(bits: Array, kind: str) -> Array:
    return torch.from_numpy(np.ascontiguousarray(bits)).view(_TORCH[kind]).float().numpy()


def _typed(bits: Array, kind: str) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(bits)).view(_TORCH[kind])


def _ordered(bits: Array) -> Array:
    """Raw bits as integers in the order of the numbers, so that a difference counts steps."""
    wide = bits.astype(np.int64)
    lowest = -(1 << (8 * bits.dtype.itemsize - 1))
    return np.where(wide < 0, lowest - wide, wide)


# --- one batch -----------------------------------------------------------------------------------------------


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


def _draw_sizes(spec: Spec, dice: np.random.Generator, cases: int) -> Sizes:
    vec, width, positions = spec.config.vec, spec.width, spec.positions
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


def _draw_metadata(spec: Spec, sizes: Sizes, dice: np.random.Generator, near: bool) -> Metadata:
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


def _interpret(spec: Spec, sizes: Sizes, m: Metadata) -> Meaning:
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
    if spec.entry == "prefill":
        # Rows before the first offset belong to nobody, which only the kernel reports; see `check_meaning`.
        fault |= (m.offsets[:, 0] != 0) * int(DeviceFault.OFFSETS)
    if sizes.flags:
        history = m.flags
    else:
        history = np.full_like(m.flags, spec.entry != "prefill")
    named = np.where(live, m.slots, -1 - np.arange(sizes.sequences))
    duplicate = (np.sort(named, 1)[:, 1:] == np.sort(named, 1)[:, :-1]).any(1)
    if spec.entry == "prefill":
        overlap = (end < begin).any(1)
    else:
        overlap = (_claims(sizes, begin, end) > 1).any(1)
    return Meaning(begin, end, live, history & live, counts - 1, fault, ~duplicate & ~overlap)


def _claims(sizes: Sizes, begin: Array, end: Array, where: Array | bool = True) -> Array:
    """How many sequences claim each row: `[cases, rows]`."""
    row = np.arange(sizes.rows)
    return ((begin[:, :, None] <= row) & (row < end[:, :, None]) & np.asarray(where)[..., None]).sum(1)


class Batch:
    """Cases of one spec and one set of sizes, run and checked together."""

    def __init__(self, spec: Spec, dice: np.random.Generator, cases: int, *, exact: bool, near: bool) -> None:
        self.spec, self._dice = spec, dice
        self.sizes = sizes = _draw_sizes(spec, dice, cases)
        x, weight, state, bias = spec.types
        n, c = sizes.sequences, sizes.channels

        def floats(name: str, kind: str, shape: Sequence[int], strides: Sequence[int], guard: int) -> Memory:
            return Memory(
                cases,
                shape,
                strides,
                raw=_RAW[kind],
                kind=_TORCH[kind],
                shift=sizes.shifts[name],
                guard=guard,
                exact=exact,
            )

        def words(shape: Sequence[int], stride: int = 1) -> Memory:
            return Memory(cases, shape, (stride,), raw=np.int32, kind=torch.int32, exact=exact)

        self.memory = {
            "x": floats("x", x, (sizes.rows, c), (sizes.x_pitch, 1), 12 * sizes.x_pitch),
            "weight": floats("weight", weight, (c, spec.width), (spec.width, 1), 0),
            "state": floats(
                "state",
                state,
                (sizes.slots, c, spec.positions),
                sizes.pool_strides,
                3 * sizes.pool_strides[0],
            ),
            "offsets": words((n + 1,)),
            "slots": words((n,), sizes.slots_stride),
            "flags": Memory(cases, (n,), (1,), raw=np.bool_, kind=torch.bool, exact=exact),
            "counts": words((n,)),
            "fault": words((1,)),
        }
        if bias != "-":
            self.memory["bias"] = floats("bias", bias, (c,), (1,), 0)
        if not sizes.in_place:
            self.memory["out"] = floats("out", x, (sizes.rows, c), (sizes.out_pitch, 1), 12 * sizes.out_pitch)
        self.near = near

    def run(self, edits: tuple[tuple[str, str], ...] = (), *, reverse: bool | None = None) -> None:
        """Fill, launch every case, check everything.

        Args:
            edits: of the source, for planted bugs.
            reverse: order of the blocks; both in turn if None.

        Raises:
            FuzzFailure: a foreign byte changed, or a result is wrong.
        """
        self.metadata = _draw_metadata(self.spec, self.sizes, self._dice, self.near)
        self.meaning = _interpret(self.spec, self.sizes, self.metadata)
        self._before = before = self._fill()
        for name, memory in self.memory.items():
            memory.write(before[name])
        self._launch(edits, reverse)
        self._after = {name: memory.read() for name, memory in self.memory.items()}
        self._check()

    # -- contents

    def _fill(self) -> dict[str, Array]:
        spec, sizes, dice, m = self.spec, self.sizes, self._dice, self.metadata
        x, weight, state, bias = spec.types

        def poisoned(name: str, kind: str) -> Array:
            poison = _bits(np.array([sizes.poison]), kind)[0]
            return np.full((sizes.cases, self.memory[name].width), poison)

        def values(kind: str, shape: tuple[int, ...]) -> Array:
            made = dice.uniform(-1, 1, (sizes.cases, *shape)).astype(np.float32)
            # Some tiny ones: subnormals of 16-bit floats, zeros of both signs.
            tiny = dice.random(made.shape) < 0.02
            return _bits(np.where(tiny, made * np.float32(2.0**-20), made), kind)

        content: dict[str, Array] = {}
        for name, kind in (("x", x), ("weight", weight), ("bias", bias), ("out", x)):
            if name in self.memory:
                content[name] = poisoned(name, kind)
                if name != "out":
                    index = self.memory[name].index
                    made = values(kind, index.shape)
                    # One set of weights a batch, so that one call of the reference serves all its cases.
                    content[name][:, index] = made if name == "x" else made[:1]
        # Only windows that a live sequence with history reads hold numbers.
        content["state"] = poisoned("state", state)
        index = self.memory["state"].index
        clean = values(state, index.shape)
        readable = np.zeros((sizes.cases, sizes.slots, spec.positions), dtype=bool)
        case, sequence = np.nonzero(self.meaning.history)
        for tap in range(spec.width - 1):
            readable[case, m.slots[case, sequence], self.meaning.start[case, sequence] + tap] = True
        content["state"][:, index] = np.where(readable[:, :, None, :], clean, content["state"][:, index])
        for name, numbers in (("offsets", m.offsets), ("slots", m.slots), ("counts", m.counts)):
            content[name] = np.full((sizes.cases, self.memory[name].width), 777, dtype=np.int32)
            content[name][:, self.memory[name].index] = numbers
        content["flags"] = np.full((sizes.cases, self.memory["flags"].width), True)
        content["flags"][:, self.memory["flags"].index] = m.flags
        content["fault"] = np.full((sizes.cases, self.memory["fault"].width), 777, dtype=np.int32)
        content["fault"][:, self.memory["fault"].index] = dice.choice([0, 0, 0, 16, 8], (sizes.cases, 1))
        return content

    # -- launches

    def _launch(self, edits: tuple[tuple[str, str], ...], reverse: bool | None) -> None:
        sizes = self.sizes
        for case in range(sizes.cases):
            launch = self._prepare(case)
            assert launch is not None
            if case == 0:
                expected = self.spec.config.vec if self.spec.aligned else 1
                assert launch.variant.vec == expected, (launch.variant, sizes)
                assert launch.variant.state_layout == ("channels", "positions", "strided").index(self._kind())
            function = _function(launch.variant, edits)
            function(launch.parameters, *launch.grid, case % 2 if reverse is None else int(reverse))

    def _kind(self) -> str:
        # With one channel every pool is channels contiguous.
        return "channels" if self.sizes.channels == 1 else self.spec.layout

    def _prepare(self, case: int) -> call.Launch | None:
        memory, sizes, spec = self.memory, self.sizes, self.spec
        x, weight, state = memory["x"][case], memory["weight"][case], memory["state"][case]
        out = x if sizes.in_place else memory["out"][case]
        slots, fault = memory["slots"][case], memory["fault"][case]
        bias = memory["bias"][case] if "bias" in memory else None
        flags = memory["flags"][case] if sizes.flags else None
        counts = memory["counts"][case] if sizes.counts else None
        activation = "silu" if spec.silu else None
        offsets = None if spec.entry == "decode" else memory["offsets"][case]
        if spec.entry == "prefill":
            assert offsets is not None
            return call.prepare_prefill(
                x,
                weight,
                state,
                offsets,
                slots,
                flags,
                bias,
                activation,
                counts,
                out,
                sizes.pad_slot_id,
                fault_flag=fault,
                multiprocessors=1,
            )
        return call.prepare_update(
            x,
            weight,
            state,
            slots,
            offsets,
            counts,
            flags,
            bias,
            activation,
            out,
            sizes.pad_slot_id,
            fault_flag=fault,
        )

    # -- checks

    def _check(self) -> None:
        before, after, sizes, meaning = self._before, self._after, self.sizes, self.meaning
        written = "x" if sizes.in_place else "out"
        for name in self.memory:
            if name not in (written, "state", "fault"):
                self._same(name, before[name], after[name])
        wanted_fault = before["fault"].copy()
        wanted_fault[:, self.memory["fault"].index[0]] |= meaning.fault.astype(np.int32)
        self._same("fault", wanted_fault, after["fault"])
        rows, values = self._reference()
        self._check_out(written, rows, values)
        self._check_state()

    def _same(self, name: str, wanted: Array, got: Array, allowed: Array | None = None) -> None:
        different = wanted != got
        if allowed is not None:
            different &= ~allowed
        if different.any():
            case = int(np.nonzero(different.any(1))[0][0])
            self._fail(case, f"{name}: elements {np.nonzero(different[case])[0][:8].tolist()} are wrong")

    def _fail(self, case: int, what: str) -> None:
        m, memory = self.metadata, self.memory
        raise FuzzFailure(
            f"{self.spec}: case {case} of a batch: {what}; view starts "
            f"{ {name: buffer.start for name, buffer in memory.items()} }, {self.sizes}, "
            f"offsets {m.offsets[case].tolist()}, slots {m.slots[case].tolist()}, flags {m.flags[case].tolist()}, "
            f"counts {m.counts[case].tolist()}, live {self.meaning.live[case].tolist()}"
        )

    def _reference(self) -> tuple[Array, Array]:
        """All live sequences of the strict cases, as one call of the reference.

        Returns:
            Rows, numbered through all cases, and the raw bits of their outputs. The expected pool is left in
            `self._wanted_pool`: raw bits `[cases, slots, channels, positions]`.
        """
        spec, sizes, m, meaning = self.spec, self.sizes, self.metadata, self.meaning
        kind, state = spec.types[0], spec.types[2]
        case, sequence = np.nonzero(meaning.live & meaning.strict[:, None])
        # Every second sequence is padding, so that neighbours need not touch.
        offsets = np.empty(2 * len(case), dtype=np.int64)
        offsets[0::2] = meaning.begin[case, sequence] + case * sizes.rows
        offsets[1::2] = meaning.end[case, sequence] + case * sizes.rows
        slots = np.full(max(0, 2 * len(case) - 1), -1, dtype=np.int64)
        slots[0::2] = m.slots[case, sequence] + case * sizes.slots
        history = np.zeros(len(slots), dtype=bool)
        history[0::2] = meaning.history[case, sequence]
        counts = np.ones(len(slots), dtype=np.int64)
        counts[0::2] = meaning.start[case, sequence] + 1
        x = self._before["x"][:, self.memory["x"].index].reshape(-1, sizes.channels)
        pool = self._before["state"][:, self.memory["state"].index]
        self._wanted_pool = pool
        if not len(case):
            return np.empty(0, dtype=np.int64), x[:0]
        result = reference.causal_conv1d(
            _typed(x, kind),
            _typed(self._before["weight"][0][self.memory["weight"].index], spec.types[1]),
            pooled := _typed(pool.reshape(-1, *pool.shape[2:]), state),
            torch.from_numpy(offsets.astype(np.int32)),
            torch.from_numpy(slots.astype(np.int32)),
            bias=(
                _typed(self._before["bias"][0][self.memory["bias"].index], spec.types[3])
                if "bias" in self.memory
                else None
            ),
            activation="silu" if spec.silu else None,
            has_initial_state=torch.from_numpy(history),
            num_accepted_tokens=torch.from_numpy(counts.astype(np.int32)),
            speculative=spec.entry == "speculative",
            pad_slot_id=-1,
        )
        self._wanted_pool = pooled.view(_RAW_TORCH[state]).numpy().reshape(pool.shape)
        bits = result.values.to(_TORCH[kind]).view(_RAW_TORCH[kind]).numpy()
        return result.rows.numpy(), bits

    def _check_out(self, name: str, rows: Array, bits: Array) -> None:
        sizes, meaning, kind = self.sizes, self.meaning, self.spec.types[0]
        index, got = self.memory[name].index, self._after[name]
        wanted = self._before[name].copy()
        strict = meaning.strict[:, None]
        case, row = np.nonzero((_claims(sizes, meaning.begin, meaning.end, ~meaning.live) > 0) & strict)
        wanted[case[:, None], index[row]] = 0
        case, row = rows // sizes.rows, rows % sizes.rows
        where = (case[:, None], index[row])
        steps = np.abs(_ordered(got[where]) - _ordered(bits))
        wrong = steps > self._steps_allowed()
        if wrong.any():
            first = int(np.nonzero(wrong.any(1))[0][0])
            self._fail(
                int(case[first]),
                f"{name}: row {int(row[first])} is {_floats(got[where][first], kind).tolist()}, "
                f"wanted {_floats(bits[first], kind).tolist()}",
            )
        wanted[where] = got[where]
        # Where overlapping offsets leave the result open, any number may stand in the rows, but only a number.
        loose = np.zeros(got.shape, dtype=bool)
        loose[:, index] = ~strict[:, :, None]
        self._clean(name, kind, loose)
        self._same(name, wanted, got, loose)

    def _steps_allowed(self) -> int:
        """Steps of the output type: none without SiLU, whose `exp` the contract leaves open to a rounding or two."""
        if not self.spec.silu:
            return 0
        # In fp32 the argument's rounding counts: |v| log2(e) half-units at |v| <= 9, and a few more.
        return 24 if self.spec.types[0] == "fp32" else 2

    def _check_state(self) -> None:
        spec, sizes, meaning = self.spec, self.sizes, self.meaning
        index, got = self.memory["state"].index, self._after["state"]
        wanted = self._before["state"].copy()
        wanted[:, index] = self._wanted_pool
        tokens = meaning.end - meaning.begin
        kept = np.full_like(tokens, spec.width - 1)
        if spec.entry == "speculative":
            kept = np.minimum(tokens + spec.width - 2, spec.positions)
        storable = np.zeros((sizes.cases, sizes.slots, spec.positions), dtype=bool)
        for case, sequence in zip(*np.nonzero(meaning.live & ~meaning.strict[:, None]), strict=True):
            storable[case, self.metadata.slots[case, sequence], : kept[case, sequence]] = True
        loose = np.zeros(got.shape, dtype=bool)
        loose[:, index] = storable[:, :, None, :]
        self._clean("state", spec.types[2], loose)
        self._same("state", wanted, got, loose)

    def _clean(self, name: str, kind: str, where: Array) -> None:
        """Elements that changed there hold numbers that clean inputs can give."""
        changed = where & (self._before[name] != self._after[name])
        if changed.any():
            case = int(np.nonzero(changed.any(1))[0][0])
            values = _floats(self._after[name][changed], kind)
            if not (np.abs(values) <= LIMIT).all():
                self._fail(case, f"{name}: foreign values came in: {values[~(np.abs(values) <= LIMIT)][:8]}")

    def check_meaning(self, case: int) -> None:
        """Compare one strict case with the reference on the raw metadata: are they read here as they are there?"""
        spec, sizes, meaning, memory = self.spec, self.sizes, self.meaning, self.memory
        if not meaning.strict[case]:
            return
        x_kind, weight_kind, state_kind, bias_kind = spec.types
        device = torch.device("cpu")

        def int32(values: Array) -> Tensor:
            return torch.from_numpy(values.astype(np.int32))

        m = self.metadata
        state = _typed(self._before["state"][case][memory["state"].index], state_kind).clone()
        kept = device_fault(device)
        clear_device_fault(device)
        result = reference.causal_conv1d(
            _typed(self._before["x"][case][memory["x"].index], x_kind),
            _typed(self._before["weight"][case][memory["weight"].index], weight_kind),
            state,
            None if spec.entry == "decode" else int32(m.offsets[case]),
            int32(m.slots[case]),
            bias=_typed(self._before["bias"][case][memory["bias"].index], bias_kind) if "bias" in memory else None,
            activation="silu" if spec.silu else None,
            has_initial_state=torch.from_numpy(m.flags[case]) if sizes.flags else spec.entry != "prefill",
            num_accepted_tokens=int32(m.counts[case]) if sizes.counts else None,
            speculative=spec.entry == "speculative",
            pad_slot_id=sizes.pad_slot_id,
        )
        fault = int(device_fault(device))
        if spec.entry == "prefill" and m.offsets[case, 0] != 0:
            fault |= int(DeviceFault.OFFSETS)
        reference.fault_flag(device).fill_(int(kept))
        if fault != meaning.fault[case]:
            self._fail(case, f"the reference leaves code {fault}, not {meaning.fault[case]}")
        pool = state.view(_RAW_TORCH[state_kind]).numpy()
        if not np.array_equal(pool, self._after["state"][case][memory["state"].index]):
            self._fail(case, "the reference leaves another pool")
        name = "x" if sizes.in_place else "out"
        got = self._after[name][case][memory[name].index]
        wanted = self._before[name][case][memory[name].index].copy()
        wanted[result.zero_rows.numpy()] = 0
        wanted[result.rows.numpy()] = result.values.to(_TORCH[x_kind]).view(_RAW_TORCH[x_kind]).numpy()
        # Rows that nobody owns hold poison on both sides; NaN patterns are bits here.
        if (np.abs(_ordered(got) - _ordered(wanted)) > self._steps_allowed()).any():
            self._fail(case, "the reference gives another output")


# --- runs ----------------------------------------------------------------------------------------------------

_BATCH = 128


def run(
    spec: Spec,
    cases: int,
    *,
    seed: int = 0,
    exact: bool = False,
    near: bool = False,
    edits: tuple[tuple[str, str], ...] = (),
    reverse: bool | None = None,
) -> int:
    """Run at least `cases` cases of a spec.

    Args:
        spec: which kernel.
        cases: how many.
        seed: of all choices.
        exact: each buffer in an allocation of its own that ends with its last element, for AddressSanitizer.
        near: hostile values stay so small that a stray access would hit the guards.
        edits: of the source, for planted bugs.
        reverse: order of the blocks; both in turn if None.

    Returns:
        The number of cases that ran.

    Raises:
        FuzzFailure: see `Batch.run`.
    """
    dice = np.random.default_rng([seed, SPECS.index(spec)])
    done = 0
    with _launch_choice(spec.config):
        while done < cases:
            batch = Batch(spec, dice, _BATCH, exact=exact, near=near)
            # The same memory twice: allocating costs as much as running.
            for _ in range(4):
                batch.run(edits, reverse=reverse)
                batch.check_meaning(int(dice.integers(_BATCH)))
                done += _BATCH
    return done


def main(arguments: Sequence[str] | None = None) -> None:
    """Run every spec, and say how many cases ran and how fast."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=200_000, help="of all specs together")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--exact", action="store_true", help="allocations without guards, for AddressSanitizer")
    parser.add_argument("--spec", type=int, action="append", help="number of a spec; all if absent")
    parser.add_argument("--mutant", choices=sorted(MUTANTS), help="plant this bug")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    edits: tuple[tuple[str, str], ...] = ()
    chosen = options.spec or range(len(SPECS))
    if options.mutant:
        edits, chosen = MUTANTS[options.mutant].edits, [MUTANTS[options.mutant].spec]
    total, started = 0, time.perf_counter()
    for number in chosen:
        begin = time.perf_counter()
        done = run(SPECS[number], -(-options.cases // len(chosen)), seed=options.seed, exact=options.exact, edits=edits)
        total += done
        print(f"{number:2} {done / (time.perf_counter() - begin):8.0f}/s  {SPECS[number]}", flush=True)
    print(f"{total} cases in {time.perf_counter() - started:.1f} s")


if __name__ == "__main__":
    main()
