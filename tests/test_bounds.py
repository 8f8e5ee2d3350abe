"""The derived bound bites: the right kernel passes it, every planted fault fails it."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from support.bounds import Verdict, assert_within, compare, half_step
from support.loop import expect
from torch import Tensor

from serving_conv import causal_conv1d_fn

ROWS, CHANNELS, WIDTH = 2048, 32, 4
TYPES = (torch.bfloat16, torch.float16, torch.float32)
Kernel = Callable[[Tensor, Tensor, Tensor], Tensor]


def rounded(value: Tensor) -> Tensor:
    return value.bfloat16().float()


def accumulate(
    windows: Tensor,
    weight: Tensor,
    bias: Tensor,
    *,
    product: Callable[[Tensor], Tensor] = lambda v: v,
    total: Callable[[Tensor], Tensor] = lambda v: v,
) -> Tensor:
    """fp32 sum with a hook on every product and on every partial sum."""
    result = bias.float().expand(windows.shape[:2])
    for tap in range(windows.shape[2]):
        result = total(result + product(windows[:, :, tap].float() * weight[:, tap].float()))
    return result


def silu(value: Tensor) -> Tensor:
    return value / (1 + torch.exp(-value))


def truncate(value: Tensor, dtype: torch.dtype) -> Tensor:
    """Round towards zero."""
    near = value.to(dtype)
    raw = {2: torch.int16, 4: torch.int32}[near.element_size()]
    too_far = near.double().abs() > value.double().abs()
    return torch.where(too_far, (near.view(raw) - 1).view(dtype), near)


def plain(windows: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """An ordinary right kernel: unfused fp32, fp32 exp."""
    return silu(accumulate(windows, weight, bias)).to(windows.dtype)


def bf16_products(windows: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return silu(accumulate(windows, weight, bias, product=rounded)).to(windows.dtype)


def bf16_accumulation(windows: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return silu(accumulate(windows, weight, bias, total=rounded)).to(windows.dtype)


def fp16_accumulation(windows: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return silu(accumulate(windows, weight, bias, total=lambda v: v.half().float())).to(windows.dtype)


def rounded_before_silu(windows: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return silu(rounded(accumulate(windows, weight, bias))).to(windows.dtype)


def truncation(windows: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    exact = silu(accumulate(windows.double(), weight.double(), bias.double()).double())
    return truncate(exact, windows.dtype)


def dropped_bias(windows: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return plain(windows, weight, torch.zeros_like(bias))


def swapped_taps(windows: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return plain(windows, weight.flip(1), bias)


def late_window(windows: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return plain(windows.roll(1, 0), weight, bias)


def no_silu(windows: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return accumulate(windows, weight, bias).to(windows.dtype)


def fast_silu(windows: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    # The sigmoid through a tanh that is good to 2^-11, as the hardware's approximate one.
    total = accumulate(windows, weight, bias)
    tanh = torch.tanh(total * 0.5)
    step = 2.0**-11
    return (total * (0.5 + 0.5 * (tanh / step).round() * step)).to(windows.dtype)


def coarse_exp(windows: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    # exp2 of an argument that was rounded to fp16 first.
    total = accumulate(windows, weight, bias)
    return (total / (1 + torch.exp2((-total * math.log2(math.e)).half().float()))).to(windows.dtype)


MUTANTS = (
    bf16_products,
    bf16_accumulation,
    fp16_accumulation,
    rounded_before_silu,
    truncation,
    dropped_bias,
    swapped_taps,
    late_window,
    no_silu,
    fast_silu,
    coarse_exp,
)


def judge(kernel: Kernel | None, dtype: torch.dtype, device: torch.device) -> Verdict:
    """Compare a kernel, or the public entry, with the oracle on random data with a small bias."""
    x, weight = torch.randn(ROWS, CHANNELS).to(dtype), (torch.randn(CHANNELS, WIDTH) * 0.5).to(dtype)
    bias = torch.randn(CHANNELS) * 0.02
    pool = torch.zeros(1, CHANNELS, WIDTH - 1, dtype=dtype)
    expected = expect(x, weight, pool, [0, ROWS], [0], history=[False], bias=bias)
    if kernel is None:
        got = causal_conv1d_fn(
            x.to(device),
            weight.to(device),
            pool.to(device),
            torch.tensor([0, ROWS], dtype=torch.int32, device=device),
            torch.zeros(1, dtype=torch.int32, device=device),
            bias=bias.to(device),
        )
    else:
        windows = torch.cat([x.new_zeros(WIDTH - 1, CHANNELS), x]).unfold(0, WIDTH, 1)
        got = kernel(windows, weight, bias)
    exact, magnitude = torch.from_numpy(expected.out), torch.from_numpy(expected.magnitude)
    return compare(got, exact, magnitude, width=WIDTH, activation="silu")


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_the_operator_passes(dtype: torch.dtype, device: torch.device) -> None:
    assert judge(None, dtype, device).worst <= 1


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_an_ordinary_fp32_kernel_passes(dtype: torch.dtype, device: torch.device) -> None:
    assert judge(plain, dtype, device).worst <= 1


# A truncating store is an error of its own only where it is coarser than fp32 sums.
PAIRS = [(m, d) for m in MUTANTS for d in TYPES if (m, d) != (truncation, torch.float32)]


@pytest.mark.parametrize(("mutant", "dtype"), PAIRS, ids=lambda value: getattr(value, "__name__", str(value)))
def test_mutants_fail(mutant: Kernel, dtype: torch.dtype, device: torch.device) -> None:
    verdict = judge(mutant, dtype, device)
    # Not by luck in a handful of elements.
    assert verdict.outside > 0.002, f"only {verdict.outside:.3%} outside the bound"


def test_the_bound_is_tight_for_16_bit_outputs(device: torch.device) -> None:
    # A bound ten times too wide would pass everything: the right kernel must come near it.
    assert judge(None, torch.bfloat16, device).worst > 0.95
    assert judge(None, torch.float16, device).worst > 0.95


@pytest.mark.parametrize(
    ("value", "dtype", "half"),
    [
        (1.0, torch.float32, 2.0**-24),
        (1.99, torch.float32, 2.0**-24),
        (2.0, torch.bfloat16, 2.0**-7),
        (1.0, torch.float16, 2.0**-11),
        (0.0, torch.float16, 2.0**-25),
        (2.0**-20, torch.float16, 2.0**-25),
        (0.0, torch.float32, 2.0**-150),
        (0.0, torch.bfloat16, 2.0**-134),
        (1e300, torch.float16, 16.0),
    ],
)
def test_half_step(value: float, dtype: torch.dtype, half: float) -> None:
    assert half_step(torch.tensor([value], dtype=torch.float64), dtype).item() == half


def test_infinities_are_judged() -> None:
    exact = torch.tensor([[65_530.0, 65_510.0, 1e6, -1e6, 1.0, 1e6]], dtype=torch.float64)
    got = torch.tensor([[torch.inf, 65_504.0, torch.inf, -torch.inf, 1.0, torch.inf]], dtype=torch.float16)
    assert_within(got, exact, exact.abs(), width=4, activation=None)
    for column, wrong in ((1, torch.inf), (2, 65_504.0), (3, torch.inf), (4, torch.inf), (5, torch.nan)):
        bad = got.clone()
        bad[0, column] = wrong
        with pytest.raises(AssertionError, match="outside the derived bound"):
            assert_within(bad, exact, exact.abs(), width=4, activation=None)


def test_shapes_must_agree() -> None:
    with pytest.raises(AssertionError, match="shape"):
        assert_within(torch.zeros(2, 3), *(torch.zeros(3, 3).double(),) * 2, width=4, activation=None)
