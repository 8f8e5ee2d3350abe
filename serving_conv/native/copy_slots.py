"""Launches `copy_slots`: a pool's tables on the device, built once, and each copy of all its layers in one launch.

A launch takes up to 64 moves as parameters, so nothing is copied to the device for it; a longer list goes through
pinned memory on the same stream, and not into a graph. Nothing waits. A captured copy repeats its slots.
"""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Sequence
from contextlib import nullcontext
from itertools import chain
from typing import Literal, Protocol, TypeAlias

import torch
from torch import Tensor

from serving_conv.errors import CaptureError
from serving_conv.native import host
from serving_conv.native.copy_plan import MOVE, PARAMETERS, Side, move_order, pack_layer, plan_lanes
from serving_conv.native.cuda import CudaBackend, load_variant
from serving_conv.native.variant import CopyVariant
from serving_conv.settings import SETTINGS

__all__ = ["CudaLauncher", "HostLauncher", "Launcher", "SlotCopyKernel", "launcher_for"]

_VARIANT = CopyVariant()
_GRID_LIMIT = 32768  # of y; moves beyond share its blocks

Kind: TypeAlias = Literal["copy", "shifted", "export", "import"]


class Launcher(Protocol):
    """Starts `copy_slots` with a parameter block."""

    def stage(self, moves: bytes) -> Tensor:
        """A list of moves where the kernel can read it."""

    def launch(self, parameters: ctypes.Array[ctypes.c_char], blocks: int, rows: int) -> None:
        """One launch of `blocks` by `rows` blocks."""


class HostLauncher:
    """The kernel's source on the CPU.

    Args:
        reverse: run the blocks from the last to the first, since no result may depend on their order.
    """

    def __init__(self, *, reverse: bool = False) -> None:
        self._reverse = reverse

    def stage(self, moves: bytes) -> Tensor:
        """A tensor of the bytes."""
        return _tensor(moves)

    def launch(self, parameters: ctypes.Array[ctypes.c_char], blocks: int, rows: int) -> None:
        """Run it to the end."""
        host._load(_VARIANT)(parameters, blocks, rows, 1, int(self._reverse))


class CudaLauncher:
    """The kernel on a GPU, on torch's current stream; loaded here, so that every later copy can be captured.

    Args:
        device_index: of the pool's device.

    Raises:
        CaptureError: the kernel is not loaded and the current stream is capturing.
        BackendError: the kernel cannot be compiled.
    """

    def __init__(self, device_index: int) -> None:
        self._device_index = device_index
        with torch.cuda.device(device_index):
            self._kernel = load_variant(_VARIANT, device_index)

    def stage(self, moves: bytes) -> Tensor:
        """The bytes on the device, sent from pinned memory on the current stream.

        Raises:
            CaptureError: the current stream is capturing, and a graph would read the memory again.
        """
        if torch.cuda.is_current_stream_capturing():
            raise CaptureError(
                "moves",
                got=f"{len(moves) // MOVE.size} moves under graph capture",
                wanted=f"{_VARIANT.moves} or fewer, which a launch takes as parameters",
                remedy="make long copies outside the graph",
            )
        # torch gives pinned memory to others only when the copy from it is done.
        return _tensor(moves).pin_memory().to(torch.device("cuda", self._device_index), non_blocking=True)

    def launch(self, parameters: ctypes.Array[ctypes.c_char], blocks: int, rows: int) -> None:
        """Launch it."""
        index = self._device_index
        with nullcontext() if index == torch.cuda.current_device() else torch.cuda.device(index):
            stream = torch._C._cuda_getCurrentRawStream(index)
            self._kernel.launch(parameters, (blocks, rows, 1), stream)


def launcher_for(device: torch.device) -> Launcher | None:
    """What runs the kernel for a device, or None if the backend that serves the device has no kernels."""
    if device.type == "cuda" and SETTINGS.backend in (None, CudaBackend.name) and CudaBackend().supports(device):
        return CudaLauncher(device.index)
    if SETTINGS.backend == host.HostBackend.name and host.HostBackend().supports(device):
        return HostLauncher()
    return None


