"""Owns the short path of eager calls: what a call like an earlier one needs no second check for.

Calls are alike if they differ only in addresses and in how many rows, sequences and checkpoints they have. All layers
of a model make calls that are alike, step after step, so the last few plans are tried first, by one compiled
comparison of all tensors (torch's own guards, as its compiler uses them for such sizes; they also see whether a
dispatch mode is on); behind them stands a table. What follows from the sizes is made once for each combination of
them. What follows from addresses (alignment, overlap) is looked at in every call.

Between two calls an engine runs so much else that nothing of this module is in the processor's caches any more. What
counts then is how many functions and how much memory a call touches, hence the few long functions here.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from serving_conv.contract import INT32_LIMIT, PREFILL, STEP, UPDATE, Entry, prefill_workspace_size
from serving_conv.dispatch import needs_dispatch
from serving_conv.faults import fault_flag
from serving_conv.native.abi import STEP_SIZES, TENSORS
from serving_conv.native.call import ForwardLaunch, prepare_update
from serving_conv.native.config import LaunchConfig
from serving_conv.native.cuda import Kernel, StepLaunch, load_variant, prefill_launch

try:  # not a public name of torch: without it the table alone serves
    from torch._C._dynamo.guards import TensorGuards
except ImportError:  # pragma: no cover
    TensorGuards = None  # type: ignore[assignment, misc]

__all__ = ["OPERATOR", "Form", "Plan", "Plans", "tensor_names"]

Tensors = tuple[Tensor | None, ...]
"""As `tensor_names` has them."""

_BIAS, _STATE, _X, _OUT = 1, 2, 3, 4
_FIXED = 3  # weight, bias and pool: their sizes belong to the layer; one axis of all others varies
_CONTIGUOUS = torch.contiguous_format
_MOST_RECENT, _MOST_PLANS, _MOST_SIZES = 8, 4096, 4096


@dataclass(frozen=True, slots=True)
class Form:
    """How a caller's tensors may differ from the operator's.

    Attributes:
        transposed: x, out and the result are `[channels, rows]`.
        longer: offsets, slots, flags and counts may be longer than the call, of whose sequences the offsets of a
            prefill, the slots of a packed update or the rows of another decide. A weight may be `[channels, 1,
            taps]`, and slots the first column of a table.
    """

    transposed: bool = False
    longer: bool = False


OPERATOR = Form()


def tensor_names(entry: Entry) -> tuple[str, ...]:
    """The tensors of an entry in the order of its plans: that of the kernel's parameters, a workspace last."""
    slots = "state_indices" if entry is UPDATE else "cache_indices"
    names = (
        "weight",
        "bias",
        "conv_state",
        "x",
        "out",
        "cu_seqlens",
        slots,
        "has_initial_state",
        "num_accepted_tokens",
    )
    if entry is STEP:
        return (*names, "speculative", "checkpoint_offsets", "checkpoint_tokens", "checkpoint_slots")
    return (*names, "workspace") if entry is PREFILL else names


def _signature(form: Form, tensors: Tensors, activation: object, pad_slot_id: object) -> tuple[Any, ...] | None:
    """All that the checks and the launch depend on, but for addresses and sizes; None if it is no key."""
    if type(pad_slot_id) is not int or not (activation is None or type(activation) is str):
        return None  # 1, 1.0 and True are equal as keys, and not every object is a key
    try:
        return (
            activation,
            pad_slot_id,
            tensors[_OUT] is tensors[_X],
            *[
                None
                if tensor is None
                else (_fixed_sizes(form, place, tensor), tensor.stride(), tensor.dtype, tensor.get_device())
                for place, tensor in enumerate(tensors)
            ],
        )
    except AttributeError:
        return None  # the full checks have the better message


def _varying_axis(form: Form, place: int) -> int:
    """The axis of a tensor, of those that are not fixed, whose size varies from step to step."""
    return 1 if form.transposed and place in (_X, _OUT) else 0


def _fixed_sizes(form: Form, place: int, tensor: Tensor) -> tuple[int | None, ...]:
    """A tensor's shape, with None where sizes vary. One with too few axes has no such place, and no plan."""
    shape: list[int | None] = list(tensor.shape)
    axis = _varying_axis(form, place)
    if place >= _FIXED and axis < len(shape):
        shape[axis] = None
    return tuple(shape)


