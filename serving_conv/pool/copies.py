"""Owns copies between slots, and between slots and packages, of all layers at once.

Where kernels serve the pool's device each is one launch for all layers, on the current stream; elsewhere torch makes
one copy a layer. Both go through strides, so both memory layouts and any padding between slots are right.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from serving_conv.errors import ContractError
from serving_conv.native.copy_plan import NOTHING
from serving_conv.native.copy_slots import Launcher, SlotCopyKernel, launcher_for
from serving_conv.pool.layout import LayerState
from serving_conv.pool.package import SlotPackage

__all__ = ["KernelCopies", "SlotCopies", "SlotMove", "TorchCopies", "copies_of", "move_slots"]


class SlotMove(NamedTuple):
    """Positions `shift : L` of `source` go to positions `0 : L - shift` of `destination`; the rest stays."""

    source: int
    destination: int
    shift: int = 0


class SlotCopies(Protocol):
    """The copies of one pool."""

    def copy(self, source: int, destination: int, shift: int = 0) -> None:
        """Copy one slot to another one in every layer.

        Args:
            source: slot to read.
            destination: slot to write, not `source`.
            shift: first position to read.
        """

    def move(self, moves: Sequence[SlotMove]) -> None:
        """Make all moves at once: every source counts as read before any destination is written.

        Raises:
            ContractError: two moves into one slot, or a shift outside `0 : L`. Nothing has been moved.
        """

    def pack(self, package: SlotPackage, windows: Sequence[tuple[int, int] | None]) -> None:
        """Fill a package, every byte of it.

        Args:
            package: on the pool's device; its bytes are of no account.
            windows: slot and first position of each entry's windows; None: they are zero, and no slot is read.
        """

    def unpack(self, package: SlotPackage, slots: Sequence[int]) -> None:
        """Copy each entry of a package, which may be on another device, to position 0 of its slot."""


def copies_of(states: Sequence[Tensor], layers: Sequence[LayerState]) -> SlotCopies:
    """The copies of a pool: by kernel where kernels serve its device, else by torch.

    Args:
        states: `[S, C, L]` a layer.
        layers: channels, width and dtype of each layer.
    """
    launcher = launcher_for(states[0].device)
    return TorchCopies(states) if launcher is None else KernelCopies(states, layers, launcher)


class KernelCopies:
    """One launch each; see `SlotCopies`."""

    def __init__(self, states: Sequence[Tensor], layers: Sequence[LayerState], launcher: Launcher) -> None:
        self._device, self._positions = states[0].device, states[0].shape[2]
        self._kernel = SlotCopyKernel(states, [layer.width - 1 for layer in layers], launcher)

    def copy(self, source: int, destination: int, shift: int = 0) -> None:
        """See `SlotCopies`."""
        self._kernel.move(((source, destination, shift),))

    def move(self, moves: Sequence[SlotMove]) -> None:
        """See `SlotCopies`."""
        _check_moves(moves, self._positions)
        self._kernel.move(moves)

    def pack(self, package: SlotPackage, windows: Sequence[tuple[int, int] | None]) -> None:
        """See `SlotCopies`."""
        self._kernel.export(package.buffer, [(NOTHING, 0) if window is None else window for window in windows])

    def unpack(self, package: SlotPackage, slots: Sequence[int]) -> None:
        """See `SlotCopies`."""
        buffer = package.buffer.to(self._device)
        if buffer.data_ptr() % 16:
            buffer = buffer.clone()  # memory of others may begin anywhere; torch's own is aligned
        self._kernel.import_(buffer, slots)


class TorchCopies:
    """One torch copy a layer; see `SlotCopies`."""

    def __init__(self, states: Sequence[Tensor]) -> None:
        self._states = states

    def copy(self, source: int, destination: int, shift: int = 0) -> None:
        """See `SlotCopies`."""
        for state in self._states:
            state[destination, :, : state.shape[2] - shift].copy_(state[source, :, shift:])

    def move(self, moves: Sequence[SlotMove]) -> None:
        """See `SlotCopies`."""
        move_slots(self._states, moves)

    def pack(self, package: SlotPackage, windows: Sequence[tuple[int, int] | None]) -> None:
        """See `SlotCopies`."""
        package.buffer.zero_()
        for entry, window in enumerate(windows):
            if window is None:
                continue
            slot, first = window
            for target, state in zip(package.windows(), self._states, strict=True):
                target[entry].copy_(state[slot, :, first : first + target.shape[2]])

    def unpack(self, package: SlotPackage, slots: Sequence[int]) -> None:
        """See `SlotCopies`."""
        for entry, slot in enumerate(slots):
            for window, state in zip(package.windows(), self._states, strict=True):
                state[slot, :, : window.shape[2]].copy_(window[entry])


def _check_moves(moves: Sequence[SlotMove], positions: int) -> None:
    for move in moves:
        if not 0 <= move.shift < positions:
            raise ContractError("shift", got=move.shift, wanted=f"0 to {positions - 1}")
    destinations = [int(move.destination) for move in moves]
    if len(set(destinations)) < len(moves):
        raise ContractError("moves", got=f"destinations {destinations}", wanted="each destination once")


def move_slots(states: Sequence[Tensor], moves: Sequence[SlotMove]) -> None:
    """Make all moves at once, by torch: the sources are read into memory of their own first.

    Args:
        states: `[S, C, L]` a layer, all on one device with the same L.
        moves: slots in range.

    Raises:
        ContractError: two moves into one slot, or a shift outside `0 : L`. Nothing has been moved.
    """
    if not moves:
        return
    positions = states[0].shape[2]
    _check_moves(moves, positions)
    by_shift: dict[int, list[int]] = {}
    for row, move in enumerate(moves):
        by_shift.setdefault(move.shift, []).append(row)
    device = states[0].device
    read = torch.tensor([int(move.source) for move in moves], device=device)
    write = torch.tensor([int(move.destination) for move in moves], device=device)
    groups = [(shift, torch.tensor(rows, device=device)) for shift, rows in by_shift.items()]
    for state in states:
        windows = state.index_select(0, read)
        for shift, rows in groups:
            moved = windows.index_select(0, rows)[:, :, shift:]
            state[:, :, : positions - shift].index_copy_(0, write[rows], moved)
