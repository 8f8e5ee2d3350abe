"""Owns the differentiable convolution on one device: `causal_conv1d`, and its operators for compilers.

Forward and backward are registered as `torch.ops.serving_conv.conv1d_forward` and `conv1d_backward`, opaque to a
compiler and with fakes, so `torch.compile(fullgraph=True)` traces through. In eager mode an autograd function calls
the same bodies directly, which costs the host less than half.
"""

from __future__ import annotations

from typing import Any, Literal, overload

import torch
from torch import Tensor

from serving_conv.errors import BackendError
from serving_conv.ops import LIBRARY, needs_dispatch, register_operator
from serving_conv.training.checks import check_convolution, check_sequences
from serving_conv.training.determinism import deterministic_reduction
from serving_conv.training.kernels import convolve, gradients
from serving_conv.training.sequences import offsets_of

__all__ = ["causal_conv1d", "eager_function", "fake_gradient", "filled", "first_derivative"]


@overload
def causal_conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    *,
    seq_idx: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    initial_states: Tensor | None = None,
    return_final_states: Literal[False] = False,
) -> Tensor: ...


@overload
def causal_conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    *,
    seq_idx: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    initial_states: Tensor | None = None,
    return_final_states: Literal[True],
) -> tuple[Tensor, Tensor]: ...


def causal_conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    *,
    seq_idx: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    initial_states: Tensor | None = None,
    return_final_states: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Differentiable causal depthwise convolution, for training.

    Every row becomes `activation(bias + sum over taps)` of its window: the W-1 inputs before it in its sequence, then
    itself, in the arithmetic of `causal_conv1d_fn` (fp32, one fixed order, one rounding), so a trainer's outputs are
    the server's, bit for bit. Gradients of x, weight, bias and initial_states are computed in fp32 and rounded once.
    The argument order is that of causal_conv1d.causal_conv1d_fn; x is `[B, T, D]` here, where that one has
    `[B, D, T]`.

    Args:
        x: `[B, T, D]` bf16, fp16, fp32 or float64 (plain torch), any strides. Where no view has its rows one behind
            another with contiguous channels, the forward makes one contiguous copy; the backward reads every x and
            output gradient as they are.
        weight: `[D, W]` contiguous, any of the three types (float64 with float64); 2 to 8 taps, the last one meets
            the current token.
        bias: `[D]` or None, own type.
        activation: "silu" ("swish") or None.
        seq_idx: int32 `[B, T]`, a number for each token: a sequence ends where the number changes.
        cu_seqlens: int32 `[N+1]` contiguous, offsets of N sequences in the T tokens of B = 1, from 0. Rows past the
            last offset give zeros and get zeros, and so do rows before a first one that is not 0, which leaves
            `DeviceFault.OFFSETS` (not in float64).
        initial_states: `[N, D, W-1]` in the type of x, any strides: the inputs before each sequence, oldest first;
            zeros if absent. Without offsets N = B. With seq_idx the n-th sequence takes the n-th; later ones start
            from zeros.
        return_final_states: also return the last W-1 inputs of each sequence, `[N, D, W-1]`, differentiable.

    Returns:
        out `[B, T, D]` in the type of x, or (out, final states), those in the type of x too.

    Raises:
        ContractError: a shape, type, stride, device or option breaks these rules; it is a ValueError.
        BackendError: the backend that `SERVING_CONV_BACKEND` names cannot serve the device; or, in the backward, the
            gradients are differentiated again.
        CaptureError: a kernel is not loaded yet and the current stream is capturing.
    """
    check_convolution(x, weight, bias, activation)
    check_sequences(x, weight, seq_idx, cu_seqlens, initial_states, want_final=return_final_states)
    offsets = cu_seqlens if seq_idx is None else offsets_of(seq_idx)
    arguments = (x, weight, bias, initial_states, offsets, activation and "silu", return_final_states)
    out: Tensor
    if needs_dispatch(x):
        out, final = torch.ops.serving_conv.conv1d_forward(*arguments)
    else:
        out, final = _Convolution.apply(*arguments)
    return (out, final) if return_final_states else out


def filled(gradient: Tensor | None, like: Tensor) -> Tensor:
    """An operator returns tensors only: one of shape `[0]`, in the type and place of `like`, stands for none."""
    return like.new_empty(0) if gradient is None else gradient


def fake_gradient(of: Tensor | None, wanted: bool, x: Tensor) -> Tensor:
    """What a fake backward returns for one argument, as `filled` would.

    Args:
        of: the argument, of any shape and type, or None.
        wanted: whether its gradient is.
        x: whose device it is on, and whose type if there is none.
    """
    if of is None or not wanted:
        return x.new_empty(0)
    return torch.empty(of.shape, dtype=of.dtype, device=x.device)


class _FirstDerivative(torch.autograd.Function):
    """A gradient that cannot be differentiated."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, gradient: Tensor) -> Tensor:
        return gradient.view_as(gradient)

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        raise BackendError(
            "causal_conv1d",
            got="a derivative of its gradient",
            wanted="first derivatives",
            remedy="use plain torch where a loss depends on gradients",
        )


