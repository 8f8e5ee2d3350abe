"""The fixed order to the last bit: bias, then W fused multiply-adds, oldest tap first, one rounding at the end.

Without an activation the contract leaves no freedom, so every backend must match exact arithmetic bit for bit.
"""

from __future__ import annotations

import pytest
import torch
from support.cases import same_bits
from support.exact import ordered_sum
from torch import Tensor

from serving_conv import causal_conv1d_fn, causal_conv1d_update

TYPES = (torch.bfloat16, torch.float16, torch.float32)
CHANNELS, LENGTH = 9, 12


def cancelling(*shape: int, dtype: torch.dtype) -> Tensor:
    """Values whose sums cancel: the order of the additions and every product's rounding show in the result."""
    magnitude = torch.randint(-6, 7, shape).double().exp2()
    return (torch.randn(*shape, dtype=torch.float64) * magnitude).to(dtype)


def both_entries(
    x: Tensor, weight: Tensor, bias: Tensor | None, pool_dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor]:
    """The same sequence as one prefill without history and as one decode step a token."""
    x, weight = x.to(device), weight.to(device)
    bias = None if bias is None else bias.to(device)
    pool = torch.full((2, x.shape[1], weight.shape[1] - 1), torch.nan, dtype=pool_dtype, device=device)
    slot = torch.ones(1, dtype=torch.int32, device=device)
    offsets = torch.tensor([0, x.shape[0]], dtype=torch.int32, device=device)
    prefill = causal_conv1d_fn(x, weight, pool, offsets, slot, bias=bias, activation=None)
    pool.fill_(torch.nan)
    rows = []
    for token in range(x.shape[0]):
        flag = torch.tensor([token > 0], device=device)
        row = x[token : token + 1]
        rows.append(causal_conv1d_update(row, weight, pool, slot, has_initial_state=flag, bias=bias, activation=None))
    return prefill.cpu(), torch.cat(rows).cpu()


def windows(x: Tensor, width: int) -> Tensor:
    """`[R, C, W]` windows of one sequence without history."""
    padded = torch.cat([x.new_zeros(width - 1, x.shape[1]), x])
    return padded.unfold(0, width, 1)


@pytest.mark.parametrize("width", range(2, 9))
@pytest.mark.parametrize("with_bias", [True, False])
def test_fp32_sums_bit_for_bit(width: int, with_bias: bool, device: torch.device) -> None:
    x, weight = cancelling(LENGTH, CHANNELS, dtype=torch.float32), cancelling(CHANNELS, width, dtype=torch.float32)
    bias = cancelling(CHANNELS, dtype=torch.float32) if with_bias else None
    exact = ordered_sum(windows(x, width), weight, bias)
    prefill, decode = both_entries(x, weight, bias, torch.float32, device)
    assert same_bits(prefill, exact)
    assert same_bits(decode, exact)


@pytest.mark.parametrize("weight_dtype", TYPES, ids=str)
@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_one_rounding_to_the_output_type(dtype: torch.dtype, weight_dtype: torch.dtype, device: torch.device) -> None:
    x, weight = cancelling(LENGTH, CHANNELS, dtype=dtype), cancelling(CHANNELS, 4, dtype=weight_dtype)
    for bias_dtype in TYPES:
        bias = cancelling(CHANNELS, dtype=bias_dtype)
        exact = ordered_sum(windows(x, 4), weight, bias).to(dtype)
        prefill, decode = both_entries(x, weight, bias, torch.float32, device)
        assert same_bits(prefill, exact)
        assert same_bits(decode, exact)


def test_the_data_would_show_another_order() -> None:
    # Guards the tests above: reversed taps, a late bias and unfused products must all change some bits.
    x, weight = cancelling(LENGTH, CHANNELS, dtype=torch.float32), cancelling(CHANNELS, 4, dtype=torch.float32)
    bias = cancelling(CHANNELS, dtype=torch.float32)
    exact = ordered_sum(windows(x, 4), weight, bias)
    assert not same_bits(exact, ordered_sum(windows(x, 4).flip(2), weight.flip(1), bias))
    assert not same_bits(exact, ordered_sum(windows(x, 4), weight, None) + bias)
    unfused = bias.expand(LENGTH, CHANNELS)
    for tap in range(4):
        unfused = unfused + windows(x, 4)[:, :, tap] * weight[:, tap]
    assert not same_bits(exact, unfused)


