"""Owns copies between slots. They go through strides, so both memory layouts and any padding between slots are right.

With channels contiguous a shifted copy is one run of memory; with positions contiguous it is one short run a channel.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from serving_conv.errors import ContractError

__all__ = ["SlotMove", "copy_slot", "move_slots"]


class SlotMove(NamedTuple):
    """Positions `shift : L` of `source` go to positions `0 : L - shift` of `destination`; the rest stays."""

    source: int
    destination: int
    shift: int = 0


def copy_slot(states: Sequence[Tensor], source: int, destination: int, shift: int = 0) -> None:
    """Copy one slot to another one in every layer.

    Args:
        states: `[S, C, L]` a layer.
        source: slot to read.
        destination: slot to write, not `source`.
        shift: first position to read.
    """
    for state in states:
        state[destination, :, : state.shape[2] - shift].copy_(state[source, :, shift:])


def move_slots(states: Sequence[Tensor], moves: Sequence[SlotMove]) -> None:
    """Make all moves at once: every source is read before any destination is written, so cycles keep every value.

    Args:
        states: `[S, C, L]` a layer, all on one device with the same L.
        moves: slots in range.

    Raises:
        ContractError: two moves into one slot, or a shift outside `0 : L`. Nothing has been moved.
    """
    if not moves:
        return
    positions = states[0].shape[2]
    by_shift: dict[int, list[int]] = {}
    for row, move in enumerate(moves):
        if not 0 <= move.shift < positions:
            raise ContractError("shift", got=move.shift, wanted=f"0 to {positions - 1}")
        by_shift.setdefault(move.shift, []).append(row)
    destinations = [int(move.destination) for move in moves]
    if len(set(destinations)) < len(moves):
        raise ContractError("moves", got=f"destinations {destinations}", wanted="each destination once")
    device = states[0].device
    read = torch.tensor([int(move.source) for move in moves], device=device)
    write = torch.tensor(destinations, device=device)
    groups = [(shift, torch.tensor(rows, device=device)) for shift, rows in by_shift.items()]
    for state in states:
        windows = state.index_select(0, read)
        for shift, rows in groups:
            moved = windows.index_select(0, rows)[:, :, shift:]
            state[:, :, : positions - shift].index_copy_(0, write[rows], moved)
