"""Owns the shape of the state: positions and bytes of a slot, memory layouts, adopted memory, channel parts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor

from serving_conv.contract import (
    FLOAT_TYPES,
    MAX_WIDTH,
    MIN_WIDTH,
    prefill_workspace_size,
    state_positions,
)
from serving_conv.errors import ContractError

__all__ = [
    "ChannelPart",
    "LayerState",
    "PoolLayout",
    "allocate",
    "check_adopted",
    "pool_positions",
    "slot_bytes",
    "workspace_elements",
]

PoolLayout: TypeAlias = Literal["channels", "positions"]
"""Which axis of `[slots, channels, positions]` is contiguous in memory."""


@dataclass(frozen=True, slots=True)
class LayerState:
    """One conv layer's share of a slot.

    Attributes:
        channels: channels of the layer on this rank.
        width: taps, 2 to 8.
        dtype: bfloat16, float16 or float32.

    Raises:
        ContractError: any of them out of range.
    """

    channels: int
    width: int = 4
    dtype: torch.dtype = torch.float32

    def __post_init__(self) -> None:
        if self.channels < 1:
            raise ContractError("channels", got=self.channels, wanted="1 or more")
        if not MIN_WIDTH <= self.width <= MAX_WIDTH:
            raise ContractError("width", got=self.width, wanted=f"{MIN_WIDTH} to {MAX_WIDTH} taps")
        if str(self.dtype).removeprefix("torch.") not in FLOAT_TYPES:
            raise ContractError("dtype", got=self.dtype, wanted=" or ".join(FLOAT_TYPES))


def pool_positions(layers: Sequence[LayerState], draft_tokens: int = 0) -> int:
    """Positions of every slot: what the widest layer needs."""
    if not layers:
        raise ContractError("layers", got="none", wanted="1 layer or more")
    return state_positions(max(layer.width for layer in layers), draft_tokens)


def slot_bytes(layers: Sequence[LayerState], draft_tokens: int = 0, positions: int | None = None) -> int:
    """Bytes of one slot over all layers, without padding between slots."""
    if positions is None:
        positions = pool_positions(layers, draft_tokens)
    return sum(layer.channels * positions * layer.dtype.itemsize for layer in layers)


def workspace_elements(max_tokens: int, max_sequences: int) -> int:
    """Elements of prefill workspace that serve every call of up to so many rows and sequences.

    The contract's size drops where its blocks grow from 8 to 16 rows, at 64 rows a sequence, so the largest call
    is not always the one that needs most.
    """
    below = min(max_tokens, max(64 * max_sequences - 1, 0))
    return max(prefill_workspace_size(rows, max_sequences) for rows in (max_tokens, below))


def allocate(slots: int, layer: LayerState, positions: int, layout: PoolLayout, device: torch.device) -> Tensor:
    """Uninitialised `[slots, channels, positions]` in the given layout."""
    inner = (1, layer.channels) if layout == "channels" else (positions, 1)
    shape = (slots, layer.channels, positions)
    strides = (layer.channels * positions, *inner)
    return torch.empty_strided(shape, strides, dtype=layer.dtype, device=device)


def check_adopted(
    tensors: Sequence[Tensor],
    slots: int,
    layers: Sequence[LayerState],
    positions: int,
    layout: PoolLayout,
    device: torch.device,
) -> None:
    """Check memory that the engine owns: shape, type, device, layout, and that no two slots or layers share bytes.

    Raises:
        ContractError: the first rule that is broken, naming the tensor.
    """
    if len(tensors) != len(layers):
        raise ContractError("tensors", got=f"{len(tensors)} tensors", wanted=f"{len(layers)}, one a layer")
    footprints: list[_Footprint] = []
    for index, (tensor, layer) in enumerate(zip(tensors, layers, strict=True)):
        name, shape = f"tensors[{index}]", (slots, layer.channels, positions)
        for fact, got, wanted in (
            ("shape", tuple(tensor.shape), shape),
            ("dtype", tensor.dtype, layer.dtype),
            ("device", tensor.device, device),
            ("requires_grad", tensor.requires_grad, False),
        ):
            if got != wanted:
                raise ContractError(name, got=f"{fact} {got}", wanted=f"{fact} {wanted}")
        strides = f"strides {tensor.stride()} of shape {shape}"
        unit_axis = 1 if layout == "channels" else 2
        mine = _footprint(tensor, unit_axis)
        if (tensor.stride(unit_axis) != 1 and shape[unit_axis] > 1) or mine.pitch < mine.row:
            remedy = 'say layout="channels" or "positions", as the memory lies'
            raise ContractError(name, got=strides, wanted=f"{layout} contiguous", remedy=remedy)
        if mine.slot_stride < mine.slot:
            raise ContractError(name, got=strides, wanted="slots that do not overlap")
        for other, theirs in enumerate(footprints):
            if _may_share(theirs, mine, slots):
                raise ContractError(name, got=f"memory of tensors[{other}]", wanted="memory of its own")
        footprints.append(mine)


class _Footprint(NamedTuple):
    """Where a tensor's bytes are: rows of `row` bytes, `pitch` apart, make a slot; slots are `slot_stride` apart."""

    start: int
    slot_stride: int
    slot: int
    pitch: int
    row: int