def test_absent_bias_is_plus_zero(device: torch.device) -> None:
    x = torch.full((1, 2), -0.0)
    prefill, decode = both_entries(x, torch.ones(2, 4), None, torch.float32, device)
    assert same_bits(prefill, torch.zeros(1, 2))  # +0 + -0 is +0
    assert same_bits(decode, torch.zeros(1, 2))


def test_subnormals_are_kept(device: torch.device) -> None:
    x = torch.tensor([[2.0**-140, 3 * 2.0**-149]])
    weight = torch.tensor([[0.0, 1.0]]).repeat(2, 1)
    prefill, decode = both_entries(x, weight, None, torch.float32, device)
    assert same_bits(prefill, x)
    assert same_bits(decode, x)


@pytest.mark.parametrize("value", [float("inf"), -float("inf"), float("nan")])
def test_infinities_and_nan_stay_in_their_sequence(value: float, device: torch.device) -> None:
    # A bad token poisons the W rows that see it and nothing else: no other row, channel or sequence.
    x = torch.ones(12, 2, device=device)
    x[3, 0] = value
    pool = torch.zeros(2, 2, 3, device=device)
    offsets = torch.tensor([0, 8, 12], dtype=torch.int32, device=device)
    slots = torch.arange(2, dtype=torch.int32, device=device)
    out = causal_conv1d_fn(x, torch.ones(2, 4, device=device), pool, offsets, slots, activation=None)
    assert out[:, 0].isfinite().tolist() == [True] * 3 + [False] * 4 + [True] * 5
    assert bool(out[:, 1].isfinite().all())
    assert bool(pool.isfinite().all())


def test_overflow_is_infinity_in_the_output_type(device: torch.device) -> None:
    x = torch.full((1, 1), 300.0, dtype=torch.float16)
    prefill, decode = both_entries(x, torch.tensor([[0.0, 300.0]]), None, torch.float32, device)
    assert prefill.item() == decode.item() == float("inf")


@pytest.mark.parametrize("state", TYPES, ids=str)
@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_windows_hold_raw_inputs(dtype: torch.dtype, state: torch.dtype, device: torch.device) -> None:
    x = torch.randn(6, 5).to(dtype).to(device)
    pool = torch.full((1, 5, 3), torch.nan, dtype=state, device=device)
    slot = torch.zeros(1, dtype=torch.int32, device=device)
    weight, bias = torch.randn(5, 4, device=device), torch.randn(5, device=device)
    causal_conv1d_fn(x[:5], weight, pool, torch.tensor([0, 5], dtype=torch.int32, device=device), slot, bias=bias)
    assert same_bits(pool[0].cpu(), x[2:5].T.to(state).cpu())
    causal_conv1d_update(x[5:], weight, pool, slot, bias=bias)
    assert same_bits(pool[0].cpu(), x[3:].T.to(state).cpu())


def test_a_narrow_pool_is_what_the_next_step_reads(device: torch.device) -> None:
    # The pool's type may be too small for the inputs: then the rounded value is history, from the pool only.
    value = 1.0 + 2.0**-10
    x = torch.full((2, 1), value, device=device)
    pool = torch.zeros(1, 1, 1, dtype=torch.bfloat16, device=device)
    slot = torch.zeros(1, dtype=torch.int32, device=device)
    weight = torch.tensor([[1.0, 0.0]], device=device)
    offsets = torch.tensor([0, 2], dtype=torch.int32, device=device)
    inside = causal_conv1d_fn(x, weight, pool, offsets, slot, activation=None)
    assert inside[:, 0].tolist() == [0.0, value], "inside a call the inputs are used as they came"
    across = causal_conv1d_update(x[:1], weight, pool, slot, activation=None)
    assert across.item() == 1.0
