"""Owns sequence numbers: from one number a token to offsets, without asking the device how many sequences there are."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["offsets_of", "reaches_back"]


def offsets_of(seq_idx: Tensor) -> Tensor:
    """Offsets of the runs of equal numbers: int32 `[B*T + 1]`, in the rows of all batches one after another.

    A run ends where the number changes or a batch ends. There are at most B*T of them, and the last offset is
    repeated for those that there are not, since only the device knows how many there are.

    Args:
        seq_idx: int32 `[B, T]`, any strides.
    """
    batches, rows = seq_idx.shape
    total = batches * rows
    starts = torch.ones((batches, rows), dtype=torch.bool, device=seq_idx.device)
    starts[:, 1:] = seq_idx[:, 1:] != seq_idx[:, :-1]
    flat = starts.view(-1)
    row = torch.arange(total, dtype=torch.int32, device=seq_idx.device)
    run = flat.cumsum(0) - 1
    # What starts no run writes the total behind the last place, where it belongs.
    offsets = torch.full((total + 1,), total, dtype=torch.int32, device=seq_idx.device)
    return offsets.scatter_(0, torch.where(flat, run, total), torch.where(flat, row, total))


def reaches_back(before: Tensor, first: Tensor) -> Tensor:
    """Which of the tokens before a token belong to its run: bool `[K]`.

    Args:
        before: int32 `[K]`, numbers of the tokens before it, oldest first.
        first: int32 `[1]`, its own number.
    """
    return (before == first).flip(0).cumprod(0).flip(0).bool()
