"""The adapters' short path: what it launches for vLLM's calls is what the operator's full path would.

No device: a recording kernel stands for the loaded ones.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from support.plans import Loaded, pretend
from torch.utils._python_dispatch import TorchDispatchMode

import serving_conv
from engine_integration.vllm_adapter import prefill_adapter, update_adapter
from serving_conv import ops
from serving_conv.native.abi import FIELDS, PACKER
from serving_conv.native.cuda import CudaBackend

C, WIDE, W, SLOTS = 64, 96, 4, 9
NAMES = [name for _, name, _ in FIELDS]


def conv_of_vllm(
    x, weight, bias, conv_states, query_start_loc, cache_indices=None, has_initial_state=None, activation="silu",
    null_block_id=0, block_idx_first_scheduled_token=None, metadata=None, *, validate_data=False, **others,
):  # fmt: skip
    raise AssertionError("fell back")


def update_of_vllm(
    x, conv_state, weight, bias=None, activation=None, conv_state_indices=None, num_accepted_tokens=None,
    query_start_loc=None, max_query_len=-1, null_block_id=0, out=None,
):  # fmt: skip
    raise AssertionError("fell back")


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Loaded]]:
    loaded = pretend(monkeypatch)
    monkeypatch.setattr(ops, "choose_backend", lambda device: CudaBackend())
    monkeypatch.setattr(torch.cuda, "current_device", lambda: None)
    for plans in ops._PLANS.values():
        plans.clear()
    yield loaded
    for plans in ops._PLANS.values():
        plans.clear()  # their kernels are pretended


def numbers(count: int) -> torch.Tensor:
    return torch.zeros(count, dtype=torch.int32)


def pool() -> torch.Tensor:
    return torch.zeros(SLOTS, W + 1, C, dtype=torch.bfloat16).transpose(1, 2)


def prefill_call(rows: int, sequences: int, spare: int, *, flags: bool, table: bool, bias: bool) -> dict[str, Any]:
    indices = numbers((sequences + spare) * 3).view(-1, 3) if table else numbers(sequences + spare)
    return {
        "x": torch.zeros(rows, WIDE, dtype=torch.bfloat16)[:, :C].t(),
        "weight": torch.zeros(C, 1, W, dtype=torch.bfloat16) if bias else torch.zeros(C, W, dtype=torch.bfloat16),
        "bias": torch.zeros(C, dtype=torch.bfloat16) if bias else None,
        "conv_states": pool(),
        "query_start_loc": numbers(sequences + 1),
        "cache_indices": indices,
        "has_initial_state": torch.zeros(sequences + spare, dtype=torch.bool) if flags else None,
    }


def update_call(rows: int, sequences: int, spare: int, *, drafts: bool, table: bool, out: bool) -> dict[str, Any]:
    rows = rows if drafts else sequences
    # Without offsets the rows are the sequences; with them the slots are.
    length = sequences if drafts else sequences + spare
    x = torch.zeros(rows, WIDE, dtype=torch.bfloat16)[:, :C]
    return {
        "x": x,
        "conv_state": pool(),
        "weight": torch.zeros(C, W, dtype=torch.bfloat16),
        "bias": torch.zeros(C, dtype=torch.bfloat16),
        "activation": "silu",
        "conv_state_indices": numbers(length * 2).view(-1, 2) if table else numbers(length),
        "num_accepted_tokens": numbers(sequences + spare) if drafts else None,
        "query_start_loc": numbers(sequences + 1 + spare) if drafts else None,
        "out": torch.zeros(rows, C, dtype=torch.bfloat16) if out else None,
    }


def parts(loaded: type[Loaded], result: torch.Tensor) -> tuple[Any, ...]:
    """The one launch since the last look; the address of the result is checked and left out."""
    ((variant, parameters, grid, stream),) = loaded.launches
    loaded.launches.clear()
    values = dict(zip(NAMES, PACKER.unpack(parameters), strict=True))
    assert values.pop("out") == result.data_ptr()
    return variant, values, grid, stream


FORMS: dict[str, tuple[Callable[..., Any], Callable[..., dict[str, Any]], dict[str, bool]]] = {
    "prefill": (prefill_adapter, prefill_call, {"flags": True, "table": False, "bias": True}),
    "prefill without flags": (prefill_adapter, prefill_call, {"flags": False, "table": False, "bias": False}),
    "prefill by a table": (prefill_adapter, prefill_call, {"flags": True, "table": True, "bias": False}),
    "decode": (update_adapter, update_call, {"drafts": False, "table": False, "out": False}),
    "decode elsewhere": (update_adapter, update_call, {"drafts": False, "table": True, "out": True}),
    "drafts": (update_adapter, update_call, {"drafts": True, "table": False, "out": False}),
    "drafts by a table": (update_adapter, update_call, {"drafts": True, "table": True, "out": True}),
}


@pytest.mark.parametrize("form", FORMS)
def test_the_short_path_launches_what_the_full_path_would(form: str, device: type[Loaded]) -> None:
    adapt, make, options = FORMS[form]
    original = conv_of_vllm if adapt is prefill_adapter else update_of_vllm
    learned = adapt(original, "learned")
    draw = random.Random(form)
    learned(**make(7, 3, 0, **options))
    device.launches.clear()
    for _ in range(40):
        sequences = draw.choice([1, 2, 5, 33, 70])
        call = make(draw.choice([1, 16, 17, 300]), sequences, draw.choice([0, 0, 1, 7]), **options)
        before = ops._run
        ops._run = None  # the full path is not taken
        try:
            result = learned(**call)
        finally:
            ops._run = before
        short = parts(device, result)
        expected = adapt(original, "fresh")(**call)
        assert short == parts(device, expected)
        assert result.shape == expected.shape
        # An axis of one row has any stride.
        assert 1 in result.shape or result.stride() == expected.stride()
    assert not serving_conv.engine_report().fallbacks


@pytest.mark.parametrize("name", ["has_initial_state", "cache_indices", "query_start_loc"])
def test_a_table_that_is_too_short_goes_to_the_checks(name: str, device: type[Loaded]) -> None:
    learned = prefill_adapter(conv_of_vllm, "learned")
    options = {"flags": True, "table": False, "bias": True}
    learned(**prefill_call(7, 3, 0, **options))
    call = prefill_call(7, 3, 0, **options)
    call[name] = numbers(1) if name == "query_start_loc" else call[name][:2]
    device.launches.clear()
    with pytest.raises(AssertionError, match="fell back"):
        learned(**call)
    assert not device.launches


@pytest.mark.parametrize(
    ("name", "value"),
    [("block_idx_first_scheduled_token", numbers(3)), ("validate", True), ("null_block_id", 5), ("activation", None)],
)
def test_other_options_are_not_taken_for_the_same(name: str, value: Any, device: type[Loaded]) -> None:
    learned = prefill_adapter(conv_of_vllm, "learned")
    call = prefill_call(7, 3, 0, flags=True, table=False, bias=True)
    learned(**call)
    plain = parts(device, learned(**call)) if not device.launches.clear() else None
    if name in ("null_block_id", "activation"):
        other = parts(device, learned(**call, **{name: value}))
        assert other != plain
        assert other == parts(device, prefill_adapter(conv_of_vllm, "fresh")(**call, **{name: value}))
    else:
        with pytest.raises(AssertionError, match="fell back"):
            learned(**call, **{name: value})
        assert not device.launches


def test_functions_that_pad_by_slot_have_no_short_path(device: type[Loaded]) -> None:
    def of_old(x, weight, bias, conv_states, query_start_loc, cache_indices=None, pad_slot_id=-1):
        raise AssertionError("fell back")

    learned = prefill_adapter(of_old, "learned")
    call = prefill_call(7, 3, 0, flags=False, table=False, bias=True)
    del call["has_initial_state"]
    for padding in (0, 5, 0):
        device.launches.clear()
        assert parts(device, learned(**call, pad_slot_id=padding))[1]["pad_slot_id"] == padding


class Watching(TorchDispatchMode):
    """Sees what is dispatched."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(str(function))
        return function(*args, **(kwargs or {}))


def test_a_dispatch_mode_sees_the_calls(device: type[Loaded]) -> None:
    learned = update_adapter(update_of_vllm, "learned")
    call = update_call(3, 3, 0, drafts=False, table=False, out=False)
    for _ in range(2):
        learned(**call)
    with Watching() as mode:
        learned(**call)
    assert any("serving_conv" in name for name in mode.seen), mode.seen
