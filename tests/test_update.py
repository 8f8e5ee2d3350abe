"""Decode and speculative steps: the grid of the contract, the limits of counts and lengths, both sentinels."""

from __future__ import annotations

import itertools

import pytest
import torch
from support.cases import (
    LAYOUTS,
    LENGTHS,
    SPECULATIVE,
    UPDATE,
    Case,
    check_case,
    dtype_combinations,
    play,
    same_bits,
    variants,
)

from serving_conv import DeviceFault, causal_conv1d_update, clear_device_fault, device_fault, state_positions

FLAGS = ((True,) * 4, (False,) * 4)


def int32(*values: int, device: torch.device) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


@pytest.mark.parametrize("case", list(variants(UPDATE.entry)), ids=str)
def test_grid(case: Case, device: torch.device) -> None:
    check_case(case, device)


@pytest.mark.parametrize("types", list(dtype_combinations()), ids=lambda types: "-".join(types.values()))
def test_all_type_combinations(types: dict[str, str], device: torch.device) -> None:
    for base, history in itertools.product((UPDATE, SPECULATIVE), FLAGS):
        play(base.but("types", history=history, channels=7, **types), device)


@pytest.mark.parametrize("channels", [1, 7, 63, 65, 130, 322])
@pytest.mark.parametrize("width", range(2, 9))
def test_widths_and_channels(width: int, channels: int, device: torch.device) -> None:
    for base, layout in itertools.product((UPDATE, SPECULATIVE), LAYOUTS):
        play(base.but("shape", width=width, channels=channels, layout=layout, x="bfloat16", state="bfloat16"), device)


@pytest.mark.parametrize("length", [n for n in LENGTHS if n < 1024])
def test_lengths_at_the_end_of_their_allocations(length: int, device: torch.device) -> None:
    case = UPDATE.but("length", lengths=(length,), offsets=True, channels=9, at_end=True, row_gap=1, x="bfloat16")
    play(case, device)
    play(case.but("speculative", counts=(2,), extra_positions=max(length - 1, 1)), device)


@pytest.mark.parametrize("where", list(itertools.product((True, False), repeat=3)))
@pytest.mark.parametrize("speculative", [False, True])
def test_empty_sequences_anywhere(where: tuple[bool, ...], speculative: bool, device: torch.device) -> None:
    lengths = tuple(n for empty in where for n in ((0, 2) if empty else (2,)))
    counts = (2,) * len(lengths) if speculative else None
    play(UPDATE.but("empty", lengths=lengths, counts=counts, extra_positions=2, offsets=True, channels=5), device)


def test_flags_absent_means_history(device: torch.device) -> None:
    case = UPDATE.but("history", history=(True,) * 4)
    assert same_bits(play(case, device).out, play(case.but("absent", history=None), device).out)


def test_no_sequences(device: torch.device) -> None:
    pool = torch.empty(2, 3, 3, device=device)
    out = causal_conv1d_update(
        torch.empty(0, 3, device=device), torch.ones(3, 4, device=device), pool, int32(device=device)
    )
    assert out.shape == (0, 3)


@pytest.mark.parametrize("speculative", [False, True])
def test_out_is_x_gives_the_bits_of_a_separate_out(speculative: bool, device: torch.device) -> None:
    base = SPECULATIVE if speculative else UPDATE
    separate = play(base.but("separate", row_gap=5, x="bfloat16"), device)
    in_place = play(base.but("in-place", row_gap=5, x="bfloat16", out="x"), device)
    assert same_bits(separate.out, in_place.out)
    assert same_bits(separate.pool, in_place.pool)


def test_slot_zero_and_the_last_slot_are_ordinary(device: torch.device) -> None:
    check_case(UPDATE.but("edges", slots=(0, 7, 3, 1)), device)


@pytest.mark.parametrize("sentinel", [5, 8, -(2**31), 2**31 - 1])
def test_sentinel_is_an_argument(sentinel: int, device: torch.device) -> None:
    case = UPDATE.but("sentinel", pad_slot_id=sentinel, padding=frozenset({1}), slots=(0, sentinel, 3, 7))
    check_case(case, device)


# --- counts and lengths -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", range(2, 9))
@pytest.mark.parametrize("drafts", [0, 1, 4])
def test_every_count_up_to_the_limit(width: int, drafts: int, device: torch.device) -> None:
    limit = drafts + 1
    assert state_positions(width, drafts) == width - 1 + drafts
    counts = tuple(range(1, limit + 1))
    for length in (1, limit):
        case = SPECULATIVE.but(
            "count", width=width, extra_positions=drafts, counts=counts, lengths=(length,) * limit, channels=5
        )
        check_case(case, device)


@pytest.mark.parametrize("bad", [-(2**31), -1, 0, 4, 5, 2**31 - 1])
@pytest.mark.parametrize("history", [True, False])
@pytest.mark.usefixtures("clean_fault")
def test_count_out_of_range_is_zero_output_and_an_untouched_slot(bad: int, history: bool, device: torch.device) -> None:
    # L - W + 2 = 3
    case = SPECULATIVE.but(
        "bad", width=4, extra_positions=2, counts=(1, bad, 3, 2), history=(True, history, True, True)
    )
    outcome = play(case, device)
    assert not bool(outcome.out[3].any())
    assert int(outcome.stored.any(1).sum()) == 3
    assert device_fault(device) == DeviceFault.ACCEPTED_COUNT


