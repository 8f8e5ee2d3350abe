"""Owns the error bound of an output, derived from the arithmetic of the contract and nothing else.

One rounding to the output type (half a step), W+1 fp32 roundings of the sum (W fused multiply-adds and slack for
the bias, each half a unit of the magnitude `|b| + sum |w x|`) carried through SiLU, whose slope is at most 1.1, and
a few fp32 units for `exp` and the division. Nothing is tuned: a kernel outside the bound is wrong.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["EXP_AND_DIVIDE_UNITS", "SILU_SLOPE", "Verdict", "assert_within", "compare", "error_bound", "half_step"]

SILU_SLOPE = 1.1  # the largest slope is 1.0998
EXP_AND_DIVIDE_UNITS = 8  # of 2^-24 relative to the result: exp to 2 ulp, one addition, one division
FP32_UNIT = 2.0**-24  # half a step at 1, the largest relative error of one rounding
FP32_TINY = 2.0**-149  # one step in fp32's subnormal range
# exp(-v) overflows fp32 below -88.72; a kernel then returns -0 where SiLU is still about -2.7e-37.
SILU_UNDERFLOW = 88.8 * math.exp(-88.7)
_BITS = {torch.float32: 24, torch.float16: 11, torch.bfloat16: 8}


def half_step(value: Tensor, dtype: torch.dtype) -> Tensor:
    """Half the distance between two neighbours of `dtype` around the float64 `value`; subnormals included."""
    normal = value.abs().clamp(torch.finfo(dtype).tiny, torch.finfo(dtype).max)
    _, exponent = torch.frexp(normal)
    return torch.ldexp(torch.ones_like(value), exponent - _BITS[dtype] - 1)


def error_bound(
    exact: Tensor, magnitude: Tensor, *, width: int, dtype: torch.dtype, activation: str | None
) -> tuple[Tensor, Tensor]:
    """Bounds of the error before, and after, the rounding to the output type.

    Args:
        exact: float64 result.
        magnitude: float64 `|b| + sum |w x|`.
        width: taps.
        dtype: output type.
        activation: None, or SiLU.
    """
    accumulation = (width + 1) * (FP32_UNIT * magnitude + FP32_TINY)
    if activation is None:
        before = accumulation
    else:
        before = SILU_SLOPE * accumulation + EXP_AND_DIVIDE_UNITS * FP32_UNIT * exact.abs() + SILU_UNDERFLOW
    # The computed value may lie in the next binade, where steps are twice as long.
    return before, before + half_step(exact.abs() + before, dtype)


@dataclass(frozen=True)
class Verdict:
    """How a result compares with its bound.

    Attributes:
        worst: largest error over its bound; at most 1 for a right kernel.
        outside: share of elements outside the bound.
        where: index of the worst element.
    """

    worst: float
    outside: float
    where: tuple[int, ...]


def compare(got: Tensor, exact: Tensor, magnitude: Tensor, *, width: int, activation: str | None) -> Verdict:
    """Compare a result with the exact one. An infinity is right where the exact value rounds to it."""
    got = got.cpu()
    before, bound = error_bound(exact, magnitude, width=width, dtype=got.dtype, activation=activation)
    value, largest = got.double(), torch.finfo(got.dtype).max
    overflow = largest + half_step(torch.tensor(largest, dtype=torch.float64), got.dtype)
    ratio = (value - exact).abs() / bound
    may_overflow = exact.abs() + before >= overflow
    right_infinity = value.isinf() & may_overflow & (value.sign() == exact.sign())
    ratio = torch.where(right_infinity, 0.0, ratio)
    # The largest finite number is right only if the exact value is not clearly beyond the range.
    ratio = torch.where(value.isfinite() & (exact.abs() - before >= overflow), torch.inf, ratio)
    ratio = torch.where(value.isnan(), torch.inf, ratio)
    if ratio.numel() == 0:
        return Verdict(0.0, 0.0, ())
    flat = int(ratio.argmax())
    where = tuple(int(i) for i in torch.unravel_index(torch.tensor(flat), ratio.shape))
    return Verdict(float(ratio.max()), float((ratio > 1).double().mean()), where)


def assert_within(got: Tensor, exact: Tensor, magnitude: Tensor, *, width: int, activation: str | None) -> None:
    """Fail with the worst element if any lies outside the bound."""
    assert got.shape == exact.shape, f"shape {tuple(got.shape)}, wanted {tuple(exact.shape)}"
    verdict = compare(got, exact, magnitude, width=width, activation=activation)
    if verdict.worst > 1:
        here = verdict.where
        raise AssertionError(
            f"{verdict.outside:.2%} of the elements are outside the derived bound; worst at {here}: got "
            f"{got[here].item()!r}, exact {exact[here].item()!r}, error / bound {verdict.worst:.3g}"
        )
