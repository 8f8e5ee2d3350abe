"""Translates calls of vLLM's causal conv1d functions to the operator: views and renames, no copy, no synchronisation.

vLLM's convention, as its 0.23 to 0.33 have it: prefill rows arrive transposed as `[channels, tokens]`; block 0 is
the null block, whose sequences are padding; update overwrites `x` unless `out` is given; tables may be longer than
the step. Whatever a version can pass that the operator has no argument for goes to vLLM's own function, counted.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from serving_conv.contract import PREFILL, UPDATE
from serving_conv.engine_report import COUNTERS, FunctionReport
from serving_conv.errors import ServingConvError
from serving_conv.native.plan import Form, Plans, tensor_names
from serving_conv.ops import causal_conv1d_fn, causal_conv1d_update, learn_plan

__all__ = ["DeferredMap", "UnsupportedSignature", "deferred_metadata", "prefill_adapter", "update_adapter"]

_Result = TypeVar("_Result")

NULL_BLOCK = 0
NO_PADDING = -1

_NEVER = ""  # what the operator takes and vLLM never passes
# What is read of a call: the operator's tensors in the order of its plans, then the options.
_PREFILL = (
    "weight",
    "bias",
    "conv_states",
    "x",
    _NEVER,
    "query_start_loc",
    "cache_indices",
    "has_initial_state",
    _NEVER,
    _NEVER,
    "activation",
    "null_block_id",
    "pad_slot_id",
)
_UPDATE = (
    "weight",
    "bias",
    "conv_state",
    "x",
    "out",
    "query_start_loc",
    "conv_state_indices",
    _NEVER,
    "num_accepted_tokens",
    "activation",
    "null_block_id",
    "pad_slot_id",
)
# Arguments that change nothing here: hints for vLLM's launch, its own checks, the block map of its kernel, sizes
# without the indices they are for, and whether the weight is packed, which `unpack` finds out by itself.
_IGNORED = frozenset(
    (
        "metadata",
        "validate_data",
        "max_query_len",
        "block_size_to_align",
        "num_computed_tokens",
        "is_weight_packed",
    )
)
# How vLLM's tensors differ from the operator's.
_FORM_OF_PREFILL, _FORM_OF_UPDATE = Form(transposed=True, longer=True), Form(longer=True)
_REQUIRED = {"prefill": ("x", "weight", "query_start_loc"), "update": ("x", "weight")}


class UnsupportedSignature(Exception):
    """A function of vLLM asks for something that this adapter does not know."""


class _Signature:
    """How one of vLLM's functions is called: by position, by name, under other names."""

    def __init__(self, original: Callable[..., Any], kind: str, renamed: Mapping[str, str]) -> None:
        self.read = _PREFILL if kind == "prefill" else _UPDATE
        self.understood = _IGNORED.union(self.read)
        self.parameters = inspect.signature(original).parameters
        self.name = original.__name__
        self.renamed = dict(renamed)
        self.given = {self.own(name): name for name in self.parameters}
        missing = [name for name in _REQUIRED[kind] if name not in self.given]
        if missing:
            raise UnsupportedSignature(f"it has no argument {missing[0]!r}")
        self.unknown: list[str] = []
        for name, parameter in self.parameters.items():
            if parameter.kind is parameter.VAR_POSITIONAL or parameter.kind is parameter.POSITIONAL_ONLY:
                raise UnsupportedSignature("it takes arguments that have no name")
            if parameter.kind is parameter.VAR_KEYWORD or self.own(name) in self.understood:
                continue
            if parameter.default is parameter.empty:
                raise UnsupportedSignature(f"its argument {name!r} is unknown")
            self.unknown.append(name)
        # Functions without a null block (the CPU build's) let `pad_slot_id` say which slot is padding; beside one it
        # only marks unused entries of vLLM's block map.
        self.pads_by_slot = "pad_slot_id" in self.given and "null_block_id" not in self.given
        self.defaults = {name: parameter.default for name, parameter in self.parameters.items()}
        if self.pads_by_slot:  # none given is not the same as the default
            self.defaults[self.given["pad_slot_id"]] = None

    def own(self, name: str) -> str:
        """VLLM's public function's name of an argument."""
        return self.renamed.get(name, name)

    def read_call(self, values: dict[str, Any]) -> tuple[Any, ...] | str:
        """What is read of a call, in order; or why the operator cannot take it."""
        found: dict[str, Any] = {"null_block_id": NULL_BLOCK}
        for name, value in values.items():
            own = self.own(name)
            if own in self.understood:
                found[own] = value
            elif value is not None and value is not self.defaults.get(name):
                block_index = name.startswith("block_idx") or name == "initial_state_idx"
                return "prefix caching passes block indices" if block_index else f"argument {name!r} is unknown"
        return tuple([found.get(name) for name in self.read])

    def passed(self, values: dict[str, Any]) -> dict[str, Any]:
        """Of all arguments, those that are not their default."""
        return {name: v for name, v in values.items() if name not in self.defaults or v is not self.defaults[name]}

    def adapt(self, plans: Plans, counter: FunctionReport, checked: Callable[..., Any], *, in_place: bool) -> Any:
        """A function with this signature: by a plan if one is known, else `checked` with all arguments by name.

        It is written out for the signature, since a call then makes no tuple and no dictionary of its arguments:
        with nothing in the processor's caches that took a fifth of the call.
        """
        written, starred = [], False
        for place, (name, parameter) in enumerate(self.parameters.items()):
            if parameter.kind is parameter.VAR_KEYWORD:
                written.append(f"**{name}")
                continue
            if parameter.kind is parameter.KEYWORD_ONLY and not starred:
                written.append("*")
                starred = True
            written.append(name if parameter.default is parameter.empty else f"{name}=defaults[{place}]")
        others = [name for name, p in self.parameters.items() if p.kind is p.VAR_KEYWORD]
        plain = [
            *("not is_dynamo_compiling()", "plans.known"),
            *(f"({name} is None or {name} is defaults[{list(self.parameters).index(name)}])" for name in self.unknown),
            *(f"not {name}" for name in others),
        ]
        read = [self.given.get(name, "None") for name in self.read]
        if in_place:
            x, out = (tensor_names(UPDATE).index(name) for name in ("x", "out"))
            read[out] = read[x] if read[out] == "None" else f"{read[x]} if {read[out]} is None else {read[out]}"
        tensors, (activation, null_block, _) = read[:-3], read[-3:]
        values = [*(f"{name!r}: {name}" for name in self.parameters if name not in others), *(f"**{n}" for n in others)]
        text = f"""
def make(plans, counter, checked, defaults, is_dynamo_compiling):
    def {self.name}({", ".join(written)}):
        if {" and ".join(plain)}:
            result = plans.run(({", ".join(tensors)}), {activation}, {null_block})
            if result is not None:
                counter.calls += 1
                return result
        return checked({{{", ".join(values)}}})
    return {self.name}
"""
        scope: dict[str, Any] = {}
        exec(text, scope)
        return scope["make"](plans, counter, checked, [*self.defaults.values()], is_dynamo_compiling)

    def padding(self, null_block: int | None, pad_slot_id: int | None) -> int:
        """The padding slot."""
        if self.pads_by_slot and pad_slot_id is not None:
            return pad_slot_id
        return NO_PADDING if null_block is None else null_block


