"""Owns what tests of slot copies share: pools in pages of random bytes, copies of every kind, and a counter."""

from __future__ import annotations

import ctypes
import random
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from support.memory import pool_strides
from torch import Tensor

from serving_conv.native.copy_slots import HostLauncher
from serving_conv.pool import LayerState, PoolLayout, SlotMove, SlotPackage, pool_positions
from serving_conv.pool.copies import SlotCopies

__all__ = ["CountingLauncher", "Pages", "Shape", "copy_everything", "shuffled_moves"]

_GUARD = 1 << 14  # bytes before and after a package


@dataclass(frozen=True)
class Shape:
    """A pool's memory; gaps and shift in elements.

    Attributes:
        layers: channels, width and dtype of each.
        slots: of each layer.
        layout: which axis is contiguous.
        draft_tokens: more positions than the widest layer needs.
        slot_gap: between two slots.
        pitch_gap: between two runs of the contiguous axis.
        shift: of the first slot, from an aligned address.
    """

    layers: tuple[LayerState, ...]
    slots: int = 9
    layout: PoolLayout = "channels"
    draft_tokens: int = 2
    slot_gap: int = 0
    pitch_gap: int = 0
    shift: int = 0

    @property
    def positions(self) -> int:
        """Positions of a slot."""
        return pool_positions(self.layers, self.draft_tokens)


class Pages:
    """The layers of a pool, each in a page of random bytes with room for two slots in front and behind."""

    def __init__(self, shape: Shape, seed: int = 0, device: str = "cpu") -> None:
        generator = torch.Generator().manual_seed(seed)
        self.shape = shape
        self.pages: list[Tensor] = []
        self.states: list[Tensor] = []
        for layer in shape.layers:
            gaps = {"slot_gap": shape.slot_gap, "pitch_gap": shape.pitch_gap}
            strides = pool_strides(shape.layout, layer.channels, shape.positions, **gaps)
            guard = -(-2 * strides[0] // 16) * 16
            elements = shape.slots * strides[0] + 2 * guard + shape.shift + 16
            page = torch.randint(0, 256, (elements * layer.dtype.itemsize,), dtype=torch.uint8, generator=generator)
            page = page.to(device)
            size = (shape.slots, layer.channels, shape.positions)
            self.pages.append(page)
            self.states.append(page.view(layer.dtype).as_strided(size, strides, guard + shape.shift))

    def same(self, other: Pages) -> bool:
        """Whether every byte is equal, guards and gaps included."""
        return all(torch.equal(a.cpu(), b.cpu()) for a, b in zip(self.pages, other.pages, strict=True))


def shuffled_moves(chooser: random.Random, slots: int, positions: int, count: int, shifts: bool) -> list[SlotMove]:
    """Moves with chains, cycles, fans and moves in place, as chance has it."""
    destinations = chooser.sample(range(slots), count)
    most = positions - 1 if shifts else 0
    return [SlotMove(chooser.randrange(slots), to, chooser.randint(0, most)) for to in destinations]


def copy_everything(copies: SlotCopies, shape: Shape, device: str = "cpu", seed: int = 0) -> list[Tensor]:
    """Copies of every kind; what they are follows from shape and seed alone.

    Returns:
        The memory around each package, guards included.
    """
    chooser = random.Random(seed)
    slots, positions = shape.slots, shape.positions
    packages = []
    for _ in range(3):
        source, destination = chooser.sample(range(slots), 2)
        copies.copy(source, destination)
        copies.copy(destination, source, chooser.randrange(positions))
        for shifts in (False, True):
            copies.move(shuffled_moves(chooser, slots, positions, chooser.randint(1, slots), shifts))
        around = chooser.sample(range(slots), min(slots, 4))
        copies.move([SlotMove(of, to) for of, to in zip(around, around[1:] + around[:1], strict=True)])
        windows: list[tuple[int, int] | None] = [None]
        windows += [(chooser.randrange(slots), chooser.randint(0, shape.draft_tokens)) for _ in range(3)]
        chooser.shuffle(windows)
        size = SlotPackage.empty([1] * len(windows), shape.layers, device).buffer.numel()
        memory = torch.full((size + 2 * _GUARD,), 0xA5, dtype=torch.uint8, device=device)
        package = SlotPackage(memory[_GUARD : _GUARD + size], (1,) * len(windows), shape.layers)
        copies.pack(package, windows)
        packages.append(memory)
        copies.unpack(package, chooser.sample(range(slots), len(windows)))
    return packages


@dataclass
class CountingLauncher(HostLauncher):
    """Counts launches and staged lists; may run the blocks backwards, or a kernel with a planted bug.

    Attributes:
        reverse: the order of the blocks.
        function: of `support.fuzz_specs.function_of`; the kernel itself if absent.
        launches: blocks of each launch so far.
        staged: lists that did not fit the parameters.
    """

    reverse: bool = False
    function: Callable[..., None] | None = None
    launches: list[tuple[int, int]] = field(default_factory=list)
    staged: int = 0

    def __post_init__(self) -> None:
        super().__init__(reverse=self.reverse)

    def stage(self, moves: bytes) -> Tensor:
        self.staged += 1
        return super().stage(moves)

    def launch(self, parameters: ctypes.Array[ctypes.c_char], blocks: int, rows: int) -> None:
        self.launches.append((blocks, rows))
        if self.function is None:
            super().launch(parameters, blocks, rows)
        else:
            self.function(parameters, blocks, rows, 1, int(self.reverse))
