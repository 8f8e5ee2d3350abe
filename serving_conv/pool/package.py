"""Owns slots in transit: one contiguous buffer for export and import, cut and joined by channel parts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod

import torch
from torch import Tensor

from serving_conv.errors import ContractError
from serving_conv.pool.layout import ChannelPart, LayerState

__all__ = ["SlotPackage", "cut_package", "join_packages"]

_ALIGNMENT = 16  # bytes; every layer begins on a multiple, so that its type may view the buffer


@dataclass(frozen=True, slots=True, eq=False)
class SlotPackage:
    """Windows and token counts of some slots, independent of the pool they came from.

    The buffer holds the layers one after another, each on a multiple of 16 bytes, as `[slots, channels, W-1]`
    contiguous, oldest input first. Bytes between layers, and windows of slots without history, are zero.

    Attributes:
        buffer: uint8, one axis, contiguous.
        tokens: history length of each slot.
        layers: channels, width and dtype of each layer.

    Raises:
        ContractError: the buffer does not fit the rest.
    """

    buffer: Tensor
    tokens: tuple[int, ...]
    layers: tuple[LayerState, ...]

    def __post_init__(self) -> None:
        buffer, size = self.buffer, _offsets(self.layers, len(self.tokens))[-1]
        wanted = f"uint8 [{size}], contiguous, starting on a multiple of {_ALIGNMENT} bytes of its storage"
        facts = (buffer.dtype, tuple(buffer.shape), buffer.is_contiguous(), buffer.storage_offset() % _ALIGNMENT)
        if facts != (torch.uint8, (size,), True, 0):
            got = f"{buffer.dtype} {list(buffer.shape)}, stride {buffer.stride()}, offset {buffer.storage_offset()}"
            raise ContractError("buffer", got=got, wanted=wanted)
        if min(self.tokens, default=0) < 0:
            raise ContractError("tokens", got=self.tokens, wanted="0 or more each")

    @classmethod
    def zeros(
        cls, tokens: Sequence[int], layers: Sequence[LayerState], device: torch.device | str = "cpu"
    ) -> SlotPackage:
        """A package whose windows are all zero."""
        size = _offsets(layers, len(tokens))[-1]
        return cls(torch.zeros(size, dtype=torch.uint8, device=device), tuple(tokens), tuple(layers))

    @classmethod
    def empty(
        cls, tokens: Sequence[int], layers: Sequence[LayerState], device: torch.device | str = "cpu"
    ) -> SlotPackage:
        """A package whose every byte is still to be written."""
        size = _offsets(layers, len(tokens))[-1]
        return cls(torch.empty(size, dtype=torch.uint8, device=device), tuple(tokens), tuple(layers))

    def window(self, layer: int) -> Tensor:
        """The layer's `[slots, channels, W-1]`, a view of the buffer."""
        state = self.layers[layer]
        shape = (len(self.tokens), state.channels, state.width - 1)
        begin = _offsets(self.layers, len(self.tokens))[layer]
        return self.buffer[begin : begin + prod(shape) * state.dtype.itemsize].view(state.dtype).view(shape)

    def windows(self) -> Iterator[Tensor]:
        """`window` of each layer."""
        return (self.window(layer) for layer in range(len(self.layers)))

    def to(self, device: torch.device | str) -> SlotPackage:
        """The package on another device."""
        return replace(self, buffer=self.buffer.to(device))


def _offsets(layers: Sequence[LayerState], slots: int) -> list[int]:
    """First byte of each layer, then the size of the buffer."""
    offsets = [0]
    for layer in layers:
        end = offsets[-1] + slots * layer.channels * (layer.width - 1) * layer.dtype.itemsize
        offsets.append(-(-end // _ALIGNMENT) * _ALIGNMENT)
    return offsets


def cut_package(package: SlotPackage, parts: Sequence[ChannelPart], rank: int, ranks: int) -> SlotPackage:
    """One rank's share of a package that holds all channels; each part is shared on its own.

    Args:
        package: all channels; every layer consists of the parts, in order.
        parts: the runs of channels.
        rank: which share.
        ranks: number of shares.

    Raises:
        ContractError: the parts are not the layers' channels, or cannot be shared evenly.
    """
    share = [part.share(rank, ranks) for part in parts]
    layers = tuple(replace(layer, channels=sum(map(len, share))) for layer in package.layers)
    cut = SlotPackage.zeros(package.tokens, layers, package.buffer.device)
    for whole, window in zip(package.windows(), cut.windows(), strict=True):
        pieces = zip(_part_windows(whole, parts), share, strict=True)
        window.copy_(torch.cat([piece[:, kept.start : kept.stop] for piece, kept in pieces], dim=1))
    return cut


def join_packages(packages: Sequence[SlotPackage], parts: Sequence[ChannelPart]) -> SlotPackage:
    """The package of all channels from the shares of all ranks, in rank order: the inverse of `cut_package`.

    Args:
        packages: one a rank, of the same slots.
        parts: the runs of channels, as they were cut.

    Raises:
        ContractError: packages that do not belong together, or replicas of a group that differ.
    """
    if not packages:
        raise ContractError("packages", got="none", wanted="one a rank")
    first, ranks = packages[0], len(packages)
    shares = [[part.share(rank, ranks) for part in parts] for rank in range(ranks)]
    for rank, (package, share) in enumerate(zip(packages, shares, strict=True)):
        expected = tuple(replace(layer, channels=sum(map(len, share))) for layer in first.layers)
        if (package.tokens, package.layers) != (first.tokens, expected):
            raise ContractError(
                f"packages[{rank}]",
                got=f"tokens {package.tokens}, layers {package.layers}",
                wanted=f"tokens {first.tokens}, layers {expected}",
            )
    channels = sum(part.channels for part in parts)
    layers = tuple(replace(layer, channels=channels) for layer in first.layers)
    whole = SlotPackage.zeros(first.tokens, layers, first.buffer.device)
    for rank, (package, share) in enumerate(zip(packages, shares, strict=True)):
        # Ranks that share a group are neighbours, so a replica is one of the rank before.
        replicas = [rank > 0 and kept == shares[rank - 1][index] for index, kept in enumerate(share)]
        for window, joined in zip(package.windows(), whole.windows(), strict=True):
            pieces = torch.split(window, [len(kept) for kept in share], dim=1)
            targets = _part_windows(joined, parts)
            for part, kept, replica, piece, target in zip(parts, share, replicas, pieces, targets, strict=True):
                target = target[:, kept.start : kept.stop]
                if not replica:
                    target.copy_(piece)
                elif not torch.equal(_as_bytes(target), _as_bytes(piece)):  # bytes: a NaN equals itself here
                    channels_named = f"channels {kept.start} to {kept.stop - 1} of {part.name}"
                    raise ContractError(
                        f"packages[{rank}]", got=f"other values in {channels_named}", wanted="equal replicas"
                    )
    return whole


def _part_windows(window: Tensor, parts: Sequence[ChannelPart]) -> tuple[Tensor, ...]:
    """Split `[slots, channels, W-1]` into its parts."""
    sizes = [part.channels for part in parts]
    if sum(sizes) != window.shape[1]:
        raise ContractError("parts", got=f"{sizes} channels", wanted=f"{window.shape[1]} in all, as the layers have")
    return torch.split(window, sizes, dim=1)


def _as_bytes(window: Tensor) -> Tensor:
    return window.contiguous().view(torch.uint8)
