"""Turns one checked call into a launch of a Triton kernel. Triton is optional and is imported at the first call."""

from __future__ import annotations

import importlib.util
from functools import cache
from typing import Any

import torch
from torch import Tensor

from serving_conv.errors import BackendError, CaptureError
from serving_conv.faults import fault_flag
from serving_conv.native.call import split
from serving_conv.settings import SETTINGS

__all__ = ["TritonBackend"]

_CHANNELS_CONTIGUOUS, _POSITIONS_CONTIGUOUS, _STRIDED = 0, 1, 2
_MOST_BYTES = 16  # of one access


class TritonBackend:
    """Runs wherever Triton has a compiler: NVIDIA, AMD and Intel GPUs; on the CPU by its interpreter, if asked for."""

    name = "triton"

    def supports(self, device: torch.device) -> bool:
        """GPU tensors, with triton installed; CPU tensors when this backend is named and the interpreter is on."""
        if importlib.util.find_spec("triton") is None:
            return False
        if device.type == "cpu":
            return SETTINGS.backend == self.name and _interpreted()
        return device.type in ("cuda", "xpu")

    def prefill(self, *, x: Tensor, cache_indices: Tensor, workspace: Tensor | None, **arguments: Any) -> None:
        """`causal_conv1d_fn`; the kernel needs no scratch."""
        _launch("conv_prefill", x=x, slots=cache_indices, **arguments)

    def update(self, *, x: Tensor, state_indices: Tensor, **arguments: Any) -> None:
        """`causal_conv1d_update`."""
        _launch("conv_update", x=x, slots=state_indices, **arguments)

    def step(
        self,
        *,
        x: Tensor,
        cache_indices: Tensor,
        speculative: Tensor | None,
        checkpoint_offsets: Tensor | None,
        checkpoint_tokens: Tensor | None,
        checkpoint_slots: Tensor | None,
        **arguments: Any,
    ) -> None:
        """`causal_conv1d_step` without drafts and checkpoints, which is prefill.

        Raises:
            BackendError: drafts or checkpoints are given; these kernels have neither.
        """
        for name, given in (("speculative", speculative), ("checkpoint_tokens", checkpoint_tokens)):
            if given is not None:
                raise BackendError(
                    name,
                    got="a step with it, on the triton backend",
                    wanted="None",
                    remedy="call causal_conv1d_fn and causal_conv1d_update apart, and copy checkpoints with the pool",
                )
        _launch("conv_prefill", x=x, slots=cache_indices, **arguments)


@cache
def _interpreted() -> bool:
    import triton

    return bool(triton.knobs.runtime.interpret)


def _layout(conv_state: Tensor) -> int:
    _, channels, positions = conv_state.shape
    _, channel_stride, position_stride = conv_state.stride()
    if channel_stride == 1 or channels == 1:
        return _CHANNELS_CONTIGUOUS
    return _POSITIONS_CONTIGUOUS if position_stride == 1 or positions == 1 else _STRIDED


def _vec(x: Tensor, out: Tensor, conv_state: Tensor, layout: int) -> int:
    """Elements, 1 to 16 and a power of two, that divide the channels and every stride between runs of them."""
    sizes = [x.shape[1], x.stride(0), out.stride(0)]
    if layout == _CHANNELS_CONTIGUOUS:
        sizes += [conv_state.stride(0), conv_state.stride(2)]
    vec = 16
    while any(size % vec for size in sizes):
        vec //= 2
    return vec


# Kernels that a process has run, by all that Triton compiles for.
_loaded: set[tuple[Any, ...]] = set()


def _launch(
    kernel: str,
    *,
    x: Tensor,
    weight: Tensor,
    conv_state: Tensor,
    cu_seqlens: Tensor | None,
    slots: Tensor,
    has_initial_state: Tensor | None,
    bias: Tensor | None,
    activation: str | None,
    num_accepted_tokens: Tensor | None,
    out: Tensor,
    pad_slot_id: int,
) -> None:
    rows, channels = x.shape
    if rows == 0 or channels == 0:
        return
    sequences, width = slots.shape[0], weight.shape[1]
    layout = _layout(conv_state)
    vec = _vec(x, out, conv_state, layout)
    scale = vec if layout == _CHANNELS_CONTIGUOUS else 1
    constants: dict[str, Any] = {"WIDTH": width, "SILU": activation is not None, "LAYOUT": layout, "VEC": vec}
    tile = 256 if channels > 128 else 128 if channels > 64 else 64
    tiles = -(-channels // tile)
    if kernel == "conv_prefill":
        block_rows = 16
        constants |= {"ROWS": block_rows, "CHANNELS": tile}
        # 16 elements a thread: 86 registers on sm_90; with 32 it is 163, and slots with positions contiguous spill.
        warps = tile * block_rows // 512
        grid = (tiles, *split(-(-rows // block_rows)))
    else:
        # With one row a sequence a counted step leaves the same slot as a plain one.
        constants |= {"SPECULATIVE": num_accepted_tokens is not None and cu_seqlens is not None, "CHANNELS": tile}
        grid = (sequences, *split(tiles))
        warps = tile // 64  # two elements a thread
    flags = None if has_initial_state is None else has_initial_state.view(torch.uint8)
    tensors = (
        x,
        weight,
        bias,
        conv_state,
        out,
        cu_seqlens,
        slots,
        flags,
        num_accepted_tokens,
        fault_flag(x.device),
    )
    key = (
        kernel,
        x.device,
        *constants.values(),
        *[None if t is None else t.dtype for t in tensors],
        *[t.data_ptr() % _MOST_BYTES == 0 for t in (x, conv_state, out)],
    )
    if key not in _loaded and x.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise CaptureError(
            kernel,
            got="a kernel that is not loaded yet, under graph capture",
            wanted="every kernel of a graph loaded before capture",
            remedy="run the step once eagerly before capturing",
        )
    sizes = (
        x.stride(0) // vec,
        out.stride(0) // vec,
        conv_state.stride(0) // scale,
        conv_state.stride(1),
        conv_state.stride(2) // scale,
        slots.stride(0),
        rows,
        channels // vec,
        sequences,
        conv_state.shape[0],
        conv_state.shape[2],
        pad_slot_id,
    )
    from serving_conv.portable import kernels

    if x.device.type == "cuda":
        with torch.cuda.device(x.device):
            getattr(kernels, kernel)[grid](*tensors, *sizes, **constants, num_warps=warps)
    else:
        getattr(kernels, kernel)[grid](*tensors, *sizes, **constants, num_warps=warps)
    _loaded.add(key)