class SlotCopyKernel:
    """Copies between the slots of one pool, and between its slots and packages.

    A package is one buffer that starts on a multiple of 16 bytes: the layers one after another, each on such a
    multiple, as `[entries, channels, window]` contiguous. Not thread safe, as the pool is not.

    Args:
        states: `[S, C, L]` a layer, at addresses that stay; any strides, no two slots sharing bytes.
        windows: positions of each layer that a package holds.
        launcher: what runs the kernel for the states' device.
    """

    def __init__(self, states: Sequence[Tensor], windows: Sequence[int], launcher: Launcher) -> None:
        self._launcher = launcher
        self._layers = len(states)
        slots = [_side(state) for state in states]
        entries = [_entry_side(state, window) for state, window in zip(states, windows, strict=True)]
        pairs: dict[Kind, tuple[list[Side], list[Side]]] = {
            "copy": (slots, slots),
            "shifted": (slots, slots),
            "export": (slots, entries),
            "import": (entries, slots),
        }
        tables = b""
        self._tables: dict[Kind, tuple[int, int]] = {}  # place of the first record, and blocks of a layer
        for kind, (sources, destinations) in pairs.items():
            place, most = len(tables), 1
            for state, source, destination in zip(states, sources, destinations, strict=True):
                element, shifted = state.element_size(), kind == "shifted"
                lanes = plan_lanes(source, destination, state.shape[1], element, shifted=shifted)
                most = max(most, lanes.lanes)
                tables += pack_layer(source, destination, lanes)
            self._tables[kind] = place, -(-most // _VARIANT.threads)
        sizes = torch.tensor([side.slot for side in entries])
        self._memory = _tensor(tables).to(states[0].device), sizes.to(states[0].device)
        self._addresses = self._memory[0].data_ptr(), self._memory[1].data_ptr()
        self._parameters = ctypes.create_string_buffer(PARAMETERS.size + _VARIANT.moves * MOVE.size)
        self._moves = ctypes.addressof(self._parameters) + PARAMETERS.size

    def move(self, moves: Sequence[tuple[int, int, int]]) -> None:
        """Make all moves at once; see `move_order`.

        Args:
            moves: source, destination and shift of each; slots and shifts in range, each destination once.
        """
        moves, ordered = move_order(moves)
        self._launch("shifted" if any(move[2] for move in moves) else "copy", moves, ordered=ordered)

    def export(self, buffer: Tensor, entries: Sequence[tuple[int, int]]) -> None:
        """Fill a package, every byte of it.

        Args:
            buffer: uint8, contents of no account.
            entries: slot and first position of each window, or `NOTHING` and 0 for zeros.
        """
        moves = [(slot, entry, first) for entry, (slot, first) in enumerate(entries)]
        self._launch("export", moves, package=buffer.data_ptr(), entries=len(entries))

    def import_(self, buffer: Tensor, slots: Sequence[int]) -> None:
        """Copy each entry of a package to its slot, from position 0 on.

        Args:
            buffer: uint8, as `export` fills it.
            slots: one an entry, each once.
        """
        moves = [(entry, slot, 0) for entry, slot in enumerate(slots)]
        self._launch("import", moves, package=buffer.data_ptr(), entries=len(slots))

    def _launch(
        self,
        kind: Kind,
        moves: Sequence[tuple[int, int, int]],
        *,
        ordered: bool = False,
        package: int = 0,
        entries: int = 0,
    ) -> None:
        if not moves:
            return
        (place, tiles), (layers, sizes), count = self._tables[kind], self._addresses, len(moves)
        staged: Tensor | None = None
        packed = array("i", chain.from_iterable(moves)).tobytes()
        if count > _VARIANT.moves:
            staged = self._launcher.stage(packed)
        else:
            ctypes.memmove(self._moves, packed, len(packed))
        address = 0 if staged is None else staged.data_ptr()
        PARAMETERS.pack_into(
            self._parameters, 0, layers + place, sizes, package, address, tiles, count, entries, int(ordered)
        )
        rows = 1 if ordered else min(count, _GRID_LIMIT)
        self._launcher.launch(self._parameters, tiles * self._layers, rows)


def _tensor(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).clone()


def _side(state: Tensor) -> Side:
    """A layer's slots."""
    slot, channel, position = (stride * state.element_size() for stride in state.stride())
    return Side(state.data_ptr(), slot, channel, position, state.shape[2])


def _entry_side(state: Tensor, window: int) -> Side:
    """A layer's entries in a package."""
    channels, element = state.shape[1], state.element_size()
    return Side(0, channels * window * element, window * element, element, window)
