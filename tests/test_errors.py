"""Bad input, one error at a time: it names argument, got, wanted, remedy, and nothing has been written."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from support.calls import ENTRY_IDS, call, snapshot, valid
from support.process import python

import serving_conv
from serving_conv import BackendError, ContractError, ServingConvError
from serving_conv.contract import (
    ACTIVATIONS,
    ENTRIES,
    INT32_LIMIT,
    PREFILL,
    STEP,
    UPDATE,
    Entry,
    Layout,
    Option,
    TensorArgument,
    prefill_workspace_size,
    state_positions,
)
from serving_conv.errors import TraceError
from serving_conv.settings import read_settings

both = pytest.mark.parametrize("entry", ENTRIES, ids=ENTRY_IDS)


def refused(entry: Entry, arguments: dict[str, Any], argument: str, got: str, wanted: str = "") -> ContractError:
    """The call raises, the error names the argument and has every field, and no byte was written."""
    before = snapshot(arguments)
    with pytest.raises(ContractError) as caught:
        call(entry, arguments)
    error = caught.value
    assert isinstance(error, ValueError)
    assert error.argument == argument
    assert got in error.got, error.got
    assert wanted in error.wanted, error.wanted
    assert error.got
    assert error.wanted
    for text in (error.argument, error.got, error.wanted, error.remedy):
        assert text in str(error)
    after = snapshot(arguments)
    assert all(torch.equal(before[name], after[name]) for name in before), "something was written"
    return error


# --- every rule of every record has a failing call ----------------------------------------------------------------

TENSORS = [(e, a) for e in ENTRIES for a in e.tensors]
OPTIONS = [(e, a) for e in ENTRIES for a in e.arguments if isinstance(a, Option)]


def record_id(value: object) -> str:
    return str(getattr(value, "name", value))


@both
@pytest.mark.parametrize("optional", [True, False])
def test_the_valid_calls_are_valid(entry: Entry, optional: bool, device: torch.device) -> None:
    arguments = valid(entry, device, optional=optional)
    if optional:
        assert set(arguments) == {a.name for a in entry.arguments}, "a new argument has no valid value here"
    call(entry, arguments)


@pytest.mark.parametrize(("entry", "argument"), TENSORS, ids=record_id)
def test_not_a_tensor(entry: Entry, argument: TensorArgument, device: torch.device) -> None:
    arguments = valid(entry, device)
    for wrong, got in (([1, 2], "list"), (3, "int 3"), ("text", "str 'text'")):
        arguments[argument.name] = wrong
        refused(entry, arguments, argument.name, got, "a torch.Tensor")
    arguments[argument.name] = None
    if argument.optional:
        # Without offsets 6 rows are 6 sequences, and checkpoints come together: other errors.
        if argument.name != "cu_seqlens" and not argument.name.startswith("checkpoint"):
            call(entry, arguments)
    else:
        error = refused(entry, arguments, argument.name, "NoneType", "a torch.Tensor")
        assert "None" not in error.wanted


@pytest.mark.parametrize(("entry", "argument"), TENSORS, ids=record_id)
def test_not_strided(entry: Entry, argument: TensorArgument, device: torch.device) -> None:
    arguments = valid(entry, device)
    arguments[argument.name] = arguments[argument.name].to_sparse()
    assert refused(entry, arguments, argument.name, "sparse", "strided").remedy


@pytest.mark.parametrize(("entry", "argument"), TENSORS, ids=record_id)
def test_wrong_number_of_axes(entry: Entry, argument: TensorArgument, device: torch.device) -> None:
    for change in (lambda t: t[None], lambda t: t[0]):
        arguments = valid(entry, device)
        arguments[argument.name] = change(arguments[argument.name])
        shape = str(list(arguments[argument.name].shape))
        refused(entry, arguments, argument.name, shape, ", ".join(argument.axes))


SHARED = {"rows", "channels", "sequences", "sequences+1"}
AXES = [(e, a, n) for e, a in TENSORS for n, axis in enumerate(a.axes) if axis in SHARED]


@pytest.mark.parametrize(("entry", "argument", "axis"), AXES, ids=record_id)
@pytest.mark.parametrize("more", [1, -1])
def test_an_axis_that_disagrees(
    entry: Entry, argument: TensorArgument, axis: int, more: int, device: torch.device
) -> None:
    arguments = valid(entry, device)
    tensor = arguments[argument.name]
    shape = list(tensor.shape)
    shape[axis] += more
    arguments[argument.name] = torch.ones(shape, dtype=tensor.dtype, device=device)
    before = snapshot(arguments)
    with pytest.raises(ContractError) as caught:
        call(entry, arguments)
    error = caught.value
    # Two arguments disagree: the error shows both names and both sizes, whichever of them is wrong.
    assert argument.name in str(error)
    assert str(shape[axis]) in str(error)
    assert str(shape[axis] - more) in str(error)
    name = argument.axes[axis].removesuffix("+1")
    others = {o.name for o in entry.tensors if o is not argument and {name, f"{name}+1"} & set(o.axes)}
    assert any(other in str(error) for other in others)
    after = snapshot(arguments)
    assert all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.parametrize(("entry", "argument"), TENSORS, ids=record_id)
def test_types_outside_the_record(entry: Entry, argument: TensorArgument, device: torch.device) -> None:
    floats = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
    others = (torch.int64, torch.int32, torch.int16, torch.uint8, torch.bool, torch.complex64)
    for dtype in (*floats, *others):
        name = str(dtype).removeprefix("torch.")
        arguments = valid(entry, device)
        accepted = name == "float32" if argument.same_dtype_as else name in argument.dtypes
        if argument.name == "x":
            del arguments["out"]
        arguments[argument.name] = arguments[argument.name].to(dtype)
        if accepted:
            call(entry, arguments)
        else:
            error = refused(entry, arguments, argument.name, str(dtype), "torch.")
            assert argument.same_dtype_as or "no entry casts" in error.remedy


@pytest.mark.parametrize(("entry", "argument"), [(e, a) for e, a in TENSORS if a.name != "x"], ids=record_id)
def test_another_device(entry: Entry, argument: TensorArgument, device: torch.device) -> None:
    arguments = valid(entry, device)
    arguments[argument.name] = arguments[argument.name].to("meta")
    refused(entry, arguments, argument.name, "meta", str(device))


@pytest.mark.parametrize(
    ("entry", "argument"), [(e, a) for e, a in TENSORS if a.layout is Layout.CONTIGUOUS], ids=record_id
)
def test_must_be_contiguous(entry: Entry, argument: TensorArgument, device: torch.device) -> None:
    arguments = valid(entry, device)
    tensor = arguments[argument.name]
    arguments[argument.name] = torch.stack([tensor, tensor], -1)[..., 0]
    refused(entry, arguments, argument.name, "strides", "contiguous")
    if tensor.ndim == 2:
        arguments[argument.name] = tensor.T.contiguous().T
        refused(entry, arguments, argument.name, "strides [1, 5]", "contiguous")


@pytest.mark.parametrize(("entry", "argument"), [(e, a) for e, a in TENSORS if a.layout is Layout.ROWS], ids=record_id)
def test_rows_must_have_contiguous_channels(entry: Entry, argument: TensorArgument, device: torch.device) -> None:
    storage = torch.zeros(1000, device=device)
    for strides in ((1, 6), (10, 2), (0, 1), (4, 1), (1, 1)):
        arguments = valid(entry, device)
        arguments[argument.name] = storage.as_strided((6, 5), strides)
        refused(entry, arguments, argument.name, f"strides {list(strides)}", "channels contiguous")
    for strides in ((5, 1), (6, 1), (100, 1)):
        arguments = valid(entry, device)
        arguments[argument.name] = storage.as_strided((6, 5), strides)
        call(entry, arguments)


@both
def test_pool_layouts(entry: Entry, device: torch.device) -> None:
    storage = torch.zeros(10_000, device=device)
    good = ((25, 5, 1), (25, 1, 5), (26, 5, 1), (31, 6, 1), (31, 1, 6), (600, 1, 5), (29, 6, 1), (29, 1, 6))
    bad = (
        (24, 5, 1),  # slots overlap by one element
        (24, 1, 5),
        (0, 5, 1),
        (5, 45, 1),  # slots interleaved with channels
        (1, 9, 45),
        (25, 4, 1),  # channels overlap
        (25, 1, 4),
        (100, 10, 2),  # neither contiguous
        (100, 0, 1),
        (100, 1, 0),
        (28, 6, 1),  # one less than the extent
    )
    for strides in good:
        call(entry, {**valid(entry, device), "conv_state": storage.as_strided((9, 5, 5), strides)})
    for strides in bad:
        arguments = {**valid(entry, device), "conv_state": storage.as_strided((9, 5, 5), strides)}
        refused(entry, arguments, "conv_state", f"strides {list(strides)}", "slots disjoint")


@both
def test_strides_of_axes_of_size_one_do_not_matter(entry: Entry, device: torch.device) -> None:
    arguments = valid(entry, device)
    storage = torch.zeros(1000, device=device)
    one = {
        "x": storage.as_strided((1, 5), (0, 1)),
        "conv_state": storage[500:].as_strided((1, 5, 3), (0, 1, 5)),
        "cu_seqlens": torch.tensor([0, 1], dtype=torch.int32, device=device),
        "has_initial_state": torch.ones(1, dtype=torch.bool, device=device),
        "num_accepted_tokens": torch.ones(1, dtype=torch.int32, device=device),
        "out": torch.zeros(1, 5, device=device),
    }
    if entry is STEP:
        one["speculative"] = torch.zeros(1, dtype=torch.bool, device=device)
        one["checkpoint_offsets"] = one["cu_seqlens"].clone()
        one["checkpoint_tokens"] = torch.ones(1, dtype=torch.int32, device=device)
        one["checkpoint_slots"] = torch.full((1,), -1, dtype=torch.int32, device=device)
    slots = "state_indices" if entry is UPDATE else "cache_indices"
    call(entry, {**arguments, **one, slots: torch.zeros(1, dtype=torch.int32, device=device)})
    # One channel: its stride is arbitrary, in x, out and the pool.
    narrow = {
        "x": torch.zeros(6, 3, device=device)[:, 1:2],
        "weight": torch.zeros(1, 4, device=device),
        "bias": None,
        "out": torch.zeros(6, 7, device=device)[:, 3:4],
        "conv_state": storage.as_strided((9, 1, 5), (50, 999, 3)),
    }
    call(entry, {**arguments, **narrow})


@pytest.mark.parametrize(("entry", "option"), OPTIONS, ids=record_id)
def test_options(entry: Entry, option: Option, device: torch.device) -> None:
    if option.choices:
        for choice in option.choices:
            call(entry, {**valid(entry, device), option.name: choice})
        for wrong in ("relu", "SiLU", "", "None", True, False, 0, 1, ["silu"]):
            error = refused(entry, {**valid(entry, device), option.name: wrong}, option.name, repr(wrong))
            assert all(repr(choice) in error.wanted for choice in option.choices)
    else:
        for number in (-1, 0, -INT32_LIMIT - 1, INT32_LIMIT):
            call(entry, {**valid(entry, device), option.name: number})
        for wrong in (None, "0", 1.0, True, torch.tensor(0), [0]):
            refused(entry, {**valid(entry, device), option.name: wrong}, option.name, type(wrong).__name__, "an int")
        for number in (INT32_LIMIT + 1, -INT32_LIMIT - 2):
            refused(entry, {**valid(entry, device), option.name: number}, option.name, str(number), "int32")


def test_activations_are_silu_its_other_name_and_none(device: torch.device) -> None:
    assert ACTIVATIONS == ("silu", "swish", None)
    results = [call(UPDATE, {**valid_like(device), "activation": activation}) for activation in ACTIVATIONS]
    assert torch.equal(results[0], results[1])
    assert not torch.equal(results[0], results[2])


def valid_like(device: torch.device) -> dict[str, Any]:
    torch.manual_seed(5)
    return valid(UPDATE, device, optional=False)


# --- sizes -------------------------------------------------------------------------------------------------------


@both
@pytest.mark.parametrize("width", [0, 1, 9, 12])
def test_width_out_of_range(entry: Entry, width: int, device: torch.device) -> None:
    arguments = {**valid(entry, device), "weight": torch.ones(5, width, device=device)}
    refused(entry, arguments, "weight", f"{width} taps", "2 to 8")


@both
def test_too_few_positions(entry: Entry, device: torch.device) -> None:
    for width in range(2, 9):
        arguments = valid(entry, device)
        arguments["weight"] = torch.ones(5, width, device=device)
        arguments["conv_state"] = torch.ones(9, 5, width - 2, device=device)
        error = refused(entry, arguments, "conv_state", f"{width - 2} positions", f"at least {width - 1}")
        assert "state_positions" in error.remedy


@both
def test_rows_without_a_sequence(entry: Entry, device: torch.device) -> None:
    arguments = valid(entry, device)
    none = torch.empty(0, dtype=torch.int32, device=device)
    arguments |= {
        "cu_seqlens": torch.zeros(1, dtype=torch.int32, device=device),
        "has_initial_state": None,
        "num_accepted_tokens": None,
        "state_indices" if entry is UPDATE else "cache_indices": none,
    }
    if entry is STEP:
        arguments |= dict.fromkeys(("speculative", "checkpoint_offsets", "checkpoint_tokens", "checkpoint_slots"))
    refused(entry, arguments, "x", "6 rows and no sequence", "at least one sequence")
    arguments |= {"x": arguments["x"][:0], "out": arguments["out"][:0]}
    assert call(entry, arguments).shape == (0, 5)


@pytest.mark.parametrize("absent", ["checkpoint_offsets", "checkpoint_tokens", "checkpoint_slots"])
def test_checkpoints_come_together(absent: str, device: torch.device) -> None:
    arguments = {**valid(STEP, device), absent: None}
    assert refused(STEP, arguments, absent, "None", "all of").remedy


def test_one_row_a_sequence_without_offsets(device: torch.device) -> None:
    arguments = {**valid(UPDATE, device), "cu_seqlens": None}
    error = refused(UPDATE, arguments, "x", "6 rows", "3")
    assert "cu_seqlens" in error.remedy


def test_too_little_workspace(device: torch.device) -> None:
    arguments = {
        "x": torch.zeros(80, 2, device=device),
        "weight": torch.zeros(2, 4, device=device),
        "conv_state": torch.zeros(40, 2, 3, device=device),
        "cu_seqlens": torch.arange(0, 81, 2, dtype=torch.int32, device=device),
        "cache_indices": torch.arange(40, dtype=torch.int32, device=device),
    }
    needed = prefill_workspace_size(80, 40)
    assert needed == 1 + 2 * min(80, 10 + 40)
    short = torch.zeros(needed - 1, dtype=torch.int32, device=device)
    error = refused(PREFILL, {**arguments, "workspace": short}, "workspace", f"{needed - 1} el", f"{needed}")
    assert "prefill_workspace_size" in error.remedy


@pytest.mark.parametrize(
    ("function", "values", "argument"),
    [
        (prefill_workspace_size, (-1, 3), "rows"),
        (prefill_workspace_size, (3, -1), "num_sequences"),
        (state_positions, (1, 0), "width"),
        (state_positions, (9, 0), "width"),
        (state_positions, (4, -1), "draft_tokens"),
    ],
)
def test_sizing_functions_refuse(function: Callable[..., int], values: tuple[int, ...], argument: str) -> None:
    with pytest.raises(ContractError) as caught:
        function(*values)
    assert caught.value.argument == argument


# --- overlap -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("other", ["x", "weight", "bias", "conv_state", "workspace"])
def test_prefill_out_shares_no_storage(other: str, device: torch.device) -> None:
    # Not even disjoint parts of one storage.
    storage = torch.zeros(2000, device=device)
    arguments = valid(PREFILL, device)
    out = storage[:30].view(6, 5)
    tensor = arguments[other]
    if other == "workspace":
        out = storage.view(torch.int32)[:64]
        arguments["workspace"], arguments["out"] = out, storage[1000:1030].view(6, 5)
    else:
        arguments["out"] = out
        arguments[other] = storage[1000 : 1000 + tensor.numel()].view(tensor.shape)
    before = snapshot(arguments)
    with pytest.raises(ContractError, match="storage") as caught:
        call(PREFILL, arguments)
    assert {"out", other} & {caught.value.argument}
    assert "out" in str(caught.value)
    assert other in str(caught.value)
    assert caught.value.remedy
    after = snapshot(arguments)
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_prefill_out_is_not_x(device: torch.device) -> None:
    arguments = valid(PREFILL, device)
    arguments["out"] = arguments["x"]
    refused(PREFILL, arguments, "out", "x", "storage of its own")


def test_update_out_may_be_x_itself_only(device: torch.device) -> None:
    storage = torch.zeros(1000, device=device)
    x = storage[:60].as_strided((6, 5), (7, 1), 3)
    arguments = {**valid(UPDATE, device), "x": x}
    call(UPDATE, {**arguments, "out": x})
    call(UPDATE, {**arguments, "out": storage.as_strided((6, 5), (7, 1), 3)})
    for strides, start in (((7, 1), 4), ((7, 1), 10), ((8, 1), 3), ((5, 1), 3), ((7, 1), 2)):
        out = storage.as_strided((6, 5), strides, start)
        error = refused(UPDATE, {**arguments, "out": out}, "out", "overlaps x", "x itself")
        assert "memory of its own" in error.wanted


def test_update_out_and_x_may_be_columns_of_one_buffer(device: torch.device) -> None:
    page = torch.zeros(6, 12, device=device)
    arguments = {**valid(UPDATE, device), "x": page[:, :5]}
    call(UPDATE, {**arguments, "out": page[:, 5:10]})
    call(UPDATE, {**arguments, "out": page[:, 7:]})
    refused(UPDATE, {**arguments, "out": page[:, 4:9]}, "out", "overlaps x")
    apart = torch.zeros(12, 5, device=device)
    call(UPDATE, {**arguments, "x": apart[:6], "out": apart[6:]})
    refused(UPDATE, {**arguments, "x": apart[:6], "out": apart[5:11]}, "out", "overlaps x")


@both
@pytest.mark.parametrize("other", ["x", "weight", "bias"])
def test_the_pool_overlaps_nothing(entry: Entry, other: str, device: torch.device) -> None:
    arguments = valid(entry, device)
    pool = arguments["conv_state"]
    tensor = arguments[other]
    arguments[other] = pool.flatten()[-tensor.numel() :].view(tensor.shape)
    error = refused(entry, arguments, "conv_state", f"overlaps {other}", "memory of its own")
    assert error.wanted


@both
def test_the_pool_and_x_may_share_a_storage(entry: Entry, device: torch.device) -> None:
    # Engines carve everything out of one big page.
    page = torch.zeros(1000, device=device)
    arguments = {**valid(entry, device), "x": page[:30].view(6, 5), "conv_state": page[30:255].view(9, 5, 5)}
    call(entry, arguments)
    arguments["conv_state"] = page[29:254].view(9, 5, 5)
    refused(entry, arguments, "conv_state", "overlaps x")


def test_update_out_overlaps_the_pool(device: torch.device) -> None:
    arguments = valid(UPDATE, device)
    arguments["out"] = arguments["conv_state"].flatten()[:30].view(6, 5)
    before = snapshot(arguments)
    with pytest.raises(ContractError, match="overlap"):
        call(UPDATE, arguments)
    assert torch.equal(before["conv_state"], snapshot(arguments)["conv_state"])


def test_out_overlaps_the_metadata(device: torch.device) -> None:
    arguments = valid(UPDATE, device)
    out = torch.zeros(6, 5, device=device)
    out.view(torch.int32).flatten()[:4] = arguments["cu_seqlens"]
    arguments |= {"out": out, "cu_seqlens": out.view(torch.int32).flatten()[:4]}
    before = out.clone()
    with pytest.raises(ContractError, match="overlap"):
        call(UPDATE, arguments)
    assert torch.equal(out, before)


@both
def test_overlap_is_found_across_storages(entry: Entry) -> None:
    # Two views of one memory that torch holds as two storages, as tensors from DLPack or NumPy are.
    page = np.zeros(1000, dtype=np.float32)
    cpu = torch.device("cpu")
    arguments = valid(entry, cpu)
    arguments["x"] = torch.from_numpy(page[:30]).view(6, 5)
    arguments["out"] = torch.from_numpy(page[5:35]).view(6, 5)
    if entry is PREFILL:
        with pytest.raises(ContractError):
            call(entry, arguments)
    else:
        refused(entry, arguments, "out", "overlaps x")
    arguments = valid(entry, cpu)
    arguments["x"] = torch.from_numpy(page[:30]).view(6, 5)
    arguments["conv_state"] = torch.from_numpy(page[29:254]).view(9, 5, 5)
    refused(entry, arguments, "conv_state", "overlaps x")


def aligned(shape: tuple[int, ...], like: torch.Tensor, page: torch.Tensor, start: int) -> torch.Tensor:
    """A view of the page at a multiple of 16 bytes, with the shape and strides of a fresh tensor."""
    assert start % 4 == 0
    strides = torch.empty(shape, device="meta").stride()
    return page.as_strided(shape, strides, start).copy_(like)


@both
@pytest.mark.parametrize("other", ["x", "weight", "bias", "conv_state"])
def test_a_call_seen_before_is_checked_again(entry: Entry, other: str, device: torch.device) -> None:
    # Same shapes, strides and types as calls that were fine, but overlapping addresses: no memory of those calls
    # may let this one through.
    arguments = valid(entry, device)
    for _ in range(3):
        call(entry, arguments)
    page = torch.zeros(4000, device=device)
    tensor = arguments[other]
    out = aligned((6, 5), torch.zeros(6, 5, device=device), page, 1000)
    clash = {"out": out, other: aligned(tuple(tensor.shape), tensor, page, 1004)}
    before = page.clone()
    with pytest.raises(ContractError):
        call(entry, {**arguments, **clash})
    assert torch.equal(page, before)
    if other != "conv_state":
        pool = aligned((9, 5, 5), torch.zeros(9, 5, 5, device=device), page, 2000)
        clash = {"conv_state": pool, other: aligned(tuple(tensor.shape), tensor, page, 2220)}
        before = page.clone()
        with pytest.raises(ContractError):
            call(entry, {**arguments, **clash})
        assert torch.equal(page, before)
    call(entry, arguments)


@both
def test_a_call_seen_before_keeps_its_other_rules(entry: Entry, device: torch.device) -> None:
    arguments = valid(entry, device)
    for _ in range(3):
        call(entry, arguments)
    for name, wrong in (
        ("x", arguments["x"].double()),
        ("weight", torch.ones(5, 4, dtype=torch.int32, device=device)),
        ("conv_state", torch.ones(9, 5, 2, device=device)),
        ("cu_seqlens", arguments["cu_seqlens"].long()),
        ("activation", "relu"),
        ("activation", True),
        ("pad_slot_id", -1.0),
        ("pad_slot_id", True),
        ("pad_slot_id", 2**31),
    ):
        refused(entry, {**arguments, name: wrong}, name, "")


@pytest.mark.parametrize("first", [1, True])
def test_equal_is_not_the_same(first: object, device: torch.device) -> None:
    # True == 1 and -1.0 == -1: a memory of earlier calls by equality would let them through.
    arguments = {**valid(UPDATE, device), "pad_slot_id": 1}
    for _ in range(3):
        call(UPDATE, arguments)
    if first is True:
        refused(UPDATE, {**arguments, "pad_slot_id": first}, "pad_slot_id", "bool")
    refused(UPDATE, {**arguments, "pad_slot_id": 1.0}, "pad_slot_id", "float")


@both
def test_nothing_is_repaired_in_silence(entry: Entry, device: torch.device) -> None:
    # The result lands in the very tensors that were given, not in hidden copies of them.
    arguments = valid(entry, device)
    before = snapshot(arguments)
    pointers = {name: value.data_ptr() for name, value in arguments.items() if hasattr(value, "data_ptr")}
    result = call(entry, arguments)
    after = snapshot(arguments)
    assert result is arguments["out"]
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert {"out", "conv_state"} <= changed <= {"out", "conv_state", "workspace"}
    assert all(arguments[name].data_ptr() == pointer for name, pointer in pointers.items())


# --- subprocesses: debug setting, backend choice ------------------------------------------------------------------


DEBUG = """
import torch
import serving_conv
from support.calls import valid, call, snapshot
from serving_conv.contract import ENTRIES, STEP, UPDATE
device = torch.device("DEVICE")

