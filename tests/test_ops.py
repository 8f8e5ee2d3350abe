"""The registered operators: schemas that hold under opcheck, compilers that trace through, fakes, the backend's log."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._dynamo.testing
from support.calls import ENTRY_IDS, call, valid
from support.cases import same_bits
from support.process import python
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import serving_conv
from serving_conv.contract import ENTRIES, PREFILL, UPDATE, Entry

both = pytest.mark.parametrize("entry", ENTRIES, ids=ENTRY_IDS)


def operator(entry: Entry, *, out: bool) -> Any:
    packet = getattr(torch.ops.serving_conv, entry.name)
    return packet.out if out else packet.default


def test_the_operators_exist() -> None:
    for entry in ENTRIES:
        assert getattr(torch.ops.serving_conv, entry.name).overloads() == ["default", "out"]


def cases(entry: Entry, device: torch.device) -> dict[str, dict[str, Any]]:
    """A few calls that differ in what is present, in type and in memory."""
    full = valid(entry, device)
    plain = valid(entry, device, optional=False)
    half = {
        **valid(entry, device),
        "x": torch.randn(6, 9, device=device)[:, :5].bfloat16(),
        "weight": torch.randn(5, 4, device=device).bfloat16(),
        "conv_state": torch.randn(9, 5, 5, device=device).bfloat16().transpose(1, 2),
        "out": torch.zeros(6, 7, device=device, dtype=torch.bfloat16)[:, :5],
        "activation": None,
        "pad_slot_id": 0,
    }
    return {"full": full, "plain": plain, "16 bits": half}


@both
@pytest.mark.parametrize("out", [False, True])
@pytest.mark.parametrize("case", ["full", "plain", "16 bits"])
def test_opcheck(entry: Entry, out: bool, case: str, device: torch.device) -> None:
    arguments = cases(entry, device)[case]
    if not out:
        arguments.pop("out", None)
    elif "out" not in arguments:
        arguments["out"] = torch.empty_like(arguments["x"])
    results = torch.library.opcheck(operator(entry, out=out), (), arguments)
    assert set(results.values()) == {"SUCCESS"}, results


@both
def test_opcheck_with_positional_arguments(entry: Entry, device: torch.device) -> None:
    arguments = valid(entry, device)
    positional = [arguments.pop(a.name) for a in entry.arguments if not a.keyword]
    del arguments["out"]
    torch.library.opcheck(operator(entry, out=False), tuple(positional), arguments)


@both
@pytest.mark.parametrize("out", [False, True])
def test_the_operator_is_the_entry(entry: Entry, out: bool, device: torch.device) -> None:
    torch.manual_seed(1)
    by_entry = valid(entry, device)
    by_operator = {n: v.clone() if isinstance(v, Tensor) else v for n, v in by_entry.items()}
    expected = call(entry, by_entry)
    if out:
        assert operator(entry, out=True)(**by_operator) is None
        got = by_operator["out"]
    else:
        del by_operator["out"]
        got = operator(entry, out=False)(**by_operator)
    assert same_bits(got.cpu(), expected.cpu())
    assert same_bits(by_operator["conv_state"].cpu(), by_entry["conv_state"].cpu())


@both
@pytest.mark.parametrize("out", [False, True])
def test_the_operator_checks_its_arguments(entry: Entry, out: bool, device: torch.device) -> None:
    arguments = valid(entry, device)
    arguments["weight"] = torch.ones(5, 9, device=device)
    if not out:
        del arguments["out"]
    with pytest.raises(serving_conv.ContractError, match="9 taps"):
        operator(entry, out=out)(**arguments)


# --- compilers --------------------------------------------------------------------------------------------------


def layer(entry: Entry, names: list[str]) -> Callable[..., Tensor]:
    """The entry between two other operations, as a model would call it; tensors come by position."""

    def forward(*tensors: Tensor) -> Tensor:
        arguments: dict[str, Any] = dict(zip(names, tensors, strict=True))
        arguments["x"] = arguments["x"] * 2
        return call(entry, arguments) + 1

    return forward


def compare_compiled(
    entry: Entry,
    arguments: dict[str, Any],
    device: torch.device,
    compiled: Callable[..., Tensor],
    eager: Callable[..., Tensor],
) -> None:
    tensors = [v for v in arguments.values() if isinstance(v, Tensor)]
    ours, theirs = ([t.clone() for t in tensors] for _ in range(2))
    expected, got = eager(*ours), compiled(*theirs)
    assert same_bits(got.cpu(), expected.cpu())
    for mine, compiled_tensor in zip(ours, theirs, strict=True):
        if mine.is_floating_point():
            assert same_bits(mine.cpu(), compiled_tensor.cpu()), "in-place results differ"


@both
@pytest.mark.parametrize("present", ["full", "plain"])
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compile(entry: Entry, present: str, backend: str, device: torch.device) -> None:
    torch._dynamo.reset()
    arguments = cases(entry, device)[present]
    arguments = {name: value for name, value in arguments.items() if isinstance(value, Tensor)}
    eager = layer(entry, list(arguments))
    compiled = torch.compile(eager, backend=backend, fullgraph=True)
    for _ in range(2):
        compare_compiled(entry, arguments, device, compiled, eager)


def test_compile_with_inductor(device: torch.device) -> None:
    torch._dynamo.reset()
    arguments = {n: v for n, v in valid(PREFILL, device).items() if isinstance(v, Tensor)}
    eager = layer(PREFILL, list(arguments))
    compare_compiled(PREFILL, arguments, device, torch.compile(eager, fullgraph=True), eager)


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
def test_compile_with_out_is_x(backend: str, device: torch.device) -> None:
    torch._dynamo.reset()

    def eager(x: Tensor, weight: Tensor, pool: Tensor, slots: Tensor) -> Tensor:
        y = x * 2
        serving_conv.causal_conv1d_update(y, weight, pool, slots, out=y)
        return y - 1

    def on_argument(x: Tensor, weight: Tensor, pool: Tensor, slots: Tensor) -> Tensor:
        return serving_conv.causal_conv1d_update(x, weight, pool, slots, out=x) - 1

    tensors = {
        "x": torch.randn(3, 5, device=device),
        "weight": torch.randn(5, 4, device=device),
        "pool": torch.randn(4, 5, 3, device=device),
        "slots": torch.tensor([2, 0, 3], dtype=torch.int32, device=device),
    }
    for function in (eager, on_argument):
        compiled = torch.compile(function, backend=backend, fullgraph=True)
        compare_compiled(UPDATE, tensors, device, compiled, function)


def test_compile_with_dynamic_shapes(device: torch.device) -> None:
    torch._dynamo.reset()
    # Sizes that coincide by chance would be taken for one: 17 channels, 97 slots.
    names = ["x", "weight", "conv_state", "cu_seqlens", "cache_indices"]
    eager = layer(PREFILL, names)
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(eager, backend=counter, fullgraph=True, dynamic=True)
    for lengths in ((9, 2, 12, 1, 1), (1, 1, 1, 4, 4, 5, 20), (7, 2, 2, 2, 9, 30)):
        rows, number = sum(lengths), len(lengths)
        offsets = torch.tensor([sum(lengths[:n]) for n in range(number + 1)], dtype=torch.int32, device=device)
        arguments = {
            "x": torch.randn(rows, 17, device=device),
            "weight": torch.randn(17, 4, device=device),
            "conv_state": torch.randn(97, 17, 3, device=device),
            "cu_seqlens": offsets,
            "cache_indices": torch.arange(number, dtype=torch.int32, device=device),
        }
        compare_compiled(PREFILL, arguments, device, compiled, eager)
    assert counter.frame_count == 1, "it was compiled again for another batch"


@both
def test_compiled_calls_refuse_bad_input(entry: Entry, device: torch.device) -> None:
    torch._dynamo.reset()
    arguments = {n: v for n, v in valid(entry, device).items() if isinstance(v, Tensor)}
    arguments["weight"] = torch.ones(5, 9, device=device)
    compiled = torch.compile(layer(entry, list(arguments)), backend="aot_eager", fullgraph=True)
    with pytest.raises(serving_conv.ContractError, match="9 taps"):
        compiled(*arguments.values())


@both
def test_fake_tensors(entry: Entry, device: torch.device) -> None:
    with FakeTensorMode() as mode:
        for arguments in cases(entry, device).values():
            result = call(entry, arguments)
            assert type(result).__name__ == "FakeTensor"
            assert result.shape == arguments["x"].shape
            assert result.dtype == arguments["x"].dtype
            assert result.device == arguments["x"].device
            if "out" in arguments:
                assert result is arguments["out"]
            else:
                assert result.is_contiguous()
    del mode


@both
def test_fakes_outside_their_mode(entry: Entry, device: torch.device) -> None:
    # As a graph break or a shape propagation pass calls it.
    mode = FakeTensorMode()
    arguments = {n: mode.from_tensor(v) if isinstance(v, Tensor) else v for n, v in valid(entry, device).items()}
    assert call(entry, arguments).shape == (6, 5)


@both
def test_a_fake_allocates_like_the_kernel(entry: Entry, device: torch.device) -> None:
    arguments = cases(entry, device)["16 bits"]
    del arguments["out"]
    real = call(entry, arguments)
    with FakeTensorMode() as mode:
        fake = call(entry, {n: mode.from_tensor(v) if isinstance(v, Tensor) else v for n, v in arguments.items()})
    assert (fake.shape, fake.stride(), fake.dtype) == (real.shape, real.stride(), real.dtype)


def test_meta_tensors() -> None:
    # torch.device("meta") models never reach a kernel; they want the shape.
    meta = torch.device("meta")
    x, weight, pool = (torch.empty(*shape, device=meta) for shape in ((3, 5), (5, 4), (9, 5, 3)))
    slots = torch.empty(3, dtype=torch.int32, device=meta)
    assert torch.ops.serving_conv.causal_conv1d_update.default(x, weight, pool, slots).shape == (3, 5)


@both
def test_under_inference_mode_and_no_grad(entry: Entry, device: torch.device) -> None:
    arguments = valid(entry, device)
    arguments["weight"] = torch.nn.Parameter(arguments["weight"])
    arguments["bias"] = torch.nn.Parameter(arguments["bias"])
    with torch.no_grad():
        call(entry, arguments)
    with torch.inference_mode():
        assert call(entry, {**valid(entry, device), "out": None}).is_inference()
    # Parameters that want gradients are no obstacle without the context either: nothing is recorded.
    assert not call(entry, {**arguments, "out": None}).requires_grad


# --- backends ---------------------------------------------------------------------------------------------------


def test_backend_for(device: torch.device) -> None:
    name = serving_conv.backend_for(torch.empty(1, device=device))
    assert name in {"reference", "host", "cuda", "triton"}
    assert serving_conv.backend_for(torch.empty(0, device=device)) == name


LOG = """
import logging, torch
records = []
class Keep(logging.Handler):
    def emit(self, record):
        records.append(record)