def first_derivative(differentiate: Any) -> Any:
    """A backward whose gradients say that they cannot be differentiated.

    Under create_graph a second derivative would silently miss this operator's part, so whoever asks for it gets a
    BackendError.

    Args:
        differentiate: `(ctx, *gradients)`, as `torch.library.register_autograd` takes it, and is returned.
    """

    def run(ctx: Any, *gradients: Any) -> Any:
        with torch.no_grad():
            found = differentiate(ctx, *gradients)
        if not torch.is_grad_enabled():
            return found
        anchor = torch.zeros((), requires_grad=True)
        return tuple(None if g is None else _FirstDerivative.apply(anchor, g) for g in found)  # type: ignore[no-untyped-call]

    return run


def eager_function(name: str, forward: Any, setup: Any, differentiate: Any) -> Any:
    """An autograd function of two operators' bodies, without a dispatcher between.

    Args:
        name: of the class.
        forward: the body of the forward operator.
        setup: `(ctx, inputs, output)`, as `torch.library.register_autograd` takes it.
        differentiate: `(ctx, *gradients)`, likewise.
    """

    def run_forward(ctx: Any, *inputs: Any) -> Any:
        output = forward(*inputs)
        setup(ctx, inputs, output)
        return output

    members = {"forward": staticmethod(run_forward), "backward": staticmethod(differentiate)}
    return type(name, (torch.autograd.Function,), members)


def _forward(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    initial: Tensor | None,
    cu_seqlens: Tensor | None,
    activation: str | None,
    want_final: bool,
) -> tuple[Tensor, Tensor]:
    out, final = convolve(x, weight, bias, initial, cu_seqlens, activation=activation, want_final=want_final)
    return out, filled(final, x)


def _fake_forward(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    initial: Tensor | None,
    cu_seqlens: Tensor | None,
    activation: str | None,
    want_final: bool,
) -> tuple[Tensor, Tensor]:
    sequences = x.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if not want_final:
        return out, x.new_empty(0)
    return out, x.new_empty((sequences, weight.shape[1] - 1, x.shape[2])).transpose(1, 2)


def _backward(
    dout: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    initial: Tensor | None,
    cu_seqlens: Tensor | None,
    dfinal: Tensor | None,
    activation: str | None,
    wanted: list[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    dx, dweight, dbias, dinitial = gradients(
        dout,
        x,
        weight,
        bias,
        initial,
        cu_seqlens,
        dfinal,
        activation=activation,
        deterministic=deterministic_reduction(),
        wanted=(wanted[0], wanted[1], wanted[2], wanted[3]),
    )
    if dinitial is not None:
        dinitial = dinitial.to(x.dtype)
    return filled(dx, x), filled(dweight, x), filled(dbias, x), filled(dinitial, x)


def _fake_backward(
    dout: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    initial: Tensor | None,
    cu_seqlens: Tensor | None,
    dfinal: Tensor | None,
    activation: str | None,
    wanted: list[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    dinitial = x.new_empty(0)
    if initial is not None and wanted[3]:
        shape = (initial.shape[0], initial.shape[2], initial.shape[1])
        dinitial = torch.empty(shape, dtype=x.dtype, device=x.device).transpose(1, 2)
    grads = [fake_gradient(of, want, x) for of, want in zip((x, weight, bias), wanted[:3], strict=True)]
    return grads[0], grads[1], grads[2], dinitial


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, weight, bias, initial, cu_seqlens, activation, want_final = inputs
    ctx.save_for_backward(x, weight, bias, initial, cu_seqlens)
    ctx.activation, ctx.want_final = activation, want_final
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, dout: Tensor | None, dfinal: Tensor | None) -> tuple[Tensor | None, ...]:
    x, weight, bias, initial, cu_seqlens = ctx.saved_tensors
    if dout is None and (dfinal is None or not ctx.want_final):
        return (None,) * 7
    if dout is None:
        dout = x.new_zeros(()).expand(x.shape)
    wanted = [bool(ctx.needs_input_grad[place]) for place in range(4)]
    run = torch.ops.serving_conv.conv1d_backward if needs_dispatch(x) else _backward
    found = run(
        dout,
        x,
        weight,
        bias,
        initial,
        cu_seqlens,
        dfinal if ctx.want_final else None,
        ctx.activation,
        wanted,
    )
    present = (True, True, bias is not None, initial is not None)
    grads = [g if want and there else None for g, want, there in zip(found, wanted, present, strict=True)]
    return (*grads, None, None, None)


_gradients = first_derivative(_differentiate)
_Convolution = eager_function("_Convolution", _forward, _setup, _gradients)

register_operator(
    "conv1d_forward(Tensor x, Tensor weight, Tensor? bias, Tensor? initial_states, Tensor? cu_seqlens, "
    "str? activation, bool want_final) -> (Tensor, Tensor)",
    _forward,
    _fake_forward,
)
register_operator(
    "conv1d_backward(Tensor dout, Tensor x, Tensor weight, Tensor? bias, Tensor? initial_states, Tensor? cu_seqlens, "
    "Tensor? dfinal, str? activation, bool[] wanted) -> (Tensor, Tensor, Tensor, Tensor)",
    _backward,
    _fake_backward,
)
torch.library.register_autograd("serving_conv::conv1d_forward", _gradients, setup_context=_setup, lib=LIBRARY)
