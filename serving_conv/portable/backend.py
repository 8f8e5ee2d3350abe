"""Turns one checked call into a launch of a Triton kernel. Triton is optional and is imported at the first call."""

from __future__ import annotations

import importlib.util
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from serving_conv.errors import CaptureError
from serving_conv.faults import fault_flag
from serving_conv.native.call import split
from serving_conv.settings import SETTINGS

__all__ = ["Choice", "Launch", "TritonBackend", "choose", "prepare"]

_CHANNELS_CONTIGUOUS, _POSITIONS_CONTIGUOUS, _STRIDED = 0, 1, 2
_MOST_BYTES = 16  # of one access
_WARP = 32


@dataclass(frozen=True, slots=True)
class Choice:
    """What a launch choice fixes.

    Attributes:
        each: channels of a thread, a power of two.
        warps: of a program, a power of two.
        rows: packed rows of a program, a power of two (prefill).
        group: rows computed together where several sequences meet, a divisor of `rows` (prefill).
        ahead: rows loaded before the first is needed (update with offsets).
        sequences: of a program (update without offsets).
        registers: most that a thread may use; None leaves it to the compiler.
    """

    each: int
    warps: int
    rows: int = 0
    group: int = 0
    ahead: int = 0
    sequences: int = 0
    registers: int | None = None


