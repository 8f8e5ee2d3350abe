"""Owns the short path of eager calls: what a call like an earlier one needs no second check for.

Calls are alike if they differ only in addresses and in how many rows, sequences and checkpoints they have. All layers
of a model make calls that are alike, step after step, so the last few plans are tried first, by one compiled
comparison of all tensors (torch's own guards, as its compiler uses them for such sizes); behind them stands a table.
What follows from the sizes is made once for each combination of them, by the functions that the full path uses too.
What follows from addresses (alignment, overlap) is looked at in every call.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor

from serving_conv.checks import check_sizes
from serving_conv.contract import STEP, UPDATE, Entry
from serving_conv.errors import ContractError
from serving_conv.faults import fault_flag
from serving_conv.native.abi import POINTERS
from serving_conv.native.call import prepare_update
from serving_conv.native.cuda import Kernel, load_variant, prefill_launch

try:  # not a public name of torch: without it the table alone serves
    from torch._C._dynamo.guards import TensorGuards
except ImportError:  # pragma: no cover
    TensorGuards = None  # type: ignore[assignment, misc]

__all__ = ["Plan", "Plans"]

Tensors = tuple[Tensor | None, ...]
"""x, weight, bias, conv_state, out, cu_seqlens, slots, has_initial_state, num_accepted_tokens, workspace; and of a step
speculative, checkpoint_offsets, checkpoint_tokens, checkpoint_slots."""

_X, _STATE, _OUT, _WORKSPACE = 0, 3, 4, 9
_FIXED = (1, 2, 3)  # weight, bias and pool: their sizes belong to the layer; the first axis of all others varies
_MOST_RECENT, _MOST_PLANS, _MOST_SIZES = 8, 4096, 4096


class _Nothing(Tensor):
    """Stands for an absent argument where guards want a tensor; of a type that no caller passes."""


def _nothing(size: int) -> Tensor:
    return torch.empty(size).as_subclass(_Nothing)


# Guards refuse one tensor twice, so each argument has its own.
_ABSENT = tuple(_nothing(0) for _ in range(14))
_IN_PLACE = _nothing(1)  # `out` is `x`


def _guarded(tensors: Tensors) -> list[Tensor | None]:
    x, weight, bias, conv_state, out, cu_seqlens, slots, flags, counts, workspace, *of_step = tensors
    guarded = [
        x,
        weight,
        _ABSENT[2] if bias is None else bias,
        conv_state,
        _ABSENT[4] if out is None else _IN_PLACE if out is x else out,
        _ABSENT[5] if cu_seqlens is None else cu_seqlens,
        slots,
        _ABSENT[7] if flags is None else flags,
        _ABSENT[8] if counts is None else counts,
        _ABSENT[9] if workspace is None else workspace,
    ]
    for place, tensor in enumerate(of_step, 10):
        guarded.append(_ABSENT[place] if tensor is None else tensor)
    return guarded


def _signature(tensors: Tensors, activation: str | None, pad_slot_id: int) -> tuple[Any, ...] | None:
    """All that the checks and the launch depend on, but for addresses and sizes; None if something is of a wrong kind.

    Strides do not say whether `out` is `x`: that is left to the addresses.
    """
    if type(pad_slot_id) is not int or not (activation is None or type(activation) is str):
        return None  # 1, 1.0 and True are equal as keys, and not every object is a key
    try:
        return (
            activation,
            pad_slot_id,
            *[
                None
                if t is None
                else (t.shape if place in _FIXED else t.shape[1:], t.stride(), t.dtype, t.get_device())
                for place, t in enumerate(tensors)
            ],
        )
    except AttributeError:
        return None  # the full checks have the better message


@dataclass(frozen=True, slots=True)
class _Sized:
    """What a plan needs for one combination of sizes.

    Attributes:
        kernel: of the variant that these sizes choose.
        grid: blocks.
        rest: of the parameters, behind the pointers.
        extents: bytes from the first element to the end of the last, of each tensor that is given.
    """

    kernel: Kernel
    grid: tuple[int, int, int]
    rest: bytes
    extents: tuple[int, ...]


class Plan:
    """A call that passed all its checks, ready to be made again with other addresses and sizes.

    Args:
        entry: that was called.
        tensors: as the caller gave them; what is None here is None in the calls that are alike.
        arguments: the same by name, with the options, and with what the call allocated.

    Raises:
        CaptureError: its kernel is not loaded and the current stream is capturing.
        BackendError: its kernel cannot be compiled.
    """

    def __init__(self, entry: Entry, tensors: Tensors, arguments: dict[str, Any]) -> None:
        x, out = arguments["x"], arguments["out"]
        self._entry = entry
        self._names = _names(entry)
        self._options = {name: arguments[name] for name in ("activation", "pad_slot_id")}
        self._device_index: int = x.device.index
        self._private_out = entry is not UPDATE and tensors[_OUT] is not None
        self._in_place = entry is UPDATE and out.stride() == x.stride()
        tensors = (*tensors[:_OUT], out, *tensors[_OUT + 1 :])
        given = [place for place, tensor in enumerate(tensors) if tensor is not None]
        self._given: Callable[[Tensors], tuple[Tensor, ...]] = itemgetter(*given)
        self._varying: Callable[[Tensors], tuple[Tensor, ...]] = itemgetter(
            *[place for place in given if place not in _FIXED]
        )
        self._state, self._out = given.index(_STATE), given.index(_OUT)
        self._words = slice(sum(place <= _OUT for place in given))  # those that are read or written in words
        # The kernel's pointers are in the order of the tensors, with the fault flag instead of the workspace.
        self._flag = [fault_flag(x.device).data_ptr()]
        self._flag_place = slice(*(sum(place < end for place in given) for end in (_WORKSPACE, _WORKSPACE + 1)))
        self._pack = struct.Struct(
            "<" + "".join("Q" if place in (*given, _WORKSPACE) else "8x" for place in range(len(POINTERS.format) - 1))
        ).pack
        self._sized: dict[tuple[int, ...], _Sized] = {}
        self._size(tensors)

    @staticmethod
    def possible(arguments: dict[str, Any]) -> bool:
        """Whether a call may become a plan: something to compute, a pool, and addresses that allow the widest words."""
        return arguments["x"].numel() > 0 < arguments["conv_state"].numel() and all(
            arguments[name] is None or arguments[name].data_ptr() % 16 == 0
            for name in ("x", "weight", "bias", "conv_state", "out")
        )

    def run(self, tensors: Tensors) -> Tensor | None:
        """Make the call; None, and nothing launched, if it needs the full checks.

        Raises:
            CaptureError: sizes choose a kernel that is not loaded, and the current stream is capturing.
            BackendError: they choose one that cannot be compiled.
        """
        x: Any = tensors[_X]
        if self._device_index != torch._C._cuda_getDevice() or x.numel() == 0:
            return None
        out = tensors[_OUT]
        if out is None:
            out = torch.empty_like(x, memory_format=torch.contiguous_format)  # half the time of x.new_empty
            tensors = (*tensors[:_OUT], out, *tensors[_OUT + 1 :])
        given = self._given(tensors)
        addresses = [tensor.data_ptr() for tensor in given]
        sized = self._sized.get(tuple([tensor.numel() for tensor in self._varying(tensors)]))
        if sized is None:
            sized = self._size(tensors)
        if sized is None or not self._is_sound(addresses, sized.extents):
            return None
        if self._private_out and not _has_private_storage(out, sized.extents[self._out], given):
            return None
        place = self._flag_place
        if place.start < place.stop and not self._is_private_workspace(place.start, given, addresses, sized.extents):
            return None
        addresses[place] = self._flag
        stream = torch._C._cuda_getCurrentRawStream(self._device_index)
        sized.kernel.launch(self._pack(*addresses) + sized.rest, sized.grid, stream)
        return out

    def _size(self, tensors: Tensors) -> _Sized | None:
        """What these sizes need, kept; None if they break a rule, or leave nothing to compute."""
        arguments: dict[str, Any] = dict(zip(self._names, tensors, strict=False)) | self._options
        x, workspace = arguments.pop("x"), arguments.pop("workspace", None)
        if not self.possible({"x": x, **arguments}):
            return None
        try:
            check_sizes(self._entry, {"x": x, "workspace": workspace, **arguments})
        except ContractError:
            return None
        if self._entry is UPDATE:
            launch = prepare_update(x, **arguments, fault_flag=fault_flag(x.device))
        else:
            launch = prefill_launch(x, arguments)
        if launch is None:
            return None
        if len(self._sized) >= _MOST_SIZES:
            self._sized.clear()
        sized = _Sized(
            kernel=load_variant(launch.variant, x.device.index),
            grid=launch.grid,
            rest=launch.parameters[POINTERS.size :],
            extents=tuple([_extent(tensor) for tensor in self._given(tensors)]),
        )
        self._sized[tuple([tensor.numel() for tensor in self._varying(tensors)])] = sized
        return sized

    def _is_sound(self, addresses: Sequence[int], extents: Sequence[int]) -> bool:
        """Whether the widest words fit these addresses, and neither pool nor output overlaps anything else."""
        together = 0
        for address in addresses[self._words]:
            together |= address
        if together & 15:
            return False
        state, out = addresses[self._state], addresses[self._out]
        state_end, out_end = state + extents[self._state], out + extents[self._out]
        overlaps = 0
        for address, extent in zip(addresses, extents, strict=True):
            end = address + extent
            if address < state_end and state < end:
                overlaps += 1
            if address < out_end and out < end:
                overlaps += 1
        # Each of the two overlaps itself.
        return overlaps == 2 or (overlaps == 3 and self._in_place and addresses[_X] == out)

    def _is_private_workspace(
        self, place: int, given: Sequence[Tensor], addresses: Sequence[int], extents: Sequence[int]
    ) -> bool:
        """Whether the workspace shares neither bytes nor storage with anything else."""
        start, end = addresses[place], addresses[place] + extents[place]
        overlaps = sum(
            address < end and start < address + extent for address, extent in zip(addresses, extents, strict=True)
        )
        return overlaps <= 1 and _has_private_storage(given[place], extents[place], given)


def _names(entry: Entry) -> tuple[str, ...]:
    """The arguments of an entry in the order of `Tensors`."""
    slots = "state_indices" if entry is UPDATE else "cache_indices"
    step = ("speculative", "checkpoint_offsets", "checkpoint_tokens", "checkpoint_slots") if entry is STEP else ()
    leading = ("x", "weight", "bias", "conv_state", "out", "cu_seqlens", slots)
    return (*leading, "has_initial_state", "num_accepted_tokens", "workspace", *step)


class Plans:
    """The plans of one entry, the last few first."""

    def __init__(self, entry: Entry) -> None:
        self._entry = entry
        self._recent: list[tuple[Any, str | None, int, Plan]] = []
        self._table: dict[tuple[Any, ...], Plan] = {}

    def run(self, tensors: Tensors, activation: str | None, pad_slot_id: int) -> Tensor | None:
        """Make the call if a plan for it is known; None, and nothing launched, otherwise. Raises as `Plan.run` does."""
        if self._recent:
            guarded = _guarded(tensors)
            for guards, its_activation, its_pad_slot_id, plan in self._recent:
                # Types first: 1, 1.0 and True are equal.
                if (
                    type(pad_slot_id) is int
                    and pad_slot_id == its_pad_slot_id
                    and type(activation) is type(its_activation)
                    and activation == its_activation
                    and guards.check(*guarded)
                ):
                    return plan.run(tensors)
        key = _signature(tensors, activation, pad_slot_id)
        plan_of_table = None if key is None else self._table.get(key)
        if plan_of_table is None:
            return None
        self._remember(tensors, activation, pad_slot_id, plan_of_table)
        return plan_of_table.run(tensors)

    def add(self, tensors: Tensors, activation: str | None, pad_slot_id: int, arguments: dict[str, Any]) -> None:
        """Keep a plan of a call that was checked and made; `arguments` are complete, `tensors` as the caller's."""
        key = _signature(tensors, activation, pad_slot_id)
        if key is None or key in self._table or not Plan.possible(arguments):
            return  # a plan that is there declined for a reason that another would have too
        if len(self._table) >= _MOST_PLANS:
            self._table.clear()
        plan = self._table[key] = Plan(self._entry, tensors, arguments)
        self._remember(tensors, activation, pad_slot_id, plan)

    def clear(self) -> None:
        """Forget everything."""
        self._recent, self._table = [], {}

    def _remember(self, tensors: Tensors, activation: str | None, pad_slot_id: int, plan: Plan) -> None:
        guards = _guards_of(_guarded(tensors))
        if guards is not None:
            self._recent = [(guards, activation, pad_slot_id, plan), *self._recent][:_MOST_RECENT]


def _guards_of(guarded: Sequence[Any]) -> Any:
    """The compiled comparison; an axis whose size may vary has None there."""
    if TensorGuards is None or len({id(t) for t in guarded}) < len(guarded):
        return None
    sizes: Any = [
        list(t.shape) if place in _FIXED or type(t) is _Nothing else [None, *t.shape[1:]]
        for place, t in enumerate(guarded)
    ]
    strides: Any = [list(t.stride()) for t in guarded]
    return TensorGuards(*guarded, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides)


def _has_private_storage(tensor: Tensor, extent: int, given: Sequence[Tensor]) -> bool:
    """Whether no other tensor lies in a tensor's storage. One that covers its storage overlaps whatever does."""
    storage = tensor.untyped_storage()
    at = storage.data_ptr()
    if storage.nbytes() == extent and at == tensor.data_ptr():
        return True
    return not any(other is not tensor and other.untyped_storage().data_ptr() == at for other in given)


def _extent(tensor: Tensor) -> int:
    """Bytes from a tensor's first element to the end of its last."""
    if tensor.numel() == 0:
        return 0
    last = 0
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        last += (size - 1) * stride
    return (last + 1) * tensor.element_size()
