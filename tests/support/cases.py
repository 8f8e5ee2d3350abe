"""Owns the test grid: a base row, and one row for each thing that the contract lets a caller change.

The axes come from the records of `serving_conv.contract`, so a type or width added there is tested without a word
here. `check_case` plays a row through a public entry, in guarded memory, against the oracle.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from support import interpreter
from support.bounds import assert_within
from support.loop import Expected, expect
from support.memory import POISONS, Guarded, pool_strides
from torch import Tensor

import serving_conv
from serving_conv.contract import FLOAT_TYPES, MAX_WIDTH, MIN_WIDTH, TensorArgument
from serving_conv.settings import SETTINGS

__all__ = [
    "CHANNELS",
    "LAYOUTS",
    "LENGTHS",
    "PREFILL",
    "SPECULATIVE",
    "UPDATE",
    "Case",
    "Outcome",
    "check_case",
    "dtype_combinations",
    "play",
    "same_bits",
    "variants",
]

LAYOUTS = ("channels", "positions")
CHANNELS = (1, 7, 63, 65, 130, 322)
LENGTHS = (
    *range(1, 11),
    *(15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 255, 256, 257),
    *range(1023, 1028),
    4099,
)


@dataclass(frozen=True)
class Case:
    """One row of the grid. Everything a caller may vary, with the plainest choice as the default.

    Attributes:
        name: for the test id.
        entry: name of the public entry.
        lengths: rows of each sequence.
        x, weight, state, bias: type names; bias None is absent.
        history: has_initial_state; None leaves the argument out.
        counts: num_accepted_tokens; None leaves the argument out.
        offsets: hand over cu_seqlens (prefill always does).
        padding: sequences whose slot is the sentinel.
        cu_seqlens: offsets to use in place of those of `lengths`.
        slots: slots to use in place of drawn ones.
        tail: rows of x past the last offset.
        extra_positions: L - (W - 1).
        row_gap, out_gap, slot_gap, pitch_gap: elements between rows, slots and runs.
        shift: elements that every base address is moved by.
        index_stride: stride of the slot tensor.
        out: "absent", "given" or "x".
        workspace: hand over scratch of exactly the needed size.
        at_end: every buffer ends with the allocation, so that an overrun leaves it.
    """

    name: str
    entry: str
    lengths: tuple[int, ...]
    x: str = "float32"
    weight: str = "float32"
    state: str = "float32"
    bias: str | None = "float32"
    activation: str | None = "silu"
    width: int = 4
    channels: int = 65
    history: tuple[bool, ...] | None = None
    counts: tuple[int, ...] | None = None
    offsets: bool = True
    padding: frozenset[int] = frozenset()
    cu_seqlens: tuple[int, ...] | None = None
    slots: tuple[int, ...] | None = None
    pad_slot_id: int = -1
    tail: int = 0
    extra_positions: int = 0
    layout: str = "channels"
    row_gap: int = 0
    out_gap: int = 0
    slot_gap: int = 0
    pitch_gap: int = 0
    shift: int = 0
    index_stride: int = 1
    out: str = "absent"
    workspace: bool = False
    at_end: bool = False

    def but(self, name: str, **changes: object) -> Case:
        """This row with some things changed."""
        return replace(self, name=name, **changes)  # type: ignore[arg-type]

    def __str__(self) -> str:
        return self.name


PREFILL = Case("base", "causal_conv1d_fn", (5, 1, 12, 2), history=(True, False, False, True))
UPDATE = Case("base", "causal_conv1d_update", (1, 1, 1, 1), offsets=False)
SPECULATIVE = UPDATE.but("speculative", lengths=(3, 1, 2, 3), offsets=True, counts=(1, 3, 2, 1), extra_positions=2)


def variants(entry: str) -> Iterator[Case]:
    """The base row of an entry, then one change per row."""
    record = next(e for e in serving_conv.contract.ENTRIES if e.name == entry)
    prefill = entry == PREFILL.entry
    base = PREFILL if prefill else UPDATE
    yield base
    for name, argument in (("x", "x"), ("weight", "weight"), ("state", "conv_state"), ("bias", "bias")):
        axis = record[argument]
        assert isinstance(axis, TensorArgument)
        for dtype in axis.dtypes:
            yield base.but(f"{name}-{dtype}", **{name: dtype})
    yield base.but("no-bias", bias=None)
    yield base.but("no-activation", activation=None)
    for width in range(MIN_WIDTH, MAX_WIDTH + 1):
        yield base.but(f"width-{width}", width=width)
    for channels in CHANNELS:
        yield base.but(f"channels-{channels}", channels=channels)
    yield base.but("positions-contiguous", layout="positions")
    for layout in LAYOUTS:
        yield base.but(f"{layout}-pitch", layout=layout, pitch_gap=3)
        yield base.but(f"{layout}-page", layout=layout, slot_gap=1001)
        yield base.but(f"{layout}-more-positions", layout=layout, extra_positions=5)
    yield base.but("far-slots", slot_gap=600_000)
    yield base.but("row-pitch", row_gap=13)
    yield base.but("wide-row-pitch", row_gap=36_864)
    yield base.but("shifted-base", shift=1)
    yield base.but("strided-slots", index_stride=3)
    yield base.but("out", out="given")
    yield base.but("out-pitch", out="given", out_gap=9)
    yield base.but("pad-0", pad_slot_id=0)
    yield base.but("padding", padding=frozenset({1, 3}))
    yield base.but("padding-first", padding=frozenset({0}), pad_slot_id=0)
    yield base.but("all-padding", padding=frozenset(range(4)))
    yield base.but("all-history", history=(True,) * 4)
    yield base.but("no-history", history=(False,) * 4)
    yield base.but("history-absent", history=None)
    yield base.but("tail", tail=3, offsets=True)
    yield base.but("one-sequence", lengths=(1,), history=None)
    yield base.but("no-sequence", lengths=(), history=None)
    yield base.but("empty-sequences", lengths=(0, 3, 0, 0, 2, 0), history=(True,) * 6, offsets=True)
    yield base.but("all-empty", lengths=(0, 0, 0), history=(True,) * 3, offsets=True)
    yield base.but("all-empty-tail", lengths=(0, 0, 0), history=(True,) * 3, offsets=True, tail=2)
    yield base.but("empty-sequences-among-padding", lengths=(0, 3, 0, 4), padding=frozenset({0, 3}), offsets=True)
    yield base.but("many-sequences", lengths=(1, 2, 0) * 23, history=(True, False, True) * 23, offsets=True)
    if prefill:
        counts = (3, 1, 2, 3)
        yield base.but("counts", counts=counts, extra_positions=2, history=(True,) * 4)
        yield base.but("counts-and-no-history", counts=counts, extra_positions=2)
        yield base.but("counts-positions", counts=counts, extra_positions=2, layout="positions")
        yield base.but("workspace", workspace=True, lengths=(2,) * 40, history=(True, False) * 20)
        yield base.but("shorter-than-window", width=8, lengths=(1, 2, 6, 7), history=(True, False, True, False))
    else:
        yield base.but("out-is-x", out="x")
        yield base.but("out-is-x-pitch", out="x", row_gap=13)
        yield base.but("out-is-x-offsets", out="x", offsets=True, lengths=(3, 1, 0, 2), tail=1)
        yield base.but("several-rows", offsets=True, lengths=(3, 1, 5, 2))
        yield SPECULATIVE
        yield SPECULATIVE.but("speculative-decode", lengths=(1,) * 4, offsets=False)
        yield SPECULATIVE.but("speculative-positions", layout="positions")
        yield SPECULATIVE.but("speculative-out-is-x", out="x")
        yield SPECULATIVE.but("speculative-padding", padding=frozenset({2}))
        yield SPECULATIVE.but("speculative-first-chunk", history=(False, True, False, True))
        yield SPECULATIVE.but(
            "speculative-count-beyond-this-step", lengths=(1,) * 4, counts=(4, 4, 3, 4), extra_positions=3
        )
        yield SPECULATIVE.but("speculative-tokens-beyond-the-limit", lengths=(4, 9, 3, 1))
        for width in range(MIN_WIDTH, MAX_WIDTH + 1):
            yield SPECULATIVE.but(f"speculative-width-{width}", width=width)


def dtype_combinations() -> Iterator[dict[str, str]]:
    """Every combination of the types of x, weight, bias and state."""
    for x, weight, bias, state in itertools.product(FLOAT_TYPES, repeat=4):
        yield {"x": x, "weight": weight, "bias": bias, "state": state}


@dataclass
class Outcome:
    """What a call left behind.

    Attributes:
        out: `[R, C]` on the CPU; rows that the contract leaves open are zeroed.
        pool: `[S, C, L]` on the CPU.
        stored: bool `[S, L]`.
        expected: the oracle's answer.
    """

    out: Tensor
    pool: Tensor
    stored: Tensor
    expected: Expected = field(repr=False)


def play(case: Case, device: torch.device, poison: str = "nan", seed: int = 0) -> Outcome:
    """Play a row in guarded memory; check output, pool, and every byte that the call does not own."""
    if (
        device.type == "cpu"
        and SETTINGS.backend == "triton"
        and "bfloat16" in (case.x, case.weight, case.state, case.bias)
        and not interpreter.repaired()
    ):
        pytest.skip("Triton's interpreter computes bfloat16 wrongly; a GPU, or a repaired one, runs this row")
    generator = torch.Generator().manual_seed(seed)
    dtype = {n: getattr(torch, t) for n, t in (("x", case.x), ("weight", case.weight), ("state", case.state))}
    width, channels, sequences = case.width, case.channels, len(case.lengths)
    positions = width - 1 + case.extra_positions
    offsets = list(case.cu_seqlens or (0, *itertools.accumulate(case.lengths)))
    rows = sum(case.lengths) + case.tail
    pool_slots = sequences + 4
    draw = [n + 1 for n in torch.randperm(pool_slots - 1, generator=generator).tolist()]
    slots = list(case.slots or [case.pad_slot_id if n in case.padding else draw[n] for n in range(sequences)])
    history = list(case.history if case.history is not None else (case.entry == UPDATE.entry,) * sequences)
    speculative = case.entry == UPDATE.entry and case.counts is not None

    memory: dict[str, Any] = {"device": device, "poison": poison, "shift": case.shift, "at_end": case.at_end}

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    def guard(values: Tensor, kind: torch.dtype, **options: Any) -> Guarded:
        return Guarded.of(values.to(kind), **memory, **options)

    x = guard(normal(rows, channels), dtype["x"], strides=(channels + case.row_gap, 1))
    weight = guard(normal(channels, width) / width**0.5, dtype["weight"])
    bias = None if case.bias is None else guard(normal(channels), getattr(torch, case.bias))
    pool = Guarded(
        (pool_slots, channels, positions),
        dtype=dtype["state"],
        strides=pool_strides(case.layout, channels, positions, slot_gap=case.slot_gap, pitch_gap=case.pitch_gap),
        **memory,
    )
    # Only what a sequence may read holds numbers; other slots, positions and slots without history are poison.
    for n, slot in enumerate(slots):
        start = 0 if case.counts is None else case.counts[n] - 1
        window = normal(channels, width - 1).to(dtype["state"])
        readable = 0 <= slot < pool_slots and slot != case.pad_slot_id and 0 <= start <= positions - width + 1
        if history[n] and readable:
            pool.view[slot, :, start : start + width - 1] = window.to(device)
    index = torch.tensor(slots, dtype=torch.int32)
    guards = {
        "x": x,
        "weight": weight,
        "conv_state": pool,
        "slots": guard(index, torch.int32, strides=(case.index_stride,)),
    }
    arguments: dict[str, Any] = {"activation": case.activation, "pad_slot_id": case.pad_slot_id}
    if bias is not None:
        guards["bias"] = bias
    if case.offsets:
        guards["cu_seqlens"] = guard(torch.tensor(offsets), torch.int32)
    if case.history is not None:
        guards["has_initial_state"] = guard(torch.tensor(case.history, dtype=torch.bool), torch.bool)
    if case.counts is not None:
        guards["num_accepted_tokens"] = guard(torch.tensor(case.counts), torch.int32)
    out: Guarded | None = x if case.out == "x" else None
    if case.out == "given":
        shape = (rows, channels)
        out = Guarded(shape, dtype=dtype["x"], strides=(channels + case.out_gap, 1), **memory)
        guards["out"] = out
    if case.workspace:
        size = serving_conv.prefill_workspace_size(rows, sequences)
        guards["workspace"] = Guarded((size,), dtype=torch.int32, **memory)

    expected = expect(
        x.view,
        weight.view,
        pool.view,
        offsets,
        slots,
        history=history,
        counts=case.counts,
        speculative=speculative,
        bias=None if bias is None else bias.view,
        activation=case.activation,
        pad_slot_id=case.pad_slot_id,
    )
    before = pool.view.cpu().clone()
    for guarded in guards.values():
        guarded.arm()
    names = {"slots": "cache_indices" if case.entry == PREFILL.entry else "state_indices"}
    arguments |= {names.get(name, name): guarded.view for name, guarded in guards.items()}
    if out is not None:
        arguments["out"] = out.view
    result = getattr(serving_conv, case.entry)(**arguments)

    assert result.dtype == dtype["x"]
    assert result.device == device
    assert out is None or result is out.view
    written, stored = torch.from_numpy(expected.written), torch.from_numpy(expected.stored)
    open_ended = (
        case.entry == PREFILL.entry
        and any(after < before for before, after in itertools.pairwise(offsets))
        and serving_conv.backend_for(x.view) != "reference"
    )
    if open_ended:
        # The kernels find the owner of a row by search, which offsets that go backwards lead astray: rows and slots of
        # the call may then be written or not, but nothing else (kernels/README.md).
        written = torch.zeros_like(written)
        stored = torch.zeros_like(stored)
        stored[[slot for slot in slots if 0 <= slot < pool_slots], : width - 1] = True
    defined = written & ~torch.from_numpy(expected.contested)
    got = result.cpu()[defined]
    magnitude = torch.from_numpy(expected.magnitude)[defined]
    assert_within(got, torch.from_numpy(expected.out)[defined], magnitude, width=width, activation=case.activation)
    # The bound leaves room for underflow; the rows of padding and of faulty sequences get none.
    assert not bool(got[magnitude == 0].any()), "a row of padding or of a faulty sequence is not zero"
    assert open_ended or same_bits(pool.view.cpu(), expected.pool(before)), "pool differs from the oracle"
    written |= open_ended
    owned = {"conv_state": stored[:, None, :], "out": written[:, None], "x": written[:, None] if out is x else None}
    for name, guarded in guards.items():
        if name == "workspace":
            mask: Tensor | None = torch.ones_like(guarded.view, dtype=torch.bool)
        else:
            mask = owned.get(name)
        guarded.assert_untouched(except_for=mask, name=name)
    full = torch.zeros(rows, channels, dtype=got.dtype)
    full[defined] = got
    return Outcome(full, pool.view.cpu(), stored, expected)


def check_case(case: Case, device: torch.device) -> None:
    """Play a row under each poison; what it computes may not depend on it."""
    first, *others = (play(case, device, poison) for poison in POISONS)
    assert bool(first.out.isfinite().all())
    mask = first.stored[:, None, :].expand(first.pool.shape)
    for poison, other in zip(POISONS[1:], others, strict=True):
        assert same_bits(first.out, other.out), f"outputs change with poison {poison}"
        assert same_bits(first.pool[mask], other.pool[mask]), f"windows change with poison {poison}"


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Equality of bits: NaN equals itself, and the sign of zero counts."""
    kind = {2: torch.int16, 4: torch.int32, 8: torch.int64}[a.element_size()]
    return a.dtype == b.dtype and torch.equal(a.contiguous().view(kind), b.contiguous().view(kind))
