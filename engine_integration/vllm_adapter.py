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
from typing import Any, NamedTuple

import torch
from torch import Tensor

from serving_conv.engine_report import COUNTERS
from serving_conv.errors import ServingConvError
from serving_conv.ops import causal_conv1d_fn, causal_conv1d_update

__all__ = ["DeferredMap", "UnsupportedSignature", "deferred_metadata", "prefill_adapter", "update_adapter"]

NULL_BLOCK = 0
NO_PADDING = -1

# What is read of a call, in this order.
_PREFILL = (
    "x",
    "weight",
    "bias",
    "conv_states",
    "query_start_loc",
    "cache_indices",
    "has_initial_state",
    "activation",
    "null_block_id",
    "pad_slot_id",
)
_UPDATE = (
    "x",
    "weight",
    "bias",
    "conv_state",
    "query_start_loc",
    "conv_state_indices",
    "num_accepted_tokens",
    "out",
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
_REQUIRED = {"prefill": ("x", "weight", "query_start_loc"), "update": ("x", "weight")}


class UnsupportedSignature(Exception):
    """A function of vLLM asks for something that this adapter does not know."""


class _Pattern(NamedTuple):
    """One way of passing arguments: so many by position, those names. A call site's is always the same.

    Attributes:
        read: places of what is read, in order, in (arguments, options, what absent ones stand for).
        unknown: places and names of what is passed and not understood.
    """

    read: tuple[int, ...]
    unknown: tuple[tuple[int, str], ...]


class _Signature:
    """How one of vLLM's functions is called: by position, by name, under other names."""

    def __init__(self, original: Callable[..., Any], kind: str, renamed: Mapping[str, str]) -> None:
        self.read = _PREFILL if kind == "prefill" else _UPDATE
        self.understood = _IGNORED.union(self.read)
        parameters = inspect.signature(original).parameters
        names = {renamed.get(name, name) for name in parameters}
        missing = [name for name in _REQUIRED[kind] if name not in names]
        if missing:
            raise UnsupportedSignature(f"it has no argument {missing[0]!r}")
        self.renamed = dict(renamed)
        self.positional: list[str] = []
        self.defaults: dict[str, object] = {}
        for name, parameter in parameters.items():
            own = renamed.get(name, name)
            if parameter.kind is parameter.VAR_POSITIONAL:
                raise UnsupportedSignature("it takes any number of arguments by position")
            if parameter.kind is parameter.VAR_KEYWORD:
                continue
            if parameter.kind is not parameter.KEYWORD_ONLY:
                self.positional.append(own)
            if parameter.default is not parameter.empty:
                self.defaults[own] = parameter.default
            elif own not in self.understood:
                raise UnsupportedSignature(f"its argument {name!r} is unknown")
        # Functions without a null block (the CPU build's) let `pad_slot_id` say which slot is padding; beside one it
        # only marks unused entries of vLLM's block map.
        self.pads_by_slot = "pad_slot_id" in names and "null_block_id" not in names
        absent = {"activation": self.defaults.get("activation")}
        absent["null_block_id"] = self.defaults.get("null_block_id", NULL_BLOCK)
        self._absent = tuple(absent.get(name) for name in self.read)
        self._patterns: dict[tuple[int, tuple[str, ...]], _Pattern] = {}

    def bind(self, arguments: tuple[Any, ...], options: dict[str, Any]) -> tuple[list[Any], str | None]:
        """What is read of a call, in order; and why the operator cannot take it, None if it can."""
        if len(arguments) > len(self.positional):
            return [], "more arguments by position than it takes"
        by_name = tuple(options)
        pattern = self._patterns.get((len(arguments), by_name))
        if pattern is None:
            pattern = self._patterns[len(arguments), by_name] = self._pattern(len(arguments), by_name)
        values = (*arguments, *options.values(), *self._absent)
        for place, name in pattern.unknown:
            value = values[place]
            if value is not None and value is not self.defaults.get(name, self):
                block_index = name.startswith("block_idx") or name == "initial_state_idx"
                reason = "prefix caching passes block indices" if block_index else f"argument {name!r} is unknown"
                return [], reason
        return [values[place] for place in pattern.read], None

    def _pattern(self, by_position: int, by_name: tuple[str, ...]) -> _Pattern:
        given = [*self.positional[:by_position], *(self.renamed.get(name, name) for name in by_name)]
        places = {name: by_position + len(by_name) + place for place, name in enumerate(self.read)}
        places |= {name: place for place, name in enumerate(given)}
        unknown = tuple((place, name) for place, name in enumerate(given) if name not in self.understood)
        return _Pattern(tuple(places[name] for name in self.read), unknown)

    def padding(self, null_block: int | None, pad_slot_id: int | None) -> int:
        """The padding slot."""
        if self.pads_by_slot and pad_slot_id is not None:
            return pad_slot_id
        return NO_PADDING if null_block is None else null_block


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

    @functools.wraps(original)
    def adapted(*arguments: Any, **options: Any) -> Tensor:
        values, reason = signature.bind(arguments, options)
        if reason is None:
            try:
                result = _prefill(signature, unpack, *values)
            except ServingConvError as error:  # raised before anything is written
                reason = _brief(error)
            except _CannotView as cannot:
                reason = str(cannot)
            else:
                counter.calls += 1
                return result
        COUNTERS.fall_back(name, reason)
        return original(
            *(_with_map(argument) for argument in arguments),
            **{name: _with_map(option) for name, option in options.items()},
        )

    adapted.serving_conv_original = original  # type: ignore[attr-defined]
    return adapted


def _prefill(
    signature: _Signature,
    unpack: Any,
    x: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    pool: Tensor | None,
    offsets: Tensor | None,
    indices: Tensor | None,
    flags: Tensor | None,
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
    if flags is not None and flags.shape[0] > sequences:
        flags = flags[:sequences]
    return causal_conv1d_fn(
        x.t(),
        _weight(weight, unpack),
        pool,
        offsets,
        _slots(indices, sequences, x.device),
        flags,
        bias=bias,
        activation=_activation(activation),
        pad_slot_id=NO_PADDING if indices is None else signature.padding(null_block, pad_slot_id),
    ).t()


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

    @functools.wraps(original)
    def adapted(*arguments: Any, **options: Any) -> Tensor:
        values, reason = signature.bind(arguments, options)
        if reason is None:
            try:
                result = _update(signature, unpack, in_place, channels_last, *values)
            except ServingConvError as error:  # raised before anything is written
                reason = _brief(error)
            except _CannotView as cannot:
                reason = str(cannot)
            else:
                counter.calls += 1
                return result
        COUNTERS.fall_back(name, reason)
        return original(*arguments, **options)

    adapted.serving_conv_original = original  # type: ignore[attr-defined]
    return adapted


def _update(
    signature: _Signature,
    unpack: Any,
    in_place: bool,
    channels_last: bool,
    x: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    pool: Tensor | None,
    offsets: Tensor | None,
    indices: Tensor | None,
    counts: Tensor | None,
    result: Tensor | None,
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
    rows, out, sequences = x, result, x.shape[0]
    if offsets is not None:
        if indices is None:
            raise _CannotView("packed tokens without state indices")
        sequences = indices.shape[0]
        if offsets.shape[0] > sequences + 1:
            offsets = offsets[: sequences + 1]
    elif x.ndim == 3:
        rows = _packed(x, channels_last)
        out = None if result is None else (rows if result is x else _packed(result, channels_last))
        tokens = x.shape[1 if channels_last else 2]
        if tokens > 1:
            offsets = torch.arange(0, x.shape[0] * tokens + 1, tokens, dtype=torch.int32, device=x.device)
    if counts is not None and counts.shape[0] > sequences:
        counts = counts[:sequences]
    out = causal_conv1d_update(
        rows,
        _weight(weight, unpack),
        pool,
        _slots(indices, sequences, x.device),
        cu_seqlens=offsets,
        num_accepted_tokens=counts,
        bias=bias,
        activation=_activation(activation),
        out=out,
        pad_slot_id=NO_PADDING if indices is None else signature.padding(null_block, pad_slot_id),
    )
    if result is not None:
        return result
    if x.ndim == 2:
        return out
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

    @functools.wraps(original)
    def adapted(*arguments: Any, **options: Any) -> tuple[DeferredMap, None, None]:
        return DeferredMap(lambda: original(*arguments, **options)), None, None

    adapted.serving_conv_original = original  # type: ignore[attr-defined]
    return adapted
