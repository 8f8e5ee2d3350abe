"""Owns the meaning of the training path: forward and backward in plain torch, for any float type and device.

float64 stays float64, which is what gradients are checked in; everything else is computed in float32. Rows are
those of all batches one after another, `[B*T, D]`. Each row belongs to one sequence: with offsets to theirs, else
to its batch. The W-1 inputs before a sequence are its initial window, or zeros.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["Gradients", "backward", "forward"]


@dataclass(frozen=True, slots=True)
class Gradients:
    """Of every argument.

    Attributes:
        dx: `[B, T, D]`, in the type of computation.
        dweight: `[D, W]`, likewise.
        dbias: `[D]`, likewise.
        dinitial: `[sequences, D, W-1]`, likewise.
    """

    dx: Tensor
    dweight: Tensor
    dbias: Tensor
    dinitial: Tensor


@dataclass(frozen=True, slots=True)
class _Rows:
    """Which sequence each row belongs to; -1 where none does."""

    sequence: Tensor  # int64 [R]
    begin: Tensor  # int64 [R], first row of the row's sequence
    offsets: Tensor  # int64 [N+1]


def _wide(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return tensor.to(torch.float64 if dtype == torch.float64 else torch.float32)


def _flat(x: Tensor) -> Tensor:
    return x.reshape(x.shape[0] * x.shape[1], x.shape[2])


def _rows(x: Tensor, cu_seqlens: Tensor | None) -> _Rows:
    batches, rows, _ = x.shape
    offsets = torch.arange(batches + 1, device=x.device) * rows if cu_seqlens is None else cu_seqlens.long()
    row = torch.arange(batches * rows, device=x.device)
    sequence = torch.searchsorted(offsets, row, right=True) - 1
    sequence = torch.where(sequence < offsets.shape[0] - 1, sequence, -1)
    begin = torch.where(sequence >= 0, offsets[sequence.clamp(min=0)], row)
    return _Rows(sequence, begin, offsets)


def _windows(x: Tensor, rows: _Rows, initial: Tensor | None, width: int) -> Tensor:
    """`[W, R, D]`: the input that each tap of each row meets."""
    flat = _flat(x)
    row = torch.arange(flat.shape[0], device=x.device)
    taps = []
    for tap in range(width):
        source = row - (width - 1) + tap
        inside = source >= rows.begin
        value = torch.where(inside[:, None], flat[source.clamp(min=0)], flat.new_zeros(()))
        if initial is not None:
            place = source - rows.begin + (width - 1)
            known = ~inside & (rows.sequence >= 0) & (rows.sequence < initial.shape[0])
            where = known.nonzero()[:, 0]
            value = value.index_copy(0, where, initial[rows.sequence[where], :, place[where]])
        taps.append(value)
    return torch.stack(taps)


def _sums(windows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    total = torch.zeros_like(windows[0]) if bias is None else bias.expand_as(windows[0])
    for tap in range(weight.shape[1]):
        total = total + windows[tap] * weight[:, tap]
    return total


def forward(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    initial: Tensor | None,
    cu_seqlens: Tensor | None,
    *,
    activation: str | None,
) -> tuple[Tensor, Tensor]:
    """The convolution and the final windows.

    Args:
        x: `[B, T, D]` of any float type.
        weight: `[D, W]` of any float type.
        bias: `[D]`, likewise, or None.
        initial: `[N, D, W-1]` initial windows, likewise, or None; sequences past the N-th start from zeros.
        cu_seqlens: int32 `[sequences + 1]` over all rows, or None: every batch is a sequence.
        activation: SiLU unless None.

    Returns:
        out `[B, T, D]` (zeros in rows of no sequence), and the last W-1 inputs of each sequence
        `[sequences, D, W-1]`, both in the type of x.
    """
    rows = _rows(x, cu_seqlens)
    windows = _windows(_wide(x, x.dtype), rows, None if initial is None else _wide(initial, x.dtype), weight.shape[1])
    total = _sums(windows, _wide(weight, x.dtype), None if bias is None else _wide(bias, x.dtype))
    if activation is not None:
        total = total * torch.sigmoid(total)
    total = torch.where((rows.sequence >= 0)[:, None], total, 0.0)
    return total.view(x.shape).to(x.dtype), _final(x, rows, initial, weight.shape[1])


def _final(x: Tensor, rows: _Rows, initial: Tensor | None, width: int) -> Tensor:
    flat = _flat(x)
    begin, end = rows.offsets[:-1], rows.offsets[1:]
    final = x.new_zeros((begin.shape[0], width - 1, x.shape[2])).transpose(1, 2)  # as the kernels leave it
    for position in range(width - 1):
        source = end - (width - 1) + position
        inside = (source >= begin).nonzero()[:, 0]
        final[inside, :, position] = flat[source[inside]]
        if initial is not None:
            known = ((source < begin) & (torch.arange(begin.shape[0], device=x.device) < initial.shape[0])).nonzero()
            where = known[:, 0]
            place = (source - begin + (width - 1))[where]
            final[where, :, position] = initial[where, :, place].to(x.dtype)
    return final


def backward(
    dout: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    initial: Tensor | None,
    cu_seqlens: Tensor | None,
    dfinal: Tensor | None,
    *,
    activation: str | None,
) -> Gradients:
    """The gradients of `forward`; arguments as there.

    Args:
        dout: `[B, T, D]` of any float type, gradient of the output.
        x: see `forward`.
        weight: see `forward`.
        bias: see `forward`.
        initial: see `forward`.
        cu_seqlens: see `forward`.
        dfinal: `[sequences, D, W-1]` of any float type, gradient of the final windows, or None.
        activation: SiLU unless None.

    Returns:
        The gradients in float64 if x is, else in float32.
    """
    width = weight.shape[1]
    rows = _rows(x, cu_seqlens)
    sequences = rows.offsets.shape[0] - 1
    wide_weight = _wide(weight, x.dtype)
    windows = _windows(_wide(x, x.dtype), rows, None if initial is None else _wide(initial, x.dtype), width)
    # Rows of no sequence may hold anything, NaN included, and nothing times NaN is not nothing.
    owned = (rows.sequence >= 0)[:, None]
    windows = torch.where(owned, windows, 0.0)
    g = torch.where(owned, _wide(dout, x.dtype).reshape(windows[0].shape), 0.0)
    if activation is not None:
        total = _sums(windows, wide_weight, None if bias is None else _wide(bias, x.dtype))
        s = torch.sigmoid(total)
        g = g * (s + total * s * (1.0 - s))
    # Gathered, never scattered, so that the order of every sum is fixed on every device.
    begin, end = rows.offsets[:-1], rows.offsets[1:]
    row = torch.arange(g.shape[0], device=x.device)
    row_end = torch.where(rows.sequence >= 0, end[rows.sequence.clamp(min=0)], row + 1) if sequences else row + 1
    dx, dinitial = torch.zeros_like(g), g.new_zeros((sequences, width - 1, g.shape[1]))
    dweight = [(g * windows[tap]).sum(0) for tap in range(width)]
    for behind in range(width):
        tap = wide_weight[:, width - 1 - behind]
        dx = dx + _at(g, row + behind, row + behind < row_end) * tap
        for position in range(width - 1):
            reader = begin + position - (width - 1) + behind
            dinitial[:, position] += _at(g, reader, (reader >= begin) & (reader < end)) * tap
    if dfinal is not None:
        given = _wide(dfinal, x.dtype).transpose(1, 2)
        place = row - row_end + (width - 1)
        known = (place >= 0) & (rows.sequence >= 0)
        where = rows.sequence.clamp(min=0) * (width - 1) + place.clamp(min=0)
        dx = dx + _at(given.reshape(sequences * (width - 1), g.shape[1]), where, known)
        for position in range(width - 1):
            place = position - (end - begin)
            part = given.gather(1, place.clamp(min=0)[:, None, None].expand(-1, 1, g.shape[1]))[:, 0]
            dinitial[:, position] += torch.where((place >= 0)[:, None], part, 0.0)
    return Gradients(dx.view(x.shape), torch.stack(dweight, 1), g.sum(0), dinitial.transpose(1, 2))


def _at(values: Tensor, where: Tensor, known: Tensor) -> Tensor:
    """Rows of `values`, zeros where they are not `known`."""
    if values.shape[0] == 0:
        return values.new_zeros((where.shape[0], values.shape[1]))
    return torch.where(known[:, None], values[where.clamp(0, values.shape[0] - 1)], 0.0)
