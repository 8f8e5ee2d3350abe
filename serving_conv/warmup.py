"""Loads the kernels that a model needs before it serves: no request compiles, no capture meets a cold one."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import torch

from serving_conv.contract import FLOAT_TYPES, MAX_WIDTH, MIN_WIDTH, state_positions
from serving_conv.errors import BackendError, ContractError
from serving_conv.native.call import Traits, variant_of
from serving_conv.native.config import choose_prefill, choose_update
from serving_conv.native.cuda import CudaBackend, compile_variant, load_variant
from serving_conv.native.variant import CHANNELS_CONTIGUOUS, POSITIONS_DENSE, Variant

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
    """Every kernel that calls of one layer can run, whatever their number of rows and sequences.

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
    if channels < 1:
        raise ContractError("channels", got=channels, wanted="1 or more")
    if not MIN_WIDTH <= width <= MAX_WIDTH:
        raise ContractError("width", got=width, wanted=f"{MIN_WIDTH} to {MAX_WIDTH} taps")
    if layout not in ("channels", "positions"):
        raise ContractError("layout", got=repr(layout), wanted="'channels' or 'positions'")
    names = [str(kind or dtype).removeprefix("torch.") for kind in (dtype, weight_dtype, state_dtype, weight_dtype)]
    for name in names:
        if name not in FLOAT_TYPES:
            raise ContractError("dtype", got=name, wanted=" or ".join(FLOAT_TYPES))
    simple = layout == "channels"
    x_bytes = dtype.itemsize

    def traits(*, counted: bool) -> Traits:
        return Traits(
            x=names[0],
            weight=names[1],
            state=names[2],
            bias=names[3],
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
    addresses or strides may still need one more kernel.

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
        device: where to load; ignored with `architecture`.
        architecture: as `sm_90`: only compile into the disk cache, which needs no GPU.
        progress: called with (kernels done, kernels in all).

    Returns:
        The number of kernels loaded, or compiled.

    Raises:
        ContractError: a value outside the contract.
        BackendError: no CUDA device, no cuda-python, or a compilation that fails.
    """
    target = torch.device(device)
    multiprocessors = _ASSUMED_MULTIPROCESSORS
    if architecture is not None:
        capability = _capability(architecture)
    else:
        if not torch.cuda.is_available() or not CudaBackend().supports(target):
            raise BackendError(
                "device",
                got=str(target),
                wanted="an NVIDIA GPU of sm_80 or later, with cuda-core and cuda-bindings installed",
                remedy="give architecture='sm_90' to compile into the disk cache without a GPU",
            )
        properties = torch.cuda.get_device_properties(target)
        multiprocessors = properties.multi_processor_count
        capability = 10 * properties.major + properties.minor
    variants = model_variants(
        channels,
        width=width,
        dtype=dtype,
        weight_dtype=weight_dtype,
        state_dtype=state_dtype,
        bias=bias,
        activation=activation,
        layout=layout,
        draft_tokens=draft_tokens,
        steps=steps,
        multiprocessors=multiprocessors,
        capability=capability,
    )
    for done, variant in enumerate(variants):
        if progress is not None:
            progress(done, len(variants))
        if architecture is not None:
            compile_variant(variant, architecture)
        else:
            load_variant(variant, torch.cuda.current_device() if target.index is None else target.index)
    if progress is not None:
        progress(len(variants), len(variants))
    return len(variants)


def _capability(architecture: str) -> int:
    digits = architecture.removeprefix("sm_")
    if not architecture.startswith("sm_") or not digits.isdigit() or int(digits) < 80:
        raise ContractError("architecture", got=repr(architecture), wanted="sm_80 or later, as sm_90")
    return int(digits)