def refused(entry, name, values, argument, *texts):
    arguments = valid(entry, device)
    slots = "state_indices" if entry is UPDATE else "cache_indices"
    name = slots if name == "slots" else name
    argument = slots if argument == "slots" else argument
    arguments[name] = torch.tensor(values, dtype=torch.int32, device=device)
    before = snapshot(arguments)
    try:
        call(entry, arguments)
    except serving_conv.ContractError as error:
        assert error.argument == argument, error
        assert all(text in str(error) for text in texts), error
    else:
        raise SystemExit(f"{entry.name} {name} {values}: not refused")
    after = snapshot(arguments)
    assert all(torch.equal(before[n], after[n]) for n in before), "something was written"

for entry in ENTRIES:
    call(entry, valid(entry, device))
    call(entry, valid(entry, device, optional=False))
    refused(entry, "slots", [1, 3, 3], "slots", "slot 3", "1 and 2", "fork")
    refused(entry, "slots", [1, 9, 3], "slots", "slot 9", "sequence 1", "0 to 8")
    refused(entry, "slots", [-2, 1, 3], "slots", "slot -2", "sequence 0")
    refused(entry, "cu_seqlens", [1, 2, 3, 6], "cu_seqlens", "[1, 2, 3, 6]", "start at 0")
    refused(entry, "cu_seqlens", [0, 3, 2, 6], "cu_seqlens", "never decrease")
    refused(entry, "cu_seqlens", [0, 2, 3, 7], "cu_seqlens", "at most at 6")
    refused(entry, "cu_seqlens", [0, -1, 3, 6], "cu_seqlens", "[0, -1, 3, 6]")
    refused(entry, "num_accepted_tokens", [1, 0, 3], "num_accepted_tokens", "0 for sequence 1", "1 to 3")
    refused(entry, "num_accepted_tokens", [1, 2, 4], "num_accepted_tokens", "4 for sequence 2")
    refused(entry, "num_accepted_tokens", [-1, 2, 3], "num_accepted_tokens", "-1 for sequence 0")
    # Padding and empty sequences are legal, twice too, whatever else they carry.
    slots = "state_indices" if entry is UPDATE else "cache_indices"
    arguments = valid(entry, device)
    arguments[slots] = torch.tensor([-1, -1, 3], dtype=torch.int32, device=device)
    arguments["num_accepted_tokens"] = torch.tensor([0, 9, 3], dtype=torch.int32, device=device)
    call(entry, arguments)
    arguments = valid(entry, device)
    arguments["cu_seqlens"] = torch.tensor([0, 0, 3, 3], dtype=torch.int32, device=device)
    arguments[slots] = torch.tensor([7, 7, 99], dtype=torch.int32, device=device)
    call(entry, arguments)
    arguments[slots] = torch.tensor([0, 2, 0], dtype=torch.int32, device=device)
    call(entry, {**arguments, "pad_slot_id": 0})