def _stand_in(original: Callable[..., _Result], adapted: Callable[..., _Result]) -> Callable[..., _Result]:
    """The function that takes an original's place; it says so, and names it."""
    functools.update_wrapper(adapted, original)
    adapted.serving_conv_original = original  # type: ignore[attr-defined]
    return adapted


def prefill_adapter(
    original: Callable[..., Tensor], name: str, *, renamed: Mapping[str, str] | None = None, unpack: Any = None
) -> Callable[..., Tensor]:
    """A function with the arguments and meaning of vLLM's `causal_conv1d_fn` that runs the operator.

    Args:
        original: vLLM's own; runs what the operator cannot.
        name: to count under.
        renamed: vLLM's argument names that differ, to those of `causal_conv1d_fn`.
        unpack: gives the plain `[channels, taps]` weight of a packed one, or None if it does not know it.

    Raises:
        UnsupportedSignature: a version this adapter does not know.
    """
    signature = _Signature(original, "prefill", renamed or {})
    counter = COUNTERS.function(name)
    plans = Plans(PREFILL, _FORM_OF_PREFILL)

    def checked(values: dict[str, Any]) -> Tensor:
        read = signature.read_call(values)
        if not isinstance(read, str):
            try:
                result = _prefill(signature, plans, unpack, *read)
            except ServingConvError as error:  # raised before anything is written
                read = _brief(error)
            except _CannotView as cannot:
                read = str(cannot)
            else:
                counter.calls += 1
                return result
        COUNTERS.fall_back(name, read)
        return original(**{name: _with_map(value) for name, value in signature.passed(values).items()})

    return _stand_in(original, signature.adapt(plans, counter, checked, in_place=False))