@pytest.mark.parametrize("length", range(1, 9))
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.usefixtures("clean_fault")
def test_tokens_beyond_the_limit_store_what_fits(length: int, layout: str, device: torch.device) -> None:
    limit, width = 3, 4
    case = SPECULATIVE.but(
        "long", width=width, lengths=(length, 1), counts=(3, 1), extra_positions=limit - 1, layout=layout
    )
    outcome = play(case, device)
    kept = sorted(int(n) for n in outcome.stored.sum(1) if n)
    assert kept == sorted([min(length + width - 2, width - 1 + limit - 1), width - 1])
    assert (device_fault(device) == DeviceFault.STATE_TRUNCATED) == (length > limit)


def test_a_count_may_exceed_this_steps_tokens(device: torch.device) -> None:
    check_case(SPECULATIVE.but("count", lengths=(1, 1, 2, 1), counts=(4, 3, 4, 2), extra_positions=3), device)


def test_speculative_width_2_keeps_tokens_only(device: torch.device) -> None:
    # W-2 = 0 positions of the window remain: the slot holds the T tokens.
    pool = torch.full((1, 1, 3), 50.0, device=device)
    x = torch.tensor([[1.0], [2.0], [3.0]], device=device)
    weight = torch.tensor([[1.0, 10.0]], device=device)
    out = causal_conv1d_update(
        x,
        weight,
        pool,
        int32(0, device=device),
        cu_seqlens=int32(0, 3, device=device),
        num_accepted_tokens=int32(1, device=device),
        activation=None,
    )
    assert out[:, 0].tolist() == [60.0, 21.0, 32.0]
    assert pool[0, 0].tolist() == [1.0, 2.0, 3.0]


# --- a plain step leaves the rest of a long slot alone ----------------------------------------------------------


@pytest.mark.parametrize("rows", [1, 2, 3, 4, 7])
def test_plain_step_uses_only_the_first_positions(rows: int, device: torch.device) -> None:
    pool = torch.tensor([7.0, 8.0, 9.0, torch.nan, 77.0], device=device).repeat(1, 1, 1)
    x = torch.arange(1.0, rows + 1, device=device)[:, None]
    causal_conv1d_update(
        x, torch.ones(1, 4, device=device), pool, int32(0, device=device), cu_seqlens=int32(0, rows, device=device)
    )
    stream = [7.0, 8.0, 9.0, *x[:, 0].tolist()]
    assert pool[0, 0, :3].tolist() == stream[-3:]
    assert bool(pool[0, 0, 3].isnan())
    assert pool[0, 0, 4] == 77.0


def test_65537_sequences(device: torch.device) -> None:
    count = 65_537
    x = torch.randn(count, 2, device=device)
    slots = torch.randperm(count, dtype=torch.int32).to(device)
    pool = torch.full((count, 2, 3), 2.0, device=device)
    weight = torch.tensor([[0.0, 0.0, 0.0, 1.0]] * 2, device=device)
    assert torch.equal(causal_conv1d_update(x, weight, pool, slots, activation=None), x)
    assert torch.equal(pool[slots.long(), :, 2], x)


def test_65537_channels(device: torch.device) -> None:
    play(UPDATE.but("wide", channels=65_537, lengths=(1, 1), x="bfloat16"), device)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_slots_beyond_two_to_the_31_elements(layout: str, device: torch.device) -> None:
    stride, count, channels = 600_000, 3_600, 8
    page = torch.empty(stride * count, dtype=torch.bfloat16, device=device)
    inner = (1, channels) if layout == "channels" else (3, 1)
    pool = page.as_strided((count, channels, 3), (stride, *inner))
    far = count - 1
    pool[far] = 1.0
    weight = torch.tensor([1.0, 10.0, 100.0, 1000.0], device=device).expand(channels, 4).contiguous()
    x = torch.full((1, channels), 2.0, device=device)
    out = causal_conv1d_update(x, weight, pool, int32(far, device=device), activation=None)
    assert out.tolist() == [[2111.0] * channels]
    assert pool[far, 0].tolist() == [1.0, 1.0, 2.0]


def test_rows_beyond_two_to_the_31_elements(device: torch.device) -> None:
    rows, pitch, channels = 60_000, 36_864, 4
    page = torch.empty(rows * pitch, dtype=torch.bfloat16, device=device)
    x = page.as_strided((rows, channels), (pitch, 1))
    x[-1] = 2.0
    slots = torch.full((rows,), -1, dtype=torch.int32, device=device)
    slots[-1] = 0
    pool = torch.ones(1, channels, 3, device=device)
    weight = torch.tensor([1.0, 10.0, 100.0, 1000.0], device=device).expand(channels, 4).contiguous()
    out = causal_conv1d_update(x, weight, pool, slots, activation=None)
    assert out[-1].tolist() == [torch.tensor(2111.0).bfloat16().item()] * channels
    assert not bool(out[:-1].any())
    clear_device_fault(device)
