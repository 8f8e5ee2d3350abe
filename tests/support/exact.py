"""Owns exact arithmetic: fp32 rounding of fractions, and the contract's sum in its fixed order, to the last bit."""

from __future__ import annotations

import math
import struct
from fractions import Fraction

import torch
from torch import Tensor

__all__ = ["float_from_bits", "fused", "ordered_sum", "round_to_fp32"]


def float_from_bits(bits: int) -> float:
    """The fp32 number with these 32 bits."""
    return float(struct.unpack("<f", struct.pack("<I", bits))[0])


def round_to_fp32(value: Fraction) -> float:
    """Round to nearest, ties to even, subnormals and overflow included."""
    if value == 0:
        return 0.0
    size = abs(value)
    exponent = size.numerator.bit_length() - size.denominator.bit_length()
    if size < Fraction(2) ** exponent:
        exponent -= 1
    step = Fraction(2) ** (max(exponent, -126) - 23)
    rounded = round(size / step) * step  # Python rounds ties of a Fraction to even
    return math.copysign(math.inf if rounded >= 2**128 else float(rounded), value)


def fused(a: float, b: float, c: float) -> float:
    """`a * b + c` with one rounding to fp32, as IEEE 754 says."""
    if not (math.isfinite(a) and math.isfinite(b)):
        # An infinite or NaN product follows the ordinary rules, which Python floats obey.
        return a * b + c
    if not math.isfinite(c):
        return c
    exact = Fraction(a) * Fraction(b) + Fraction(c)
    if exact == 0:
        # Only two zeros of one sign keep it; everything that cancels is +0.
        product = math.copysign(1.0, a) * math.copysign(1.0, b)
        both_zero = (a == 0 or b == 0) and c == 0
        return -0.0 if both_zero and product < 0 and math.copysign(1.0, c) < 0 else 0.0
    return round_to_fp32(exact)


def ordered_sum(windows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """fp32 `[R, C]`: bias, then one fused multiply-add a tap, oldest first.

    Args:
        windows: `[R, C, W]` raw inputs, oldest first.
        weight: `[C, W]`.
        bias: `[C]` or None.
    """
    rows, channels, width = windows.shape
    inputs, taps = windows.double().tolist(), weight.double().tolist()
    first = [0.0] * channels if bias is None else bias.double().tolist()
    result = []
    for row in range(rows):
        line = []
        for channel in range(channels):
            total = first[channel]
            for tap in range(width):
                total = fused(inputs[row][channel][tap], taps[channel][tap], total)
            line.append(total)
        result.append(line)
    return torch.tensor(result, dtype=torch.float64).float().reshape(rows, channels)