def _footprint(tensor: Tensor, unit_axis: int) -> _Footprint:
    size, rows = tensor.itemsize, tensor.shape[3 - unit_axis]
    row = tensor.shape[unit_axis] * size
    pitch = tensor.stride(3 - unit_axis) * size if rows > 1 else row
    return _Footprint(tensor.data_ptr(), tensor.stride(0) * size, (rows - 1) * pitch + row, pitch, row)


def _may_share(a: _Footprint, b: _Footprint, slots: int) -> bool:
    """Whether two layers could share a byte; false only if it is certain that they do not."""
    gap = b.start - a.start
    if gap >= (slots - 1) * a.slot_stride + a.slot or -gap >= (slots - 1) * b.slot_stride + b.slot:
        return False
    if a.slot_stride != b.slot_stride:
        return True
    # Interleaved in one page: apart if their slots, or their rows, stay apart within one stride.
    if a.slot <= gap % a.slot_stride <= a.slot_stride - b.slot:
        return False
    rows_repeat = a.pitch == b.pitch and a.slot_stride % a.pitch == 0
    return not (rows_repeat and a.row <= gap % a.pitch <= a.pitch - b.row)


@dataclass(frozen=True, slots=True)
class ChannelPart:
    """A run of conv channels that tensor parallelism shards on its own: x, B or C; q, k or v.

    Attributes:
        name: shown in errors.
        channels: channels of the part over all ranks.
        groups: the part consists of so many equal groups that ranks receive whole; with more ranks than groups each
            group is replicated, rank r having group `r * groups // ranks`. None: any even split will do.

    Raises:
        ContractError: no channels, or channels that the groups do not divide.
    """

    name: str
    channels: int
    groups: int | None = None

    def __post_init__(self) -> None:
        if self.channels < 1:
            raise ContractError(f"{self.name}.channels", got=self.channels, wanted="1 or more")
        if self.groups is not None and (self.groups < 1 or self.channels % self.groups):
            raise ContractError(f"{self.name}.groups", got=self.groups, wanted=f"a divisor of {self.channels}")

    def share(self, rank: int, ranks: int) -> range:
        """Channels, counted within the part, that a rank holds.

        Raises:
            ContractError: the part cannot be shared evenly, or no such rank.
        """
        if not 0 <= rank < ranks:
            raise ContractError("rank", got=f"{rank} of {ranks}", wanted="0 <= rank < ranks")
        units = self.groups or self.channels
        if units % ranks == 0:
            size = self.channels // ranks
            return range(rank * size, (rank + 1) * size)
        if self.groups is None or ranks % units:
            kind = "channels" if self.groups is None else "groups"
            raise ContractError(
                "ranks", got=f"{ranks} for the {units} {kind} of {self.name}", wanted=f"a number that shares {units}"
            )
        size = self.channels // units
        group = rank * units // ranks
        return range(group * size, (group + 1) * size)
