"""The differentiable convolution on one device: hand-checked gradients, gradcheck, strides, packing, compilers."""

from __future__ import annotations

import threading
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from support.gradients import exact_and_bounds, make_case, worst
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.autograd import gradcheck
from torch.utils.checkpoint import checkpoint

import serving_conv
from serving_conv import ContractError, backends, causal_conv1d
from serving_conv.training import kernels, reference
from serving_conv.training.sequences import offsets_of

SEQ_IDX = [[0, 0, 1, 1, 1, 5, 0, 0, 0]]  # a number that comes again begins another sequence


def leaf(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, dtype=dtype).requires_grad_()


def digits(values: list[float]) -> Tensor:
    return torch.tensor([[values]]).transpose(1, 2)


@pytest.mark.parametrize(
    ("tokens", "dout", "dfinal", "dx", "dweight", "dhistory"),
    [
        (2, 1.0, (0, 0, 0), [1100, 1000], [15, 17, 10, 3], [1, 11, 110]),
        (1, 0.0, (1, 10, 100), [100], [0, 0, 0, 0], [0, 1, 10]),
        (2, 0.0, (1, 10, 100), [10, 100], [0, 0, 0, 0], [0, 0, 1]),
    ],
)
def test_kit_4(
    tokens: int, dout: float, dfinal: tuple[int, ...], dx: list[int], dweight: list[int], dhistory: list[int]
) -> None:
    x = digits([1.0, 2.0])[:, :tokens].clone().requires_grad_()
    weight = torch.tensor([[1.0, 10, 100, 1000]]).requires_grad_()
    history = torch.tensor([[[7.0, 8, 9]]]).requires_grad_()
    out, final = causal_conv1d(x, weight, initial_states=history, return_final_states=True)
    assert out.flatten().tolist() == [1987, 2198][:tokens]
    assert final.flatten().tolist() == [[8, 9, 1], [9, 1, 2]][tokens - 1]
    (dout * out.sum() + (final * torch.tensor(dfinal)).sum()).backward()
    assert x.grad is not None and weight.grad is not None and history.grad is not None
    assert x.grad.flatten().tolist() == dx
    assert weight.grad.flatten().tolist() == dweight
    assert history.grad.flatten().tolist() == dhistory


@pytest.mark.parametrize("activation", [None, "silu"])
@pytest.mark.parametrize("width", [2, 4, 8])
def test_gradcheck(width: int, activation: str | None) -> None:
    x, weight, bias = leaf(1, 9, 2), leaf(2, width), leaf(2)
    offsets = torch.tensor([0, 1, 3, 3, 9], dtype=torch.int32)
    windows = leaf(4, 2, width - 1)

    def packed(*leaves: Tensor) -> Any:
        x, weight, bias, windows = leaves
        return causal_conv1d(
            x, weight, bias, activation, cu_seqlens=offsets, initial_states=windows, return_final_states=True
        )

    assert gradcheck(packed, (x, weight, bias, windows))
    numbers = torch.tensor(SEQ_IDX, dtype=torch.int32)
    assert gradcheck(
        lambda x, weight, bias, windows: causal_conv1d(
            x, weight, bias, activation, seq_idx=numbers, initial_states=windows
        ),
        (x, weight, bias, leaf(2, 2, width - 1)),
    )
    batch = leaf(3, 2, 2)  # shorter than most windows
    assert gradcheck(
        lambda x, weight, windows: causal_conv1d(
            x, weight, None, activation, initial_states=windows, return_final_states=True
        ),
        (batch, weight, leaf(3, 2, width - 1)),
    )