def _prefill(
    signature: _Signature,
    plans: Plans,
    unpack: Any,
    weight: Tensor | None,
    bias: Tensor | None,
    pool: Tensor | None,
    x: Tensor | None,
    _out: None,
    offsets: Tensor | None,
    indices: Tensor | None,
    flags: Tensor | None,
    _counts: None,
    _workspace: None,
    activation: str | bool | None,
    null_block: int | None,
    pad_slot_id: int | None,
) -> Tensor:
    if x is None or weight is None or offsets is None:
        raise _CannotView("a call without x, weight or offsets")
    if pool is None:
        raise _CannotView("a call without a state pool")
    if x.ndim != 2:
        raise _CannotView(f"x with {x.ndim} axes")
    sequences = offsets.shape[0] - 1
    call: dict[str, Any] = {
        "x": x.t(),
        "weight": _weight(weight, unpack),
        "conv_state": pool,
        "cu_seqlens": offsets,
        "cache_indices": _slots(indices, sequences, x.device),
        "has_initial_state": flags if flags is None or flags.shape[0] <= sequences else flags[:sequences],
        "bias": bias,
        "activation": _activation(activation),
        "pad_slot_id": NO_PADDING if indices is None else signature.padding(null_block, pad_slot_id),
    }
    out = causal_conv1d_fn(**call)
    if unpack is None and indices is not None and not signature.pads_by_slot:
        tensors = (weight, bias, pool, x, None, offsets, indices, flags, None, None)
        call |= {"out": out, "num_accepted_tokens": None, "workspace": None}
        learn_plan(plans, tensors, activation, null_block, call)
    return out.t()


def update_adapter(
    original: Callable[..., Tensor],
    name: str,
    *,
    renamed: Mapping[str, str] | None = None,
    unpack: Any = None,
    in_place: bool = True,
    channels_last: bool = False,
) -> Callable[..., Tensor]:
    """A function with the arguments and meaning of vLLM's `causal_conv1d_update` that runs the operator.

    Args:
        original: vLLM's own; runs what the operator cannot.
        name: to count under.
        renamed: vLLM's argument names that differ, to those of `causal_conv1d_update`.
        unpack: as for `prefill_adapter`.
        in_place: the original overwrites `x` where no `out` is given; else it allocates.
        channels_last: three axes are `[batch, tokens, channels]` and not `[batch, channels, tokens]`.

    Raises:
        UnsupportedSignature: a version this adapter does not know.
    """
    signature = _Signature(original, "update", renamed or {})
    counter = COUNTERS.function(name)
    plans = Plans(UPDATE, _FORM_OF_UPDATE)

    def checked(values: dict[str, Any]) -> Tensor:
        read = signature.read_call(values)
        if not isinstance(read, str):
            try:
                result = _update(signature, plans, unpack, in_place, channels_last, *read)
            except ServingConvError as error:  # raised before anything is written
                read = _brief(error)
            except _CannotView as cannot:
                read = str(cannot)
            else:
                counter.calls += 1
                return result
        COUNTERS.fall_back(name, read)
        return original(**signature.passed(values))

    return _stand_in(original, signature.adapt(plans, counter, checked, in_place=in_place))


