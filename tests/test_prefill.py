"""Packed prefill: the grid of the contract, row by row, in guarded memory and under three poisons."""

from __future__ import annotations

import itertools

import pytest
import torch
from support.bounds import assert_within
from support.cases import LAYOUTS, LENGTHS, PREFILL, Case, check_case, dtype_combinations, play, same_bits, variants
from support.loop import expect

import serving_conv
from serving_conv import causal_conv1d_fn

FLAGS = ((True,) * 4, (False,) * 4)


def int32(*values: int, device: torch.device) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


@pytest.mark.parametrize("case", list(variants(PREFILL.entry)), ids=str)
def test_grid(case: Case, device: torch.device) -> None:
    check_case(case, device)


@pytest.mark.parametrize("types", list(dtype_combinations()), ids=lambda types: "-".join(types.values()))
def test_all_type_combinations(types: dict[str, str], device: torch.device) -> None:
    for history in FLAGS:
        play(PREFILL.but("types", history=history, channels=7, **types), device)


@pytest.mark.parametrize("channels", [1, 7, 63, 65, 130, 322])
@pytest.mark.parametrize("width", range(2, 9))
def test_widths_and_channels(width: int, channels: int, device: torch.device) -> None:
    for layout in LAYOUTS:
        case = PREFILL.but(
            "shape", width=width, channels=channels, layout=layout, x="bfloat16", weight="bfloat16", state="bfloat16"
        )
        play(case.but("plain", extra_positions=width % 3), device)


@pytest.mark.parametrize("length", LENGTHS)
def test_lengths_at_the_end_of_their_allocations(length: int, device: torch.device) -> None:
    for width, types in ((4, "bfloat16"), (8, "float32")):
        case = PREFILL.but(
            "length",
            lengths=(length,),
            width=width,
            channels=9,
            x=types,
            history=None,
            at_end=True,
            out="given",
            out_gap=1,
            row_gap=1,
        )
        play(case, device)
        play(case.but("history", history=(True,), layout="positions"), device)


def test_sequences_of_all_lengths_in_one_call(device: torch.device) -> None:
    lengths = tuple(n for n in LENGTHS if n < 300)
    history = tuple(n % 2 == 0 for n in range(len(lengths)))
    play(PREFILL.but("ragged", lengths=lengths, history=history, channels=33, workspace=True), device)


@pytest.mark.parametrize("where", list(itertools.product((True, False), repeat=4)))
def test_empty_sequences_anywhere(where: tuple[bool, ...], device: torch.device) -> None:
    lengths = tuple(n for empty in where for n in ((0, 2) if empty else (2,)))
    play(PREFILL.but("empty", lengths=lengths, history=(True,) * len(lengths), channels=5), device)


@pytest.mark.parametrize("length", range(9))
def test_window_is_made_of_history_then_tokens(length: int, device: torch.device) -> None:
    # Width 8 keeps 7 inputs: with fewer tokens, older history stays in the window, shifted.
    pool = torch.arange(1.0, 8.0, device=device).repeat(2, 1, 1)
    x = torch.arange(10.0, 10.0 + length, device=device)[:, None]
    weight = torch.zeros(1, 8, device=device)
    causal_conv1d_fn(
        x,
        weight,
        pool,
        int32(0, length, device=device),
        int32(1, device=device),
        torch.ones(1, dtype=torch.bool, device=device),
    )
    stream = [*range(1, 8), *range(10, 10 + length)]
    assert pool[1, 0].tolist() == [float(n) for n in stream[-7:]]
    assert pool[0, 0].tolist() == [float(n) for n in range(1, 8)]


@pytest.mark.parametrize("length", range(1, 9))
def test_window_without_history_is_zeros_then_tokens(length: int, device: torch.device) -> None:
    pool = torch.full((2, 1, 9), torch.nan, device=device)
    x = torch.arange(10.0, 10.0 + length, device=device)[:, None]
    weight = torch.ones(1, 8, device=device)
    out = causal_conv1d_fn(x, weight, pool, int32(0, length, device=device), int32(1, device=device), activation=None)
    stream = [0] * 7 + list(range(10, 10 + length))
    assert pool[1, 0, :7].tolist() == [float(n) for n in stream[-7:]]
    assert bool(pool[1, 0, 7:].isnan().all()), "the rest of the slot keeps its bytes"
    assert out[:, 0].tolist() == [float(sum(stream[n : n + 8])) for n in range(length)]


def test_flags_absent_means_no_history(device: torch.device) -> None:
    case = PREFILL.but("no-history", history=(False,) * 4)
    assert same_bits(play(case, device).out, play(case.but("absent", history=None), device).out)


def test_no_rows_but_sequences(device: torch.device) -> None:
    play(PREFILL.but("no-rows", lengths=(0, 0), history=(True, True)), device)


def test_a_slot_pool_without_calls_on_it(device: torch.device) -> None:
    x, weight = torch.empty(0, 3, device=device), torch.ones(3, 4, device=device)
    out = causal_conv1d_fn(
        x, weight, torch.empty(0, 3, 3, device=device), int32(0, device=device), int32(device=device)
    )
    assert out.shape == (0, 3)


def test_slot_zero_and_the_last_slot_are_ordinary(device: torch.device) -> None:
    check_case(PREFILL.but("edges", slots=(0, 7, 3, 1)), device)


@pytest.mark.parametrize("sentinel", [5, 8, -(2**31), 2**31 - 1])
def test_sentinel_is_an_argument(sentinel: int, device: torch.device) -> None:
    case = PREFILL.but("sentinel", pad_slot_id=sentinel, padding=frozenset({1}), slots=(0, sentinel, 3, 7))
    check_case(case, device)