def test_the_reference_is_torchs_convolution() -> None:
    x, weight, bias = leaf(2, 11, 5), leaf(5, 4), leaf(5)
    want = torch.nn.functional.conv1d(x.transpose(1, 2), weight[:, None], bias, padding=3, groups=5)[..., :11]
    want = torch.nn.functional.silu(want).transpose(1, 2)
    got, _ = reference.forward(x.detach(), weight.detach(), bias.detach(), None, None, activation="silu")
    torch.testing.assert_close(got, want.detach())
    dout = torch.randn_like(want)
    found = reference.backward(dout, x.detach(), weight.detach(), bias.detach(), None, None, None, activation="silu")
    exact = torch.autograd.grad(want, (x, weight, bias), dout)
    for got, wanted in zip((found.dx, found.dweight, found.dbias), exact, strict=True):
        torch.testing.assert_close(got, wanted)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_gradients_are_within_the_derived_bound(dtype: torch.dtype) -> None:
    case = make_case(x=dtype, weight=dtype, bias=dtype, offsets=[0, 1, 3, 3, 10, 80])
    names = ("x", "weight", "bias", "initial")
    leaves = {name: getattr(case, name).clone().requires_grad_() for name in names}
    out, final = causal_conv1d(
        leaves["x"],
        leaves["weight"],
        leaves["bias"],
        "silu",
        cu_seqlens=case.cu_seqlens,
        initial_states=leaves["initial"],
        return_final_states=True,
    )
    assert case.dfinal is not None
    case.dfinal = case.dfinal.to(dtype).float()
    torch.autograd.backward((out, final), (case.dout, case.dfinal.to(dtype).transpose(1, 2)))
    exact, bounds = exact_and_bounds(case)
    for name in names:
        grad = leaves[name].grad
        assert grad is not None and grad.dtype == leaves[name].dtype
        assert worst(grad, getattr(exact, f"d{name}"), getattr(bounds, f"d{name}")) <= 1, name


@pytest.mark.parametrize("activation", ["silu", None])
def test_outputs_are_the_servers_bit_for_bit(activation: str | None) -> None:
    lengths, channels = [5, 0, 1, 9], 24
    x = torch.randn(1, 15, channels).bfloat16()
    weight, bias = torch.randn(channels, 4).bfloat16(), torch.randn(channels).bfloat16()
    windows = torch.randn(4, channels, 3).bfloat16()
    offsets = torch.tensor([0, *torch.tensor(lengths).cumsum(0)], dtype=torch.int32)
    out, final = causal_conv1d(
        x, weight, bias, activation, cu_seqlens=offsets, initial_states=windows, return_final_states=True
    )
    pool = windows.clone()
    served = serving_conv.causal_conv1d_fn(
        *(x[0], weight, pool, offsets, torch.arange(4, dtype=torch.int32), torch.ones(4, dtype=torch.bool)),
        bias=bias,
        activation=activation,
    )
    assert torch.equal(out[0], served)
    assert torch.equal(final, pool)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_documents_are_isolated(dtype: torch.dtype) -> None:
    numbers = torch.tensor(SEQ_IDX, dtype=torch.int32)
    x, weight, bias = torch.randn(1, 9, 4, dtype=dtype), leaf(4, 4, dtype=dtype), leaf(4, dtype=dtype)

    def run(x: Tensor, dout: Tensor) -> tuple[Tensor, Tensor]:
        x = x.clone().requires_grad_()
        out = causal_conv1d(x, weight, bias, "silu", seq_idx=numbers)
        (grad,) = torch.autograd.grad(out, x, dout)
        return out.detach(), grad

    dout = torch.randn(1, 9, 4, dtype=dtype)
    out, grad = run(x, dout)
    for begin, end in ((0, 2), (2, 5), (5, 6), (6, 9)):
        other, other_dout = x.clone(), dout.clone()
        other[:, begin:end] += 1
        other_dout[:, begin:end] += 1
        moved, moved_grad = run(other, other_dout)
        outside = torch.ones(9, dtype=torch.bool)
        outside[begin:end] = False
        assert torch.equal(moved[:, outside], out[:, outside])
        assert torch.equal(moved_grad[:, outside], grad[:, outside])
        assert not torch.equal(moved, out)


def test_offsets_of_numbers() -> None:
    numbers = torch.tensor([[4, 4, 4, 0], [0, 0, 7, 7]], dtype=torch.int32)
    assert offsets_of(numbers).tolist() == [0, 3, 4, 6, 8, 8, 8, 8, 8]
    assert offsets_of(numbers.T.contiguous().T).tolist() == [0, 3, 4, 6, 8, 8, 8, 8, 8]
    assert offsets_of(numbers[:1, :1]).tolist() == [0, 1]
    assert offsets_of(numbers[:, :0]).tolist() == [0]