def choose(kernel: str, *, width: int, element_bytes: int, layout: int, packed: bool, most_tokens: int) -> Choice:
    """Every launch choice: a pure function of what a model fixes, so that no size of a step makes another kernel.

    Measured on an H200, bf16, 8192 channels, 4 taps; microseconds a call beside the CUDA backend's:
        prefill                 512 rows 8.03 (6.88), 8192 68.5 (67.2), 32768 263 (256), 256 short 34.2 (27.3),
                                4096 + 200 of one 46.5 (45.2); 2 rows a group are the most within 128 registers
        decode                  1 1.41 (1.35), 8 1.80 (1.67), 64 3.66 (3.28), 1024 35.3 (36.3)
        decode, positions       64 5.06 (3.21), 1024 57.3 (37.9); 5.9 and 58.5 with 4 channels a thread
        speculative             2 warps 1.02 of the best over 8 and 256 sequences, 4 warps 1.035, 8 channels 1.10
        speculative, positions  256 46.7 (23.8); 52 with 4 channels a thread

    Args:
        kernel: its name.
        width: taps.
        element_bytes: of x.
        layout: LAYOUT of the pool.
        packed: offsets are given.
        most_tokens: of a speculative step, L-W+2.
    """
    each = max(1, min(8 // element_bytes, 16 // width if width <= 4 else 2))
    if kernel == "conv_prefill":
        return Choice(each=each, warps=4, rows=16, group=2)
    ahead = max(1, min(4, most_tokens))
    if layout == _CHANNELS_CONTIGUOUS:
        return Choice(each=each, warps=2, ahead=ahead) if packed else Choice(each=each, warps=4, sequences=1)
    if packed:
        return Choice(each=1, warps=4, ahead=ahead)
    return Choice(each=min(each, 2), warps=4, sequences=1)


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

    def step(self, *, x: Tensor, cache_indices: Tensor, **arguments: Any) -> None:
        """`causal_conv1d_step`: the kernel of prefill."""
        _launch("conv_prefill", x=x, slots=cache_indices, **arguments)


@cache
def _interpreted() -> bool:
    import triton

    return bool(triton.knobs.runtime.interpret)


def _is_nvidia(device: torch.device) -> bool:
    return device.type == "cuda" and torch.version.hip is None


@cache
def _launches_dependently(device: torch.device) -> bool:
    """Whether a kernel may start while the one before it still runs: programmatic dependent launch, from sm_90."""
    return SETTINGS.dependent_launch and _is_nvidia(device) and torch.cuda.get_device_capability(device) >= (9, 0)


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


def _tap_word(weight: Tensor) -> int:
    """Bytes of the words, 8 or 4, that the taps of a channel fill, several taps a word; 0 if there are none such."""
    run = weight.shape[1] * weight.element_size()
    for word in (8, 4):
        if word > weight.element_size() and run % word == 0 and weight.data_ptr() % word == 0:
            return word
    return 0


def _bytes(flags: Tensor | None) -> Tensor | None:
    return None if flags is None else flags.view(torch.uint8)


@dataclass(frozen=True, slots=True)
class Launch:
    """One launch of a Triton kernel.

    Attributes:
        kernel: its name.
        grid: of programs.
        tensors: the kernel's first parameters; the first five are those whose alignment Triton compiles for.
        sizes: the parameters after them; nothing is compiled for their values.
        constants: what is compiled in.
        options: of Triton's compiler and launcher.
    """

    kernel: str
    grid: tuple[int, int, int]
    tensors: tuple[Tensor | None, ...]
    sizes: tuple[int, ...]
    constants: dict[str, Any]
    options: dict[str, Any]

    def compiled_for(self) -> tuple[Any, ...]:
        """All that makes another kernel, but for the device."""
        return (
            self.kernel,
            *self.constants.values(),
            *self.options.values(),
            *[None if t is None else t.dtype for t in self.tensors],
            *[t is not None and t.data_ptr() % _MOST_BYTES == 0 for t in self.tensors[:5]],
        )


def prepare(
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
    speculative: Tensor | None = None,
    checkpoint_offsets: Tensor | None = None,
    checkpoint_tokens: Tensor | None = None,
    checkpoint_slots: Tensor | None = None,
    fault_flag: Tensor,
    nvidia: bool,
    dependent: bool,
) -> Launch | None:
    """The launch of a checked call, or None if there is nothing to compute. No device is touched.

    `kernel` is `conv_prefill`, with the arguments of `causal_conv1d_step`, or `conv_update`; `slots` are the
    `cache_indices` of the one and the `state_indices` of the other. Sticky codes go to `fault_flag`. `nvidia` says that
    the device speaks PTX, `dependent` that it has programmatic dependent launch.
    """
    rows, channels = x.shape
    if rows == 0 or channels == 0:
        return None
    sequences, width = slots.shape[0], weight.shape[1]
    layout = _layout(conv_state)
    vec = _vec(x, out, conv_state, layout)
    scale = vec if layout == _CHANNELS_CONTIGUOUS else 1
    choice = choose(
        kernel,
        width=width,
        element_bytes=x.element_size(),
        layout=layout,
        packed=cu_seqlens is not None,
        most_tokens=conv_state.shape[2] - width + 2,
    )
    tile, warps = choice.each * choice.warps * _WARP, choice.warps
    while warps > 1 and tile // 2 >= channels:  # fewer threads hold them all
        tile, warps = tile // 2, warps // 2
    tiles = -(-channels // tile)
    constants: dict[str, Any] = {
        "WIDTH": width,
        "SILU": activation is not None,
        "LAYOUT": layout,
        "VEC": vec,
        "CHANNELS": tile,
        "EVEN": channels % tile == 0,
        "TAP_WORD": _tap_word(weight),
        "PTX": nvidia,
        "DEPENDENT": dependent,
    }
    options: dict[str, Any] = {"num_warps": warps}
    if dependent:
        options["launch_pdl"] = True
    if nvidia and choice.registers is not None:
        options["maxnreg"] = choice.registers
    tensors: tuple[Tensor | None, ...] = (
        x,
        weight,
        bias,
        conv_state,
        out,
        cu_seqlens,
        slots,
        _bytes(has_initial_state),
        num_accepted_tokens,
        fault_flag,
    )
    sizes: tuple[int, ...] = (
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
    if kernel == "conv_prefill":
        constants |= {"ROWS": choice.rows, "GROUP": choice.group}
        checkpoints = 0 if checkpoint_tokens is None else checkpoint_tokens.shape[0]
        if checkpoints == 0:
            checkpoint_offsets = checkpoint_tokens = checkpoint_slots = None
        tensors += (_bytes(speculative), checkpoint_offsets, checkpoint_tokens, checkpoint_slots)
        sizes += (checkpoints,)
        # A program for each checkpoint behind those of the rows.
        grid = (tiles, *split(-(-rows // choice.rows) + checkpoints))
    else:
        # With one row a sequence a counted step leaves the same slot as a plain one.
        constants |= {"SPECULATIVE": num_accepted_tokens is not None and cu_seqlens is not None}
        constants |= {"AHEAD": choice.ahead, "SEQUENCES": choice.sequences}
        grid = (sequences if cu_seqlens is not None else -(-sequences // choice.sequences), *split(tiles))
    return Launch(kernel, grid, tensors, sizes, constants, options)


# Kernels that a process has run, by device and all that Triton compiles for.
_loaded: set[tuple[Any, ...]] = set()


def _launch(kernel: str, *, x: Tensor, **arguments: Any) -> None:
    device = x.device
    launch = prepare(
        kernel,
        x=x,
        **arguments,
        fault_flag=fault_flag(device),
        nvidia=_is_nvidia(device),
        dependent=_launches_dependently(device),
    )
    if launch is None:
        return
    key = (device, *launch.compiled_for())
    if key not in _loaded and device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise CaptureError(
            kernel,
            got="a kernel that is not loaded yet, under graph capture",
            wanted="every kernel of a graph loaded before capture",
            remedy="run the step once eagerly, or serving_conv.warmup(...), before capturing",
        )
    from serving_conv.portable import kernels

    with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
        getattr(kernels, kernel)[launch.grid](*launch.tensors, *launch.sizes, **launch.constants, **launch.options)
    _loaded.add(key)