@dataclass(frozen=True, slots=True)
class _Rule:
    """What the size of a tensor must be.

    Attributes:
        elements: of one row, sequence or checkpoint.
        of: what it must have as many of: place in (rows, sequences, checkpoints, elements of a workspace).
        more: and so many more.
        longer: it may have more still.
        step: bytes from one to the next.
        last: bytes of one, from its first element to the end of its last.
    """

    elements: int
    of: int
    more: int
    longer: bool
    step: int
    last: int


_ROWS, _SEQUENCES, _CHECKPOINTS, _WORKSPACE = range(4)
_RULES: dict[str, tuple[int, int]] = {
    "x": (_ROWS, 0),
    "out": (_ROWS, 0),
    "cu_seqlens": (_SEQUENCES, 1),
    "checkpoint_offsets": (_SEQUENCES, 1),
    "checkpoint_tokens": (_CHECKPOINTS, 0),
    "checkpoint_slots": (_CHECKPOINTS, 0),
    "workspace": (_WORKSPACE, 0),
}


def _rule(form: Form, place: int, name: str, tensor: Tensor, *, packed: bool) -> _Rule:
    of, more = _RULES.get(name, (_SEQUENCES, 0))
    if of == _ROWS and not packed:
        of = _SEQUENCES
    axis = _varying_axis(form, place)
    others = [
        (n, stride) for at, (n, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)) if at != axis
    ]
    elements, last = 1, 1
    for size, stride in others:
        elements, last = elements * size, last + (size - 1) * stride
    return _Rule(
        elements=elements,
        of=of,
        more=more,
        longer=of == _WORKSPACE or (form.longer and place not in (_X, _OUT)),
        step=tensor.stride(axis) * tensor.element_size(),
        last=last * tensor.element_size(),
    )


