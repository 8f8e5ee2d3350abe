"""Plans copies between slots: how a layer is cut into lanes, and in which order moves are safe. Plain integers only.

`kernels/copy_slots.cu` gives one thread to a lane: a word that repeats at a step, in the source as in the
destination. Everything that depends on layouts is decided here, once for each pool:

- channels contiguous on both sides: a lane is a word of channels, its steps are positions;
- positions contiguous on both sides and nothing shifted: a word of a channel's run, or of the whole slot if it is
  dense, and one step;
- anything else (a shifted run, a change of layout): one channel, its steps are positions.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import NamedTuple

__all__ = [
    "KEPT",
    "LAYER",
    "MOVE",
    "NOTHING",
    "PARAMETERS",
    "Lanes",
    "Move",
    "Side",
    "move_order",
    "pack_layer",
    "plan_lanes",
]

NOTHING, KEPT = -1, -2  # as in kernels/copy_slots.cu
_WIDEST_WORD = 16
_MOST_LANES = 2**31 - 1

LAYER = struct.Struct("<QqqqqQqqqqiiiiii")  # struct Layer
PARAMETERS = struct.Struct("<QQQQiiii")  # struct Parameters, before its moves
MOVE = struct.Struct("<iii")  # struct Move


class Side(NamedTuple):
    """One layer's slots on one side of a copy; distances in bytes.

    Attributes:
        base: address of slot 0, or 0: the layer's part of a package, on a multiple of 16 bytes.
        slot: from a slot to the next.
        channel: from a channel to the next.
        position: from a position to the next.
        positions: of a slot.
    """

    base: int
    slot: int
    channel: int
    position: int
    positions: int


class Lanes(NamedTuple):
    """How the threads share a layer; distances in bytes, of source and destination.

    Attributes:
        lanes: words at step 0.
        lanes_of_row: lanes that lie in one row.
        row: from a row to the next.
        lane: from a lane to the next in its row.
        step: from a step to the next.
        steps: of a source slot, of a destination slot.
        word: bytes of a lane at a step: 2, 4, 8 or 16.
    """

    lanes: int
    lanes_of_row: int
    row: tuple[int, int]
    lane: tuple[int, int]
    step: tuple[int, int]
    steps: tuple[int, int]
    word: int


def _word(*facts: int) -> int:
    """Largest word, up to 16 bytes, that divides everything: runs, addresses and distances."""
    bits = _WIDEST_WORD
    for fact in facts:
        bits |= fact
    return bits & -bits


def plan_lanes(source: Side, destination: Side, channels: int, element: int, *, shifted: bool) -> Lanes:
    """Cut one layer into lanes, as wide as runs, addresses and strides allow.

    Args:
        source: the slots that are read.
        destination: the slots that are written.
        channels: of the layer.
        element: bytes of a value.
        shifted: moves may begin at another position than 0 of the source.
    """
    sides = (source, destination)
    positions = (source.positions, destination.positions)
    anywhere = [fact for side in sides for fact in (side.base, side.slot)]
    if channels == 1 or all(side.channel == element for side in sides):
        run = channels * element
        word = _word(run, *anywhere, *(side.position for side in sides if side.positions > 1))
        lanes = run // word
        return Lanes(lanes, lanes, (0, 0), (word, word), (source.position, destination.position), positions, word)
    whole_runs = positions[0] == positions[1] and all(side.position == element for side in sides)
    if not shifted and (whole_runs or positions == (1, 1)):
        run, rows = positions[0] * element, channels
        row = (source.channel, destination.channel)
        if row == (run, run):
            run, rows = run * channels, 1
        word = _word(run, *anywhere, *(row if rows > 1 else ()))
        if rows * (run // word) <= _MOST_LANES:
            return Lanes(rows * (run // word), run // word, row, (word, word), (0, 0), (1, 1), word)
    channel = (source.channel, destination.channel)
    return Lanes(channels, channels, (0, 0), channel, (source.position, destination.position), positions, element)


def pack_layer(source: Side, destination: Side, lanes: Lanes) -> bytes:
    """A layer's record in the table that the kernel reads."""
    halves = (
        (side.base, side.slot, lanes.row[i], lanes.lane[i], lanes.step[i])
        for i, side in enumerate((source, destination))
    )
    return LAYER.pack(
        *(fact for half in halves for fact in half),
        lanes.lanes,
        lanes.lanes_of_row,
        lanes.steps[1],
        lanes.steps[0],
        lanes.word,
        0,
    )


class Move(NamedTuple):
    """Positions from `shift` on of slot `source` go to positions from 0 on of slot `destination`."""

    source: int
    destination: int
    shift: int


def move_order(moves: Sequence[tuple[int, int, int]]) -> tuple[list[Move], bool]:
    """An order in which moves one after another do what all of them at once would do.

    A thread runs the whole list for position 0, then for position 1, and so on. So a shifted move reads ahead of
    all that was written, and only moves of one position can meet: whoever reads a slot must come before its writer.
    Chains are sorted that way. A cycle has no such order: it begins behind a shifted move, which reads ahead, or
    else with a word that the thread keeps. No scratch slot, no second launch, for cycles of any length.

    Args:
        moves: source, destination and shift of each; each destination once.

    Returns:
        The moves, those without effect left out, and whether their order matters.
    """
    left = {to: Move(int(of), int(to), shift) for of, to, shift in moves if of != to or shift}
    if left.keys().isdisjoint(move.source for move in left.values()):
        return list(left.values()), False
    readers: dict[int, int] = {}
    for move in left.values():
        if move.source != move.destination:  # its own slot a move reads ahead of what it writes
            readers[move.source] = readers.get(move.source, 0) + 1
    ordered: list[Move] = []
    ready = [slot for slot in left if not readers.get(slot)]
    while ready:
        move = left.pop(ready.pop())
        ordered.append(move)
        if move.source != move.destination:
            readers[move.source] -= 1
            if not readers[move.source] and move.source in left:
                ready.append(move.source)
    while left:  # cycles alone: each slot has one reader and one writer
        cycle = [left.pop(next(iter(left)))]
        while cycle[-1].source in left:
            cycle.append(left.pop(cycle[-1].source))
        last = max(range(len(cycle)), key=lambda place: cycle[place].shift)
        cycle = cycle[last + 1 :] + cycle[: last + 1]
        if cycle[-1].shift == 0:
            ordered.append(Move(cycle[0].destination, KEPT, 0))
            cycle[-1] = Move(KEPT, cycle[-1].destination, 0)
        ordered += cycle
    return ordered, True
