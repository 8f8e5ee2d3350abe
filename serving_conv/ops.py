"""Owns the public entries: check, choose a backend, run; and their registration as `torch.ops.serving_conv.*`.

Each entry is registered twice, since a custom operator may not return one of its inputs: the plain overload
allocates and returns the result, `.out` writes to `out` and returns nothing. The public functions hide that. In
eager mode they call the body directly; under a compiler, a fake mode or a tensor subclass they go through the
registered operator, which is opaque to the compiler and says exactly what it writes.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from serving_conv.backends import choose_backend
from serving_conv.checks import check, check_values
from serving_conv.contract import ENTRIES, PREFILL, STEP, UPDATE, Entry, Option, prefill_workspace_size
from serving_conv.dispatch import needs_dispatch
from serving_conv.native.plan import Plans, tensor_names
from serving_conv.settings import SETTINGS
from serving_conv.signatures import documented, schema

__all__ = [
    "LIBRARY",
    "causal_conv1d_fn",
    "causal_conv1d_step",
    "causal_conv1d_update",
    "learn_plan",
    "needs_dispatch",
    "register_operator",
]

# Library.define + impl costs 4 us a call where the custom_op decorator was measured at 28.
LIBRARY = torch.library.Library("serving_conv", "DEF")  # type: ignore[no-untyped-call]

# The short paths. Their guards see whether `needs_dispatch`, except for a compiler, which must not trace them.
_PLANS_OF_PREFILL, _PLANS_OF_UPDATE, _PLANS_OF_STEP = (Plans(entry) for entry in (PREFILL, UPDATE, STEP))
_PLANS = {PREFILL.name: _PLANS_OF_PREFILL, UPDATE.name: _PLANS_OF_UPDATE, STEP.name: _PLANS_OF_STEP}


@documented(PREFILL)
def causal_conv1d_fn(
    x: Tensor,
    weight: Tensor,
    conv_state: Tensor,
    cu_seqlens: Tensor,
    cache_indices: Tensor,
    has_initial_state: Tensor | None = None,
    *,
    bias: Tensor | None = None,
    activation: str | None = "silu",
    num_accepted_tokens: Tensor | None = None,
    out: Tensor | None = None,
    workspace: Tensor | None = None,
    pad_slot_id: int = -1,
) -> Tensor:
    """Causal depthwise convolution of packed prompt chunks.

    Every row becomes `activation(bias + sum over taps)` of its window: the W-1 inputs before it in its sequence,
    then itself. The inputs before the first row come from the sequence's slot if `has_initial_state` says so,
    else they are zeros. Afterwards positions `0 : W-1` of each live slot hold the sequence's last W-1 inputs.

    The positional order and the meaning are those of flashinfer.mamba.causal_conv1d_fn. Sums are fp32, bias first,
    one fused multiply-add a tap, oldest tap first, so a sequence gives the same bits however it is batched or cut.
    Empty sequences are legal. A sequence whose slot, offsets or count are out of range gets zero output, leaves
    its slot alone and sets a sticky code (`serving_conv.device_fault`).
    """
    if not is_dynamo_compiling() and _PLANS_OF_PREFILL.known:
        tensors = (
            weight,
            bias,
            conv_state,
            x,
            out,
            cu_seqlens,
            cache_indices,
            has_initial_state,
            num_accepted_tokens,
            workspace,
        )
        result = _PLANS_OF_PREFILL.run(tensors, activation, pad_slot_id)
        if result is not None:
            return result
    arguments = {
        "x": x,
        "weight": weight,
        "conv_state": conv_state,
        "cu_seqlens": cu_seqlens,
        "cache_indices": cache_indices,
        "has_initial_state": has_initial_state,
        "bias": bias,
        "activation": activation,
        "num_accepted_tokens": num_accepted_tokens,
        "out": out,
        "workspace": workspace,
        "pad_slot_id": pad_slot_id,
    }
    if needs_dispatch(x):
        return _dispatch(torch.ops.serving_conv.causal_conv1d_fn, arguments)
    return _run_eager(PREFILL, arguments)


@documented(UPDATE)
def causal_conv1d_update(
    x: Tensor,
    weight: Tensor,
    conv_state: Tensor,
    state_indices: Tensor,
    *,
    cu_seqlens: Tensor | None = None,
    num_accepted_tokens: Tensor | None = None,
    has_initial_state: Tensor | None = None,
    bias: Tensor | None = None,
    activation: str | None = "silu",
    out: Tensor | None = None,
    pad_slot_id: int = -1,
) -> Tensor:
    """Decode and linear speculative steps of the causal depthwise convolution.

    Plain (no counts): the window is positions `0 : W-1` of the slot, which afterwards hold the last W-1 of (window,
    tokens). Speculative: count `a` says how many tokens of the previous step were kept, bonus token included; the
    window is positions `a-1 : a+W-2`, and afterwards positions `0 : T+W-2` hold (the last W-2 of the window, all T
    tokens), so that the next step can start behind any accepted one. After a prefill the first count is 1.

    Sums are those of `causal_conv1d_fn`, bit for bit. A sequence whose slot, offsets or count are out of range gets
    zero output, leaves its slot alone and sets a sticky code (`serving_conv.device_fault`). With more than L-W+2
    tokens in a speculative step every output is right and only what fits is stored.
    """
    if not is_dynamo_compiling() and _PLANS_OF_UPDATE.known:
        tensors = (
            weight,
            bias,
            conv_state,
            x,
            out,
            cu_seqlens,
            state_indices,
            has_initial_state,
            num_accepted_tokens,
        )
        result = _PLANS_OF_UPDATE.run(tensors, activation, pad_slot_id)
        if result is not None:
            return result
    arguments = {
        "x": x,
        "weight": weight,
        "conv_state": conv_state,
        "state_indices": state_indices,
        "cu_seqlens": cu_seqlens,
        "num_accepted_tokens": num_accepted_tokens,
        "has_initial_state": has_initial_state,
        "bias": bias,
        "activation": activation,
        "out": out,
        "pad_slot_id": pad_slot_id,
    }
    if needs_dispatch(x):
        return _dispatch(torch.ops.serving_conv.causal_conv1d_update, arguments)
    return _run_eager(UPDATE, arguments)


@documented(STEP)
def causal_conv1d_step(
    x: Tensor,
    weight: Tensor,
    conv_state: Tensor,
    cu_seqlens: Tensor,
    cache_indices: Tensor,
    has_initial_state: Tensor | None = None,
    *,
    num_accepted_tokens: Tensor | None = None,
    speculative: Tensor | None = None,
    checkpoint_offsets: Tensor | None = None,
    checkpoint_tokens: Tensor | None = None,
    checkpoint_slots: Tensor | None = None,
    bias: Tensor | None = None,
    activation: str | None = "silu",
    out: Tensor | None = None,
    pad_slot_id: int = -1,
) -> Tensor:
    """A whole step of an engine in one launch: what its sequences are is said per sequence, on the device.

    First chunks (no initial state), later chunks, decode rows (one token with history) and speculative rows (marked
    in `speculative`, each with its accepted count) may come in any mix and order. Outputs and slots are those of the
    separate entries, bit for bit: a marked sequence leaves its slot as `causal_conv1d_update` with counts does, any
    other as `causal_conv1d_fn` does.

    A sequence may name checkpoints: the window after so many of its tokens in this call (its last W-1 inputs there)
    is also written to another slot, so that a prefix can be taken up again from that token. A checkpoint's slot must
    not be a live slot of the call. One with a bad count or slot is not written and leaves a sticky code
    (`serving_conv.device_fault`).
    """
    if not is_dynamo_compiling() and _PLANS_OF_STEP.known:
        tensors = (
            weight,
            bias,
            conv_state,
            x,
            out,
            cu_seqlens,
            cache_indices,
            has_initial_state,
            num_accepted_tokens,
            speculative,
            checkpoint_offsets,
            checkpoint_tokens,
            checkpoint_slots,
        )
        result = _PLANS_OF_STEP.run(tensors, activation, pad_slot_id)
        if result is not None:
            return result
    arguments = {
        "x": x,
        "weight": weight,
        "conv_state": conv_state,
        "cu_seqlens": cu_seqlens,
        "cache_indices": cache_indices,
        "has_initial_state": has_initial_state,
        "num_accepted_tokens": num_accepted_tokens,
        "speculative": speculative,
        "checkpoint_offsets": checkpoint_offsets,
        "checkpoint_tokens": checkpoint_tokens,
        "checkpoint_slots": checkpoint_slots,
        "bias": bias,
        "activation": activation,
        "out": out,
        "pad_slot_id": pad_slot_id,
    }
    if needs_dispatch(x):
        return _dispatch(torch.ops.serving_conv.causal_conv1d_step, arguments)
    return _run_eager(STEP, arguments)


def _dispatch(op: Any, arguments: dict[str, Any]) -> Tensor:
    """Through the registered operator; every argument may go by name."""
    out: Tensor | None = arguments["out"]
    if out is not None:
        op.out(**arguments)
        return out
    del arguments["out"]
    result: Tensor = op.default(**arguments)
    return result


def learn_plan(
    plans: Plans, tensors: tuple[Tensor | None, ...], activation: object, pad_slot_id: object, arguments: dict[str, Any]
) -> None:
    """Keep a plan of a call that was made, if the backend has such; arguments as of `Plans.add`."""
    if not SETTINGS.debug and choose_backend(arguments["x"].device).name == "cuda":
        plans.add(tensors, activation, pad_slot_id, arguments)


def _run_eager(entry: Entry, arguments: dict[str, Any]) -> Tensor:
    tensors = tuple([arguments[name] for name in tensor_names(entry)])
    out = _run(entry, arguments)
    learn_plan(_PLANS[entry.name], tensors, arguments["activation"], arguments["pad_slot_id"], arguments)
    return out


def _run(entry: Entry, arguments: dict[str, Any]) -> Tensor:
    """The body of both overloads: check everything, then allocate, then compute."""
    sizes = check(entry, arguments)
    if SETTINGS.debug:
        check_values(entry, sizes, arguments)
    x: Tensor = arguments["x"]
    backend = choose_backend(x.device)
    if arguments["out"] is None:
        arguments["out"] = x.new_empty(x.shape)
    if entry is UPDATE:
        backend.update(**arguments)
    elif entry is STEP:
        backend.step(**arguments)
    else:
        scratch = prefill_workspace_size(sizes.rows, sizes.sequences)
        if arguments["workspace"] is None and scratch:
            arguments["workspace"] = x.new_empty(scratch, dtype=torch.int32)
        backend.prefill(**arguments)
    out: Tensor = arguments["out"]
    return out


def register_operator(signature: str, body: Any, fake: Any) -> None:
    """Register one opaque operator of `torch.ops.serving_conv` for every device; the signature begins with its name."""
    name = signature.partition("(")[0]
    LIBRARY.define(signature)  # type: ignore[no-untyped-call]
    for key in ("CPU", "CUDA", "XPU"):
        LIBRARY.impl(name, body, key)  # type: ignore[no-untyped-call]
    torch.library.register_fake(f"serving_conv::{name}", fake, lib=LIBRARY)


def _register(entry: Entry) -> None:
    defaults = {a.name: a.default if isinstance(a, Option) else None for a in entry.arguments}
    names = [a.name for a in entry.arguments if not a.keyword]

    def bind(values: tuple[Any, ...], options: dict[str, Any]) -> dict[str, Any]:
        # The dispatcher drops arguments that equal their default.
        return {**defaults, **dict(zip(names, values, strict=False)), **options}

    def allocating(*values: Any, **options: Any) -> Tensor:
        return _run(entry, bind(values, options))

    def writing(*values: Any, **options: Any) -> None:
        _run(entry, bind(values, options))

    def fake_allocating(*values: Any, **options: Any) -> Tensor:
        x: Tensor = bind(values, options)["x"]
        return x.new_empty(x.shape)

    def fake_writing(*values: Any, **options: Any) -> None:
        return None

    register_operator(schema(entry, out=False), allocating, fake_allocating)
    register_operator(schema(entry, out=True), writing, fake_writing)


for _entry in ENTRIES:
    _register(_entry)
