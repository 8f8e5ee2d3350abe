"""The switch between the two reductions, and the guard that trainers call."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from serving_conv import assert_causal_conv1d_deterministic
from serving_conv.training.determinism import deterministic_reduction

SWITCH = "CAUSAL_CONV1D_DETERMINISTIC"


@pytest.fixture(autouse=True)
def _restored(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv(SWITCH, raising=False)
    before = torch.are_deterministic_algorithms_enabled()
    yield
    torch.use_deterministic_algorithms(before)


@pytest.mark.parametrize("torch_asks", [False, True])
@pytest.mark.parametrize(
    ("value", "decides"),
    [("1", True), ("1x", True), ("0", False), ("01", False), ("", None), ("true", None), (" 1", None), ("2", None)],
)
def test_only_a_leading_digit_decides(
    value: str, decides: bool | None, torch_asks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(SWITCH, value)
    torch.use_deterministic_algorithms(torch_asks)
    assert deterministic_reduction() is (torch_asks if decides is None else decides)


def test_torch_decides_without_the_switch() -> None:
    for asked in (False, True):
        torch.use_deterministic_algorithms(asked)
        assert deterministic_reduction() is asked


def test_the_guard_refuses_what_could_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.use_deterministic_algorithms(False)
    assert_causal_conv1d_deterministic(False)
    with pytest.raises(AssertionError, match="use_deterministic_algorithms"):
        assert_causal_conv1d_deterministic(True)
    monkeypatch.setenv(SWITCH, "1")
    assert_causal_conv1d_deterministic(True)
    monkeypatch.setenv(SWITCH, "0")
    torch.use_deterministic_algorithms(True)
    with pytest.raises(AssertionError, match=SWITCH):
        assert_causal_conv1d_deterministic(True)
    monkeypatch.delenv(SWITCH)
    assert_causal_conv1d_deterministic(True)