def test_numbers_of_several_batches() -> None:
    numbers = torch.tensor([[0, 0, 0, 0, 0], [0, 0, 1, 1, 1]], dtype=torch.int32)
    x, weight = leaf(2, 5, 3), leaf(3, 4)
    got = causal_conv1d(x, weight, seq_idx=numbers)
    want = [causal_conv1d(x[:1], weight), causal_conv1d(x[1:, :2], weight), causal_conv1d(x[1:, 2:], weight)]
    torch.testing.assert_close(got[1], torch.cat([part[0] for part in want[1:]]))
    torch.testing.assert_close(got[0], want[0][0])


@pytest.mark.parametrize("kind", ["channels first", "sliced", "expanded rows", "transposed batch"])
def test_any_strides_of_x_and_of_the_output_gradient(kind: str) -> None:
    wide = torch.randn(2, 12, 8)
    views = {
        "channels first": wide.transpose(1, 2),
        "sliced": wide[:, ::2, 2:7],
        "expanded rows": wide[:, :1].expand(2, 12, 8),
        "transposed batch": wide.transpose(0, 1),
    }
    x = views[kind]
    weight = leaf(x.shape[2], 4, dtype=torch.float32)
    leaves = [x.detach().requires_grad_(), x.detach().contiguous().clone().requires_grad_()]
    grads = []
    for leaf_x in leaves:
        out = causal_conv1d(leaf_x, weight, None, "silu")
        grads.append(torch.autograd.grad(out, (leaf_x, weight), torch.ones(()).expand(out.shape)))
    assert torch.equal(grads[0][0], grads[1][0])
    torch.testing.assert_close(grads[0][1], grads[1][1])
    out = causal_conv1d(leaves[0], weight, None, "silu")
    wide_dout = torch.randn(*out.shape[:2], out.shape[2] + 3)
    got = torch.autograd.grad(out, (leaves[0], weight), wide_dout[..., 2:-1], retain_graph=True)
    want = torch.autograd.grad(out, (leaves[0], weight), wide_dout[..., 2:-1].contiguous())
    assert torch.equal(got[0], want[0])
    torch.testing.assert_close(got[1], want[1])


def test_rows_past_the_last_offset_are_zeros() -> None:
    x, weight = leaf(1, 9, 3, dtype=torch.float32), leaf(3, 4, dtype=torch.float32)
    out = causal_conv1d(x, weight, cu_seqlens=torch.tensor([0, 4], dtype=torch.int32))
    assert not out[:, 4:].any() and bool(out[:, :4].any())
    out.sum().backward()
    assert x.grad is not None and not x.grad[:, 4:].any()


