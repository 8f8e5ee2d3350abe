"""Values on the device may be anything: no foreign byte is touched, the sequence is zero, a sticky code is left."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.cases import PREFILL, SPECULATIVE, UPDATE, Case, play

from serving_conv import DeviceFault, causal_conv1d_update, clear_device_fault, device_fault

LOW, HIGH = -(2**31), 2**31 - 1
BASES = (PREFILL, UPDATE.but("rows", offsets=True, lengths=PREFILL.lengths), SPECULATIVE)


def base_id(case: Case) -> str:
    return f"{case.entry}-{case.name}"


@pytest.fixture(autouse=True)
def _start_clear(clean_fault: None) -> None:
    pass


@pytest.mark.parametrize("base", BASES, ids=base_id)
@pytest.mark.parametrize("slot", [-1, -2, 8, 9, HIGH, LOW])
@pytest.mark.parametrize("sentinel", [-1, 0])
def test_slot_out_of_range(slot: int, sentinel: int, base: Case, device: torch.device) -> None:
    slots = (3, slot, 7, 1)
    outcome = play(base.but("slot", slots=slots, pad_slot_id=sentinel, padding=frozenset()), device)
    first = base.lengths[0]
    assert not bool(outcome.out[first : first + base.lengths[1]].any())
    assert outcome.stored.any(1).nonzero()[:, 0].tolist() == [1, 3, 7]
    wanted = DeviceFault.NONE if slot == sentinel else DeviceFault.SLOT
    assert device_fault(device) == wanted


@pytest.mark.parametrize("base", BASES, ids=base_id)
@pytest.mark.parametrize(
    "offsets",
    [
        (0, 3, 6, 5, 8),  # backwards in the middle
        (0, 3, 6, 8, 2),  # backwards at the end
        (0, 3, HIGH, HIGH, HIGH),
        (0, 3, 6, 8, 10_000),  # past R
        (0, 3, 6, 8, HIGH),
        (-4, 3, 6, 8, 9),
        (LOW, 3, 6, 8, 9),
        (LOW, HIGH, LOW, HIGH, LOW),
        (HIGH, LOW, HIGH, LOW, HIGH),
        (5, 4, 3, 2, 1),
        (0, 5, 0, 5, 0),
    ],
)
def test_hostile_offsets(offsets: tuple[int, ...], base: Case, device: torch.device) -> None:
    rows = sum(base.lengths)
    play(base.but("offsets", cu_seqlens=offsets, slots=(3, 5, 7, 1), out="given", out_gap=3), device)
    pairs = list(itertools.pairwise(offsets))
    bad = any(begin < 0 or end < begin or end > rows for begin, end in pairs)
    assert bool(device_fault(device) & DeviceFault.OFFSETS) == bad


def test_offsets_past_the_end_give_zero_rows(device: torch.device) -> None:
    outcome = play(PREFILL.but("past", lengths=(4, 4), history=(True, True), cu_seqlens=(0, 4, 9)), device)
    assert bool(outcome.out[:4].any())
    assert not bool(outcome.out[4:].any())
    assert int(outcome.stored.any(1).sum()) == 1


@pytest.mark.parametrize("base", BASES, ids=base_id)
def test_padding_may_carry_garbage(base: Case, device: torch.device) -> None:
    # What else a padded entry holds is never looked at, so it is no fault.
    counts = (1, HIGH, 2, 1) if base.counts is not None else None
    history = (True, True, True, True)
    case = base.but("garbage", slots=(3, -1, 7, 1), history=history, counts=counts)
    play(case, device)
    assert device_fault(device) == DeviceFault.NONE


@pytest.mark.parametrize("end", [5, 99, HIGH])
def test_padding_may_carry_hostile_offsets(end: int, device: torch.device) -> None:
    # A padded tail of a graph: whatever the stale offsets say, rows that exist are zero, and it is no fault.
    case = PREFILL.but("tail", lengths=(5, 3), history=(True, True), slots=(3, -1), cu_seqlens=(0, 5, end))
    play(case, device)
    assert device_fault(device) == DeviceFault.NONE


@pytest.mark.parametrize("sequences", [1, 40])
@pytest.mark.parametrize("end", [3, -9, LOW])
def test_padding_whose_offsets_go_backwards_is_a_fault(end: int, sequences: int, device: torch.device) -> None:
    # They lead the search for the owner of a row astray, so rows of live sequences may be left out: not in silence.
    stale = tuple(max(LOW, end - n) for n in range(sequences))
    case = PREFILL.but(
        "tail",
        lengths=(5, *(0,) * sequences),
        history=(True,) * (1 + sequences),
        slots=(3, *(-1,) * sequences),
        cu_seqlens=(0, 5, *stale),
    )
    play(case, device)
    assert device_fault(device) == DeviceFault.OFFSETS


def test_empty_sequences_may_carry_garbage(device: torch.device) -> None:
    # An empty sequence touches nothing, so its slot and count do not matter.
    play(PREFILL.but("empty", lengths=(2, 0, 3, 0), slots=(3, 99, 7, LOW), history=(True,) * 4), device)
    play(SPECULATIVE.but("empty", lengths=(2, 0, 3, 0), slots=(3, 99, 7, 1), counts=(1, 0, 1, HIGH)), device)
    assert device_fault(device) == DeviceFault.NONE


@pytest.mark.parametrize("bad", [LOW, -1, 0, 4, HIGH])
def test_prefill_count_out_of_range(bad: int, device: torch.device) -> None:
    case = PREFILL.but("count", counts=(1, 2, bad, 3), extra_positions=2, history=(True,) * 4)
    outcome = play(case, device)
    assert not bool(outcome.out[6:18].any())
    assert int(outcome.stored.any(1).sum()) == 3
    assert device_fault(device) == DeviceFault.ACCEPTED_COUNT


# --- the sticky code ------------------------------------------------------------------------------------------


def test_sound_calls_leave_no_code(device: torch.device) -> None:
    for base in BASES:
        play(base, device)
    assert device_fault(device) == DeviceFault.NONE


def test_codes_stick_and_add_up_until_cleared(device: torch.device) -> None:
    play(UPDATE.but("slot", slots=(3, 99, 7, 1)), device)
    assert device_fault(device) == DeviceFault.SLOT
    assert device_fault(device) == DeviceFault.SLOT, "reading does not clear"
    play(UPDATE, device)
    assert device_fault(device) == DeviceFault.SLOT, "a sound call does not clear"
    play(SPECULATIVE.but("count", counts=(0, 1, 1, 1)), device)
    assert device_fault(device) == DeviceFault.SLOT | DeviceFault.ACCEPTED_COUNT
    play(PREFILL.but("offsets", cu_seqlens=(0, 5, 6, 18, 99)), device)
    play(SPECULATIVE.but("long", lengths=(9, 1, 1, 1)), device)
    assert device_fault(device) == DeviceFault(15)
    clear_device_fault(device)
    assert device_fault(device) == DeviceFault.NONE
    play(UPDATE.but("slot", slots=(3, 99, 7, 1)), device)
    assert device_fault(device) == DeviceFault.SLOT, "the flag works again after it was cleared"


def test_one_sequence_reports_one_fault(device: torch.device) -> None:
    # Offsets come before slot, slot before count: later facts of a faulty sequence are never looked at.
    play(PREFILL.but("offsets", cu_seqlens=(0, 5, 6, 18, 99), slots=(3, 5, 7, 99)), device)
    assert device_fault(device) == DeviceFault.OFFSETS
    clear_device_fault(device)
    play(SPECULATIVE.but("slot", slots=(3, 99, 7, 1), counts=(1, 0, 1, 1)), device)
    assert device_fault(device) == DeviceFault.SLOT


def test_device_may_be_named(device: torch.device) -> None:
    pool, slots = torch.zeros(2, 1, 3, device=device), torch.full((1,), 9, dtype=torch.int32, device=device)
    causal_conv1d_update(torch.ones(1, 1, device=device), torch.ones(1, 4, device=device), pool, slots)
    assert device_fault(device.type) == device_fault(device) == DeviceFault.SLOT
    clear_device_fault(device.type)
    assert device_fault(device) == DeviceFault.NONE


def test_a_flag_made_under_inference_mode_serves_everywhere(device: torch.device) -> None:
    with torch.inference_mode():
        play(UPDATE.but("slot", slots=(3, 99, 7, 1)), device)
    play(SPECULATIVE.but("count", counts=(0, 1, 1, 1)), device)
    assert device_fault(device) == DeviceFault.SLOT | DeviceFault.ACCEPTED_COUNT


# --- fuzz -----------------------------------------------------------------------------------------------------

ANY_INT = st.one_of(st.integers(-3, 14), st.sampled_from([LOW, HIGH, 10_000, -10_000]), st.integers(LOW, HIGH))


@st.composite
def hostile(draw: st.DrawFn) -> Case:
    """A call whose device values are partly nonsense; live slots stay unique, which is the caller's duty."""
    base = draw(st.sampled_from(BASES))
    lengths = tuple(draw(st.lists(st.integers(0, 5), min_size=1, max_size=6)))
    number = len(lengths)
    sound = draw(st.permutations(range(number + 4)))[:number]
    slots = tuple(draw(st.one_of(st.just(s), st.sampled_from([-1, -2, LOW, HIGH, 99]))) for s in sound)
    offsets = None
    if draw(st.booleans()):
        offsets = tuple(draw(st.lists(ANY_INT, min_size=number + 1, max_size=number + 1)))
    counts = None
    if base.entry == PREFILL.entry or base.counts is not None:
        counts = draw(st.one_of(st.just((1,) * number), st.tuples(*[st.one_of(st.integers(0, 4), ANY_INT)] * number)))
    return base.but(
        "fuzz",
        lengths=lengths,
        slots=slots,
        cu_seqlens=offsets,
        counts=counts,
        offsets=True,
        history=tuple(draw(st.lists(st.booleans(), min_size=number, max_size=number))),
        extra_positions=draw(st.integers(0, 3)),
        layout=draw(st.sampled_from(["channels", "positions"])),
        channels=draw(st.sampled_from([1, 3, 8])),
        width=draw(st.integers(2, 8)),
        pad_slot_id=draw(st.sampled_from([-1, 0])),
        tail=draw(st.integers(0, 2)),
        out="given",
        out_gap=1,
        row_gap=1,
    )


@settings(max_examples=150)
@given(case=hostile(), poison=st.sampled_from(["nan", "777"]))
def test_fuzz(case: Case, poison: str, device: torch.device) -> None:
    play(case, device, poison)
