"""Turns one checked call into a launch: the variant, the packed parameters and the grid. No device is touched."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from serving_conv.native.abi import PACKER
from serving_conv.native.config import LaunchConfig, choose_prefill, choose_update
from serving_conv.native.variant import CHANNELS_CONTIGUOUS, POSITIONS_DENSE, STRIDED, Variant

__all__ = ["Launch", "Traits", "prepare_prefill", "prepare_update", "split", "state_layout", "variant_of", "word"]

_GRID_LIMIT = 32768  # of y and z; CUDA allows 65535
_DENSE_LIMIT = 16  # positions of a dense slot that a thread holds in registers; longer slots go by strides


@dataclass(frozen=True, slots=True)
class Launch:
    """Everything a backend needs; `parameters` holds addresses, so the tensors must stay alive."""

    variant: Variant
    parameters: bytes
    grid: tuple[int, int, int]


def _dtype(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def state_layout(conv_state: Tensor) -> int:
    """STATE_LAYOUT of a `[slots, channels, positions]` tensor."""
    _, channels, positions = conv_state.shape
    _, channel_stride, position_stride = conv_state.stride()
    if channel_stride == 1 or channels == 1:
        return CHANNELS_CONTIGUOUS
    if (position_stride == 1 or positions == 1) and channel_stride == positions and positions <= _DENSE_LIMIT:
        return POSITIONS_DENSE
    return STRIDED


def word(bytes_in_run: int) -> int:
    """Largest power of two up to 16 that divides a run of bytes; `word_bytes` of kernels/channels.cuh."""
    return min(16, bytes_in_run & -bytes_in_run)


def _aligned_vec(
    vec: int, x: Tensor, weight: Tensor, bias: Tensor | None, conv_state: Tensor, out: Tensor, layout: int
) -> int:
    """Halve `vec` until channels, base addresses and strides all allow its words."""
    channels = x.shape[1]
    width = weight.shape[1]
    while vec > 1:
        x_word = word(vec * x.element_size())
        runs = [
            (x, x_word, (x.stride(0),)),
            (out, x_word, (out.stride(0),)),
            (weight, word(vec * width * weight.element_size()), ()),
        ]
        if bias is not None:
            runs.append((bias, word(vec * bias.element_size()), ()))
        if layout == CHANNELS_CONTIGUOUS:
            strides = (conv_state.stride(0), conv_state.stride(2))
            runs.append((conv_state, word(vec * conv_state.element_size()), strides))
        elif layout == POSITIONS_DENSE:
            run = vec * conv_state.shape[2] * conv_state.element_size()
            runs.append((conv_state, word(run), (conv_state.stride(0),)))
        if channels % vec == 0 and all(
            tensor.data_ptr() % word == 0 and all(stride * tensor.element_size() % word == 0 for stride in strides)
            for tensor, word, strides in runs
        ):
            break
        vec //= 2
    return vec


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def split(count: int) -> tuple[int, int]:
    """A count as two grid axes, the second the high digit."""
    low = min(count, _GRID_LIMIT)
    return low, -(-count // low)


def _pack(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    conv_state: Tensor,
    out: Tensor,
    cu_seqlens: Tensor | None,
    slots: Tensor,
    has_initial_state: Tensor | None,
    num_accepted_tokens: Tensor | None,
    fault_flag: Tensor,
    pad_slot_id: int,
    speculative: Tensor | None = None,
    checkpoint_offsets: Tensor | None = None,
    checkpoint_tokens: Tensor | None = None,
    checkpoint_slots: Tensor | None = None,
) -> bytes:
    return PACKER.pack(
        x.data_ptr(),
        weight.data_ptr(),
        _address(bias),
        conv_state.data_ptr(),
        out.data_ptr(),
        _address(cu_seqlens),
        slots.data_ptr(),
        _address(has_initial_state),
        _address(num_accepted_tokens),
        fault_flag.data_ptr(),
        _address(speculative),
        _address(checkpoint_offsets),
        _address(checkpoint_tokens),
        _address(checkpoint_slots),
        x.stride(0),
        out.stride(0),
        *conv_state.stride(),
        slots.stride(0),
        x.shape[0],
        x.shape[1],
        slots.shape[0],
        conv_state.shape[0],
        conv_state.shape[2],
        pad_slot_id,
        0 if checkpoint_tokens is None else checkpoint_tokens.shape[0],
        0,
    )


@dataclass(frozen=True, slots=True)
class Traits:
    """What a variant takes from the tensors of a call, beside the launch choice.

    Attributes:
        x: type name of x and out; `weight`, `state` and `bias` likewise.
        width: taps.
        layout: STATE_LAYOUT of the pool.
        positions: of a slot.
        has_bias: a bias is given.
        silu: an activation is applied.
        counted: accepted counts are given.
    """

    x: str
    weight: str
    state: str
    bias: str
    width: int
    layout: int
    positions: int
    has_bias: bool
    silu: bool
    counted: bool


def _traits(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    conv_state: Tensor,
    activation: str | None,
    num_accepted_tokens: Tensor | None,
) -> Traits:
    return Traits(
        x=_dtype(x),
        weight=_dtype(weight),
        state=_dtype(conv_state),
        bias=_dtype(weight if bias is None else bias),
        width=weight.shape[1],
        layout=state_layout(conv_state),
        positions=conv_state.shape[2],
        has_bias=bias is not None,
        silu=activation is not None,
        counted=num_accepted_tokens is not None,
    )


def variant_of(
    kernel: str,
    traits: Traits,
    config: LaunchConfig,
    vec: int,
    *,
    packed: bool = False,
    drafts: bool = False,
    checkpoints: bool = False,
) -> Variant:
    """The variant that a call with these traits runs; `drafts` and `checkpoints` as a step may give them."""
    # A speculative step has at most L-W+2 tokens worth storing: with all of them ahead a dense slot is one run.
    most_tokens = traits.positions - traits.width + 2
    return Variant(
        kernel=kernel,
        x=traits.x,
        weight=traits.weight,
        state=traits.state,
        bias=traits.bias,
        width=traits.width,
        vec=vec,
        threads=config.threads,
        min_blocks=config.min_blocks,
        state_layout=traits.layout,
        positions=traits.positions if traits.layout == POSITIONS_DENSE else traits.width - 1,
        has_bias=traits.has_bias,
        silu=traits.silu,
        rows=config.rows,
        packed=packed,
        # With one row a sequence a counted step leaves the same slot as a plain one.
        speculative=drafts or (packed and traits.counted),
        checkpoints=checkpoints,
        ahead=(min(8, most_tokens) if traits.counted else 4) if packed else 0,
        sequences=0 if packed else config.sequences,
    )


def prepare_prefill(
    x: Tensor,
    weight: Tensor,
    conv_state: Tensor,
    cu_seqlens: Tensor,
    cache_indices: Tensor,
    has_initial_state: Tensor | None,
    bias: Tensor | None,
    activation: str | None,
    num_accepted_tokens: Tensor | None,
    out: Tensor,
    pad_slot_id: int,
    *,
    speculative: Tensor | None = None,
    checkpoint_offsets: Tensor | None = None,
    checkpoint_tokens: Tensor | None = None,
    checkpoint_slots: Tensor | None = None,
    fault_flag: Tensor,
    multiprocessors: int,
    capability: int = 80,
) -> Launch | None:
    """The launch of `causal_conv1d_step`, and of `causal_conv1d_fn`; None if there is nothing to compute."""
    rows, channels = x.shape
    if rows == 0 or channels == 0:
        return None
    traits = _traits(x, weight, bias, conv_state, activation, num_accepted_tokens)
    config = choose_prefill(
        rows=rows,
        channels=channels,
        width=traits.width,
        x_bytes=x.element_size(),
        simple_state=traits.layout == CHANNELS_CONTIGUOUS,
        multiprocessors=multiprocessors,
        capability=capability,
    )
    vec = _aligned_vec(config.vec, x, weight, bias, conv_state, out, traits.layout)
    checkpoints = 0 if checkpoint_tokens is None else checkpoint_tokens.shape[0]
    variant = variant_of(
        "conv_prefill", traits, config, vec, drafts=speculative is not None, checkpoints=checkpoints > 0
    )
    parameters = _pack(
        x,
        weight,
        bias,
        conv_state,
        out,
        cu_seqlens,
        cache_indices,
        has_initial_state,
        num_accepted_tokens,
        fault_flag,
        pad_slot_id,
        speculative,
        checkpoint_offsets,
        checkpoint_tokens,
        checkpoint_slots,
    )
    # A block for each checkpoint behind those of the rows.
    blocks = -(-rows // config.rows) + checkpoints
    return Launch(variant, parameters, (-(-channels // (config.threads * vec)), *split(blocks)))


def prepare_update(
    x: Tensor,
    weight: Tensor,
    conv_state: Tensor,
    state_indices: Tensor,
    cu_seqlens: Tensor | None,
    num_accepted_tokens: Tensor | None,
    has_initial_state: Tensor | None,
    bias: Tensor | None,
    activation: str | None,
    out: Tensor,
    pad_slot_id: int,
    *,
    fault_flag: Tensor,
) -> Launch | None:
    """The launch of `causal_conv1d_update`, or None if there is nothing to compute."""
    channels, sequences = x.shape[1], state_indices.shape[0]
    if x.shape[0] == 0 or channels == 0:
        return None
    packed = cu_seqlens is not None
    traits = _traits(x, weight, bias, conv_state, activation, num_accepted_tokens)
    config = choose_update(
        sequences=sequences,
        channels=channels,
        width=traits.width,
        x_bytes=x.element_size(),
        packed=packed,
        simple_state=traits.layout == CHANNELS_CONTIGUOUS,
    )
    vec = _aligned_vec(config.vec, x, weight, bias, conv_state, out, traits.layout)
    variant = variant_of("conv_update", traits, config, vec, packed=packed)
    parameters = _pack(
        x,
        weight,
        bias,
        conv_state,
        out,
        cu_seqlens,
        state_indices,
        has_initial_state,
        num_accepted_tokens,
        fault_flag,
        pad_slot_id,
    )
    tiles = -(-channels // (config.threads * vec))
    groups = sequences if packed else -(-sequences // config.sequences)
    return Launch(variant, parameters, (groups, *split(tiles)))