class Plan:
    """A call that passed all its checks, ready to be made again with other addresses and sizes.

    Args:
        entry: that was called.
        form: of the caller's tensors.
        tensors: as the caller gave them; what is None here is None in the calls that are alike.
        arguments: the operator's, by name, complete with the result.
        launch: what the full path makes of them.

    Attributes:
        device_index: of the tensors.
        fixed: so many of the tensors given belong to the layer; they come first, the pool last among them.
        allocates: no `out` is given; else `in_place` says whether it is `x`, `may_be_x` whether it may be the same
            view as x, and `private_out` whether its storage must be its own.
        has_workspace: the last of the tensors is one.
        pack: packs addresses, and skips absent tensors.
        steps: what combinations of sizes need.
        transposed: see `Form`; a new output then has the axes of x.

    Raises:
        CaptureError: its kernel is not loaded and the current stream is capturing.
        BackendError: its kernel cannot be compiled.
    """

    __slots__ = (
        "_chooser",
        "_constant",
        "_extents",
        "_kernels",
        "_rules",
        "_sequences_from",
        "_updates",
        "allocates",
        "device_index",
        "fixed",
        "has_workspace",
        "in_place",
        "may_be_x",
        "pack",
        "private_out",
        "steps",
        "transposed",
    )

    def __init__(
        self, entry: Entry, form: Form, tensors: Tensors, arguments: dict[str, Any], launch: ForwardLaunch
    ) -> None:
        x, out = arguments["x"], arguments["out"]
        self._chooser = launch.chooser
        self._constant = launch.parameters[TENSORS.size : -STEP_SIZES.size]
        self._kernels: dict[tuple[int, int, bool], tuple[Kernel, LaunchConfig]] = {}
        self._updates = entry is UPDATE
        self.device_index: int = x.device.index
        self.allocates, self.in_place = tensors[_OUT] is None, tensors[_OUT] is tensors[_X]
        self.transposed = form.transposed
        self.private_out = entry is not UPDATE and not self.allocates
        self.may_be_x = entry is UPDATE and not self.in_place and out.stride() == x.stride()

        names = tensor_names(entry)
        given = [place for place, tensor in enumerate(tensors) if tensor is not None]
        if self.in_place:
            given.remove(_OUT)
        self.fixed = sum(place < _FIXED for place in given)  # so many come first
        varying = given[self.fixed :]
        packed = arguments["cu_seqlens"] is not None
        rules = {p: _rule(form, p, names[p], tensors[p], packed=packed) for p in varying}  # type: ignore[arg-type]
        self._rules = tuple(rules.values())
        name = names[6] if not form.longer or (packed and entry is UPDATE) else "cu_seqlens" if packed else "x"
        self._sequences_from = varying.index(names.index(name))
        # Of each tensor given, its bytes, or the rule that they follow.
        self._extents = tuple([rules.get(place) or _extent(tensors[place]) for place in given])  # type: ignore[arg-type]

        self.has_workspace = names[given[-1]] == "workspace"
        passed = {_OUT, *given[: -1 if self.has_workspace else None]}
        places = range(TENSORS.size // 8)
        self.pack = struct.Struct("<" + "".join("Q" if place in passed else "8x" for place in places))
        self.steps: dict[tuple[int, ...], StepLaunch] = {}
        self.step(tuple([tensors[place].numel() for place in varying]))  # type: ignore[union-attr]

    @staticmethod
    def possible(arguments: dict[str, Any]) -> bool:
        """Whether a call may become a plan: something to compute, a pool, and addresses that allow the widest words.

        Its strides must be such that more rows and sequences could have them too.
        """
        x = arguments["x"]
        return (
            x.numel() > 0 < arguments["conv_state"].numel()
            and all(rows.stride(0) >= rows.shape[1] for rows in (x, arguments["out"]))
            and all(
                tensor is None or tensor.data_ptr() % 16 == 0
                for tensor in (arguments[name] for name in ("x", "weight", "bias", "conv_state", "out"))
            )
            and all(
                tensor.stride(0) == 1
                for name, tensor in arguments.items()
                if isinstance(tensor, Tensor) and tensor.ndim == 1 and name not in ("state_indices", "cache_indices")
            )
        )

    def step(self, numels: tuple[int, ...]) -> StepLaunch | None:
        """What these sizes need, kept; None if they break a rule, or leave nothing to compute."""
        rules = self._rules
        counts = [numel // rule.elements for numel, rule in zip(numels, rules, strict=True)]
        rows, sequences, checkpoints = counts[0], counts[self._sequences_from] - rules[self._sequences_from].more, 0
        for count, rule in zip(counts, rules, strict=True):
            if rule.of == _CHECKPOINTS:
                checkpoints = count
        if not 0 < rows <= INT32_LIMIT or not 0 < sequences <= INT32_LIMIT:
            return None
        wanted = (rows, sequences, checkpoints, prefill_workspace_size(rows, sequences) if self.has_workspace else 0)
        for count, rule in zip(counts, rules, strict=True):
            spare = count - wanted[rule.of] - rule.more
            if spare < 0 or (spare > 0 and not rule.longer):
                return None
        kernel, config = self._kernel(rows, sequences, checkpoints > 0)
        by_rule = iter(counts)
        step = StepLaunch(
            kernel,
            self._chooser.grid(config, rows, sequences, checkpoints),
            self._constant + STEP_SIZES.pack(rows, sequences, checkpoints, 0),
            tuple(
                [
                    extent if isinstance(extent, int) else max(0, next(by_rule) - 1) * extent.step + extent.last
                    for extent in self._extents
                ]
            ),
        )
        if len(self.steps) >= _MOST_SIZES:
            self.steps.clear()
        self.steps[numels] = step
        return step

    def _kernel(self, rows: int, sequences: int, checkpoints: bool) -> tuple[Kernel, LaunchConfig]:
        """The launch choice for these sizes and its kernel, remembered for all sizes with the same first four bits.

        Unless the choice changes among those; it does so at few sizes, and never to and fro.
        """
        size, chooser = sequences if self._updates else rows, self._chooser
        shift = max(0, size.bit_length() - 4)
        key = (size >> shift, shift, checkpoints)
        found = self._kernels.get(key)
        if found is None:
            low, high = key[0] << shift, ((key[0] + 1) << shift) - 1
            config = chooser.config(rows, sequences)
            variant = chooser.variant(config, checkpoints=checkpoints)
            found = load_variant(variant, self.device_index), config
            if chooser.config(low, low) == chooser.config(high, high):
                self._kernels[key] = found
        return found


def _prepare(entry: Entry, arguments: dict[str, Any]) -> ForwardLaunch | None:
    """The full path's launch of a checked call."""
    others = {name: value for name, value in arguments.items() if name not in ("x", "workspace")}
    x: Tensor = arguments["x"]
    return (
        prepare_update(x, **others, fault_flag=fault_flag(x.device)) if entry is UPDATE else prefill_launch(x, others)
    )


def _extent(tensor: Tensor) -> int:
    """Bytes from a tensor's first element to the end of its last; it has some."""
    last = 0
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        last += (size - 1) * stride
    return (last + 1) * tensor.element_size()


def _is_private_workspace(given: Sequence[Tensor], addresses: Sequence[int], extents: Sequence[int]) -> bool:
    """Whether a workspace, the last tensor, shares neither bytes nor storage with another."""
    # A new output, which only `addresses` has, lies apart anyway.
    start = addresses[-1]
    end = start + extents[-1]
    lying = [(tensor.data_ptr(), extent) for tensor, extent in zip(given[:-1], extents, strict=False)]
    apart = all(address >= end or start >= address + extent for address, extent in lying)
    return apart and _has_private_storage(given[-1], extents[-1], given)


def _has_private_storage(tensor: Tensor, extent: int, given: Sequence[Tensor]) -> bool:
    """Whether no other tensor lies in a tensor's storage. One that covers its storage overlaps whatever does."""
    storage = tensor.untyped_storage()
    at = storage.data_ptr()
    if storage.nbytes() == extent and at == tensor.data_ptr():
        return True
    return not any(other is not tensor and other.untyped_storage().data_ptr() == at for other in given)


class _Recent(NamedTuple):
    """A plan with the compiled comparison that finds it.

    Attributes:
        guards: compare the tensors that are given; an axis whose size may vary has None there.
        number: of them.
        absent: places of the others.
        in_place: `out` is `x`, which guards are shown once.
        activation: of the plan.
        pad_slot_id: of the plan.
    """

    guards: Any
    number: int
    absent: tuple[int, ...]
    in_place: bool
    activation: str | None
    pad_slot_id: int
    plan: Plan


class Plans:
    """The plans of one entry for callers of one form, the last few first.

    Attributes:
        known: whether there is any, so that callers need not ask in vain.
    """

    def __init__(self, entry: Entry, form: Form = OPERATOR) -> None:
        self.known = False
        self._entry, self._form = entry, form
        self._recent: list[_Recent] = []
        self._table: dict[tuple[Any, ...], Plan] = {}

    def run(self, tensors: Tensors, activation: object, pad_slot_id: object) -> Tensor | None:
        """Make the call if a plan for it is known; None, and nothing launched, if it needs the full checks.

        Not to be called while a compiler traces.

        Raises:
            CaptureError: sizes choose a kernel that is not loaded, and the current stream is capturing.
            BackendError: they choose one that cannot be compiled.
        """
        given = [tensor for tensor in tensors if tensor is not None]
        in_place = tensors[_OUT] is tensors[_X]
        if in_place:
            del given[_OUT if tensors[_BIAS] is not None else _OUT - 1]
        plan: Plan | None = None
        for guards, number, absent, its_in_place, its_activation, its_pad_slot_id, its_plan in self._recent:
            # Types where it is not the same object: 1, 1.0 and True are equal.
            if (
                number == len(given)
                and in_place is its_in_place
                and (pad_slot_id is its_pad_slot_id or (type(pad_slot_id) is int and pad_slot_id == its_pad_slot_id))
                and (activation is its_activation or (type(activation) is str and activation == its_activation))
                and guards.check(*given)
            ):
                for place in absent:
                    if tensors[place] is not None:
                        break
                else:
                    plan = its_plan
                    break
        if plan is None:
            plan = self._find(tensors, activation, pad_slot_id)
            if plan is None:
                return None

        device, fixed = plan.device_index, plan.fixed
        if device != torch._C._cuda_getDevice():
            return None
        numels = tuple([tensor.numel() for tensor in given[fixed:]])
        step = plan.steps.get(numels)
        if step is None:
            step = plan.step(numels)
            if step is None:
                return None
        extents = step.extents
        addresses = [tensor.data_ptr() for tensor in given]
        # The pool, and what is written of the rows, may overlap nothing but themselves; a new output overlaps nothing.
        place = fixed if in_place else fixed + 1
        state, start, end, overlaps = addresses[fixed - 1], 0, 0, 1
        state_end = state + extents[fixed - 1]
        if not plan.allocates:
            start, overlaps = addresses[place], 2
            end = start + extents[place]
        for number, address in enumerate(addresses):
            if address < state_end and state < address + extents[number]:
                overlaps -= 1
            if address < end and start < address + extents[number]:
                overlaps -= 1
        if overlaps and not (overlaps == -1 and plan.may_be_x and addresses[fixed] == start):
            return None
        if plan.allocates:
            x = given[fixed]
            result = torch.empty_like(x) if plan.transposed else torch.empty_like(x, memory_format=_CONTIGUOUS)
            addresses.insert(place, result.data_ptr())
        else:
            result = given[place]
            if in_place:
                addresses.insert(place, start)
            if plan.private_out and not _has_private_storage(result, extents[place], given):
                return None
        if plan.has_workspace:
            if not _is_private_workspace(given, addresses, extents):
                return None
            del addresses[-1]  # the kernel takes none
        together = 0
        for address in addresses[: fixed + 2]:
            together |= address
        if together & 15:  # the widest words do not fit
            return None
        step.kernel.launch_step(step, plan.pack, addresses, torch._C._cuda_getCurrentRawStream(device))
        return result

    def _find(self, tensors: Tensors, activation: object, pad_slot_id: object) -> Plan | None:
        """The plan in the table, which becomes the most recent one."""
        if needs_dispatch(tensors[_X]):
            return None
        key = _signature(self._form, tensors, activation, pad_slot_id)
        plan = None if key is None else self._table.get(key)
        if plan is not None:
            self._remember(tensors, key, plan)
        return plan

    def add(self, tensors: Tensors, activation: object, pad_slot_id: object, arguments: dict[str, Any]) -> None:
        """Keep a plan of a call that was checked and made.

        Args:
            tensors: the caller's.
            activation: the caller's.
            pad_slot_id: the caller's.
            arguments: the operator's, by name, complete with the result.
        """
        key = _signature(self._form, tensors, activation, pad_slot_id)
        if key is None or key in self._table or not Plan.possible(arguments):
            return  # a plan that is there declined for a reason that another would have too
        launch = _prepare(self._entry, arguments)
        if launch is None:
            return
        if len(self._table) >= _MOST_PLANS:
            self._table.clear()
        plan = self._table[key] = Plan(self._entry, self._form, tensors, arguments, launch)
        self.known = True
        self._remember(tensors, key, plan)

    def clear(self) -> None:
        """Forget everything."""
        self.known, self._recent, self._table = False, [], {}

    def _remember(self, tensors: Tensors, key: Any, plan: Plan) -> None:
        in_place = tensors[_OUT] is tensors[_X]
        given = {
            place: tensor
            for place, tensor in enumerate(tensors)
            if tensor is not None and not (place == _OUT and in_place)
        }
        if TensorGuards is None or len({id(tensor) for tensor in given.values()}) < len(given):
            return  # guards refuse one tensor twice
        sizes: Any = [list(_fixed_sizes(self._form, place, tensor)) for place, tensor in given.items()]
        strides: Any = [list(tensor.stride()) for tensor in given.values()]
        guards = TensorGuards(*given.values(), dynamic_dims_sizes=sizes, dynamic_dims_strides=strides)
        absent = tuple(place for place, tensor in enumerate(tensors) if tensor is None)
        recent = _Recent(guards, len(given), absent, in_place, key[0], key[1], plan)
        self._recent = [recent, *self._recent][:_MOST_RECENT]
