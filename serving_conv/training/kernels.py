"""Owns who computes the training path: the serving kernels and their backward, or plain torch.

The forward is `causal_conv1d_fn`'s own kernel, so a trainer's outputs are the server's, bit for bit. The backward has
a kernel where the `cuda` or `host` backend serves the device; elsewhere it is the reference. In float64 both are.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from typing import TypeAlias

import torch
from torch import Tensor

from serving_conv.backends import choose_backend
from serving_conv.contract import FLOAT_TYPES, prefill_workspace_size
from serving_conv.faults import fault_flag
from serving_conv.native import cuda, host
from serving_conv.native.backward import BackwardBuffers
from serving_conv.training import reference

__all__ = ["convolve", "gradients"]

_BACKWARD_KERNELS = {"cuda": cuda.run_backward, "host": host.run_backward}
_PADDING = -1
_LARGEST = 2**31 - 1

_Metadata: TypeAlias = tuple[Tensor, Tensor, Tensor]
"""Offsets (with packing only the one behind the last sequence), slots and flags."""


def _by_kernel(x: Tensor) -> bool:
    return str(x.dtype).removeprefix("torch.") in FLOAT_TYPES


def convolve(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    initial: Tensor | None,
    cu_seqlens: Tensor | None,
    *,
    activation: str | None,
    want_final: bool,
) -> tuple[Tensor, Tensor | None]:
    """The convolution and, if wanted, the final windows.

    Args:
        x: `[B, T, D]` bf16, fp16, fp32 or float64; the kernel reads rows with contiguous channels, anything else is
            copied once.
        weight: `[D, W]` contiguous, one of the three narrow types, or float64 with x.
        bias: `[D]`, likewise, or None.
        initial: `[N, D, W-1]` in the type of x, or None for zeros; sequences past the N-th start from zeros.
        cu_seqlens: int32 `[sequences + 1]` over the B*T rows, or None: every batch is a sequence.
        activation: SiLU unless None.
        want_final: return the last W-1 inputs of each sequence.

    Returns:
        out `[B, T, D]`, zeros in rows before the first and past the last offset; `[sequences, D, W-1]` or None; both
        in the type of x.

    Raises:
        BackendError: the backend that `SERVING_CONV_BACKEND` names cannot serve the device.
        CaptureError: a kernel is not loaded yet and the current stream is capturing.
    """
    batches, rows, channels = x.shape
    if not _by_kernel(x):
        out, final = reference.forward(x, weight, bias, initial, cu_seqlens, activation=activation)
        return out, final if want_final else None
    width, total = weight.shape[1], batches * rows
    sequences = batches if cu_seqlens is None else cu_seqlens.shape[0] - 1
    given = 0 if initial is None else min(initial.shape[0], sequences)
    kept = sequences if want_final else given
    # One slot more than is kept: whoever keeps nothing leaves its window there, unread.
    make = torch.zeros if want_final else torch.empty
    pool = make((kept + 1, width - 1, channels), dtype=x.dtype, device=x.device).transpose(1, 2)
    if initial is not None:
        pool[:given].copy_(initial[:given])
    out = torch.empty((batches, rows, channels), dtype=x.dtype, device=x.device)
    if out.numel():
        ends, slots, flags = _metadata(x.device, sequences, kept, given, rows, total, cu_seqlens is not None)
        offsets = ends if cu_seqlens is None else _between_padding(cu_seqlens, ends)
        scratch = prefill_workspace_size(total, slots.shape[0])
        backend = choose_backend(x.device)
        run = cuda.run_forward if backend.name == "cuda" else backend.prefill
        run(
            x=_as_rows(x),
            weight=weight,
            conv_state=pool,
            cu_seqlens=offsets,
            cache_indices=slots,
            has_initial_state=flags if given else None,
            bias=bias,
            activation=activation,
            num_accepted_tokens=None,
            out=out.view(total, channels),
            workspace=torch.empty(scratch, dtype=torch.int32, device=x.device) if scratch else None,
            pad_slot_id=_PADDING,
        )
    return out, pool[:sequences] if want_final else None


def _as_rows(x: Tensor) -> Tensor:
    """`[B*T, D]` with contiguous channels; a view wherever strides allow one."""
    batches, rows, channels = x.shape
    if x.stride(2) != 1 and channels > 1:
        return x.contiguous().view(batches * rows, channels)
    return x.reshape(batches * rows, channels)


def _between_padding(cu_seqlens: Tensor, end: Tensor) -> Tensor:
    """Offsets with a sequence of padding before the first and behind the last, so that every row has an owner."""
    # -1 if the first offset is positive, else 0: rows before it are the padding's, and the kernel reports offsets
    # that do not start at 0, as it does without padding.
    return torch.cat((cu_seqlens[:1] // -_LARGEST, cu_seqlens, end))


def _metadata(
    device: torch.device, sequences: int, kept: int, given: int, rows: int, total: int, packed: bool
) -> _Metadata:
    """What the kernel wants to know of the sequences; with `packed` two of padding stand around them."""
    if device.type != "cuda":
        return _kept_metadata(device, sequences, kept, given, rows, total, packed)
    if torch.cuda.is_current_stream_capturing():
        # The graph makes its own each time: nothing may be copied from the host, or kept beyond the graph.
        return _make_metadata(device, sequences, kept, given, rows, total, packed)
    found = _kept_metadata(device, sequences, kept, given, rows, total, packed)
    if torch._C._cuda_getCurrentRawStream(device.index):
        # They belong to the default stream, which may reuse them once they have had to make room for others.
        for tensor in found:
            tensor.record_stream(torch.cuda.current_stream(device))
    return found


@lru_cache(maxsize=256)
def _kept_metadata(
    device: torch.device, sequences: int, kept: int, given: int, rows: int, total: int, packed: bool
) -> _Metadata:
    made = _make_metadata(torch.device("cpu"), sequences, kept, given, rows, total, packed)
    if device.type == "cpu":
        return made

    def upload() -> _Metadata:
        fault_flag(device)  # is kept too, and the kernel is about to ask for it
        # Copies from pageable memory are complete on return, so any stream may use them.
        ends, slots, flags = (t.to(device) for t in made)
        return ends, slots, flags

    # A step that is about to become a graph (torch.compile's reduce-overhead, a MemPool) runs once with a pool of its
    # own, and what is allocated there is overwritten by replays. Such a pool is bound to the thread and its current
    # stream: another thread, on the default stream, allocates outside.
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(upload).result()


def _make_metadata(
    device: torch.device, sequences: int, kept: int, given: int, rows: int, total: int, packed: bool
) -> _Metadata:
    with torch.inference_mode(False):
        if not packed:
            number = torch.arange(sequences + 1, dtype=torch.int32, device=device)
            return number * rows, number[:-1].clamp(max=kept), number[:-1] < given
        number = torch.arange(-1, sequences + 1, dtype=torch.int32, device=device)
        slots = number.clamp(max=kept)
        slots[:1].fill_(_PADDING)
        slots[-1:].fill_(_PADDING)
        flags = (number >= 0) & (number < given)
        return torch.full((1,), total, dtype=torch.int32, device=device), slots, flags


def _backward_kernel(x: Tensor) -> Callable[..., None] | None:
    return _BACKWARD_KERNELS.get(choose_backend(x.device).name) if _by_kernel(x) else None


def gradients(
    dout: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    initial: Tensor | None,
    cu_seqlens: Tensor | None,
    dfinal: Tensor | None,
    *,
    activation: str | None,
    deterministic: bool,
    wanted: tuple[bool, bool, bool, bool],
) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
    """Gradients of x, weight, bias and initial, those that are `wanted`; arguments else as of `convolve`.

    Args:
        dout: `[B, T, D]` in the type of x, any strides, 0 included.
        x: see `convolve`; any strides are read as they are.
        weight: see `convolve`.
        bias: see `convolve`.
        initial: see `convolve`.
        cu_seqlens: see `convolve`.
        dfinal: `[sequences, D, W-1]` of any float type, gradient of the final windows, or None.
        activation: see `convolve`.
        deterministic: add the sums for weight and bias in one fixed order.
        wanted: of x, weight, bias, initial.

    Returns:
        dx `[B, T, D]`, dweight `[D, W]`, dbias `[D]` in their arguments' types; dinitial `[N, D, W-1]` in fp32
        (float64 for float64), so that it can travel before it is rounded. None for what is not wanted or not there.

    Raises:
        BackendError: see `convolve`.
        CaptureError: see `convolve`.
    """
    run = _backward_kernel(x)
    want_dx, want_dweight, want_dbias, want_dinitial = wanted
    want_dbias, want_dinitial = want_dbias and bias is not None, want_dinitial and initial is not None
    if run is None:
        found = reference.backward(dout, x, weight, bias, initial, cu_seqlens, dfinal, activation=activation)
        return (
            found.dx.to(x.dtype) if want_dx else None,
            found.dweight.to(weight.dtype) if want_dweight else None,
            found.dbias.to(bias.dtype) if want_dbias and bias is not None else None,
            _first(found.dinitial, initial.shape[0]) if want_dinitial and initial is not None else None,
        )
    if initial is not None:  # W-1 rows a sequence: the kernel knows one layout
        initial = initial.transpose(1, 2).contiguous().transpose(1, 2)
    flat_dfinal = _flat_dfinal(dfinal)
    empty = x.numel() == 0
    buffers = BackwardBuffers(
        dx=torch.empty(x.shape, dtype=x.dtype, device=x.device) if want_dx else None,
        dweight=_buffer_like(weight, zero=empty) if want_dweight else None,
        dbias=_buffer_like(bias, zero=empty) if want_dbias and bias is not None else None,
        dinitial=(
            _dinitial_buffer(initial, flat_dfinal, written=cu_seqlens is None and not empty)
            if want_dinitial and initial is not None
            else None
        ),
    )
    run(
        dout,
        x,
        weight,
        bias,
        initial,
        cu_seqlens,
        flat_dfinal,
        buffers,
        activation=activation,
        ordered=deterministic,
    )
    dinitial = buffers.dinitial
    return buffers.dx, buffers.dweight, buffers.dbias, None if dinitial is None else dinitial.transpose(1, 2)


def _first(dinitial: Tensor, count: int) -> Tensor:
    """The gradients of `count` initial windows; those of no sequence are zeros."""
    missing = count - dinitial.shape[0]
    if missing <= 0:
        return dinitial[:count]
    return torch.cat((dinitial, dinitial.new_zeros((missing, *dinitial.shape[1:]))))


def _buffer_like(parameter: Tensor, *, zero: bool) -> Tensor:
    make = torch.zeros if zero else torch.empty
    return make(parameter.shape, dtype=parameter.dtype, device=parameter.device)


def _flat_dfinal(dfinal: Tensor | None) -> Tensor | None:
    """fp32 `[sequences, W-1, D]` contiguous, as the kernels read it."""
    return None if dfinal is None else dfinal.transpose(1, 2).to(torch.float32).contiguous()


def _dinitial_buffer(initial: Tensor, dfinal: Tensor | None, *, written: bool) -> Tensor:
    """fp32 `[N, W-1, D]`; sequences without rows hand the final window's gradient straight on."""
    shape = (initial.shape[0], initial.shape[2], initial.shape[1])
    if written:
        return torch.empty(shape, dtype=torch.float32, device=initial.device)
    buffer = torch.zeros(shape, dtype=torch.float32, device=initial.device)
    if dfinal is not None:
        known = min(shape[0], dfinal.shape[0])
        buffer[:known].copy_(dfinal[:known])
    return buffer