logger = logging.getLogger("serving_conv")
logger.setLevel(logging.INFO)
logger.addHandler(Keep())
import serving_conv
from support.calls import call, valid
from serving_conv.contract import ENTRIES
assert not records, "importing says nothing"
device = torch.device("cpu")
for _ in range(3):
    for entry in ENTRIES:
        call(entry, valid(entry, device))
    serving_conv.backend_for(torch.ones(1))
about = [r.getMessage() for r in records if "backend" in r.getMessage()]
assert len(about) == 1, about
print(about[0])
"""


@pytest.mark.parametrize(
    ("environment", "why"), [({}, "by device"), ({"SERVING_CONV_BACKEND": "reference"}, "SERVING_CONV_BACKEND")]
)
def test_one_log_line_says_which_backend_runs(environment: dict[str, str], why: str) -> None:
    result = python(LOG, **{"SERVING_CONV_BACKEND": "", **environment})
    assert result.returncode == 0, result.stderr
    assert "'reference'" in result.stdout or not environment
    assert "cpu" in result.stdout
    assert why in result.stdout


def test_no_log_line_reaches_a_user_who_asked_for_none() -> None:
    code = "import torch, serving_conv; serving_conv.backend_for(torch.ones(1))"
    result = python(code)
    assert (result.stdout, result.stderr) == ("", "")
