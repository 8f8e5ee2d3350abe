"""Derives the argument checks from the contract. Host facts only: shapes, types, strides, devices, addresses.

Values on the device are the kernels' business; `check_values` is the debug setting's exception to that.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from serving_conv.contract import (
    INT32_LIMIT,
    MAX_WIDTH,
    MIN_WIDTH,
    PREFILL,
    STEP,
    UPDATE,
    Entry,
    Layout,
    Option,
    TensorArgument,
    accepted_limit,
    prefill_workspace_size,
)
from serving_conv.errors import ContractError

__all__ = ["Sizes", "check", "check_sizes", "check_values"]


@dataclass(frozen=True, slots=True)
class Sizes:
    """The named axes of one call."""

    rows: int
    channels: int
    width: int
    slots: int
    positions: int
    sequences: int


def check(entry: Entry, arguments: Mapping[str, object]) -> Sizes:
    """Check one call against its entry.

    Args:
        entry: the record of the contract.
        arguments: every argument by name; None where an optional one is absent.

    Raises:
        ContractError: the first rule that is broken.
    """
    given = _check_kinds(entry, arguments)
    axes = _check_axes(given)
    for argument, tensor in given:
        _check_dtype(argument, tensor, arguments)
        _check_layout(argument, tensor)
    _check_device(given)
    sizes = Sizes(*(axes[name] for name in Sizes.__slots__))
    _check_sizes(entry, sizes, arguments)
    _check_memory(given)
    return sizes


def check_sizes(entry: Entry, arguments: Mapping[str, object]) -> Sizes:
    """Those checks of `check` that sizes decide, for a call whose types and devices are known to be right.

    Raises:
        ContractError: the first rule that is broken.
    """
    given = _check_kinds(entry, arguments)
    axes = _check_axes(given)
    for argument, tensor in given:
        _check_layout(argument, tensor)
    sizes = Sizes(*(axes[name] for name in Sizes.__slots__))
    _check_sizes(entry, sizes, arguments)
    return sizes


def _check_kinds(entry: Entry, arguments: Mapping[str, object]) -> list[tuple[TensorArgument, Tensor]]:
    """Check the options, and that tensors are tensors; those that are given, in call order."""
    given: list[tuple[TensorArgument, Tensor]] = []
    for argument in entry.arguments:
        value = arguments[argument.name]
        if isinstance(argument, Option):
            _check_option(argument, value)
        elif value is not None or not argument.optional:
            given.append((argument, _check_kind(argument, value)))
    return given


def _check_option(option: Option, value: object) -> None:
    if option.choices:
        # `True == 1` and friends: compare type and value, so that a boolean is not an activation.
        if not (value is None or isinstance(value, str)) or value not in option.choices:
            wanted = ", ".join(repr(choice) for choice in option.choices)
            raise ContractError(option.name, got=repr(value), wanted=wanted)
    elif not isinstance(value, int) or isinstance(value, bool):
        raise ContractError(option.name, got=_describe(value), wanted="an int")
    elif not -INT32_LIMIT - 1 <= value <= INT32_LIMIT:
        raise ContractError(option.name, got=value, wanted="a number within int32, the type of the slots")


def _describe(value: object) -> str:
    return f"{type(value).__name__} {value!r}" if isinstance(value, (int, float, str)) else type(value).__name__


def _check_kind(argument: TensorArgument, value: object) -> Tensor:
    if not isinstance(value, Tensor):
        wanted = "a torch.Tensor" + (" or None" if argument.optional else "")
        raise ContractError(argument.name, got=_describe(value), wanted=wanted)
    if value.layout != torch.strided:
        raise ContractError(
            argument.name, got=f"layout {value.layout}", wanted="a strided tensor", remedy="call .to_dense()"
        )
    return value


def _check_axes(given: list[tuple[TensorArgument, Tensor]]) -> dict[str, int]:
    """Bind axis names to sizes; every later use of a name must agree, and the error shows who set it."""
    bound: dict[str, tuple[int, str]] = {}
    deferred: list[tuple[TensorArgument, Tensor]] = []
    for argument, tensor in given:
        if tensor.ndim != len(argument.axes):
            raise ContractError(
                argument.name,
                got=f"shape {list(tensor.shape)}",
                wanted=f"{len(argument.axes)} axes [{', '.join(argument.axes)}]",
            )
        if argument.axes[0].endswith("+1"):  # offsets, of one axis
            deferred.append((argument, tensor))
            continue
        for axis, size in zip(argument.axes, tensor.shape, strict=True):
            known, owner = bound.setdefault(axis, (size, argument.name))
            if size != known:
                raise ContractError(
                    argument.name,
                    got=f"shape {list(tensor.shape)}, so {size} {axis}",
                    wanted=f"{known} {axis} as in {owner}",
                )
    for argument, tensor in deferred:
        known, owner = bound[argument.axes[0].removesuffix("+1")]
        if tensor.shape[0] != known + 1:
            raise ContractError(
                argument.name,
                got=f"{tensor.shape[0]} offsets",
                wanted=f"{known + 1}, one more than the sequences in {owner}",
            )
    return {axis: size for axis, (size, _) in bound.items()}


def _check_dtype(argument: TensorArgument, tensor: Tensor, arguments: Mapping[str, object]) -> None:
    if argument.same_dtype_as is not None:
        other = arguments[argument.same_dtype_as]
        if isinstance(other, Tensor) and tensor.dtype != other.dtype:
            raise ContractError(
                argument.name,
                got=str(tensor.dtype),
                wanted=f"{other.dtype}, the type of {argument.same_dtype_as}",
            )
    elif str(tensor.dtype).removeprefix("torch.") not in argument.dtypes:
        raise ContractError(
            argument.name,
            got=str(tensor.dtype),
            wanted=" or ".join(f"torch.{name}" for name in argument.dtypes),
            remedy="convert it before the call; no entry casts in silence",
        )


def _check_layout(argument: TensorArgument, tensor: Tensor) -> None:
    if argument.layout is Layout.ANY or tensor.numel() == 0:
        return
    if argument.layout is Layout.CONTIGUOUS:
        good = tensor.is_contiguous()
    elif argument.layout is Layout.ROWS:
        rows, channels = tensor.shape
        good = (channels == 1 or tensor.stride(1) == 1) and (rows == 1 or tensor.stride(0) >= channels)
    else:
        good = _is_pool(tensor)
    if not good:
        raise ContractError(
            argument.name,
            got=f"shape {list(tensor.shape)} with strides {list(tensor.stride())}",
            wanted=argument.layout.value,
            remedy="pass a view with those strides, or a copy you keep; no entry copies in silence",
        )


def _is_pool(tensor: Tensor) -> bool:
    """Whether channels or positions are contiguous and nothing overlaps; an axis of size 1 has no stride."""
    slots, channels, positions = tensor.shape
    slot_stride, channel_stride, position_stride = tensor.stride()
    channels_inside = (channels == 1 or channel_stride == 1) and (positions == 1 or position_stride >= channels)
    positions_inside = (positions == 1 or position_stride == 1) and (channels == 1 or channel_stride >= positions)
    if not (channels_inside or positions_inside):
        return False
    extent = (channels - 1) * channel_stride + (positions - 1) * position_stride + 1
    return slots == 1 or slot_stride >= extent


def _check_device(given: list[tuple[TensorArgument, Tensor]]) -> None:
    (first, reference), *rest = given
    for argument, tensor in rest:
        if tensor.device != reference.device:
            raise ContractError(
                argument.name,
                got=f"device {tensor.device}",
                wanted=f"{reference.device}, the device of {first.name}",
            )


def _check_sizes(entry: Entry, sizes: Sizes, arguments: Mapping[str, object]) -> None:
    if not MIN_WIDTH <= sizes.width <= MAX_WIDTH:
        raise ContractError("weight", got=f"{sizes.width} taps", wanted=f"{MIN_WIDTH} to {MAX_WIDTH}")
    if sizes.positions < sizes.width - 1:
        raise ContractError(
            "conv_state",
            got=f"{sizes.positions} positions a slot",
            wanted=f"at least {sizes.width - 1}, one less than the taps of weight",
            remedy="size it with serving_conv.state_positions(width, draft_tokens)",
        )
    for axis in ("rows", "channels", "sequences", "slots"):
        if getattr(sizes, axis) > INT32_LIMIT:
            raise ContractError(axis, got=getattr(sizes, axis), wanted=f"at most {INT32_LIMIT}")
    if sizes.rows > 0 and sizes.sequences == 0:
        raise ContractError("x", got=f"{sizes.rows} rows and no sequence", wanted="at least one sequence, or no rows")
    if entry is PREFILL:
        workspace = arguments["workspace"]
        needed = prefill_workspace_size(sizes.rows, sizes.sequences)
        if isinstance(workspace, Tensor) and workspace.numel() < needed:
            raise ContractError(
                "workspace",
                got=f"{workspace.numel()} elements",
                wanted=f"at least {needed}",
                remedy="size it with serving_conv.prefill_workspace_size(rows, num_sequences)",
            )
    elif entry is STEP:
        names = ("checkpoint_offsets", "checkpoint_tokens", "checkpoint_slots")
        absent = [name for name in names if arguments[name] is None]
        if 0 < len(absent) < len(names):
            raise ContractError(
                absent[0], got="None", wanted=f"all of {', '.join(names)}, or none of them", remedy="give all three"
            )
    elif arguments["cu_seqlens"] is None and sizes.rows != sizes.sequences:
        raise ContractError(
            "x",
            got=f"{sizes.rows} rows",
            wanted=f"{sizes.sequences}, one for each sequence in state_indices",
            remedy="give cu_seqlens if sequences have several rows",
        )


class _Memory(NamedTuple):
    """Where a tensor lies: its storage, its first byte and the one behind its last."""

    argument: TensorArgument
    tensor: Tensor
    storage: int
    start: int
    end: int


def _memory_of(argument: TensorArgument, tensor: Tensor) -> _Memory:
    start = tensor.data_ptr()
    last = 0
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        last += (size - 1) * stride
    end = start + (last + 1) * tensor.element_size()
    return _Memory(argument, tensor, tensor.untyped_storage().data_ptr(), start, end)


def _check_memory(given: list[tuple[TensorArgument, Tensor]]) -> None:
    """No argument that is written may overlap another one, except where the entry says so.

    By address, since two storages may hold the same memory (DLPack, NumPy).
    """
    places = [_memory_of(argument, tensor) for argument, tensor in given if tensor.numel() > 0]
    for written in places:
        argument = written.argument
        if not argument.mutated:
            continue
        for place in places:
            if place is written:
                continue
            other = place.argument
            together = written.start < place.end and place.start < written.end
            shared = written.storage == place.storage
            if not (together or shared):
                continue
            if other.name == argument.may_be or other.may_be == argument.name:
                if _same_view(written.tensor, place.tensor):
                    continue
            elif shared and (argument.private_storage or other.private_storage):
                raise ContractError(
                    argument.name,
                    got=f"the storage of {other.name}",
                    wanted="storage of its own",
                    remedy="allocate it apart",
                )
            if together and not _in_columns_apart(written, place):
                exact = f", or {argument.may_be} itself" if argument.may_be else ""
                raise ContractError(
                    argument.name,
                    got=f"memory that overlaps {other.name}",
                    wanted=f"memory of its own{exact}",
                )


def _same_view(a: Tensor, b: Tensor) -> bool:
    return a.data_ptr() == b.data_ptr() and a.stride() == b.stride() and a.shape == b.shape


def _in_columns_apart(a: _Memory, b: _Memory) -> bool:
    """Whether two are blocks of columns of one wider matrix, without a byte in common.

    So lie x and out that are slices of a projection's buffer.
    """
    if a.tensor.ndim != 2 or b.tensor.ndim != 2 or a.tensor.stride(1) != 1 or b.tensor.stride(1) != 1:
        return False
    pitch = a.tensor.stride(0) * a.tensor.element_size()
    if pitch != b.tensor.stride(0) * b.tensor.element_size() or pitch <= 0:
        return False
    apart = (b.start - a.start) % pitch
    width_a, width_b = (place.tensor.shape[1] * place.tensor.element_size() for place in (a, b))
    return width_a <= apart and apart + width_b <= pitch


def check_values(entry: Entry, sizes: Sizes, arguments: Mapping[str, Any]) -> None:
    """Check what lives on the device, on the host: waits for the device, so only the debug setting calls it.

    Raises:
        ContractError: offsets that do not start at 0, go backwards or pass R; a slot or count out of range; a
            slot that two live sequences share. Of a step also: checkpoint offsets that do not start at 0, go
            backwards or pass the checkpoints; a live sequence's checkpoint outside its tokens, or in a slot that
            is out of range, live in this call, or another checkpoint's.
    """
    slots_name = "state_indices" if entry is UPDATE else "cache_indices"
    pad_slot_id = arguments["pad_slot_id"]
    cu_seqlens, num_accepted_tokens = arguments["cu_seqlens"], arguments["num_accepted_tokens"]
    offsets = list(range(sizes.sequences + 1)) if cu_seqlens is None else cu_seqlens.tolist()
    backwards = any(after < before for before, after in itertools.pairwise(offsets))
    if offsets[0] != 0 or offsets[-1] > sizes.rows or backwards:
        raise ContractError(
            "cu_seqlens",
            got=_shorten(offsets),
            wanted=f"offsets that start at 0, never decrease and end at most at {sizes.rows}, the rows of x",
        )
    limit = accepted_limit(sizes.width, sizes.positions)
    counts = None if num_accepted_tokens is None else num_accepted_tokens.tolist()
    owner: dict[int, int] = {}
    for sequence, slot in enumerate(arguments[slots_name].tolist()):
        if slot == pad_slot_id or offsets[sequence] == offsets[sequence + 1]:
            continue
        if not 0 <= slot < sizes.slots:
            raise ContractError(
                slots_name,
                got=f"slot {slot} for sequence {sequence}",
                wanted=f"0 to {sizes.slots - 1}, or pad_slot_id {pad_slot_id}",
            )
        if slot in owner:
            raise ContractError(
                slots_name,
                got=f"slot {slot} for sequences {owner[slot]} and {sequence}",
                wanted="one live sequence a slot",
                remedy="fork the slot",
            )
        owner[slot] = sequence
        if counts is not None and not 1 <= counts[sequence] <= limit:
            raise ContractError(
                "num_accepted_tokens",
                got=f"{counts[sequence]} for sequence {sequence}",
                wanted=f"1 to {limit} (L-W+2)",
                remedy="after a prefill or a plain step the count is 1",
            )
    if entry is STEP and arguments["checkpoint_offsets"] is not None:
        _check_checkpoints(sizes, arguments, offsets, owner)


def _check_checkpoints(sizes: Sizes, arguments: Mapping[str, Any], offsets: list[int], owner: dict[int, int]) -> None:
    """Check the checkpoints of live sequences, whose slots `owner` knows; the others' are never looked at."""
    tokens, slots = arguments["checkpoint_tokens"].tolist(), arguments["checkpoint_slots"].tolist()
    named, pad_slot_id = arguments["checkpoint_offsets"].tolist(), arguments["pad_slot_id"]
    backwards = any(after < before for before, after in itertools.pairwise(named))
    if named[0] != 0 or named[-1] > len(tokens) or backwards:
        raise ContractError(
            "checkpoint_offsets",
            got=_shorten(named),
            wanted=f"offsets that start at 0, never decrease and end at most at {len(tokens)}, the checkpoints given",
            remedy="sequence i names checkpoints offsets[i] up to offsets[i + 1]; one without any repeats its offset",
        )
    writer: dict[int, int] = {}
    for sequence in sorted(owner.values()):
        length = offsets[sequence + 1] - offsets[sequence]
        for checkpoint in range(named[sequence], named[sequence + 1]):
            slot = slots[checkpoint]
            if slot == pad_slot_id:
                continue
            if not 1 <= tokens[checkpoint] <= length:
                raise ContractError(
                    "checkpoint_tokens",
                    got=f"{tokens[checkpoint]} for checkpoint {checkpoint} of sequence {sequence}",
                    wanted=f"1 to {length}, the tokens of that sequence in this call",
                    remedy="count from the first token of this call, not of the whole prompt",
                )
            if not 0 <= slot < sizes.slots:
                raise ContractError(
                    "checkpoint_slots",
                    got=f"slot {slot} for checkpoint {checkpoint} of sequence {sequence}",
                    wanted=f"0 to {sizes.slots - 1}, or pad_slot_id {pad_slot_id}",
                )
            if slot in owner:
                raise ContractError(
                    "checkpoint_slots",
                    got=f"slot {slot} for checkpoint {checkpoint}, which sequence {owner[slot]} owns in this call",
                    wanted="a slot of its own",
                    remedy="write checkpoints to slots that no live sequence has",
                )
            if slot in writer:
                raise ContractError(
                    "checkpoint_slots",
                    got=f"slot {slot} for checkpoints {writer[slot]} and {checkpoint}",
                    wanted="a slot for each checkpoint",
                    remedy="give each its own slot, or pad_slot_id where none is kept",
                )
            writer[slot] = checkpoint


def _shorten(values: list[int]) -> str:
    return str(values) if len(values) <= 16 else f"{values[:8]} ... {values[-4:]}"