offsets, tokens, slots = "checkpoint_offsets", "checkpoint_tokens", "checkpoint_slots"
refused(STEP, offsets, [1, 1, 1, 3], offsets, "[1, 1, 1, 3]", "start at 0", "repeats its offset")
refused(STEP, offsets, [0, 2, 1, 3], offsets, "[0, 2, 1, 3]", "never decrease")
refused(STEP, offsets, [0, -1, 1, 3], offsets, "[0, -1, 1, 3]")
refused(STEP, offsets, [0, 1, 1, 4], offsets, "at most at 3")
refused(STEP, tokens, [0, 2, 3], tokens, "0 for checkpoint 0 of sequence 0", "1 to 2", "of this call")
refused(STEP, tokens, [3, 2, 3], tokens, "3 for checkpoint 0 of sequence 0", "1 to 2")
refused(STEP, tokens, [1, 2, 4], tokens, "4 for checkpoint 2 of sequence 2", "1 to 3")
refused(STEP, tokens, [1, -(2**31), 3], tokens, "checkpoint 1 of sequence 2")
refused(STEP, slots, [4, 9, 6], slots, "slot 9 for checkpoint 1 of sequence 2", "0 to 8")
refused(STEP, slots, [-2, 5, 6], slots, "slot -2 for checkpoint 0 of sequence 0", "pad_slot_id -1")
refused(STEP, slots, [4, 5, 7], slots, "slot 7 for checkpoint 2", "sequence 1 owns", "no live sequence")
refused(STEP, slots, [1, 5, 6], slots, "slot 1 for checkpoint 0", "sequence 0 owns")
refused(STEP, slots, [4, 5, 4], slots, "slot 4 for checkpoints 0 and 2", "its own slot")

