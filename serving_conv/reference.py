"""Owns the meaning of every entry: vectorised torch, no kernel of its own, any device.

Two arithmetics share one data flow. `FIXED_ORDER` is the contract's: fp32, bias first, one fused multiply-add a
tap in tap order, SiLU, one rounding to the output type; every operation used is correctly rounded by IEEE 754, so
the bits depend on the values alone, never on the position in a vector, the batch or the split. `FLOAT64` is what
error bounds are measured from; it also yields the magnitude `|b| + sum |w x|` that those bounds need.

The data flow: each live sequence becomes a *stream*, its W-1 inputs of history followed by its T new tokens. Row t
reads stream positions t .. t+W-1, and what the slot keeps is a slice of the stream.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor

from serving_conv.contract import accepted_limit
from serving_conv.faults import DeviceFault, fault_flag

__all__ = ["Arithmetic", "Result", "causal_conv1d", "fused_multiply_add", "silu"]


class Arithmetic(Enum):
    """How the sum is formed; see the module text."""

    FIXED_ORDER = "float32, fixed order"
    FLOAT64 = "float64"


@dataclass(frozen=True, slots=True)
class Result:
    """What a call computed, by row.

    Attributes:
        values: `[rows, C]`, float32 (fixed order) or float64, before the rounding to the output type.
        magnitude: `[rows, C]` float64 `|b| + sum |w x|`, or None for the fixed order.
        rows: int64 `[rows]`, the row of x each line belongs to; a row that padding or a fault owns is absent.
        zero_rows: int64, rows that belong to padding or to a faulty sequence: zero output.
    """

    values: Tensor
    magnitude: Tensor | None
    rows: Tensor
    zero_rows: Tensor


@torch.no_grad()
def causal_conv1d(
    x: Tensor,
    weight: Tensor,
    conv_state: Tensor,
    cu_seqlens: Tensor | None,
    slots: Tensor,
    *,
    bias: Tensor | None,
    activation: str | None,
    has_initial_state: Tensor | bool,
    num_accepted_tokens: Tensor | None,
    speculative: Tensor | bool,
    pad_slot_id: int,
    checkpoints: tuple[Tensor, Tensor, Tensor] | None = None,
    arithmetic: Arithmetic = Arithmetic.FIXED_ORDER,
) -> Result:
    """Convolve packed sequences against their slots and update the slots in place.

    Args:
        x: `[R, C]` packed tokens.
        weight: `[C, W]`.
        conv_state: `[S, C, L]`, updated in place.
        cu_seqlens: int32 `[N+1]`, or None for one row a sequence.
        slots: int32 `[N]`.
        bias: `[C]` or None.
        activation: SiLU unless None.
        has_initial_state: bool `[N]`, or one answer for all.
        num_accepted_tokens: int32 `[N]` or None: the window starts at count - 1.
        speculative: keep (last W-2 of the window, all T tokens) instead of the last W-1 inputs; bool `[N]`, or one
            answer for all.
        pad_slot_id: slot number that marks padding.
        checkpoints: int32 offsets `[N+1]`, token counts `[K]` and slots `[K]`: windows to write to further slots.
        arithmetic: see `Arithmetic`.
    """
    taps = weight.shape[1]
    slot_count, _, positions = conv_state.shape
    sequences = _classify(
        rows=x.shape[0],
        cu_seqlens=cu_seqlens,
        slots=slots,
        slot_count=slot_count,
        num_accepted_tokens=num_accepted_tokens,
        largest_count=accepted_limit(taps, positions),
        pad_slot_id=pad_slot_id,
        flag=fault_flag(x.device),
    )
    live = sequences.live
    slot = slots.long()[live]
    length = sequences.length[live]
    window_start = torch.zeros_like(slot) if num_accepted_tokens is None else num_accepted_tokens.long()[live] - 1
    history = _each(has_initial_state, live)
    drafts = _each(speculative, live)

    # The streams, one after another: where each begins, and where each row's token lies in them.
    stream_length = length + (taps - 1)
    stream_start = stream_length.cumsum(0) - stream_length
    row, owner = _ragged_arange(sequences.first_row[live], length)
    token = stream_start[owner] + (taps - 1) + row - sequences.first_row[live][owner]

    # Raw inputs keep their type (and their bits) when pool and x agree; fp32 holds every accepted type exactly.
    exact = x.dtype if x.dtype == conv_state.dtype else torch.float32
    stream = x.new_zeros((int(stream_length.sum()), x.shape[1]), dtype=exact)
    stream[token] = x[row].to(exact)
    window = torch.arange(taps - 1, device=x.device)
    # Only slots with history are read: a slot without it may hold anything, NaN included.
    stream[(stream_start[history, None] + window).flatten()] = (
        conv_state[slot[history, None], :, window_start[history, None] + window].to(exact).flatten(0, 1)
    )

    values, magnitude = _convolve(stream, token - (taps - 1), weight, bias, arithmetic)
    if activation is not None:
        values = silu(values)

    truncated = drafts & (length > accepted_limit(taps, positions))
    _raise_flag(fault_flag(x.device), DeviceFault.STATE_TRUNCATED, truncated)
    kept = torch.where(drafts, (length + (taps - 2)).clamp(max=positions), taps - 1)
    source = stream_start + torch.where(drafts, 1, length)
    position, owner = _ragged_arange(torch.zeros_like(kept), kept)
    conv_state[slot[owner], :, position] = stream[source[owner] + position].to(conv_state.dtype)
    if checkpoints is not None:
        to_slot, source = _checkpoints(checkpoints, live, length, stream_start, slot_count, pad_slot_id, x.device)
        windows = stream[source[:, None] + window].to(conv_state.dtype)
        conv_state[to_slot[:, None], :, window] = windows
    return Result(values, magnitude, row, sequences.zero_rows)


def _each(answer: Tensor | bool, live: Tensor) -> Tensor:
    """A flag of every live sequence, from one for each sequence or one for all."""
    if isinstance(answer, Tensor):
        return answer[live]
    return torch.full((int(live.sum()),), answer, dtype=torch.bool, device=live.device)


def _checkpoints(
    checkpoints: tuple[Tensor, Tensor, Tensor],
    live: Tensor,
    length: Tensor,
    stream_start: Tensor,
    slot_count: int,
    pad_slot_id: int,
    device: torch.device,
) -> tuple[Tensor, Tensor]:
    """Slots of the checkpoints that are written, and where in the streams their windows begin."""
    offsets, tokens, slots = (t.long() for t in checkpoints)
    first = offsets[:-1].clamp(0, tokens.shape[0])[live]
    named = (offsets[1:].clamp(0, tokens.shape[0])[live] - first).clamp(min=0)
    index, owner = _ragged_arange(first, named)
    tokens, slots = tokens[index], slots[index]
    padding = slots == pad_slot_id
    bad_tokens = (tokens < 1) | (tokens > length[owner])
    bad_slot = (slots < 0) | (slots >= slot_count)
    _raise_flag(fault_flag(device), DeviceFault.CHECKPOINT, bad_tokens & ~padding)
    _raise_flag(fault_flag(device), DeviceFault.SLOT, bad_slot & ~bad_tokens & ~padding)
    sound = ~padding & ~bad_tokens & ~bad_slot
    return slots[sound], stream_start[owner[sound]] + tokens[sound]


@dataclass(frozen=True, slots=True)
class _Sequences:
    live: Tensor  # bool [N]: computes and touches its slot
    first_row: Tensor  # int64 [N]
    length: Tensor  # int64 [N]
    zero_rows: Tensor  # int64: rows of padding and faulty sequences


def _classify(
    *,
    rows: int,
    cu_seqlens: Tensor | None,
    slots: Tensor,
    slot_count: int,
    num_accepted_tokens: Tensor | None,
    largest_count: int,
    pad_slot_id: int,
    flag: Tensor,
) -> _Sequences:
    """Sort the sequences into live, empty, padding and faulty, in the order every kernel must use.

    Padding comes first (what else it carries is never looked at, but for offsets that go backwards), then offsets,
    then emptiness (an empty sequence touches nothing, so its slot does not matter), then slot and count.
    """
    if cu_seqlens is None:
        begin = torch.arange(slots.shape[0], device=slots.device)
        end = begin + 1
    else:
        begin, end = cu_seqlens[:-1].long(), cu_seqlens[1:].long()
        _raise_flag(flag, DeviceFault.OFFSETS, begin[:1] != 0)
    padding = slots == pad_slot_id
    bad_offsets = (begin < 0) | (end < begin) | (end > rows)
    empty = begin == end
    bad_slot = (slots < 0) | (slots >= slot_count)
    if num_accepted_tokens is None:
        bad_count = torch.zeros_like(padding)
    else:
        bad_count = (num_accepted_tokens < 1) | (num_accepted_tokens > largest_count)
    _raise_flag(flag, DeviceFault.OFFSETS, (bad_offsets & ~padding) | (end < begin))
    touched = ~padding & ~bad_offsets & ~empty
    _raise_flag(flag, DeviceFault.SLOT, bad_slot & touched)
    _raise_flag(flag, DeviceFault.ACCEPTED_COUNT, bad_count & ~bad_slot & touched)
    live = touched & ~bad_slot & ~bad_count
    first = begin.clamp(0, rows)
    length = end.clamp(0, rows) - first
    zero_rows, _ = _ragged_arange(first[~live], length[~live].clamp(min=0))
    return _Sequences(live, first, length, zero_rows)


def _raise_flag(flag: Tensor, fault: DeviceFault, where: Tensor) -> None:
    flag |= where.any().to(torch.int32) * int(fault)


def _ragged_arange(start: Tensor, length: Tensor) -> tuple[Tensor, Tensor]:
    """Concatenate `start[i] .. start[i] + length[i] - 1`; also say which i each element came from."""
    owner = torch.repeat_interleave(length)
    offset = length.cumsum(0) - length
    return torch.arange(owner.shape[0], device=start.device) + (start - offset)[owner], owner


def _convolve(
    stream: Tensor, oldest: Tensor, weight: Tensor, bias: Tensor | None, arithmetic: Arithmetic
) -> tuple[Tensor, Tensor | None]:
    """Sum of taps for the windows that begin at stream positions `oldest`: values, and their magnitude."""
    wide = arithmetic is Arithmetic.FLOAT64
    dtype = torch.float64 if wide else torch.float32
    shape = (oldest.shape[0], stream.shape[1])
    total = (stream.new_zeros((), dtype=dtype) if bias is None else bias.to(dtype)).expand(shape)
    magnitude = total.abs() if wide else None
    for tap in range(weight.shape[1]):
        value = stream[oldest + tap]
        if magnitude is None:
            total = fused_multiply_add(value, weight[:, tap], total)
        else:
            product = value.double() * weight[:, tap].double()
            total = total + product
            magnitude = magnitude + product.abs()
    return total, magnitude


def fused_multiply_add(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """`a * b + c` in fp32 with one rounding, as the hardware instruction, from float64 operations.

    The product of two fp32 numbers is exact in float64. Rounding the float64 sum to fp32 rounds twice, which
    errs only when the first rounding lands exactly between two fp32 numbers (or below the normal range, where
    they lie further apart): there the sum is first rounded to odd (Boldo and Melquiond, 2008).
    """
    product = a.double() * b.double()
    addend = c.double()
    total = product + addend
    bits = total.view(torch.int64)
    doubtful = ((bits & 0x1FFF_FFFF) == 0x1000_0000) | ((total.abs() < 2.0**-125) & (total != 0))
    if bool(doubtful.any()):
        where = doubtful.nonzero(as_tuple=True)
        total[where] = _round_to_odd(product[where], addend.expand_as(total)[where], total[where])
    return total.float()


def _round_to_odd(a: Tensor, b: Tensor, total: Tensor) -> Tensor:
    """`a + b` rounded to the float64 neighbour with an odd last bit unless exact; `total` is the nearest."""
    virtual = total - a
    error = (a - (total - virtual)) + (b - virtual)  # exact: Knuth's TwoSum
    bits = total.view(torch.int64)
    away = torch.where((error > 0) == (total > 0), 1, -1)
    adjust = (error != 0) & (bits & 1 == 0) & total.isfinite()
    return torch.where(adjust, bits + away, bits).view(torch.float64)


_LOG2_E = 1.4426950408889634
_LN2_HIGH = 0.693147180369123816490  # 33 bits, so that k * _LN2_HIGH is exact for |k| < 2^20
_LN2_LOW = 1.90821492927058770002e-10
_EXP_TERMS = 14  # |r| <= ln2/2: the first term left out is below 2^-60


def silu(value: Tensor) -> Tensor:
    """`v / (1 + exp(-v))`, evaluated in float64 and returned in the type of `value`.

    torch's exp gives other bits in the tail of a vector than in its body, which would break batch invariance;
    this one uses correctly rounded operations only.
    """
    v = value.double()
    # Beyond +-745 exp leaves the float64 range; the clamp also keeps NaN.
    x = (-v).clamp(-745.0, 745.0)
    k = torch.round(x * _LOG2_E)
    r = (x - k * _LN2_HIGH) - k * _LN2_LOW
    series = torch.ones_like(r)
    for term in range(_EXP_TERMS, 0, -1):
        series = 1.0 + series * r / term
    # Two halves, since 2^k itself leaves the range at both ends.
    k = torch.nan_to_num(k).long()
    half = k >> 1
    exponential = series * _power_of_two(half) * _power_of_two(k - half)
    return (v / (1.0 + exponential)).to(value.dtype)


def _power_of_two(exponent: Tensor) -> Tensor:
    """Exact 2^exponent in float64; torch's exp2 is not exact at every position of a vector."""
    return ((exponent + 1023) << 52).view(torch.float64)
