"""The short path of eager calls: which calls a plan answers, and that it launches what the full path would.

No device: a recording kernel stands for the loaded ones.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, ClassVar, Literal

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from serving_conv.checks import check
from serving_conv.contract import PREFILL, STEP, UPDATE, Entry, prefill_workspace_size
from serving_conv.errors import CaptureError
from serving_conv.native import cuda as cuda_module
from serving_conv.native import plan as plans_module
from serving_conv.native.call import prepare_update
from serving_conv.native.cuda import prefill_launch
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

    def __init__(self, entry: Any, tensors: Any, arguments: dict[str, Any]) -> None:
        self.tensors = tensors

    def run(self, tensors: tuple[Tensor | None, ...]) -> Tensor:
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


def test_other_sizes_are_answered(plans: Plans) -> None:
    arguments = {**call(), "x": torch.randn(5, 8), "slots": torch.arange(5, dtype=torch.int32)}
    assert plans.run(tensors_of(arguments), "silu", -1) is not None


def test_many_signatures_are_kept(plans: Plans) -> None:
    for slots in range(6, 26):
        arguments = {**call(), "conv_state": torch.randn(slots, 8, 3)}
        plans.add(tensors_of(arguments), "silu", -1, {**arguments, "out": torch.empty(3, 8)})
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
    plans.add(tensors_of(arguments), "silu", -1, arguments)
    assert plans.run(tensors_of(arguments), "silu", -1) is None


# What depends on addresses. Tensors stand at numbers of our choice: nothing reads them.


@dataclass
class At:
    """A tensor by its address alone, with storage of its own."""

    address: int

    def untyped_storage(self) -> Any:
        return SimpleNamespace(data_ptr=lambda: self.address - 1, nbytes=lambda: 0)


EXTENTS = {"x": 128, "weight": 96, "bias": 64, "conv_state": 256, "out": 128, "cu_seqlens": 16, "slots": 12}
EXTENTS |= {"has_initial_state": 3, "num_accepted_tokens": 12, "workspace": 64, "checkpoint_slots": 12}
ADDRESSES = {"x": 1024, "weight": 2048, "bias": 3072, "conv_state": 4096, "out": 8192, "cu_seqlens": 16384}
ADDRESSES |= {"slots": 16512, "has_initial_state": 16640, "num_accepted_tokens": 16768, "workspace": 32768}
ADDRESSES |= {"checkpoint_slots": 24576}


def plan_at(names: Sequence[str], *, in_place: bool = False) -> Plan:
    plan = Plan.__new__(Plan)
    plan._state, plan._out = names.index("conv_state"), names.index("out")
    plan._words, plan._in_place = slice(names.index("out") + 1), in_place
    return plan


def is_sound(changed: dict[str, int], *, in_place: bool = False, without: Sequence[str] = ()) -> bool:
    names = [name for name in NAMES if name in ADDRESSES and name not in without]
    addresses = [(ADDRESSES | changed)[name] for name in names]
    extents = [EXTENTS[name] for name in names]
    plan = plan_at(names, in_place=in_place)
    sound = plan._is_sound(addresses, extents)
    if "workspace" in names:
        tensors: Any = [At(address) for address in addresses]
        private = plan._is_private_workspace(names.index("workspace"), tensors, addresses, extents)
        return sound and private
    return sound


@pytest.mark.parametrize(
    ("changed", "sound"),
    [
        ({}, True),
        ({"x": 1025}, False),  # not aligned
        ({"bias": 3080}, False),
        ({"slots": 16516}, True),  # no words are read there
        ({"x": 3984}, False),  # its last bytes are the pool's first
        ({"x": 3968}, True),  # right before the pool
        ({"bias": 4096}, False),
        ({"slots": 4252}, False),
        ({"num_accepted_tokens": 8192 + 124}, False),  # in out
        ({"num_accepted_tokens": 8192 + 128}, True),  # right behind it
        ({"checkpoint_slots": 4096}, False),
        ({"out": 4224}, False),
        ({"out": 1024}, False),  # x itself, but not in place
        ({"slots": 16384}, True),  # offsets and slots may share: both are read
        ({"workspace": 8192 + 124}, False),  # in out
        ({"workspace": 4096 - 60}, False),  # into the pool
        ({"workspace": 16640 - 60}, False),  # in the flags
        ({"workspace": 4096 - 64}, True),  # right before the pool
    ],
)
def test_addresses_are_looked_at(changed: dict[str, int], sound: bool) -> None:
    assert is_sound(changed) is sound
    assert is_sound(changed, without=("workspace",)) is (sound or "workspace" in changed)


def test_in_place_means_x_itself() -> None:
    assert is_sound({"out": 1024}, in_place=True)
    assert not is_sound({"out": 1040}, in_place=True)
    assert not is_sound({"out": 4096 - 128 + 16, "x": 4096 - 128 + 16}, in_place=True)  # and in the pool


# The launches.


class Loaded:
    """Stands for a loaded kernel."""

    launches: ClassVar[list[tuple[Any, bytes, tuple[int, int, int], int]]] = []

    def __init__(self, variant: Any) -> None:
        self.variant = variant

    def launch(self, parameters: bytes, grid: tuple[int, int, int], stream: int) -> None:
        self.launches.append((self.variant, parameters, grid, stream))


FLAG = torch.zeros(1, dtype=torch.int32)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> type[Loaded]:
    """The CPU passes for a GPU of 132 multiprocessors, all of whose kernels are loaded."""
    for module in (plans_module, cuda_module):
        monkeypatch.setattr(module, "fault_flag", lambda device: FLAG)
        monkeypatch.setattr(module, "load_variant", lambda variant, index: Loaded(variant))
    monkeypatch.setattr(cuda_module, "_traits_of_device", lambda index: (132, 90))
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: None, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 77, raising=False)
    Loaded.launches.clear()
    return Loaded


@dataclass(frozen=True)
class Kind:
    """Calls that are alike: an entry, and what is given to it."""

    entry: Entry
    given: frozenset[str]
    channels: int = 64
    positions: int = 5
    pool: Literal["channels", "positions"] = "channels"
    pitch: int = 0
    x: torch.dtype = torch.bfloat16
    state: torch.dtype = torch.bfloat16
    activation: str | None = "silu"
    pad_slot_id: int = -1


KINDS: dict[str, Kind] = {
    "decode": Kind(UPDATE, frozenset()),
    "decode in place": Kind(UPDATE, frozenset({"out is x"}), pitch=96),
    "decode with everything": Kind(UPDATE, frozenset({"bias", "out", "has_initial_state", "num_accepted_tokens"})),
    "speculative": Kind(UPDATE, frozenset({"cu_seqlens", "num_accepted_tokens", "out is x"}), positions=6),
    "prefill": Kind(PREFILL, frozenset({"cu_seqlens"})),
    "prefill of a slice": Kind(PREFILL, frozenset({"cu_seqlens", "bias", "has_initial_state"}), pitch=80),
    "prefill with everything": Kind(
        PREFILL,
        frozenset({"cu_seqlens", "bias", "has_initial_state", "num_accepted_tokens", "out", "workspace"}),
        activation=None,
        pad_slot_id=0,
    ),
    "prefill, positions contiguous": Kind(PREFILL, frozenset({"cu_seqlens"}), pool="positions", state=torch.float32),
    "prefill, no words": Kind(PREFILL, frozenset({"cu_seqlens", "bias"}), channels=7, x=torch.float32),
    "step": Kind(STEP, frozenset({"cu_seqlens", "has_initial_state"})),
    "step with drafts": Kind(STEP, frozenset({"cu_seqlens", "num_accepted_tokens", "speculative", "out"})),
    "step with checkpoints": Kind(STEP, frozenset({"cu_seqlens", "bias", "has_initial_state", "checkpoints"})),
}


def make_call(kind: Kind, rows: int, sequences: int, checkpoints: int = 2) -> dict[str, Any]:
    """Arguments of one call, each in memory of its own."""
    channels, positions, given = kind.channels, kind.positions, kind.given
    numbers = lambda count: torch.zeros(count, dtype=torch.int32)  # noqa: E731
    x = torch.zeros(rows, max(channels, kind.pitch), dtype=kind.x)[:, :channels]
    pool = torch.zeros(9, positions, channels, dtype=kind.state).transpose(1, 2)
    arguments: dict[str, Any] = {
        "x": x,
        "weight": torch.zeros(channels, 4, dtype=kind.x),
        "bias": torch.zeros(channels) if "bias" in given else None,
        "conv_state": pool if kind.pool == "channels" else pool.contiguous(),
        "out": x if "out is x" in given else torch.zeros(rows, channels, dtype=kind.x) if "out" in given else None,
        "cu_seqlens": numbers(sequences + 1) if "cu_seqlens" in given else None,
        "slots": numbers(sequences),
        "num_accepted_tokens": numbers(sequences) if "num_accepted_tokens" in given else None,
        "has_initial_state": torch.zeros(sequences, dtype=torch.bool) if "has_initial_state" in given else None,
        "workspace": numbers(prefill_workspace_size(rows, sequences) + 3) if "workspace" in given else None,
    }
    if kind.entry is STEP:
        arguments["speculative"] = torch.zeros(sequences, dtype=torch.bool) if "speculative" in given else None
        named = "checkpoints" in given
        arguments["checkpoint_offsets"] = numbers(sequences + 1) if named else None
        arguments["checkpoint_tokens"] = numbers(checkpoints) if named else None
        arguments["checkpoint_slots"] = numbers(checkpoints) if named else None
    return arguments


def complete(kind: Kind, arguments: dict[str, Any], out: Tensor) -> dict[str, Any]:
    """As the full path has them."""
    slots = "state_indices" if kind.entry is UPDATE else "cache_indices"
    renamed = {slots if name == "slots" else name: value for name, value in arguments.items()}
    if kind.entry is not PREFILL:
        del renamed["workspace"]
    return renamed | {"out": out, "activation": kind.activation, "pad_slot_id": kind.pad_slot_id}


def in_order(arguments: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(arguments[name] for name in NAMES if name in arguments)


def of_full_path(kind: Kind, arguments: dict[str, Any], out: Tensor) -> tuple[Any, bytes, tuple[int, int, int], int]:
    whole = complete(kind, arguments, out)
    check(kind.entry, whole)
    x = whole.pop("x")
    whole.pop("workspace", None)
    launch = prepare_update(x, **whole, fault_flag=FLAG) if kind.entry is UPDATE else prefill_launch(x, whole)
    assert launch is not None
    return launch.variant, launch.parameters, launch.grid, 77


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
        plans.add(in_order(first), kind.activation, kind.pad_slot_id, complete(kind, first, out))
        for sizes in steps:
            for layer in range(2):
                arguments = make_call(kind, *sizes)
                device.launches.clear()
                result = plans.run(in_order(arguments), kind.activation, kind.pad_slot_id)
                assert result is not None, (sizes, layer)
                assert result.shape == arguments["x"].shape
                assert result.is_contiguous() or "out is x" in kind.given
                assert device.launches == [of_full_path(kind, arguments, result)]
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
            plans.add(in_order(arguments), kind.activation, kind.pad_slot_id, complete(kind, arguments, out))
        if spoilt:
            change(arguments)
        made = plans.run(in_order(arguments), kind.activation, kind.pad_slot_id)
        assert (made is None) is spoilt
    assert len(device.launches) == 2


def test_strides_that_only_one_row_may_have(device: type[Loaded]) -> None:
    kind = KINDS["prefill"]
    plans = Plans(PREFILL)
    memory = torch.zeros(640, dtype=kind.x)
    for rows in (1, 2):
        x = memory.as_strided((rows, 64), (32, 1))  # rows that overlap
        arguments = {**make_call(kind, rows, 1), "x": x}
        if rows == 1:
            plans.add(in_order(arguments), "silu", -1, complete(kind, arguments, torch.zeros(1, 64, dtype=kind.x)))
        assert (plans.run(in_order(arguments), "silu", -1) is None) is (rows == 2)


def test_a_kernel_that_sizes_choose_anew_is_not_loaded_under_capture(
    device: type[Loaded], monkeypatch: pytest.MonkeyPatch
) -> None:
    kind = KINDS["prefill"]
    plans = Plans(PREFILL)
    arguments = make_call(kind, 10, 1)
    plans.add(in_order(arguments), "silu", -1, complete(kind, arguments, torch.zeros(10, 64, dtype=kind.x)))

    def capturing(variant: Any, index: int) -> None:
        raise CaptureError("kernel", got="capture", wanted="a loaded kernel")

    monkeypatch.setattr(plans_module, "load_variant", capturing)
    assert plans.run(in_order(arguments), "silu", -1) is not None
    with pytest.raises(CaptureError):
        plans.run(in_order(make_call(kind, 20, 1)), "silu", -1)


def test_sizes_do_not_pile_up(device: type[Loaded], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plans_module, "_MOST_SIZES", 8)
    kind = KINDS["prefill"]
    plans = Plans(PREFILL)
    for rows in range(1, 30):
        arguments = make_call(kind, rows, 1)
        if rows == 1:
            plans.add(in_order(arguments), "silu", -1, complete(kind, arguments, torch.zeros(1, 64, dtype=kind.x)))
        assert plans.run(in_order(arguments), "silu", -1) is not None
    (plan,) = plans._table.values()
    assert len(plan._sized) <= 8