def int32(*values):
    return torch.tensor(values, dtype=torch.int32, device=device)

# Legal: checkpoints of nobody, of padding and of empty sequences, whatever they carry; padding ones twice; the slot
# of a sequence that is padding or empty.
for legal in (
    {offsets: int32(0, 1, 1, 1), tokens: int32(2, 99, -5), slots: int32(4, 1, 4)},
    {offsets: int32(0, 0, 0, 0), tokens: int32(0, 0, 0), slots: int32(1, 7, 3)},
    {tokens: int32(1, 0, 99), slots: int32(4, -1, -1)},
    {"cache_indices": int32(-1, 7, 3), tokens: int32(77, 2, 3), slots: int32(99, 5, 1)},
    {"cu_seqlens": int32(0, 0, 3, 6), tokens: int32(77, 2, 3), slots: int32(7, 1, 6)},
    {offsets: int32(0, 0, 0, 0), tokens: int32(), slots: int32()},
):
    call(STEP, {**valid(STEP, device), **legal})
print("done")
"""


def test_debug_setting_checks_device_values(device: torch.device) -> None:
    result = python(DEBUG.replace("DEVICE", str(device)), SERVING_CONV_DEBUG="1")
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == "done"


def test_without_the_debug_setting_values_are_not_checked(device: torch.device) -> None:
    result = python(DEBUG.replace("DEVICE", str(device)))
    assert "not refused" in result.stderr


UPDATE_ONCE = """
import torch, serving_conv
from support.calls import call, valid
from serving_conv.contract import UPDATE
for _ in range(2):
    try:
        serving_conv.backend_for(torch.ones(1))
    except serving_conv.BackendError as error:
        print(error.argument, "|", error.got, "|", error.wanted, "|", error.remedy)
    arguments = valid(UPDATE, torch.device("cpu"))
    before = arguments["conv_state"].clone()
    try:
        call(UPDATE, arguments)
    except serving_conv.BackendError as error:
        assert torch.equal(arguments["conv_state"], before)
        print("call refused")