def _update(
    signature: _Signature,
    plans: Plans,
    unpack: Any,
    in_place: bool,
    channels_last: bool,
    weight: Tensor | None,
    bias: Tensor | None,
    pool: Tensor | None,
    x: Tensor | None,
    result: Tensor | None,
    offsets: Tensor | None,
    indices: Tensor | None,
    _flags: None,
    counts: Tensor | None,
    activation: str | bool | None,
    null_block: int | None,
    pad_slot_id: int | None,
) -> Tensor:
    if x is None or weight is None or pool is None:
        raise _CannotView("a call without x, weight or a state pool")
    if x.ndim != 2 and (x.ndim != 3 or offsets is not None):
        raise _CannotView(f"x with {x.ndim} axes")
    if result is None and in_place:
        result = x
    rows, out, sequences, packed = x, result, x.shape[0], offsets
    if offsets is not None:
        if indices is None:
            raise _CannotView("packed tokens without state indices")
        sequences = indices.shape[0]
        if offsets.shape[0] > sequences + 1:
            packed = offsets[: sequences + 1]
    elif x.ndim == 3:
        rows = _packed(x, channels_last)
        out = None if result is None else (rows if result is x else _packed(result, channels_last))
        tokens = x.shape[1 if channels_last else 2]
        if tokens > 1:
            packed = torch.arange(0, x.shape[0] * tokens + 1, tokens, dtype=torch.int32, device=x.device)
    call: dict[str, Any] = {
        "x": rows,
        "weight": _weight(weight, unpack),
        "conv_state": pool,
        "state_indices": _slots(indices, sequences, x.device),
        "cu_seqlens": packed,
        "num_accepted_tokens": counts if counts is None or counts.shape[0] <= sequences else counts[:sequences],
        "bias": bias,
        "activation": _activation(activation),
        "out": out,
        "pad_slot_id": NO_PADDING if indices is None else signature.padding(null_block, pad_slot_id),
    }
    out = causal_conv1d_update(**call)
    if x.ndim == 2:
        if unpack is None and indices is not None and not signature.pads_by_slot:
            tensors = (weight, bias, pool, x, result, offsets, indices, None, counts)
            learn_plan(plans, tensors, activation, null_block, {**call, "out": out, "has_initial_state": None})
        return out if result is None else result
    if result is not None:
        return result
    batched = out.view(x.shape[0], -1, out.shape[1])
    return batched if channels_last else batched.transpose(1, 2)


class _CannotView(Exception):
    """The call's memory has no view in the operator's layout, or it lacks something."""


def _packed(x: Tensor, channels_last: bool) -> Tensor:
    """Three axes as rows of channels, without a copy."""
    batched = x if channels_last else x.transpose(1, 2)
    batch, tokens, channels = batched.shape
    if batch > 1 and tokens > 1 and batched.stride(0) != tokens * batched.stride(1):
        raise _CannotView("three axes that no view packs into rows")
    if tokens == 1:
        return batched[:, 0]
    return batched.as_strided((batch * tokens, channels), (batched.stride(1), batched.stride(2)))


def _slots(indices: Tensor | None, sequences: int, device: torch.device) -> Tensor:
    if indices is None:  # sequence i has slot i, slot 0 too
        return torch.arange(sequences, dtype=torch.int32, device=device)
    if indices.ndim == 2:  # a block table: the state is in the first block
        indices = indices[:, 0]
    return indices[:sequences] if indices.shape[0] > sequences else indices


def _activation(activation: str | bool | None) -> str | None:
    if activation is True:
        return "silu"
    return None if activation is False else activation


def _weight(weight: Tensor, unpack: Any) -> Tensor:
    if unpack is not None:
        plain = unpack(weight)
        if plain is None:
            raise _CannotView("a packed weight whose plain form is not known")
        weight = plain
    return weight.squeeze(1) if weight.ndim == 3 else weight


def _brief(error: ServingConvError) -> str:
    # Without the sizes of this call, so that a reason is counted once and not once a shape.
    return f"{error.argument}: wanted {error.wanted}" if type(error).__name__ == "ContractError" else str(error)[:200]


class DeferredMap(dict[Any, Any]):
    """Stands for vLLM's host-built block map until one of its own kernels asks; ours need none."""

    def __init__(self, build: Callable[[], tuple[Any, Any, Any]]) -> None:
        super().__init__()
        self._build = build
        self._built: tuple[Any, Any, Any] | None = None

    def like_metadata(self) -> SimpleNamespace:
        """An object with the three fields that vLLM's prefill function reads; built once a step."""
        if self._built is None:
            self._built = self._build()
        nums, batch, offsets = self._built
        return SimpleNamespace(nums_dict=nums, batch_ptr=batch, token_chunk_offset_ptr=offsets)


def _with_map(argument: Any) -> Any:
    """The argument, or what vLLM's own function reads in the place of metadata whose map was put off."""
    map_ = getattr(argument, "nums_dict", None)
    return map_.like_metadata() if isinstance(map_, DeferredMap) else argument


def deferred_metadata(original: Callable[..., Any]) -> Callable[..., Any]:
    """Puts vLLM's `compute_causal_conv1d_metadata` off until a fallback needs its result."""

    def adapted(*arguments: Any, **options: Any) -> tuple[DeferredMap, None, None]:
        return DeferredMap(lambda: original(*arguments, **options)), None, None

    return _stand_in(original, adapted)
