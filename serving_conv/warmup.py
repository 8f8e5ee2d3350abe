"""Loads the kernels that a model needs before it serves: no request compiles, no capture meets a cold one."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from serving_conv.backends import choose_backend
from serving_conv.contract import FLOAT_TYPES, MAX_WIDTH, MIN_WIDTH, state_positions
from serving_conv.errors import BackendError, ContractError
from serving_conv.native import cuda, host
from serving_conv.native.call import Traits, variant_of
from serving_conv.native.config import choose_prefill, choose_update
from serving_conv.native.variant import CHANNELS_CONTIGUOUS, POSITIONS_DENSE, Variant
from serving_conv.ops import causal_conv1d_fn, causal_conv1d_step, causal_conv1d_update

__all__ = ["model_variants", "warmup"]

_MOST = 1 << 20  # rows or sequences: more than any step has
_ASSUMED_MULTIPROCESSORS = 132


def model_variants(
    channels: int,
    *,
    width: int = 4,
    dtype: torch.dtype = torch.bfloat16,
    weight_dtype: torch.dtype | None = None,
    state_dtype: torch.dtype | None = None,
    bias: bool = True,
    activation: str | None = "silu",
    layout: str = "channels",
    draft_tokens: int = 0,
    steps: bool = False,
    multiprocessors: int = _ASSUMED_MULTIPROCESSORS,
    capability: int = 90,
) -> list[Variant]:
    """Every CUDA kernel that calls of one layer can run, whatever their number of rows and sequences.

    `causal_conv1d_step` runs prefill's kernels while it names neither drafts nor checkpoints; `steps` adds the others.

    Args:
        channels: of the convolution on this rank.
        width: taps.
        dtype: of x.
        weight_dtype: of weight and bias; `dtype` if None.
        state_dtype: of the pool; `dtype` if None.
        bias: the layer has one.
        activation: as in the entries.
        layout: `channels` or `positions`, whichever is contiguous in the pool.
        draft_tokens: 0 without speculation.
        steps: also those of steps with drafts (if there are any), with checkpoints, and with both.
        multiprocessors: of the device; the launch of small prefills depends on it.
        capability: of the device, as 90.

    Raises:
        ContractError: a value outside the contract.
    """
    names = _checked(channels, width, layout, dtype, weight_dtype, state_dtype)
    simple = layout == "channels"
    x_bytes = dtype.itemsize

    def traits(*, counted: bool) -> Traits:
        return Traits(
            x=names[0],
            weight=names[1],
            state=names[2],
            bias=names[1],
            width=width,
            layout=CHANNELS_CONTIGUOUS if simple else POSITIONS_DENSE,
            positions=state_positions(width, draft_tokens),
            has_bias=bias,
            silu=activation is not None,
            counted=counted,
        )

    def aligned(vec: int) -> int:
        while channels % vec:
            vec //= 2
        return vec

    found: dict[Variant, None] = {}
    for size in (1 << power for power in range(_MOST.bit_length())):
        config = choose_prefill(
            rows=size,
            channels=channels,
            width=width,
            x_bytes=x_bytes,
            simple_state=simple,
            multiprocessors=multiprocessors,
            capability=capability,
        )
        for drafts, checkpoints in itertools.product((False, True), repeat=2) if steps else ((False, False),):
            if draft_tokens or not drafts:
                variant = variant_of(
                    "conv_prefill",
                    traits(counted=False),
                    config,
                    aligned(config.vec),
                    drafts=drafts,
                    checkpoints=checkpoints,
                )
                found[variant] = None
        for packed in (False, True):
            config = choose_update(
                sequences=size,
                channels=channels,
                width=width,
                x_bytes=x_bytes,
                packed=packed,
                simple_state=simple,
            )
            for counted in (False, True) if draft_tokens else (False,):
                variant = variant_of("conv_update", traits(counted=counted), config, aligned(config.vec), packed=packed)
                found[variant] = None
    return list(found)


def warmup(
    channels: int,
    *,
    width: int = 4,
    dtype: torch.dtype = torch.bfloat16,
    weight_dtype: torch.dtype | None = None,
    state_dtype: torch.dtype | None = None,
    bias: bool = True,
    activation: str | None = "silu",
    layout: str = "channels",
    draft_tokens: int = 0,
    steps: bool = False,
    device: torch.device | str = "cuda",
    architecture: str | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> int:
    """Load every kernel that one layer's calls can run; see `model_variants` for the arguments.

    Call it once for each distinct layer. Contiguous tensors as torch allocates them are assumed; a call with odd
    addresses or strides may still need one more kernel. Where the Triton backend serves, whose kernels its own cache
    keeps, each is run once on zeros.

    Args:
        channels: of the convolution on this rank.
        width: taps.
        dtype: of x.
        weight_dtype: of weight and bias.
        state_dtype: of the pool.
        bias: the layer has one.
        activation: as in the entries.
        layout: of the pool.
        draft_tokens: 0 without speculation.
        steps: also what `causal_conv1d_step` runs with drafts or checkpoints.
        device: where to load, for the backend that serves it; ignored with `architecture`.
        architecture: as `sm_90`: only compile the CUDA kernels into the disk cache, which needs no GPU.
        progress: called with (kernels done, kernels in all).

    Returns:
        The number of kernels loaded, or compiled.

    Raises:
        ContractError: a value outside the contract.
        BackendError: no such device, a backend without kernels, or a compilation that fails.
    """
    traits: dict[str, Any] = {
        "width": width,
        "dtype": dtype,
        "weight_dtype": weight_dtype,
        "state_dtype": state_dtype,
        "bias": bias,
        "activation": activation,
        "layout": layout,
        "draft_tokens": draft_tokens,
    }
    variants = partial(model_variants, channels, **traits, steps=steps)
    target = torch.device(device)
    loads: list[Callable[[], object]]
    if architecture is not None:
        found = variants(capability=_capability(architecture))
        loads = [partial(cuda.compile_variant, variant, architecture) for variant in found]
    else:
        target, backend = _served(target)
        if backend == "cuda":
            properties = torch.cuda.get_device_properties(target)
            found = variants(
                multiprocessors=properties.multi_processor_count, capability=10 * properties.major + properties.minor
            )
            loads = [partial(cuda.load_variant, variant, target.index) for variant in found]
        elif backend == "host":
            found = variants(multiprocessors=host.MULTIPROCESSORS)
            loads = [partial(host.load_variant, variant) for variant in found]
        else:
            loads = list(_first_calls(channels, **traits, steps=steps, device=target))
    for done, load in enumerate(loads):
        if progress is not None:
            progress(done, len(loads))
        load()
    if progress is not None:
        progress(len(loads), len(loads))
    return len(loads)


def _served(target: torch.device) -> tuple[torch.device, str]:
    """The device with its index, and the name of the backend whose kernels are loaded there."""
    if target.type == "cpu" or (target.type in ("cuda", "xpu") and getattr(torch, target.type).is_available()):
        target = torch.empty(0, device=target).device
        backend = choose_backend(target).name
        if backend != "reference":
            return target, backend
        why = "which the reference serves, without kernels"
    else:
        why = "which torch does not see"
    raise BackendError(
        "device",
        got=f"{target}, {why}",
        wanted="an NVIDIA GPU of sm_80 or later, with cuda-core and cuda-bindings installed, or one that Triton serves",
        remedy="give architecture='sm_90' to compile into the disk cache without a GPU",
    )


def _first_calls(
    channels: int,
    *,
    width: int,
    dtype: torch.dtype,
    weight_dtype: torch.dtype | None,
    state_dtype: torch.dtype | None,
    bias: bool,
    activation: str | None,
    layout: str,
    draft_tokens: int,
    steps: bool,
    device: torch.device,
) -> Iterator[Callable[[], object]]:
    """Calls of one token that together run each Triton kernel of a layer.

    Triton compiles for types, for which arguments are absent, for the alignment of addresses, and for constants that
    follow from the channels and the pool's layout: never for a number of rows, sequences or slots.
    """
    _checked(channels, width, layout, dtype, weight_dtype, state_dtype)

    def zeros(*shape: int, kind: torch.dtype | None = None) -> torch.Tensor:
        return torch.zeros(shape, dtype=kind or dtype, device=device)

    def number(value: int) -> torch.Tensor:
        return torch.full((1,), value, dtype=torch.int32, device=device)

    pool = zeros(2, state_positions(width, draft_tokens), channels, kind=state_dtype).transpose(1, 2)
    if layout == "positions":
        pool = pool.contiguous()
    x, weight, slots = zeros(1, channels), zeros(channels, width, kind=weight_dtype), number(1)
    offsets = torch.tensor([0, 1], dtype=torch.int32, device=device)
    options: dict[str, Any] = {"activation": activation, "bias": zeros(channels, kind=weight_dtype) if bias else None}
    for flags in (None, slots > 0):
        options["has_initial_state"] = flags
        for counts in (None, number(1)) if draft_tokens else (None,):
            options["num_accepted_tokens"] = counts
            yield partial(causal_conv1d_fn, x, weight, pool, offsets, slots, **options)
            for packed in (None, offsets):
                yield partial(causal_conv1d_update, x, weight, pool, slots, cu_seqlens=packed, **options)
            for named in _step_arguments(offsets, draft_tokens > 0) if steps else ():
                yield partial(causal_conv1d_step, x, weight, pool, offsets, slots, **named, **options)


def _step_arguments(offsets: torch.Tensor, drafts: bool) -> Iterator[dict[str, Any]]:
    """What a step of one token may give that prefill does not have: drafts, a checkpoint in slot 0, or both."""
    marks = {"speculative": offsets[1:] > 0}
    checkpoint = {
        "checkpoint_offsets": offsets,
        "checkpoint_tokens": torch.ones_like(offsets[1:]),
        "checkpoint_slots": torch.zeros_like(offsets[1:]),
    }
    yield checkpoint
    if drafts:
        yield from (marks, marks | checkpoint)


def _checked(
    channels: int,
    width: int,
    layout: str,
    dtype: torch.dtype,
    weight_dtype: torch.dtype | None,
    state_dtype: torch.dtype | None,
) -> tuple[str, str, str]:
    """Names of the types of x, of weight and bias, and of the pool, once every value is within the contract."""
    if channels < 1:
        raise ContractError("channels", got=channels, wanted="1 or more")
    if not MIN_WIDTH <= width <= MAX_WIDTH:
        raise ContractError("width", got=width, wanted=f"{MIN_WIDTH} to {MAX_WIDTH} taps")
    if layout not in ("channels", "positions"):
        raise ContractError("layout", got=repr(layout), wanted="'channels' or 'positions'")
    x, weight, state = (str(kind or dtype).removeprefix("torch.") for kind in (dtype, weight_dtype, state_dtype))
    for name in (x, weight, state):
        if name not in FLOAT_TYPES:
            raise ContractError("dtype", got=name, wanted=" or ".join(FLOAT_TYPES))
    return x, weight, state


def _capability(architecture: str) -> int:
    digits = architecture.removeprefix("sm_")
    if not architecture.startswith("sm_") or not digits.isdigit() or int(digits) < 80:
        raise ContractError("architecture", got=repr(architecture), wanted="sm_80 or later, as sm_90")
    return int(digits)