def test_strided_slots_of_stride_zero_mark_all_padding(device: torch.device) -> None:
    pool = torch.full((3, 2, 3), torch.nan, device=device)
    slots = int32(-1, device=device).expand(3)
    out = causal_conv1d_fn(
        torch.ones(6, 2, device=device), torch.ones(2, 4, device=device), pool, int32(0, 2, 4, 6, device=device), slots
    )
    assert not bool(out.any())
    assert bool(pool.isnan().all())


def test_workspace_of_flashinfer_is_enough(device: torch.device) -> None:
    # A caller that sizes its scratch by FlashInfer's formula is never refused; one element less is.
    for sequences, rows in ((32, 64), (33, 33), (33, 64 * 33), (40, 5000)):
        block = 8 if rows < 64 * sequences else 16
        size = 0 if sequences <= 32 else 1 + 2 * min(rows, -(-rows // block) + sequences)
        assert serving_conv.prefill_workspace_size(rows, sequences) == size
        offsets = torch.linspace(0, rows, sequences + 1, device=device).to(torch.int32)
        pool = torch.zeros(sequences, 1, 3, device=device)
        slots = torch.arange(sequences, dtype=torch.int32, device=device)
        x, weight = torch.randn(rows, 1, device=device), torch.ones(1, 4, device=device)
        scratch = torch.full((size,), 2**31 - 1, dtype=torch.int32, device=device)
        plain = causal_conv1d_fn(x, weight, pool.clone(), offsets, slots)
        assert torch.equal(causal_conv1d_fn(x, weight, pool.clone(), offsets, slots, workspace=scratch), plain)
        if size:
            with pytest.raises(serving_conv.ContractError, match="workspace"):
                causal_conv1d_fn(x, weight, pool, offsets, slots, workspace=scratch[:-1])


@pytest.mark.parametrize("rows", [0, 31, 10_000])
def test_workspace_size_of_small_calls_is_zero(rows: int) -> None:
    assert serving_conv.prefill_workspace_size(rows, 32) == 0
    assert serving_conv.prefill_workspace_size(0, 65_536) == 0


def test_65537_sequences(device: torch.device) -> None:
    count = 65_537
    x = torch.randn(count, 2, device=device)
    weight, pool = torch.randn(2, 4, device=device), torch.full((count + 1, 2, 3), torch.nan, device=device)
    slots = torch.randperm(count, dtype=torch.int32).to(device)
    offsets = torch.arange(count + 1, dtype=torch.int32, device=device)
    out = causal_conv1d_fn(x, weight, pool, offsets, slots, activation=None)
    assert torch.equal(out, x * weight[:, 3])  # adding to +0 is exact
    assert torch.equal(pool[slots.long(), :, 2], x)
    assert not bool(pool[slots.long(), :, :2].any())
    assert bool(pool[count].isnan().all())


def test_65537_channels(device: torch.device) -> None:
    play(PREFILL.but("wide", channels=65_537, lengths=(3, 1), history=(True, False), x="bfloat16"), device)


def test_rows_beyond_two_to_the_31_elements(device: torch.device) -> None:
    # 60,000 rows of pitch 36,864: 2.2e9 elements. Memory that is never written costs nothing on a CPU.
    rows, pitch, channels = 60_000, 36_864, 8
    page = torch.empty(rows * pitch, dtype=torch.bfloat16, device=device)
    x = page.as_strided((rows, channels), (pitch, 1))
    last = 6
    first = rows - last
    x[first:] = torch.randn(last, channels)
    weight = torch.randn(channels, 4, device=device)
    pool = torch.full((3, channels, 3), torch.nan, device=device)
    begin = x[first:]
    offsets = int32(0, first, rows, device=device)
    out = causal_conv1d_fn(x, weight, pool, offsets, int32(-1, 1, device=device))
    expected = expect(begin, weight, pool, [0, last], [1], history=[False])
    assert_within(
        out[first:], torch.from_numpy(expected.out), torch.from_numpy(expected.magnitude), width=4, activation="silu"
    )
    assert not bool(out[:first].any())
    assert torch.equal(pool[1], x[-3:].T.float())


@pytest.mark.parametrize("layout", LAYOUTS)
def test_slots_beyond_two_to_the_31_elements(layout: str, device: torch.device) -> None:
    stride, count, channels = 600_000, 3_600, 8
    page = torch.empty(stride * count, dtype=torch.bfloat16, device=device)
    inner = (1, channels) if layout == "channels" else (3, 1)
    pool = page.as_strided((count, channels, 3), (stride, *inner))
    near, far = 19, count - 1  # far * stride wraps around 32 bits to another slot's range
    pool[far] = 1.0
    pool[near] = 2.0
    x = torch.ones(2, channels, dtype=torch.bfloat16, device=device)
    weight = torch.tensor([1.0, 10.0, 100.0, 1000.0], device=device).expand(channels, 4).contiguous()
    flags = torch.ones(2, dtype=torch.bool, device=device)
    out = causal_conv1d_fn(
        x, weight, pool, int32(0, 1, 2, device=device), int32(far, near, device=device), flags, activation=None
    )
    assert out[0].unique().tolist() == [torch.tensor(1111.0).bfloat16().item()]
    assert out[1].unique().tolist() == [torch.tensor(1222.0).bfloat16().item()]
    assert pool[far].flatten().tolist() == [1.0] * (3 * channels)
    assert pool[near, 0].tolist() == [2.0, 2.0, 1.0]