@pytest.mark.parametrize("backend", ["reference", "host"])
@pytest.mark.parametrize("offsets", [[3, 4, 9], [1, 9], [9, 9], [25, 30], [0, 5, 9], [-2, 4, 9]], ids=str)
def test_rows_before_the_first_offset_are_zeros(
    offsets: list[int], backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    cpu = torch.device("cpu")
    chosen = next(each for each in backends._BACKENDS if each.name == backend)
    monkeypatch.setitem(backends._chosen, cpu, chosen)
    rows, begin, width = 31, min(max(offsets[0], 0), 31), 4
    x, weight = leaf(1, rows, 8, dtype=torch.float32), leaf(8, width, dtype=torch.float32)
    x.data[:, :begin] = float("nan")
    plain = torch.empty
    # Memory that nobody has written to, made visible.
    monkeypatch.setattr(torch, "empty", lambda *a, **k: plain(*a, **k).fill_(float("nan") if "dtype" in k else 0))
    serving_conv.clear_device_fault()
    out = causal_conv1d(x, weight, None, "silu", cu_seqlens=torch.tensor(offsets, dtype=torch.int32))
    assert bool(out.isfinite().all()) and not out[:, :begin].any()
    fault = serving_conv.DeviceFault.OFFSETS if offsets[0] else serving_conv.DeviceFault.NONE
    assert serving_conv.device_fault() == fault
    (dx,) = torch.autograd.grad(out.sum(), x)
    assert bool(dx.isfinite().all()) and not dx[:, :begin].any()
    last = min(offsets[-1], rows)
    if offsets[0] >= 0 and last > begin:
        shifted = torch.tensor(offsets, dtype=torch.int32) - begin
        owned = x.detach()[:, begin:last].clone().requires_grad_()
        same = causal_conv1d(owned, weight, None, "silu", cu_seqlens=shifted)
        assert torch.equal(out[:, begin:last], same)
        torch.testing.assert_close(dx[:, begin:last], torch.autograd.grad(same.sum(), owned)[0])
    serving_conv.clear_device_fault()


def test_only_the_gradients_that_are_needed() -> None:
    x, weight, bias = leaf(1, 5, 3), leaf(3, 4), leaf(3)
    for wanted in (x, weight, bias):
        leaves = [t if t is wanted else t.detach() for t in (x, weight, bias)]
        out = causal_conv1d(*leaves, "silu")
        (grad,) = torch.autograd.grad(out.sum(), wanted)
        whole = causal_conv1d(x, weight, bias, "silu")
        assert torch.equal(grad, torch.autograd.grad(whole.sum(), wanted)[0])


def test_only_the_final_windows_are_used() -> None:
    x, weight, windows = leaf(2, 2, 3), leaf(3, 4), leaf(2, 3, 3)
    _, final = causal_conv1d(x, weight, initial_states=windows, return_final_states=True)
    final.sum().backward()
    assert x.grad is not None and torch.equal(x.grad, torch.ones_like(x))
    assert windows.grad is not None and windows.grad[0, 0].tolist() == [0, 0, 1]


@pytest.mark.parametrize("shape", [(0, 4, 3), (2, 0, 3), (2, 4, 0)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_nothing_to_compute(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x, weight, bias = leaf(*shape, dtype=dtype), leaf(shape[2], 4, dtype=dtype), leaf(shape[2], dtype=dtype)
    windows = leaf(shape[0], shape[2], 3, dtype=dtype)
    out, final = causal_conv1d(x, weight, bias, "silu", initial_states=windows, return_final_states=True)
    (out.sum() + final.sum()).backward()
    assert out.shape == shape and final.shape == windows.shape
    assert weight.grad is not None and not weight.grad.any()
    if shape[1] == 0:
        assert torch.equal(final, windows.detach())
        assert windows.grad is not None and torch.equal(windows.grad, torch.ones_like(windows))


def test_compiled_without_a_break() -> None:
    numbers = torch.tensor(SEQ_IDX, dtype=torch.int32)

    def step(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        out = causal_conv1d(x * 2, weight, bias, "silu", seq_idx=numbers)
        return out.square().sum()

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    x, weight, bias = leaf(1, 9, 3, dtype=torch.float32), leaf(3, 4, dtype=torch.float32), leaf(3, dtype=torch.float32)
    want = torch.autograd.grad(step(x, weight, bias), (x, weight, bias))
    got = torch.autograd.grad(compiled(x, weight, bias), (x, weight, bias))
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_opcheck() -> None:
    x, weight, bias, windows = (leaf(*s, dtype=torch.float32) for s in ((2, 5, 8), (8, 4), (8,), (2, 8, 3)))
    ops = torch.ops.serving_conv
    torch.library.opcheck(ops.conv1d_forward.default, (x, weight, bias, windows, None, "silu", True))
    torch.library.opcheck(ops.conv1d_forward.default, (x, weight, None, None, None, None, False))
    offsets = torch.tensor([0, 2, 5], dtype=torch.int32)
    flat = (x.detach()[:1], weight.detach(), bias.detach(), windows.detach(), offsets)
    torch.library.opcheck(ops.conv1d_forward.default, (*flat, "silu", True))
    dfinal = torch.randn(2, 8, 3)
    torch.library.opcheck(
        ops.conv1d_backward.default, (torch.randn(1, 5, 8), *flat, dfinal, "silu", [True, False, True, True])
    )


def test_checkpointed() -> None:
    x, weight = leaf(1, 9, 3, dtype=torch.float32), leaf(3, 4, dtype=torch.float32)

    def block(x: Tensor) -> Tensor:
        out = causal_conv1d(x, weight, None, "silu")
        return out * x

    want = torch.autograd.grad(block(x).sum(), (x, weight))
    got = torch.autograd.grad(checkpoint(block, x, use_reentrant=False).sum(), (x, weight))
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_autocast_keeps_the_parameters_types() -> None:
    linear = torch.nn.Linear(3, 3)
    weight, bias = leaf(3, 4, dtype=torch.float32), leaf(3, dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        x = linear(torch.randn(1, 9, 3))
        out = causal_conv1d(x, weight, bias, "silu")
        assert x.dtype == out.dtype == torch.bfloat16
        checkpointed = checkpoint(causal_conv1d, x, weight, bias, "silu", use_reentrant=False)
        assert torch.equal(checkpointed, out)
    out.float().sum().backward()
    assert weight.grad is not None and weight.grad.dtype == torch.float32
    assert linear.weight.grad is not None and bool(linear.weight.grad.any())


X, WEIGHT = torch.zeros(2, 5, 4), torch.zeros(4, 4)
OFFSETS = torch.tensor([0, 5], dtype=torch.int32)
WRONG: dict[str, tuple[str, dict[str, Any]]] = {
    "x is no tensor": ("x", {"x": [1.0]}),
    "x of two axes": ("x", {"x": X[0]}),
    "x of integers": ("x", {"x": X.int()}),
    "one tap": ("weight", {"weight": WEIGHT[:, :1].contiguous()}),
    "nine taps": ("weight", {"weight": torch.zeros(4, 9)}),
    "other channels": ("weight", {"weight": torch.zeros(5, 4)}),
    "strided taps": ("weight", {"weight": WEIGHT.T}),
    "float64 taps alone": ("weight", {"weight": WEIGHT.double()}),
    "bias of two axes": ("bias", {"bias": WEIGHT}),
    "longer bias": ("bias", {"bias": torch.zeros(5)}),
    "unknown activation": ("activation", {"activation": "gelu"}),
    "activation of another kind": ("activation", {"activation": True}),
    "two kinds of packing": ("seq_idx", {"x": X[:1], "seq_idx": torch.zeros(1, 5).int(), "cu_seqlens": OFFSETS}),
    "short seq_idx": ("seq_idx", {"seq_idx": torch.zeros(2, 4).int()}),
    "long integers": ("seq_idx", {"seq_idx": torch.zeros(2, 5).long()}),
    "final windows of unknown number": (
        "return_final_states",
        {"seq_idx": torch.zeros(2, 5).int(), "return_final_states": True},
    ),
    "windows of unknown order": (
        "initial_states",
        {"seq_idx": torch.zeros(2, 5).int(), "initial_states": torch.zeros(2, 4, 3)},
    ),
    "offsets of two batches": ("x", {"cu_seqlens": OFFSETS}),
    "long offsets": ("cu_seqlens", {"x": X[:1], "cu_seqlens": OFFSETS.long()}),
    "no sequence": ("cu_seqlens", {"x": X[:1], "cu_seqlens": OFFSETS[:1]}),
    "too few windows": ("initial_states", {"initial_states": torch.zeros(1, 4, 3)}),
    "windows too long": ("initial_states", {"initial_states": torch.zeros(2, 4, 4)}),
    "windows of another type": ("initial_states", {"initial_states": torch.zeros(2, 4, 3).half()}),
    "another device": ("bias", {"bias": torch.zeros(4, device="meta")}),
}


@pytest.mark.parametrize("name", WRONG)
def test_errors_name_the_argument(name: str) -> None:
    argument, changes = WRONG[name]
    with pytest.raises(ContractError) as caught:
        causal_conv1d(**{"x": X, "weight": WEIGHT, **changes})
    assert caught.value.argument == argument
    assert isinstance(caught.value, ValueError)


@pytest.mark.parametrize("kind", ["positions", "strided", "expanded"])
def test_any_strides_of_the_initial_windows(kind: str) -> None:
    x, weight = leaf(2, 2, 6, dtype=torch.float32), leaf(6, 4, dtype=torch.float32)
    windows = {
        "positions": torch.randn(2, 6, 3),
        "strided": torch.randn(2, 12, 5)[:, ::2, 1:4],
        "expanded": torch.randn(1, 6, 1).expand(2, 6, 3),
    }[kind]
    results = []
    for given in (windows, windows.transpose(1, 2).contiguous().transpose(1, 2)):
        given = given.detach().requires_grad_()
        out, final = causal_conv1d(x, weight, None, "silu", initial_states=given, return_final_states=True)
        results.append((out, final, *torch.autograd.grad(out.sum() + final.sum(), (x, weight, given))))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_rows_of_no_sequence_may_hold_nan() -> None:
    for dtype in (torch.float32, torch.float64):
        x, weight, bias = leaf(1, 9, 3, dtype=dtype), leaf(3, 4, dtype=dtype), leaf(3, dtype=dtype)
        x.data[:, 4:] = float("nan")
        causal_conv1d(x, weight, bias, "silu", cu_seqlens=torch.tensor([0, 4], dtype=torch.int32)).sum().backward()
        for found in (x.grad, weight.grad, bias.grad):
            assert found is not None and bool(found.isfinite().all())


def test_a_second_derivative_is_refused() -> None:
    x, weight = leaf(1, 5, 3), leaf(3, 4)
    out = causal_conv1d(x, weight, None, "silu")
    (gradient,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    with pytest.raises(serving_conv.BackendError, match="first derivatives"):
        gradient.square().sum().backward()


@pytest.mark.parametrize("how", ["fake", "compiled", "inside a compiled function"])
def test_a_second_derivative_is_refused_by_the_operator(how: str) -> None:
    def gradient(x: Tensor, weight: Tensor) -> Tensor:
        out = causal_conv1d(x, weight, None, "silu")
        (found,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        return found

    if how == "inside a compiled function":
        gradient = torch.compile(gradient, backend="eager")
    elif how == "compiled":
        fast = torch.compile(causal_conv1d, fullgraph=True, backend="eager")

        def gradient(x: Tensor, weight: Tensor) -> Tensor:
            (found,) = torch.autograd.grad(fast(x, weight, None, "silu").sum(), x, create_graph=True)
            return found

    with FakeTensorMode() if how == "fake" else nullcontext():
        x, weight = leaf(1, 5, 3, dtype=torch.float32), leaf(3, 4, dtype=torch.float32)
        with pytest.raises(serving_conv.BackendError, match="first derivatives"):
            gradient(x, weight).square().sum().backward()


def test_a_second_derivative_of_a_compiled_backward_is_an_error() -> None:
    # There torch itself refuses, before this package is asked.
    x, weight = leaf(1, 5, 3, dtype=torch.float32), leaf(3, 4, dtype=torch.float32)
    out = torch.compile(causal_conv1d, fullgraph=True, backend="aot_eager")(x, weight, None, "silu")
    (gradient,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="double backward"):
        gradient.square().sum().backward()


def test_more_initial_windows_than_sequences() -> None:
    x, weight, windows = leaf(1, 2, 3), leaf(3, 4), leaf(3, 3, 3)
    numbers = torch.tensor([[0, 1]], dtype=torch.int32)
    causal_conv1d(x, weight, seq_idx=numbers, initial_states=windows).sum().backward()
    assert windows.grad is not None and bool(windows.grad[:2].any()) and not windows.grad[2].any()


def test_final_windows_have_the_same_strides_in_every_type() -> None:
    for dtype in (torch.float32, torch.float64):
        _, final = causal_conv1d(leaf(2, 5, 3, dtype=dtype), leaf(3, 4, dtype=dtype), return_final_states=True)
        assert final.stride() == (9, 1, 3)


def test_what_is_kept_is_allocated_on_a_thread_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    # There no pool of a graph in the making takes it; tests/gpu has the pools.
    seen: list[bool] = []
    here, to = threading.get_ident(), Tensor.to

    def watched(tensor: Tensor, *arguments: Any) -> Tensor:
        seen.append(threading.get_ident() == here)
        return to(tensor, *arguments)

    monkeypatch.setattr(Tensor, "to", watched)
    monkeypatch.setattr(kernels, "fault_flag", lambda _: seen.append(threading.get_ident() == here))
    kernels._kept_metadata.__wrapped__(torch.device("meta"), 2, 0, 0, 5, 5, True)
    assert seen == [False] * 4
