"""The guards themselves: a stray write, a missing write and a read of poison are all seen."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.cases import PREFILL, UPDATE, Case, check_case
from support.memory import POISONS, Guarded
from torch import Tensor

import serving_conv

CPU = torch.device("cpu")


@pytest.mark.parametrize("poison", POISONS)
def test_guards_see_a_write_outside(poison: str) -> None:
    guarded = Guarded((3, 4), dtype=torch.float32, device=CPU, strides=(6, 1), poison=poison)
    guarded.arm()
    guarded.assert_untouched()
    mask = torch.zeros(3, 4, dtype=torch.bool)
    mask[1] = True
    guarded.view[1] = 1.0
    guarded.assert_untouched(except_for=mask)
    with pytest.raises(AssertionError, match="x: 4 elements"):
        guarded.assert_untouched(name="x")
    start = guarded.view.storage_offset()
    for stray in (0, start - 1, start + 4, start + 5, start + 16, guarded.buffer.numel() - 1):
        kept = guarded.buffer[stray].clone()
        guarded.buffer[stray] = 5.0
        with pytest.raises(AssertionError, match="does not own"):
            guarded.assert_untouched(except_for=mask)
        guarded.buffer[stray] = kept


def broken(entry: str, fault: Callable[[dict[str, Any], Tensor], None]) -> Callable[..., Tensor]:
    """The public entry with a fault planted behind it."""
    sound = getattr(serving_conv, entry)

    def call(**arguments: Any) -> Tensor:
        result: Tensor = sound(**arguments)
        fault(arguments, result)
        return result

    return call


def stray_row(arguments: dict[str, Any], result: Tensor) -> None:
    if result.shape[0]:
        result.as_strided((1,), (1,), result.storage_offset() + result.shape[1]).fill_(3.0)


def stray_slot(arguments: dict[str, Any], result: Tensor) -> None:
    pool, live = arguments["conv_state"], arguments["cache_indices"].tolist()
    pool[next(slot for slot in range(pool.shape[0]) if slot not in live)] = 1.0


def stray_position(arguments: dict[str, Any], result: Tensor) -> None:
    arguments["conv_state"][:, :, -1] = 0.0


def shifted_window(arguments: dict[str, Any], result: Tensor) -> None:
    pool = arguments["conv_state"]
    pool.copy_(pool.roll(1, 2))


def lost_bit(arguments: dict[str, Any], result: Tensor) -> None:
    if result.numel():
        result[0, 0] += 1e-4 * result[0, 0].abs() + 1e-4


def read_poison(arguments: dict[str, Any], result: Tensor) -> None:
    live = arguments["cache_indices"].tolist()
    pool = arguments["conv_state"]
    result[0, 0] += pool[next(slot for slot in range(pool.shape[0]) if slot not in live), 0, 0]


@pytest.mark.parametrize(
    ("fault", "case"),
    [
        (stray_row, PREFILL.but("f", out="given", out_gap=2)),
        (stray_slot, PREFILL),
        (stray_position, PREFILL.but("f", extra_positions=1)),
        (shifted_window, PREFILL),
        (lost_bit, PREFILL),
        (read_poison, PREFILL),
        (lost_bit, UPDATE),
        (shifted_window, UPDATE),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_check_case_sees_planted_faults(
    fault: Callable[[dict[str, Any], Tensor], None],
    case: Case,
    monkeypatch: pytest.MonkeyPatch,
    device: torch.device,
) -> None:
    check_case(case, device)
    monkeypatch.setattr(serving_conv, case.entry, broken(case.entry, fault))
    with pytest.raises(AssertionError):
        check_case(case, device)
