"""Owns the error bounds of gradients, derived from the backward's arithmetic, and problems to hold against them.

u is half a unit in the last place of fp32. A row's sum is off by (W+1) u of its magnitude; SiLU's slope changes by at
most 0.5 a unit; sigmoid and the slope's own operations cost a few u of their terms. What that leaves of g goes through
the transposed convolution, whose W+1 fused steps cost u each, or into a sum over rows, n steps. One rounding to the
type of the result ends it. Nothing is tuned.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from support.bounds import FP32_TINY, FP32_UNIT, half_step
from torch import Tensor

from serving_conv.training import reference

__all__ = ["Case", "exact_and_bounds", "make_case", "worst"]

SLOPE_UNITS = 16  # of u: exp to 2 ulp, reciprocal to 1, their sum, and four operations behind them


@dataclass
class Case:
    """The arguments of one backward."""

    dout: Tensor
    x: Tensor
    weight: Tensor
    bias: Tensor | None
    initial: Tensor | None
    cu_seqlens: Tensor | None
    dfinal: Tensor | None  # [N, W-1, D] fp32, as the kernels take it
    activation: str | None

    @property
    def sequences(self) -> int:
        """N."""
        return self.x.shape[0] if self.cu_seqlens is None else self.cu_seqlens.shape[0] - 1


def make_case(
    *,
    batches: int = 1,
    rows: int = 83,
    channels: int = 24,
    width: int = 4,
    x: torch.dtype = torch.bfloat16,
    weight: torch.dtype = torch.bfloat16,
    bias: torch.dtype | None = torch.bfloat16,
    initial: bool = True,
    offsets: list[int] | None = None,
    final: bool = True,
    activation: str | None = "silu",
) -> Case:
    """Random values."""
    sequences = batches if offsets is None else len(offsets) - 1
    shape = (batches, rows, channels)
    windows = None
    if initial:
        windows = torch.randn(sequences, width - 1, channels).to(x).transpose(1, 2)
    return Case(
        dout=torch.randn(shape).to(x),
        x=torch.randn(shape).to(x),
        weight=torch.randn(channels, width).to(weight),
        bias=None if bias is None else torch.randn(channels).to(bias),
        initial=windows,
        cu_seqlens=None if offsets is None else torch.tensor(offsets, dtype=torch.int32),
        dfinal=torch.randn(sequences, width - 1, channels) if final else None,
        activation=activation,
    )


def exact_and_bounds(case: Case) -> tuple[reference.Gradients, reference.Gradients]:
    """float64 gradients, and how far fp32 arithmetic in any order of rows may be from them before its rounding."""
    wide = {
        name: None if (value := getattr(case, name)) is None else value.cpu().double()
        for name in ("dout", "x", "weight", "bias", "initial")
    }
    offsets = None if case.cu_seqlens is None else case.cu_seqlens.cpu()
    dfinal = None if case.dfinal is None else case.dfinal.cpu().double().transpose(1, 2)
    dout, x, weight = wide["dout"], wide["x"], wide["weight"]
    assert dout is not None and x is not None and weight is not None
    width, steps = weight.shape[1], x.shape[0] * x.shape[1]
    exact = reference.backward(
        dout, x, weight, wide["bias"], wide["initial"], offsets, dfinal, activation=case.activation
    )
    g, error = dout.abs(), torch.zeros_like(dout)
    if case.activation is not None:
        arguments = (x, weight, wide["bias"], wide["initial"], offsets)
        total, _ = reference.forward(*arguments, activation=None)
        magnitude, _ = reference.forward(*[_absolute(a) for a in arguments[:4]], offsets, activation=None)
        s = torch.sigmoid(total)
        g = (dout * (s + total * s * (1 - s))).abs()
        slope = 0.5 * (width + 1) * FP32_UNIT * magnitude + SLOPE_UNITS * FP32_UNIT * (s + total.abs() * s)
        error = dout.abs() * slope + FP32_UNIT * g + FP32_TINY

    def through(rows: Tensor) -> reference.Gradients:
        """Rows of errors or magnitudes through the linear part, everything positive."""
        return reference.backward(
            rows, x.abs(), weight.abs(), None, _absolute(wide["initial"]), offsets, None, activation=None
        )

    carried, spread, summed = through(error), through((width + 1) * FP32_UNIT * g), through(steps * FP32_UNIT * g)
    final = 0.0 if dfinal is None else (width + 1) * FP32_UNIT * float(dfinal.abs().max())
    return exact, reference.Gradients(
        dx=carried.dx + spread.dx + final + FP32_TINY,
        dweight=carried.dweight + summed.dweight + FP32_TINY,
        dbias=carried.dbias + summed.dbias + FP32_TINY,
        dinitial=carried.dinitial + spread.dinitial + final + FP32_TINY,
    )


def _absolute(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.abs()


def worst(got: Tensor, exact: Tensor, before: Tensor) -> float:
    """Largest error over its bound, the rounding to the type of `got` included; infinite for NaN."""
    value = got.cpu().double()
    bound = before + half_step(exact.abs() + before, got.dtype)
    ratio = torch.where(value.isnan(), torch.inf, (value - exact).abs() / bound)
    return float(ratio.max()) if ratio.numel() else 0.0
