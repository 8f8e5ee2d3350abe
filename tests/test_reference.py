"""The reference's own building blocks: the emulated fused multiply-add, SiLU, and the float64 path."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.cases import same_bits
from support.exact import float_from_bits, fused
from support.loop import expect, silu64
from torch import Tensor

from serving_conv.reference import Arithmetic, Result, causal_conv1d, fused_multiply_add, silu

BITS = st.integers(0, 2**32 - 1)


def one(a: float, b: float, c: float) -> float:
    return float(fused_multiply_add(torch.tensor([a]), torch.tensor([b]), torch.tensor([c])).item())


def check_fused(a: float, b: float, c: float) -> None:
    got, exact = one(a, b, c), fused(a, b, c)
    if math.isnan(exact):
        assert math.isnan(got)
    else:
        assert got == exact, (a.hex(), b.hex(), c.hex())
        assert math.copysign(1, got) == math.copysign(1, exact), (a.hex(), b.hex(), c.hex())


TINY = 2.0**-149
HUGE = float(torch.finfo(torch.float32).max)


@pytest.mark.parametrize(
    ("a", "b", "c"),
    [
        (1.0 + 2.0**-12, 1.0 + 2.0**-12, 2.0**-70),  # product on a tie, addend decides
        (1.0 + 2.0**-12, 1.0 + 2.0**-12, -(2.0**-70)),
        (1.0 + 2.0**-12, 1.0 + 2.0**-12, 0.0),  # a true tie: to even
        (1.0 + 3 * 2.0**-12, 1.0 + 2.0**-12, 0.0),
        (2.0**-75, 2.0**-75, 0.0),  # half of the smallest subnormal: to zero
        (2.0**-75, 2.0**-75, 2.0**-140),
        (2.0**-75, 2.0**-74, 0.0),
        (-(2.0**-75), 2.0**-75, 0.0),
        (2.0**-75, 2.0**-75 * (1 + 2.0**-23), 0.0),  # a hair above half: up
        (2.0**-100, 2.0**-60, TINY),
        (2.0**-100, -(2.0**-60), TINY),
        (2.0**-74, 2.0**-75, TINY),  # tie between two subnormals
        (2.0**-74, 2.0**-75, 3 * TINY),
        (2.0**-126, 1.0, -TINY),
        # Below the normal range: the float64 sum lands on a tie that the exact sum is beside, from either side.
        (2.0**-75 * (1 + 2.0**-23), 2.0**-75 * (1 - 2.0**-23), 2.0**-130 + TINY),
        (2.0**-75 * (1 + 2.0**-12), 2.0**-75 * (1 - 2.0**-12 + 2.0**-24), 2.0**-130),
        (-(2.0**-75) * (1 + 2.0**-12), 2.0**-75 * (1 - 2.0**-12 + 2.0**-24), -(2.0**-130)),
        (HUGE, 1.0, 2.0**103),  # tie at the edge of the range: to infinity
        (HUGE, 1.0, math.nextafter(2.0**103, 0.0)),
        (HUGE, 1.0, 2.0**102),
        (HUGE, 2.0, -HUGE),
        (HUGE, HUGE, -HUGE),
        (-HUGE, HUGE, HUGE),
        (math.inf, 0.0, 1.0),
        (math.inf, 1.0, -math.inf),
        (math.inf, -1.0, 1.0),
        (1.0, 1.0, math.nan),
        (0.0, -0.0, -0.0),
        (0.0, 0.0, -0.0),
        (1.0, -1.0, 1.0),
        (1.0, 1e-30, 1e30),
    ],
)
def test_fused_multiply_add_corner_cases(a: float, b: float, c: float) -> None:
    check_fused(*(float(np.float32(v)) for v in (a, b, c)))


@settings(max_examples=400)
@given(BITS, BITS, BITS)
@example(0x3F800800, 0x3F800800, 0x1C800000)
def test_fused_multiply_add_any_bits(a: int, b: int, c: int) -> None:
    check_fused(float_from_bits(a), float_from_bits(b), float_from_bits(c))


@settings(max_examples=400)
@given(BITS, BITS, st.integers(-60, 60), st.booleans(), st.integers(0, 2**23 - 1))
def test_fused_multiply_add_near_its_product(a: int, b: int, shift: int, minus: bool, mantissa: int) -> None:
    # Random bits rarely meet: put the addend within 60 binades of the product, where roundings interact.
    left, right = float_from_bits(a), float_from_bits(b)
    product = left * right
    if not math.isfinite(product) or product == 0:
        return
    exponent = min(max(math.frexp(product)[1] + shift, -148), 127)
    addend = float(np.float32(math.ldexp((1 + mantissa * 2.0**-23) / 2, exponent)))
    check_fused(left, right, -addend if minus else addend)


@settings(max_examples=300)
@given(st.integers(-3, 3), st.integers(-3, 3), st.integers(-(2**21), 2**21), st.booleans())
def test_fused_multiply_add_on_ties_between_subnormals(i: int, j: int, units: int, minus: bool) -> None:
    # A product within a few parts in 2^23 of half the smallest subnormal, and a subnormal addend.
    a = (-1) ** minus * 2.0**-75 * (1 + i * 2.0**-23)
    check_fused(a, 2.0**-75 * (1 + j * 2.0**-23), units * TINY)


@settings(max_examples=300)
@given(st.integers(1, 2**24 - 1), st.integers(1, 2**24 - 1), st.integers(-149, 100), st.integers(-3, 3))
def test_fused_multiply_add_on_constructed_ties(a: int, b: int, exponent: int, nudge: int) -> None:
    # The addend makes the sum end on, or next to, the middle between two fp32 numbers.
    product = Fraction(a * b)
    unit = 2 ** max((a * b).bit_length() + 2 - 24, 1)
    target = (a * b // unit + 3) * unit + unit // 2
    addend = float(np.float32(float(target - product) + nudge))
    left = float(np.float32(math.ldexp(a, min(exponent, 60))))
    scaled = float(np.float32(math.ldexp(addend, min(exponent, 60))))
    check_fused(left, float(b), scaled)


def test_fused_multiply_add_is_the_same_for_any_shape() -> None:
    a, b, c = (torch.randn(7, 1001) for _ in range(3))
    whole = fused_multiply_add(a, b, c)
    for piece in (slice(0, 1), slice(3, 20), slice(990, 1001)):
        assert same_bits(fused_multiply_add(a[:, piece], b[:, piece], c[:, piece]), whole[:, piece])


SILU_POINTS = torch.cat(
    [
        torch.linspace(-110, 110, 4001),
        torch.linspace(-1, 1, 2001),
        torch.tensor([0.0, TINY, -TINY, 2.0**-126, HUGE, -HUGE, -88.72, -103.9, -700.0, -744.0, -746.0, 1e30]),
    ]
)


def test_silu_rounds_the_exact_value_once() -> None:
    exact = torch.from_numpy(silu64(SILU_POINTS.double().numpy()))
    assert torch.equal(silu(SILU_POINTS), exact.float())


def test_silu_in_float64() -> None:
    exact = torch.from_numpy(silu64(SILU_POINTS.double().numpy()))
    error = (silu(SILU_POINTS.double()) - exact).abs()
    assert bool((error <= exact.abs() * 2.0**-50 + 1e-300).all())


def test_silu_of_specials() -> None:
    got = silu(torch.tensor([torch.inf, torch.nan, 0.0, -0.0, -HUGE, -1000.0]))
    assert got[0] == torch.inf
    assert bool(got[1].isnan())
    assert same_bits(got[2:], torch.tensor([0.0, -0.0, -0.0, -0.0]))


@settings(max_examples=60)
@given(BITS)
def test_silu_any_bits(bits: int) -> None:
    value = float_from_bits(bits)
    got = float(silu(torch.tensor([value])).item())
    if math.isnan(value) or value == -math.inf:
        return
    with np.errstate(all="ignore"):
        exact = value if value == math.inf else float(np.float32(silu64(np.array([value]))[0]))
    assert got == exact


def test_silu_bits_do_not_depend_on_place() -> None:
    # torch's own exp gives other bits in the tail of a vector than in its body.
    values = torch.randn(4099) * 20
    whole = silu(values)
    for length in (1, 2, 3, 5, 7, 8, 9, 15, 16, 17, 31, 33, 4098):
        assert same_bits(silu(values[:length]), whole[:length])
        assert same_bits(silu(values[-length:]), whole[-length:])
        assert same_bits(silu(values[1 : length + 1].clone()), whole[1 : length + 1])
    assert same_bits(silu(values[::3]), whole[::3])
    assert same_bits(silu(values[:4096].view(64, 64).T), whole[:4096].view(64, 64).T)


def run_float64(
    x: Tensor,
    weight: Tensor,
    pool: Tensor,
    lengths: list[int],
    history: bool,
    bias: Tensor | None,
    activation: str | None,
) -> Result:
    offsets = torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32)
    return causal_conv1d(
        x,
        weight,
        pool,
        offsets,
        torch.arange(len(lengths), dtype=torch.int32),
        bias=bias,
        activation=activation,
        has_initial_state=history,
        num_accepted_tokens=None,
        speculative=False,
        pad_slot_id=-1,
        arithmetic=Arithmetic.FLOAT64,
    )


@pytest.mark.parametrize("width", range(2, 9))
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("history", [True, False])
def test_float64_path_is_the_oracle(width: int, dtype: torch.dtype, history: bool) -> None:
    lengths, channels = [4, 1, 9, 0, 2], 7
    x, weight = torch.randn(16, channels).to(dtype), torch.randn(channels, width).to(dtype)
    bias, pool = torch.randn(channels).to(dtype), torch.randn(5, channels, width + 1).to(dtype)
    offsets = [0, *np.cumsum(lengths).tolist()]
    for activation in ("silu", None):
        state = pool.clone()
        expected = expect(x, weight, state, offsets, range(5), history=[history] * 5, bias=bias, activation=activation)
        result = run_float64(x, weight, state, lengths, history, bias, activation)
        assert result.values.dtype == torch.float64
        assert result.magnitude is not None
        assert torch.equal(result.rows, torch.arange(16))
        torch.testing.assert_close(result.values, torch.from_numpy(expected.out), rtol=1e-13, atol=1e-13)
        torch.testing.assert_close(result.magnitude, torch.from_numpy(expected.magnitude), rtol=1e-13, atol=0)
        assert same_bits(state, expected.pool(pool))


@pytest.mark.parametrize("width", range(2, 9))
def test_float64_path_is_torch_conv1d(width: int) -> None:
    x, weight, bias = torch.randn(40, 6), torch.randn(6, width), torch.randn(6)
    padded = F.pad(x.double().T[None], (width - 1, 0))
    exact = F.silu(F.conv1d(padded, weight.double()[:, None], bias.double(), groups=6))[0].T
    result = run_float64(x, weight, torch.empty(1, 6, width - 1), [40], False, bias, "silu")
    torch.testing.assert_close(result.values, exact, rtol=1e-13, atol=1e-13)


def test_rows_of_padding_are_listed_apart() -> None:
    result = causal_conv1d(
        torch.randn(6, 2),
        torch.randn(2, 4),
        torch.zeros(3, 2, 3),
        torch.tensor([0, 2, 5, 6], dtype=torch.int32),
        torch.tensor([1, -1, 0], dtype=torch.int32),
        bias=None,
        activation="silu",
        has_initial_state=True,
        num_accepted_tokens=None,
        speculative=False,
        pad_slot_id=-1,
    )
    assert result.rows.tolist() == [0, 1, 5]
    assert result.zero_rows.tolist() == [2, 3, 4]
    assert result.values.dtype == torch.float32
    assert result.magnitude is None
