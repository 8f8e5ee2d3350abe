"""The check can fail: faults that engines had, planted in the operator and the pool, each show as mismatches."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner

from serving_conv import ops
from serving_conv.cli import app
from serving_conv.pool import StatePool, state_pool
from serving_conv.replay import ReplayReport, Request, Trace

Play = Callable[..., ReplayReport]
Plant = Callable[[pytest.MonkeyPatch], None]


def change_call(entry: str, change: Callable[[dict[str, Any]], None]) -> Plant:
    """Alter the keyword view of a call: `conv_state`, `has_initial_state` and `num_accepted_tokens` by name."""
    sound = getattr(ops, entry)

    def faulty(x: Tensor, weight: Tensor, conv_state: Tensor, *rest: Tensor, **options: Any) -> Tensor:
        if len(rest) == 3:  # the loop's own calls of causal_conv1d_fn; solo runs pass no flags
            options["has_initial_state"] = rest[2]
            rest = rest[:2]
        if "has_initial_state" in options:
            change(options)
        result: Tensor = sound(x, weight, conv_state, *rest, **options)
        return result

    return lambda patch: patch.setattr(ops, entry, faulty)


def drop_counts(options: dict[str, Any]) -> None:
    options["num_accepted_tokens"] = None


def count_one(options: dict[str, Any]) -> None:
    if options.get("num_accepted_tokens") is not None:
        options["num_accepted_tokens"] = torch.ones_like(options["num_accepted_tokens"])


def forget_history(options: dict[str, Any]) -> None:
    options["has_initial_state"] = torch.zeros_like(options["has_initial_state"])


def leak_history(options: dict[str, Any]) -> None:
    options["has_initial_state"] = torch.ones_like(options["has_initial_state"])


def vary_with_the_batch(patch: pytest.MonkeyPatch) -> None:
    sound = ops.causal_conv1d_update

    def faulty(x: Tensor, weight: Tensor, *rest: Any, **options: Any) -> Tensor:
        # Slightly other sums, for some batch sizes only.
        return sound(x, weight if len(x) % 3 else weight * (1 + 2**-7), *rest, **options)

    patch.setattr(ops, "causal_conv1d_update", faulty)


def copy_nothing(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(state_pool, "copy_slot", lambda *args, **options: None)


def import_nothing(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(state_pool, "unpack_slot", lambda *args, **options: None)


def pool_forgets_counts(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(StatePool, "accepted", lambda pool, slot: 1)


def pool_forgets_some_histories(patch: pytest.MonkeyPatch) -> None:
    sound = StatePool.has_history
    patch.setattr(StatePool, "has_history", lambda pool, slot: sound(pool, slot) and pool.tokens(slot) % 37 != 0)


def take_drafts_for_tokens(options: dict[str, Any]) -> None:
    options["speculative"] = None


def take_tokens_for_drafts(options: dict[str, Any]) -> None:
    options["speculative"] = torch.ones_like(options["speculative"])


STEP_FAULTS: dict[str, Plant] = {
    "counts are dropped": change_call("causal_conv1d_step", drop_counts),
    "drafts are taken for tokens": change_call("causal_conv1d_step", take_drafts_for_tokens),
    "tokens are taken for drafts": change_call("causal_conv1d_step", take_tokens_for_drafts),
    "history is forgotten": change_call("causal_conv1d_step", forget_history),
    "the last owner's history is read": change_call("causal_conv1d_step", leak_history),
}

FAULTS: dict[str, Plant] = {
    "speculative step drops the count": change_call("causal_conv1d_update", count_one),
    "prefill after a speculative step drops the count": change_call("causal_conv1d_fn", drop_counts),
    "speculative step becomes a plain one": change_call("causal_conv1d_update", drop_counts),
    "prefill forgets its history": change_call("causal_conv1d_fn", forget_history),
    "decode forgets its history": change_call("causal_conv1d_update", forget_history),
    "prefill reads what the last owner left": change_call("causal_conv1d_fn", leak_history),
    "decode reads what the last owner left": change_call("causal_conv1d_update", leak_history),
    "bits depend on the batch": vary_with_the_batch,
    "checkpoints are not copied": copy_nothing,
    "imports are not copied": import_nothing,
    "pool forgets accepted counts": pool_forgets_counts,
    "pool forgets histories of some lengths": pool_forgets_some_histories,
}


@pytest.fixture(scope="module")
def faulty_trace(excerpt: Trace) -> Trace:
    """The excerpt, and prompts of one token, whose first chunk is a decode without history."""
    last = excerpt.requests[-1]
    single = [Request(last.index + 1 + n, last.arrival + n, 1, 5) for n in range(3)]
    return Trace("with short prompts", (*excerpt.requests[:20], *single))


def test_without_a_fault_there_are_no_mismatches(play: Play, faulty_trace: Trace) -> None:
    assert play(faulty_trace).mismatches == ()


@pytest.mark.parametrize("plant", FAULTS.values(), ids=FAULTS)
def test_a_planted_fault_shows(play: Play, faulty_trace: Trace, monkeypatch: pytest.MonkeyPatch, plant: Plant) -> None:
    plant(monkeypatch)
    assert len(play(faulty_trace).mismatches) > 0


@pytest.mark.parametrize("plant", STEP_FAULTS.values(), ids=STEP_FAULTS)
def test_a_planted_fault_of_a_step_shows(
    play: Play, faulty_trace: Trace, monkeypatch: pytest.MonkeyPatch, plant: Plant
) -> None:
    plant(monkeypatch)
    assert len(play(faulty_trace, launch="step").mismatches) > 0


def test_recomputation_is_compared_with_the_first_time(play: Play, monkeypatch: pytest.MonkeyPatch) -> None:
    sound = ops.causal_conv1d_fn
    calls = 0

    def drifting(x: Tensor, weight: Tensor, *rest: Any, **options: Any) -> Tensor:
        nonlocal calls
        calls += 1
        return sound(x, weight * (2.0 if calls > 8 else 1.0), *rest, **options)

    monkeypatch.setattr(ops, "causal_conv1d_fn", drifting)
    requests = [Request(index, 0.0, 50, 100) for index in range(2)]
    report = play(requests, slots=2, patience=0.0, resume="recompute", layers=1, draft_tokens=0)
    assert "recomputed" in {mismatch.against for mismatch in report.mismatches}


def test_exit_code_and_place_of_a_mismatch(monkeypatch: pytest.MonkeyPatch) -> None:
    FAULTS["speculative step drops the count"](monkeypatch)
    arguments = ["replay", "--requests", "3", "--max-context", "100", "--max-generated", "30", "--channels", "2"]
    result = CliRunner().invoke(app, [*arguments, "--json"])
    assert result.exit_code == 1
    found = json.loads(result.stdout)
    assert found["mismatches"] == len(found["mismatch_details"]) == 3
    assert set(found["mismatch_details"][0]) == {"request", "against", "layer", "position", "channel"}
    assert found["mismatch_details"][0]["position"] >= 100  # prompts are not speculative
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 1
    assert "differs from its solo run at layer 0" in " ".join(result.stdout.replace("│", " ").split())
