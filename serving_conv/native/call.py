"""Turns one checked call into a launch: the variant, the packed parameters and the grid. No device is touched."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import TypeAlias

import torch
from torch import Tensor

from serving_conv.native.abi import PACKER
from serving_conv.native.config import LaunchConfig, choose_prefill, choose_update
from serving_conv.native.variant import CHANNELS_CONTIGUOUS, POSITIONS_DENSE, STRIDED, Variant

__all__ = [
    "Chooser",
    "ForwardLaunch",
    "Launch",
    "Run",
    "Traits",
    "address",
    "aligned_vec",
    "dtype_name",
    "prepare_prefill",
    "prepare_update",
    "split",
    "state_layout",
    "variant_of",
    "weight_runs",
]

_GRID_LIMIT = 32768  # of y and z; CUDA allows 65535
_DENSE_LIMIT = 16  # positions of a dense slot that a thread holds in registers; longer slots go by strides


@dataclass(frozen=True, slots=True)
class Launch:
    """Everything a backend needs; `parameters` holds addresses, so the tensors must stay alive."""

    variant: Variant
    parameters: bytes
    grid: tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class ForwardLaunch(Launch):
    """A launch of the convolution, with what chooses it for other sizes."""

    chooser: Chooser


def dtype_name(tensor: Tensor) -> str:
    """As the variants spell it."""
    return _name(tensor.dtype)


@cache
def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def state_layout(conv_state: Tensor) -> int:
    """STATE_LAYOUT of a `[slots, channels, positions]` tensor."""
    _, channels, positions = conv_state.shape
    _, channel_stride, position_stride = conv_state.stride()
    if channel_stride == 1 or channels == 1:
        return CHANNELS_CONTIGUOUS
    if (position_stride == 1 or positions == 1) and channel_stride == positions and positions <= _DENSE_LIMIT:
        return POSITIONS_DENSE
    return STRIDED


def _word(bytes_in_run: int) -> int:
    """Largest power of two up to 16 that divides a run of bytes; `word_bytes` of kernels/channels.cuh."""
    return min(16, bytes_in_run & -bytes_in_run)


Run: TypeAlias = tuple[Tensor, int, tuple[int, ...]]
"""A tensor, the bytes that a channel of a thread has in one piece there, and the strides between such pieces."""


def aligned_vec(vec: int, channels: int, runs: Sequence[Run]) -> int:
    """Halve `vec`, a power of two, until channels, base addresses and strides all allow its words."""
    while vec > 1:
        if channels % vec == 0 and all(
            tensor.data_ptr() % _word(vec * size) == 0
            and all(stride * tensor.element_size() % _word(vec * size) == 0 for stride in strides)
            for tensor, size, strides in runs
        ):
            break
        vec //= 2
    return vec


def weight_runs(weight: Tensor, bias: Tensor | None) -> list[Run]:
    """The runs of taps and bias."""
    runs: list[Run] = [(weight, weight.shape[1] * weight.element_size(), ())]
    if bias is not None:
        runs.append((bias, bias.element_size(), ()))
    return runs


def _runs(x: Tensor, weight: Tensor, bias: Tensor | None, conv_state: Tensor, out: Tensor, layout: int) -> list[Run]:
    runs: list[Run] = [(rows, rows.element_size(), (rows.stride(0),)) for rows in (x, out)]
    if layout == CHANNELS_CONTIGUOUS:
        runs.append((conv_state, conv_state.element_size(), (conv_state.stride(0), conv_state.stride(2))))
    elif layout == POSITIONS_DENSE:
        size = conv_state.shape[2] * conv_state.element_size()
        runs.append((conv_state, size, (conv_state.stride(0),)))
    return runs + weight_runs(weight, bias)


def address(tensor: Tensor | None) -> int:
    """Where a tensor begins; 0 if it is absent."""
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
        weight.data_ptr(),
        address(bias),
        conv_state.data_ptr(),
        x.data_ptr(),
        out.data_ptr(),
        address(cu_seqlens),
        slots.data_ptr(),
        address(has_initial_state),
        address(num_accepted_tokens),
        address(speculative),
        address(checkpoint_offsets),
        address(checkpoint_tokens),
        address(checkpoint_slots),
        fault_flag.data_ptr(),
        x.stride(0),
        out.stride(0),
        *conv_state.stride(),
        slots.stride(0),
        x.shape[1],
        conv_state.shape[0],
        conv_state.shape[2],
        pad_slot_id,
        x.shape[0],
        slots.shape[0],
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
        x=dtype_name(x),
        weight=dtype_name(weight),
        state=dtype_name(conv_state),
        bias=dtype_name(weight if bias is None else bias),
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


@dataclass(frozen=True, slots=True)
class Chooser:
    """Chooses the launch of calls that differ in sizes and addresses alone, every address allowing the widest words.

    Attributes:
        kernel: conv_prefill, which serves steps too, or conv_update.
        traits: of the calls.
        channels: of a row.
        x_bytes: of an element of x.
        most_vec: most channels a thread may own, as far as strides and addresses decide.
        packed: offsets are given (update).
        drafts: sequences may be marked as drafts.
        multiprocessors: of the device; only the prefill kernel's launch depends on the device.
        capability: of the device, as 90.
    """

    kernel: str
    traits: Traits
    channels: int
    x_bytes: int
    most_vec: int
    packed: bool = False
    drafts: bool = False
    multiprocessors: int = 0
    capability: int = 80

    def config(self, rows: int, sequences: int) -> LaunchConfig:
        """The launch choice; an update's depends on the sequences alone, another's on the rows."""
        simple_state = self.traits.layout == CHANNELS_CONTIGUOUS
        if self.kernel == "conv_update":
            return choose_update(
                sequences=sequences,
                channels=self.channels,
                width=self.traits.width,
                x_bytes=self.x_bytes,
                packed=self.packed,
                simple_state=simple_state,
            )
        return choose_prefill(
            rows=rows,
            channels=self.channels,
            width=self.traits.width,
            x_bytes=self.x_bytes,
            simple_state=simple_state,
            multiprocessors=self.multiprocessors,
            capability=self.capability,
        )

    def variant(self, config: LaunchConfig, *, checkpoints: bool) -> Variant:
        """The variant that a launch choice runs."""
        vec = min(config.vec, self.most_vec)
        return variant_of(
            *(self.kernel, self.traits, config, vec), packed=self.packed, drafts=self.drafts, checkpoints=checkpoints
        )

    def grid(self, config: LaunchConfig, rows: int, sequences: int, checkpoints: int) -> tuple[int, int, int]:
        """Blocks of a launch choice."""
        tiles = -(-self.channels // (config.threads * min(config.vec, self.most_vec)))
        if self.kernel == "conv_update":
            groups = sequences if self.packed else -(-sequences // config.sequences)
            return (groups, *split(tiles))
        # A block for each checkpoint behind those of the rows.
        return (tiles, *split(-(-rows // config.rows) + checkpoints))


def _chooser(
    kernel: str,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    conv_state: Tensor,
    activation: str | None,
    num_accepted_tokens: Tensor | None,
    out: Tensor,
    *,
    packed: bool = False,
    drafts: bool = False,
    multiprocessors: int = 0,
    capability: int = 80,
) -> Chooser:
    traits = _traits(x, weight, bias, conv_state, activation, num_accepted_tokens)
    most_vec = aligned_vec(16 // x.element_size(), x.shape[1], _runs(x, weight, bias, conv_state, out, traits.layout))
    return Chooser(
        *(kernel, traits, x.shape[1], x.element_size(), most_vec, packed, drafts, multiprocessors, capability)
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
) -> ForwardLaunch | None:
    """The launch of `causal_conv1d_step`, and of `causal_conv1d_fn`; None if there is nothing to compute."""
    (rows, channels), sequences = x.shape, cache_indices.shape[0]
    if rows == 0 or channels == 0:
        return None
    chooser = _chooser(
        "conv_prefill",
        *(x, weight, bias, conv_state, activation, num_accepted_tokens, out),
        drafts=speculative is not None,
        multiprocessors=multiprocessors,
        capability=capability,
    )
    checkpoints = 0 if checkpoint_tokens is None else checkpoint_tokens.shape[0]
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
    return _launch(chooser, parameters, rows, sequences, checkpoints)


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
) -> ForwardLaunch | None:
    """The launch of `causal_conv1d_update`, or None if there is nothing to compute."""
    (rows, channels), sequences = x.shape, state_indices.shape[0]
    if rows == 0 or channels == 0:
        return None
    packed = cu_seqlens is not None
    chooser = _chooser("conv_update", x, weight, bias, conv_state, activation, num_accepted_tokens, out, packed=packed)
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
    return _launch(chooser, parameters, rows, sequences, 0)


def _launch(chooser: Chooser, parameters: bytes, rows: int, sequences: int, checkpoints: int) -> ForwardLaunch:
    config = chooser.config(rows, sequences)
    variant = chooser.variant(config, checkpoints=checkpoints > 0)
    return ForwardLaunch(variant, parameters, chooser.grid(config, rows, sequences, checkpoints), chooser)
