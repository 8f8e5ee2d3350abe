"""The short path of eager calls: which calls a plan answers, and that what depends on addresses is looked at."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from serving_conv.contract import UPDATE
from serving_conv.native import plan as plans_module
from serving_conv.native.plan import Plan, Plans

NAMES = (
    "x",
    "weight",
    "bias",
    "conv_state",
    "out",
    "cu_seqlens",
    "slots",
    "has_initial_state",
    "num_accepted_tokens",
    "workspace",
    "speculative",
    "checkpoint_offsets",
    "checkpoint_tokens",
    "checkpoint_slots",
)


class Recorded:
    """Stands for a plan, which needs a device; says that it was asked."""

    def __init__(self, entry: Any, arguments: dict[str, Any], given_out: bool) -> None:
        self.given_out = given_out

    def run(self, *tensors: Tensor | None) -> Tensor:
        return torch.tensor(1.0)

    possible = staticmethod(Plan.possible)


def call() -> dict[str, Any]:
    return {
        "x": torch.randn(3, 8),
        "weight": torch.randn(8, 4),
        "bias": None,
        "conv_state": torch.randn(5, 8, 3),
        "out": None,
        "cu_seqlens": None,
        "slots": torch.arange(3, dtype=torch.int32),
        "has_initial_state": None,
        "num_accepted_tokens": None,
        "workspace": None,
    }


def tensors_of(arguments: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(arguments.get(name) for name in NAMES)


@pytest.fixture(params=["guards", "table"])
def plans(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Plans:
    monkeypatch.setattr(plans_module, "Plan", Recorded)
    if request.param == "table":
        monkeypatch.setattr(plans_module, "TensorGuards", None)
    plans = Plans(UPDATE)
    arguments = call()
    plans.add(tensors_of(arguments), "silu", -1, {**arguments, "out": torch.empty(3, 8)})
    assert bool(plans._recent) is (request.param == "guards")
    return plans


def test_the_guards_of_this_torch_are_there() -> None:
    assert plans_module.TensorGuards is not None, "eager calls are 4 us slower without them"


def test_equal_metadata_is_enough(plans: Plans) -> None:
    for _ in range(2):
        assert plans.run(tensors_of(call()), "silu", -1) is not None


OTHER: dict[str, Callable[[dict[str, Any]], Any]] = {
    "rows": lambda c: c.update(x=torch.randn(4, 8)),
    "row stride": lambda c: c.update(x=torch.randn(3, 16)[:, :8]),
    "type": lambda c: c.update(x=torch.randn(3, 8).bfloat16()),
    "integer type": lambda c: c.update(slots=torch.arange(3)),
    "taps": lambda c: c.update(weight=torch.randn(8, 3)),
    "state strides": lambda c: c.update(conv_state=torch.randn(5, 3, 8).transpose(1, 2)),
    "slots": lambda c: c.update(conv_state=torch.randn(6, 8, 3)),
    "a bias": lambda c: c.update(bias=torch.randn(8)),
    "counts": lambda c: c.update(num_accepted_tokens=torch.ones(3, dtype=torch.int32)),
    "flags": lambda c: c.update(has_initial_state=torch.ones(3, dtype=torch.bool)),
    "out": lambda c: c.update(out=torch.empty(3, 8)),
    "drafts": lambda c: c.update(speculative=torch.ones(3, dtype=torch.bool)),
    "checkpoints": lambda c: c.update(checkpoint_slots=torch.ones(3, dtype=torch.int32)),
    "in place": lambda c: c.update(out=c["x"]),
    "no tensor": lambda c: c.update(slots=[0, 1, 2]),
    "a number": lambda c: c.update(bias=0),
}


@pytest.mark.parametrize("other", OTHER)
def test_another_signature_is_not_answered(plans: Plans, other: str) -> None:
    arguments = call()
    OTHER[other](arguments)
    assert plans.run(tensors_of(arguments), "silu", -1) is None


@pytest.mark.parametrize(
    ("activation", "pad_slot_id"),
    [(None, -1), ("swish", -1), (1, -1), ("silu", 0), ("silu", -1.0), ("silu", True), (["silu"], -1)],
)
def test_another_option_is_not_answered(plans: Plans, activation: Any, pad_slot_id: Any) -> None:
    assert plans.run(tensors_of(call()), activation, pad_slot_id) is None


def test_in_place_calls_have_plans_of_their_own(plans: Plans) -> None:
    arguments = call()
    arguments["out"] = arguments["x"]
    plans.add(tensors_of(arguments), "silu", -1, arguments)
    assert len(plans._recent) in (0, 2)  # by guards too, though guards refuse one tensor twice
    again = call()
    again["out"] = again["x"]
    assert plans.run(tensors_of(again), "silu", -1) is not None
    assert plans.run(tensors_of(call()), "silu", -1) is not None


def test_many_signatures_are_kept(plans: Plans) -> None:
    for rows in range(4, 24):
        arguments = {**call(), "x": torch.randn(rows, 8), "slots": torch.arange(rows, dtype=torch.int32)}
        plans.add(tensors_of(arguments), "silu", -1, {**arguments, "out": torch.empty(rows, 8)})
    assert len(plans._recent) <= plans_module._MOST_RECENT
    for _ in range(2):
        assert plans.run(tensors_of(call()), "silu", -1) is not None
    plans.clear()
    assert plans.run(tensors_of(call()), "silu", -1) is None


def test_unaligned_calls_make_no_plan() -> None:
    arguments = call()
    arguments["out"] = torch.empty(25)[1:].view(3, 8)
    plans = Plans(UPDATE)
    plans.add(tensors_of(arguments), "silu", -1, arguments)
    assert plans.run(tensors_of(arguments), "silu", -1) is None


def plan_of(reads: tuple[int, ...], *, in_place: bool = False) -> Plan:
    plan = Plan.__new__(Plan)
    plan._reads, plan._state_extent, plan._out_extent, plan._in_place = (*reads, 0, 0, 0, 12), 256, 128, in_place
    plan._scratch_extent = 64
    return plan


@pytest.mark.parametrize(
    ("changed", "sound"),
    [
        ({}, True),
        ({"x": 1025}, False),  # not aligned
        ({"x": 3968}, False),  # its last bytes are the pool's first
        ({"x": 3872}, True),  # right before the pool
        ({"bias": 4096}, False),
        ({"slots": 4252}, False),
        ({"counts": 8192 + 124}, False),  # in out
        ({"counts": 8192 + 128}, True),  # right behind it
        ({"checkpoint_slots": 4096}, False),
        ({"out": 4224}, False),
        ({"out": 1024}, False),  # x itself, but not in place
        ({"scratch": 8192 + 124}, False),  # in out
        ({"scratch": 4096 - 60}, False),  # into the pool
        ({"scratch": 16640 - 60}, False),  # in the flags
        ({"scratch": 4096 - 64}, True),  # right before the pool
    ],
)
def test_addresses_are_looked_at(changed: dict[str, int], sound: bool) -> None:
    scratch = {"scratch": 32768, **changed}["scratch"]
    at = {
        "x": 1024,
        "weight": 2048,
        "bias": 3072,
        "state": 4096,
        "out": 8192,
        "offsets": 16384,
        "slots": 16512,
        "flags": 16640,
        "counts": 16768,
        "flag": 20480,
        "speculative": 0,
        "checkpoint_offsets": 0,
        "checkpoint_tokens": 0,
        "checkpoint_slots": 24576,
    }
    plan = plan_of((128 + 96, 64, 16, 16, 12, 3, 12))
    assert plan._is_sound(tuple((at | changed)[name] for name in at), scratch) is sound


def test_in_place_means_x_itself() -> None:
    plan = plan_of((128, 64, 16, 0, 12, 0, 0), in_place=True)
    assert plan._is_sound((1024, 2048, 3072, 4096, 1024, 0, 16512, 0, 0, 20480, 0, 0, 0, 0))
    assert not plan._is_sound((1024, 2048, 3072, 4096, 1040, 0, 16512, 0, 0, 20480, 0, 0, 0, 0))
