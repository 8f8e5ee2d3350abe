"""Turns one backward call into its launches: the gradients of a run of rows, then the ordered sum of the runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from serving_conv.native.abi import BACKWARD_PACKER
from serving_conv.native.call import Launch, Run, address, aligned_vec, dtype_name, split, weight_runs
from serving_conv.native.config import LaunchConfig, choose_backward
from serving_conv.native.variant import CHANNELS_CONTIGUOUS, Variant

__all__ = ["BackwardBuffers", "prepare_backward"]

_SUM_THREADS = 128


@dataclass(frozen=True, slots=True)
class BackwardBuffers:
    """What a backward writes; None where it is not wanted.

    Attributes:
        dx: `[B, T, D]`, channels contiguous, the type of x.
        dweight: `[D, W]` contiguous, the type of the taps.
        dbias: `[D]`, the type of the bias.
        dinitial: fp32 `[N, W-1, D]` contiguous; sequences without rows leave their place as it is.
    """

    dx: Tensor | None
    dweight: Tensor | None
    dbias: Tensor | None
    dinitial: Tensor | None


def _vec(
    vec: int,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    initial: Tensor | None,
    dout: Tensor,
    dfinal: Tensor | None,
    dx: Tensor | None,
) -> int:
    """Channels of a thread: as many as addresses and strides allow, one where they do not lie side by side."""
    if x.stride(2) != 1 or dout.stride(2) != 1:
        return 1
    runs: list[Run] = [(t, t.element_size(), t.stride()[:2]) for t in (x, dout, dx) if t is not None]
    if initial is not None:
        runs.append((initial, initial.element_size(), (initial.stride(0), initial.stride(2))))
    if dfinal is not None:
        runs.append((dfinal, dfinal.element_size(), dfinal.stride()[:2]))
    return aligned_vec(vec, x.shape[2], runs + weight_runs(weight, bias))


def prepare_backward(
    dout: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    initial: Tensor | None,
    cu_seqlens: Tensor | None,
    dfinal: Tensor | None,
    buffers: BackwardBuffers,
    *,
    activation: str | None,
    ordered: bool,
    multiprocessors: int,
    choose: Callable[..., LaunchConfig] = choose_backward,
) -> tuple[list[Launch], list[Any]]:
    """The launches of one backward, in order, and the scratch that must outlive them.

    Args:
        dout: `[B, T, D]`, any strides.
        x: `[B, T, D]`, any strides.
        weight: `[D, W]` contiguous.
        bias: `[D]` contiguous, or None.
        initial: `[N, D, W-1]` initial windows, channels contiguous, or None for zeros; sequences past the N-th
            start from zeros.
        cu_seqlens: int32 `[sequences + 1]` over all B*T rows, or None: every batch is a sequence.
        dfinal: fp32 `[N, W-1, D]` contiguous, or None.
        buffers: where the gradients go.
        activation: SiLU unless None.
        ordered: the sums of dweight and dbias are added in one fixed order.
        multiprocessors: of the device.
        choose: the launch choice.
    """
    batches, rows, channels = x.shape
    width = weight.shape[1]
    if batches == 0 or channels == 0 or rows == 0:
        return [], []
    config = choose(
        rows=rows,
        batches=batches,
        channels=channels,
        width=width,
        x_bytes=x.element_size(),
        multiprocessors=multiprocessors,
    )
    runs_per_batch = -(-rows // config.rows)
    runs = runs_per_batch * batches
    terms = width + (bias is not None)
    sums = buffers.dweight is not None or buffers.dbias is not None
    partials = dweight = dbias = None
    if sums:
        places = runs if ordered else 1
        make = torch.empty if ordered else torch.zeros
        partials = make((places, terms, channels), dtype=torch.float32, device=x.device)
        # The second kernel writes both; what nobody asked for goes to scratch.
        dweight = torch.empty_like(weight) if buffers.dweight is None else buffers.dweight
        dbias = torch.empty_like(bias) if bias is not None and buffers.dbias is None else buffers.dbias
    vec = _vec(config.vec, x, weight, bias, initial, dout, dfinal, buffers.dx)
    variant = Variant(
        kernel="conv_backward",
        x=dtype_name(x),
        weight=dtype_name(weight),
        state=dtype_name(x if initial is None else initial),
        bias=dtype_name(weight if bias is None else bias),
        width=width,
        vec=vec,
        threads=config.threads,
        min_blocks=config.min_blocks,
        state_layout=CHANNELS_CONTIGUOUS,
        positions=width - 1,
        has_bias=bias is not None,
        silu=activation is not None,
        ahead=config.ahead,
        ordered=ordered,
    )

    def pack(run_count: int) -> bytes:
        return BACKWARD_PACKER.pack(
            weight.data_ptr(),
            address(bias),
            address(initial),
            x.data_ptr(),
            0,  # out
            address(cu_seqlens),
            *(0, 0, 0),  # slots, flags and counts
            *(0, 0, 0, 0),  # drafts and checkpoints of a step
            0,  # fault flag
            x.stride(1),
            0,
            *((0, 0, 0) if initial is None else initial.stride()),
            0,
            channels,
            0 if initial is None else initial.shape[0],
            width - 1,
            -1,
            batches * rows,
            batches if cu_seqlens is None else cu_seqlens.shape[0] - 1,
            *(0, 0),
            dout.data_ptr(),
            address(buffers.dx),
            address(dfinal),
            address(buffers.dinitial),
            address(partials),
            address(dweight),
            address(dbias),
            x.stride(0),
            x.stride(2),
            *dout.stride(),
            *((0, 0) if buffers.dx is None else buffers.dx.stride()[:2]),
            rows,
            config.rows,
            runs_per_batch,
            run_count,
            0 if buffers.dinitial is None else buffers.dinitial.shape[0],
            0 if dfinal is None else dfinal.shape[0],
        )

    tiles = -(-channels // (config.threads * vec))
    launches = [Launch(variant, pack(runs), (tiles, *split(runs)))]
    if sums:
        adder = Variant(
            kernel="sum_partials",
            x="float32",
            weight=variant.weight,
            state="float32",
            bias=variant.bias,
            width=width,
            vec=1,
            threads=_SUM_THREADS,
            min_blocks=4,
            state_layout=CHANNELS_CONTIGUOUS,
            positions=width - 1,
            has_bias=variant.has_bias,
            silu=False,
            ordered=True,
        )
        blocks = -(-terms * channels // _SUM_THREADS)
        launches.append(Launch(adder, pack(runs if ordered else 1), (*split(blocks), 1)))
    return launches, [partials, dweight, dbias]