"""


def test_unknown_backend() -> None:
    result = python(UPDATE_ONCE, SERVING_CONV_BACKEND="abacus")
    assert result.returncode == 0, result.stderr
    lines = result.stdout.splitlines()
    assert len(lines) == 4
    assert lines[0].startswith("SERVING_CONV_BACKEND | 'abacus'")
    assert "reference" in lines[0]
    assert "unset" in lines[0]
    assert lines[1] == lines[3] == "call refused"


def test_bad_debug_setting() -> None:
    result = python("import serving_conv", SERVING_CONV_DEBUG="yes")
    assert result.returncode != 0
    assert "ContractError: SERVING_CONV_DEBUG: got 'yes'; wanted 1 or 0" in result.stderr


@pytest.mark.parametrize(
    ("environment", "backend", "debug"),
    [
        ({}, None, False),
        ({"SERVING_CONV_BACKEND": "", "SERVING_CONV_DEBUG": ""}, None, False),
        ({"SERVING_CONV_BACKEND": "host", "SERVING_CONV_DEBUG": "1"}, "host", True),
        ({"SERVING_CONV_DEBUG": "0"}, None, False),
    ],
)
def test_read_settings(environment: dict[str, str], backend: str | None, debug: bool) -> None:
    settings = read_settings(environment)
    assert (settings.backend, settings.debug) == (backend, debug)
    with pytest.raises(ContractError, match="SERVING_CONV_DEBUG"):
        read_settings({**environment, "SERVING_CONV_DEBUG": "true"})


# --- the errors themselves --------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [ServingConvError, ContractError, BackendError, TraceError])
@pytest.mark.parametrize("remedy", ["", "do that"])
def test_errors_survive_pickling_and_copying(kind: type[ServingConvError], remedy: str) -> None:
    error = kind("x", got=[1, 2], wanted="a tensor", remedy=remedy)
    for twin in (pickle.loads(pickle.dumps(error)), copy.copy(error), copy.deepcopy(error)):
        assert type(twin) is kind
        assert str(twin) == str(error)
        assert (twin.argument, twin.got, twin.wanted, twin.remedy) == ("x", "[1, 2]", "a tensor", remedy)


def test_error_family() -> None:
    assert issubclass(ContractError, ServingConvError)
    assert issubclass(ContractError, ValueError)
    assert issubclass(BackendError, RuntimeError)
    assert issubclass(TraceError, ValueError)
    assert str(ContractError("x", got=1, wanted="2")) == "x: got 1; wanted 2"
    assert str(ContractError("x", got=1, wanted="2", remedy="add")) == "x: got 1; wanted 2. Remedy: add"


def test_public_error_names() -> None:
    assert serving_conv.ContractError is ContractError
    assert serving_conv.ServingConvError is ServingConvError
