"""Owns the short path of eager calls: a call that passed its checks once is launched again without them.

Everything the checks and the launch depend on, but for addresses, is a call's signature. A plan keeps what follows
from one signature. Layers of a model share it, so the last few plans are tried first, by one compiled comparison of
all tensors (torch's own guards, as its compiler uses them); behind them stands a table.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from serving_conv.contract import UPDATE, Entry
from serving_conv.errors import BackendError
from serving_conv.faults import fault_flag
from serving_conv.native.abi import PACKER, POINTERS
from serving_conv.native.call import prepare_update
from serving_conv.native.cuda import Kernel, check_status, load_variant, prefill_launch

try:  # not a public name of torch: without it the table alone serves
    from torch._C._dynamo.guards import TensorGuards
except ImportError:  # pragma: no cover
    TensorGuards = None  # type: ignore[assignment, misc]

__all__ = ["Plan", "Plans"]

Tensors = tuple[Tensor | None, ...]
"""x, weight, bias, conv_state, out, cu_seqlens, slots, has_initial_state, num_accepted_tokens, workspace; and of a step
speculative, checkpoint_offsets, checkpoint_tokens, checkpoint_slots."""

_OUT = 4
_WRITTEN, _STEP = 3, 5  # where the written tensors begin, and what changes from step to step
_MOST_RECENT, _MOST_PLANS, _MOST_ADDRESSES = 4, 4096, 4096


class _Nothing(Tensor):
    """Stands for an absent argument where guards want a tensor; of a type that no caller passes."""


def _nothing(size: int) -> Tensor:
    return torch.empty(size).as_subclass(_Nothing)


_OF_STEP = ("speculative", "checkpoint_offsets", "checkpoint_tokens", "checkpoint_slots")

_NOTHING_OF_STEP = (0,) * len(_OF_STEP)  # their addresses in other calls

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
    """All that the checks and the launch depend on, but for addresses; None if something is of a wrong kind."""
    if type(pad_slot_id) is not int or not (activation is None or type(activation) is str):
        return None  # 1, 1.0 and True are equal as keys, and not every object is a key
    try:
        return (
            activation,
            pad_slot_id,
            *[None if t is None else (t.shape, t.stride(), t.dtype, t.get_device()) for t in tensors],
        )
    except AttributeError:
        return None  # the full checks have the better message


class Plan:
    """A call that passed all its checks, ready to be made again with other addresses."""

    def __init__(self, entry: Entry, arguments: dict[str, Any], given_out: bool) -> None:
        x: Tensor = arguments["x"]
        rest = {name: value for name, value in arguments.items() if name not in ("x", "workspace")}
        if entry is not UPDATE:
            launch = prefill_launch(x, rest)
        else:
            launch = prepare_update(x, **rest, fault_flag=fault_flag(x.device))
        if launch is None:
            raise BackendError(entry.name, got="a call with nothing to compute", wanted="one that `possible` accepts")
        self._launch = PreparedLaunch(load_variant(launch.variant, x.device.index), launch.grid, launch.parameters)
        self._device_index: int = x.device.index
        self._fault_flag = fault_flag(x.device).data_ptr()
        out: Tensor = arguments["out"]
        self._shape = x.shape
        self._like_x = x.is_contiguous()
        self._private_storage = entry is not UPDATE and given_out
        self._in_place = entry is UPDATE and out.stride() == x.stride()
        slots = arguments["state_indices" if entry is UPDATE else "cache_indices"]
        self._reads = tuple(
            _extent(t)
            for t in (
                x,
                arguments["weight"],
                arguments["bias"],
                arguments["cu_seqlens"],
                slots,
                arguments["has_initial_state"],
                arguments["num_accepted_tokens"],
                *(arguments.get(name) for name in _OF_STEP),
            )
        )
        self._state_extent = _extent(arguments["conv_state"])
        self._out_extent = _extent(out)
        self._scratch_extent = _extent(arguments.get("workspace"))
        self._sound: set[tuple[int, ...]] = set()  # addresses whose overlap was looked at

    @staticmethod
    def possible(arguments: dict[str, Any]) -> bool:
        """Whether a call may become a plan: something to compute, and addresses that allow the widest words."""
        x: Tensor = arguments["x"]
        return x.numel() > 0 and all(
            arguments[name] is None or arguments[name].data_ptr() % 16 == 0
            for name in ("x", "weight", "bias", "conv_state", "out")
        )

    def run(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        conv_state: Tensor,
        out: Tensor | None,
        cu_seqlens: Tensor | None,
        slots: Tensor,
        has_initial_state: Tensor | None,
        num_accepted_tokens: Tensor | None,
        workspace: Tensor | None,
        *of_step: Tensor | None,
    ) -> Tensor | None:
        """Make the call; None, and nothing done, if these addresses need the full checks."""
        device_index = self._device_index
        if device_index != torch._C._cuda_getDevice():
            return None
        if out is None:
            # A dense x has the strides that the output wants, and is allocated like in half the time.
            out = torch.empty_like(x) if self._like_x else x.new_empty(self._shape)
        elif self._private_storage and not _owns_its_storage(out, self._out_extent):
            tensors = (x, weight, bias, conv_state, cu_seqlens, slots, has_initial_state, num_accepted_tokens, *of_step)
            if _shares_storage(out, (*tensors, workspace)):
                return None
        addresses = (
            x.data_ptr(),
            weight.data_ptr(),
            0 if bias is None else bias.data_ptr(),
            conv_state.data_ptr(),
            out.data_ptr(),
            0 if cu_seqlens is None else cu_seqlens.data_ptr(),
            slots.data_ptr(),
            0 if has_initial_state is None else has_initial_state.data_ptr(),
            0 if num_accepted_tokens is None else num_accepted_tokens.data_ptr(),
            self._fault_flag,
            *([0 if t is None else t.data_ptr() for t in of_step] or _NOTHING_OF_STEP),
        )
        scratch = 0
        if workspace is not None:
            scratch = workspace.data_ptr()
            if not _owns_its_storage(workspace, self._scratch_extent):
                tensors = (x, weight, bias, conv_state, cu_seqlens, slots, has_initial_state, num_accepted_tokens)
                if _shares_storage(workspace, (*tensors, out, *of_step)):
                    return None
        # An engine's rows, layers and metadata lie in few places each, but meet in many combinations.
        layer, step = (scratch, *addresses[:_STEP]), (scratch, *addresses[_WRITTEN:])
        if layer not in self._sound or step not in self._sound:
            if not self._is_sound(addresses, scratch):
                return None
            if len(self._sound) >= _MOST_ADDRESSES:
                self._sound.clear()
            self._sound |= {layer, step}
        self._launch.launch(addresses, torch._C._cuda_getCurrentRawStream(device_index))
        return out

    def _is_sound(self, addresses: tuple[int, ...], scratch: int = 0) -> bool:
        """Whether the widest words fit these addresses, and nothing that is written overlaps anything else."""
        x, weight, bias, state, out, offsets, slots, flags, counts, _, *of_step = addresses
        if (x | weight | bias | state | out) & 15:
            return False
        state_end, out_end = state + self._state_extent, out + self._out_extent
        scratch_end = scratch + self._scratch_extent if scratch else 0
        if state < out_end and out < state_end:
            return False
        if (scratch < state_end and state < scratch_end) or (scratch < out_end and out < scratch_end):
            return False
        for at, extent in zip((x, weight, bias, offsets, slots, flags, counts, *of_step), self._reads, strict=True):
            end = at + extent
            if (at < state_end and state < end) or (at < scratch_end and scratch < end):
                return False
            if at < out_end and out < end and not (self._in_place and at == x == out):
                return False
        return True


class PreparedLaunch:
    """A kernel with a launch configuration and a block of parameters of its own; shared by threads, hence the lock."""

    def __init__(self, kernel: Kernel, grid: tuple[int, int, int], parameters: bytes) -> None:
        self._kernel = kernel  # must outlive its function
        self._function, self._call = kernel.function, kernel.call
        self._config = kernel.new_config(grid)
        self._stream: int | None = None
        self._buffer = ctypes.create_string_buffer(parameters, PACKER.size)
        self._arguments = (ctypes.c_void_p * 1)(ctypes.addressof(self._buffer))
        self._arguments_address = ctypes.addressof(self._arguments)
        self._lock = threading.Lock()

    def launch(self, addresses: tuple[int, ...], stream: int) -> None:
        """Launch with other addresses on a raw stream handle of the current device."""
        with self._lock:
            POINTERS.pack_into(self._buffer, 0, *addresses)
            if stream != self._stream:
                self._config.hStream = self._stream = stream
            status = self._call(self._config, self._function, self._arguments_address, 0)
        if status[0]:
            check_status(status)


class Plans:
    """The plans of one entry, the last few first."""

    def __init__(self, entry: Entry) -> None:
        self._entry = entry
        self._recent: list[tuple[Any, str | None, int, Plan]] = []
        self._table: dict[tuple[Any, ...], Plan] = {}

    def run(self, tensors: Tensors, activation: str | None, pad_slot_id: int) -> Tensor | None:
        """Make the call if a plan for it is known; None, and nothing done, otherwise."""
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
                    return plan.run(*tensors)  # type: ignore[arg-type]
        key = _signature(tensors, activation, pad_slot_id)
        plan_of_table = None if key is None else self._table.get(key)
        if plan_of_table is None:
            return None
        self._remember(tensors, activation, pad_slot_id, plan_of_table)
        return plan_of_table.run(*tensors)  # type: ignore[arg-type]

    def add(self, tensors: Tensors, activation: str | None, pad_slot_id: int, arguments: dict[str, Any]) -> None:
        """Keep a plan of a call that was checked and made; `arguments` are complete, `tensors` as the caller's."""
        key = _signature(tensors, activation, pad_slot_id)
        if key is None or not Plan.possible(arguments):
            return
        if len(self._table) >= _MOST_PLANS:  # sizes that change from step to step make new ones
            self._table.clear()
        plan = self._table[key] = Plan(self._entry, arguments, given_out=tensors[_OUT] is not None)
        self._remember(tensors, activation, pad_slot_id, plan)

    def clear(self) -> None:
        """Forget everything."""
        self._recent, self._table = [], {}

    def _remember(self, tensors: Tensors, activation: str | None, pad_slot_id: int, plan: Plan) -> None:
        guards = _guards_of(_guarded(tensors))
        if guards is not None:
            kept = [one for one in self._recent if one[3] is not plan]
            self._recent = [(guards, activation, pad_slot_id, plan), *kept][:_MOST_RECENT]


def _guards_of(guarded: Sequence[Any]) -> Any:
    if TensorGuards is None or len({id(t) for t in guarded}) < len(guarded):
        return None
    sizes: Any = [list(t.shape) for t in guarded]
    strides: Any = [list(t.stride()) for t in guarded]
    return TensorGuards(*guarded, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides)


def _owns_its_storage(tensor: Tensor, extent: int) -> bool:
    """Whether a tensor covers its storage, so that whatever shares it overlaps it."""
    storage = tensor.untyped_storage()
    return storage.nbytes() == extent and storage.data_ptr() == tensor.data_ptr()


def _shares_storage(tensor: Tensor, others: Sequence[Tensor | None]) -> bool:
    at = tensor.untyped_storage().data_ptr()
    return any(t is not None and t.untyped_storage().data_ptr() == at for t in others)


def _extent(tensor: Tensor | None) -> int:
    """Bytes from a tensor's first element to the end of its last."""
    if tensor is None or tensor.numel() == 0:
        return 0
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.element_size()
