"""The short path of eager calls: which calls a plan answers, and that it launches what the full path would.

No device: a recording kernel stands for the loaded ones.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.plans import KINDS, Kind, Loaded, complete, full_path, in_order, make_call, pretend
from torch import Tensor

from serving_conv.contract import PREFILL, UPDATE
from serving_conv.errors import CaptureError
from serving_conv.native import plan as plans_module
from serving_conv.native.plan import Form, Plans, tensor_names


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
    }


def tensors_of(arguments: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(arguments["slots" if name == "state_indices" else name] for name in tensor_names(UPDATE))


def whole(arguments: dict[str, Any], out: Tensor | None = None) -> dict[str, Any]:
    """The operator's arguments, complete."""
    named = {"state_indices" if name == "slots" else name: value for name, value in arguments.items()}
    return named | {"out": torch.empty(3, 8) if out is None else out, "activation": "silu", "pad_slot_id": -1}


@pytest.fixture(params=["guards", "table"])
def plans(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Plans:
    pretend(monkeypatch)
    if request.param == "table":
        monkeypatch.setattr(plans_module, "TensorGuards", None)
    plans = Plans(UPDATE)
    arguments = call()
    plans.add(tensors_of(arguments), "silu", -1, whole(arguments))
    assert bool(plans._recent) is (request.param == "guards")
    return plans


def test_the_guards_of_this_torch_are_there() -> None:
    assert plans_module.TensorGuards is not None, "eager calls are 4 us slower without them"


def test_equal_metadata_is_enough(plans: Plans) -> None:
    for _ in range(2):
        assert plans.run(tensors_of(call()), "silu", -1) is not None


OTHER: dict[str, Callable[[dict[str, Any]], Any]] = {
    "channels": lambda c: c.update(x=torch.randn(3, 4)),
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


def test_in_place_and_allocating_calls_have_plans_of_their_own(plans: Plans) -> None:
    arguments = call()
    arguments["out"] = arguments["x"]
    plans.add(tensors_of(arguments), "silu", -1, whole(arguments, arguments["out"]))
    assert len(plans._recent) in (0, 2)  # by guards too, though guards refuse one tensor twice
    again = call()
    again["out"] = again["x"]
    assert plans.run(tensors_of(again), "silu", -1) is not None
    assert plans.run(tensors_of(call()), "silu", -1) is not None


def test_in_place_and_elsewhere_have_plans_of_their_own(plans: Plans) -> None:
    inside, elsewhere = call(), {**call(), "out": torch.empty(3, 8)}
    inside["out"] = inside["x"]
    for arguments in (inside, elsewhere):
        plans.add(tensors_of(arguments), "silu", -1, whole(arguments, arguments["out"]))
    for _ in range(3):
        for arguments in (inside, elsewhere):
            assert plans.run(tensors_of(arguments), "silu", -1) is not None
    assert len(plans._table) == 3
    assert len(plans._recent) in (0, 3)  # all stay: neither call makes the other slow


def test_a_plan_that_declined_is_not_made_anew(plans: Plans) -> None:
    (plan,) = plans._table.values()
    plans.add(tensors_of(call()), "silu", -1, whole(call()))
    assert list(plans._table.values()) == [plan]


def test_other_sizes_are_answered(plans: Plans) -> None:
    arguments = {**call(), "x": torch.randn(5, 8), "slots": torch.arange(5, dtype=torch.int32)}
    assert plans.run(tensors_of(arguments), "silu", -1) is not None


def test_many_signatures_are_kept(plans: Plans) -> None:
    for slots in range(6, 26):
        arguments = {**call(), "conv_state": torch.randn(slots, 8, 3)}
        plans.add(tensors_of(arguments), "silu", -1, whole(arguments))
    assert len(plans._table) == 21
    assert len(plans._recent) <= plans_module._MOST_RECENT
    for _ in range(2):
        assert plans.run(tensors_of(call()), "silu", -1) is not None
    plans.clear()
    assert plans.run(tensors_of(call()), "silu", -1) is None


def test_unaligned_calls_make_no_plan() -> None:
    arguments = call()
    arguments["out"] = torch.empty(25)[1:].view(3, 8)
    plans = Plans(UPDATE)
    plans.add(tensors_of(arguments), "silu", -1, whole(arguments, arguments["out"]))
    assert plans.run(tensors_of(arguments), "silu", -1) is None


# The launches.


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> type[Loaded]:
    return pretend(monkeypatch)


def sizes_of(kind: Kind) -> st.SearchStrategy[tuple[int, int, int]]:
    few = st.integers(1, 70)
    if "cu_seqlens" not in kind.given:
        return few.map(lambda rows: (rows, rows, 0))
    return st.tuples(st.integers(1, 3000) | few, few, st.integers(0, 3))


@pytest.mark.parametrize("guards", [True, False], ids=["guards", "table"])
@pytest.mark.parametrize("name", KINDS)
def test_a_plan_launches_what_the_full_path_would(
    name: str, guards: bool, device: type[Loaded], monkeypatch: pytest.MonkeyPatch
) -> None:
    kind = KINDS[name]
    if not guards:
        monkeypatch.setattr(plans_module, "TensorGuards", None)

    @settings(max_examples=12, deadline=None)
    @given(st.lists(sizes_of(kind), min_size=2, max_size=5))
    def launches_agree(steps: list[tuple[int, int, int]]) -> None:
        plans = Plans(kind.entry)
        first = make_call(kind, *steps[0])
        out = torch.zeros(steps[0][0], kind.channels, dtype=kind.x) if first["out"] is None else first["out"]
        plans.add(in_order(kind, first), kind.activation, kind.pad_slot_id, complete(kind, first, out))
        for sizes in steps:
            for layer in range(2):
                arguments = make_call(kind, *sizes)
                device.launches.clear()
                result = plans.run(in_order(kind, arguments), kind.activation, kind.pad_slot_id)
                assert result is not None, (sizes, layer)
                assert result.shape == arguments["x"].shape
                assert result.is_contiguous() or "out is x" in kind.given
                assert device.launches == [full_path(kind, arguments, result)]
        assert len(plans._table) == 1

    launches_agree()


WRONG: dict[str, tuple[str, Callable[[dict[str, Any]], Any]]] = {
    "rows without offsets": ("decode", lambda c: c.update(slots=c["slots"][:2])),
    "offsets": ("prefill", lambda c: c.update(cu_seqlens=torch.zeros(7, dtype=torch.int32))),
    "flags": ("step", lambda c: c.update(has_initial_state=torch.zeros(9, dtype=torch.bool))),
    "out": ("step with drafts", lambda c: c.update(out=torch.zeros(8, 64, dtype=torch.bfloat16))),
    "workspace": ("prefill with everything", lambda c: c.update(workspace=torch.zeros(20, dtype=torch.int32))),
    "checkpoints": ("step with checkpoints", lambda c: c.update(checkpoint_slots=torch.zeros(1, dtype=torch.int32))),
    "nothing": ("prefill", lambda c: c.update(x=c["x"][:0])),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_sizes_are_checked(wrong: str, device: type[Loaded]) -> None:
    name, change = WRONG[wrong]
    kind = KINDS[name]
    plans = Plans(kind.entry)
    for rows, sequences, spoilt in ((10, 10, False), (40, 40, True), (41, 41, False)):
        arguments = make_call(kind, rows, sequences)
        if not device.launches:
            out = torch.zeros(rows, kind.channels, dtype=kind.x) if arguments["out"] is None else arguments["out"]
            plans.add(in_order(kind, arguments), kind.activation, kind.pad_slot_id, complete(kind, arguments, out))
        if spoilt:
            change(arguments)
        made = plans.run(in_order(kind, arguments), kind.activation, kind.pad_slot_id)
        assert (made is None) is spoilt
    assert len(device.launches) == 2


@pytest.mark.parametrize("transposed", [False, True], ids=["operator", "adapter"])
@pytest.mark.parametrize("guards", [True, False], ids=["guards", "table"])
@pytest.mark.parametrize("name", KINDS)
def test_other_numbers_of_axes_are_left_to_the_full_checks(
    name: str, guards: bool, transposed: bool, device: type[Loaded], monkeypatch: pytest.MonkeyPatch
) -> None:
    kind = KINDS[name]
    if not guards:
        monkeypatch.setattr(plans_module, "TensorGuards", None)
    plans = Plans(kind.entry, Form(transposed=transposed))
    arguments = make_call(kind, 6, 6)
    out = torch.zeros(6, kind.channels, dtype=kind.x) if arguments["out"] is None else arguments["out"]
    whole = complete(kind, arguments, out)

    def as_given(tensors: tuple[Any, ...]) -> list[Any]:
        given = list(tensors)
        if transposed:
            x, result = tensor_names(kind.entry).index("x"), tensor_names(kind.entry).index("out")
            in_place = given[result] is given[x]
            given[x] = given[x].t()
            given[result] = given[x] if in_place else None if given[result] is None else given[result].t()
        return given

    given = as_given(in_order(kind, arguments))
    plans.add(tuple(given), kind.activation, kind.pad_slot_id, whole)
    assert plans.run(tuple(given), kind.activation, kind.pad_slot_id) is not None
    for place, tensor in enumerate(given):
        if tensor is None:
            continue
        for other in (tensor[None], tensor[0], tensor.reshape(-1)[0]):
            changed = [other if each is tensor else each for each in given]
            assert plans.run(tuple(changed), kind.activation, kind.pad_slot_id) is None, (place, other.shape)


def test_the_device_must_be_current(device: type[Loaded], monkeypatch: pytest.MonkeyPatch) -> None:
    kind, plans = KINDS["prefill"], Plans(PREFILL)
    arguments = make_call(kind, 10, 1)
    plans.add(in_order(kind, arguments), "silu", -1, complete(kind, arguments, torch.zeros(10, 64, dtype=kind.x)))
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 1)
    assert plans.run(in_order(kind, arguments), "silu", -1) is None


def test_strides_that_only_one_row_may_have(device: type[Loaded]) -> None:
    kind = KINDS["prefill"]
    plans = Plans(PREFILL)
    memory = torch.zeros(640, dtype=kind.x)
    for rows in (1, 2):
        x = memory.as_strided((rows, 64), (32, 1))  # rows that overlap
        arguments = {**make_call(kind, rows, 1), "x": x}
        if rows == 1:
            plans.add(
                in_order(kind, arguments), "silu", -1, complete(kind, arguments, torch.zeros(1, 64, dtype=kind.x))
            )
        assert not plans._table  # more rows could not have them
        assert plans.run(in_order(kind, arguments), "silu", -1) is None


def test_a_kernel_that_sizes_choose_anew_is_not_loaded_under_capture(
    device: type[Loaded], monkeypatch: pytest.MonkeyPatch
) -> None:
    kind = KINDS["prefill"]
    plans = Plans(PREFILL)
    arguments = make_call(kind, 10, 1)
    plans.add(in_order(kind, arguments), "silu", -1, complete(kind, arguments, torch.zeros(10, 64, dtype=kind.x)))

    (loaded,) = {kernel.variant for plan in plans._table.values() for kernel, _ in plan._kernels.values()}

    def capturing(variant: Any, index: int) -> Loaded:
        if variant == loaded:
            return Loaded(variant)
        raise CaptureError("kernel", got="capture", wanted="a loaded kernel")

    monkeypatch.setattr(plans_module, "load_variant", capturing)
    assert plans.run(in_order(kind, arguments), "silu", -1) is not None
    with pytest.raises(CaptureError):
        plans.run(in_order(kind, make_call(kind, 20_000, 1)), "silu", -1)
    assert plans.run(in_order(kind, make_call(kind, 20, 1)), "silu", -1) is not None  # by the kernel that is loaded


def test_sizes_do_not_pile_up(device: type[Loaded], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plans_module, "_MOST_SIZES", 8)
    kind = KINDS["prefill"]
    plans = Plans(PREFILL)
    for rows in range(1, 30):
        arguments = make_call(kind, rows, 1)
        if rows == 1:
            plans.add(
                in_order(kind, arguments), "silu", -1, complete(kind, arguments, torch.zeros(1, 64, dtype=kind.x))
            )
        assert plans.run(in_order(kind, arguments), "silu", -1) is not None
    (plan,) = plans._table.values()
    assert len(plan.steps) <= 8
