"""The training path where only a GPU can show it: the kernels at full size, races, capture, and ranks on devices."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as processes
from support.gradients import exact_and_bounds, make_case, worst
from support.process import python
from torch import Tensor

import serving_conv
from serving_conv import causal_conv1d
from serving_conv.native import cuda, host
from serving_conv.native.backward import BackwardBuffers
from serving_conv.training import kernels, reference
from serving_conv.training.kernels import gradients

pytestmark = pytest.mark.gpu

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
DOCUMENTS = [0, 1, 3, 3, 10, 140, 141, 700, 1000]
ROWS: dict[str, dict[str, Any]] = {
    "base": {},
    "packed": {"offsets": DOCUMENTS},
    "batches": {"batches": 3},
    "fp16": {"x": FP16, "weight": FP16, "bias": FP16, "offsets": DOCUMENTS},
    "fp32": {"x": FP32, "weight": FP32, "bias": FP32, "offsets": DOCUMENTS},
    "fp32 weights": {"weight": FP32, "bias": FP16},
    "no bias": {"bias": None},
    "no activation": {"activation": None},
    "odd channels": {"channels": 1301, "offsets": DOCUMENTS},
    **{f"{width} taps": {"width": width, "offsets": DOCUMENTS} for width in (2, 3, 5, 6, 7, 8)},
}


def on_gpu(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.cuda()


@pytest.mark.parametrize("deterministic", [True, False], ids=["ordered", "fast"])
@pytest.mark.parametrize("row", ROWS)
def test_within_the_derived_bound(row: str, deterministic: bool) -> None:
    case = make_case(**{"rows": 1003, "channels": 1304, **ROWS[row]})
    dfinal = None if case.dfinal is None else case.dfinal.cuda().transpose(1, 2)
    found = gradients(
        *(case.dout.cuda(), case.x.cuda(), case.weight.cuda(), on_gpu(case.bias), on_gpu(case.initial)),
        *(on_gpu(case.cu_seqlens), dfinal),
        activation=case.activation,
        deterministic=deterministic,
        wanted=(True, True, True, True),
    )
    exact, bounds = exact_and_bounds(case)
    for name, got in zip(("dx", "dweight", "dbias", "dinitial"), found, strict=True):
        if got is not None:
            assert worst(got, getattr(exact, name), getattr(bounds, name)) <= 1, name


@pytest.mark.parametrize("length", [*range(1, 11), *(15, 16, 17, 31, 33, 63, 65, 127, 129, 255, 257, 1023, 1027, 4099)])
def test_any_length(length: int) -> None:
    case = make_case(rows=length, channels=64)
    found = gradients(
        *(case.dout.cuda(), case.x.cuda(), case.weight.cuda(), on_gpu(case.bias), on_gpu(case.initial), None),
        None if case.dfinal is None else case.dfinal.cuda().transpose(1, 2),
        activation="silu",
        deterministic=True,
        wanted=(True, True, True, True),
    )
    exact, bounds = exact_and_bounds(case)
    for name, got in zip(("dx", "dweight", "dbias", "dinitial"), found, strict=True):
        assert got is not None
        assert worst(got, getattr(exact, name), getattr(bounds, name)) <= 1, name


def test_the_host_build_gives_the_same_bits() -> None:
    # Without SiLU every operation is exact or correctly rounded on both sides, and the cut into runs is the same.
    for changes in ({"offsets": [0, 1, 3, 3, 10, 80]}, {"batches": 2, "channels": 13}):
        case = make_case(activation=None, rows=83 if "offsets" in changes else 21, **changes)
        results = []
        for run, device in ((cuda.run_backward, "cuda"), (host.run_backward, "cpu")):
            there = [None if t is None else t.to(device) for t in (case.dout, case.x, case.weight, case.bias)]
            there += [None if t is None else t.to(device) for t in (case.initial, case.cu_seqlens, case.dfinal)]
            assert there[1] is not None and there[2] is not None and there[3] is not None
            buffers = BackwardBuffers(
                torch.empty_like(there[1]),
                torch.empty_like(there[2]),
                torch.empty_like(there[3]),
                torch.zeros(case.sequences, 3, case.x.shape[2], device=device),
            )
            run(*there, buffers, activation=None, ordered=True, choose=_one_choice)
            results.append([buffers.dx, buffers.dweight, buffers.dbias, buffers.dinitial])
        for got, want in zip(*results, strict=True):
            assert got is not None and want is not None and torch.equal(got.cpu(), want)


def _one_choice(**sizes: Any) -> Any:
    from serving_conv.native.config import choose_backward

    return choose_backward(**{**sizes, "multiprocessors": 4})


def test_hundred_deterministic_backwards_under_load() -> None:
    rows, channels = 8192, 2048
    x, dout = (torch.randn(1, rows, channels, device="cuda").bfloat16() for _ in range(2))
    weight, bias = torch.randn(channels, 4, device="cuda").bfloat16(), torch.randn(channels, device="cuda").bfloat16()
    offsets = torch.tensor([0, 1, 700, 703, 5000, 8192], dtype=torch.int32, device="cuda")
    busy, noise = torch.cuda.Stream(), torch.randn(1 << 24, device="cuda")
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    first: list[Tensor] = []
    for _ in range(100):
        with torch.cuda.stream(busy):
            noise.mul_(1.0)
        found = gradients(
            *(dout, x, weight, bias, None, offsets, None),
            activation="silu",
            deterministic=True,
            wanted=(True, True, True, False),
        )
        grads = [grad for grad in found if grad is not None]
        first = first or [grad.clone() for grad in grads]
        for grad, same in zip(grads, first, strict=True):
            wrong += (grad.view(torch.int16) != same.view(torch.int16)).sum()
    assert int(wrong) == 0


def test_outputs_are_the_servers_bit_for_bit() -> None:
    lengths, channels = [5, 0, 1, 900, 17], 512
    x = torch.randn(1, sum(lengths), channels, device="cuda").bfloat16()
    weight = torch.randn(channels, 4, device="cuda").bfloat16()
    offsets = torch.tensor([0, *torch.tensor(lengths).cumsum(0)], dtype=torch.int32, device="cuda")
    windows = torch.randn(5, channels, 3, device="cuda").bfloat16()
    out, final = causal_conv1d(
        x, weight, None, "silu", cu_seqlens=offsets, initial_states=windows, return_final_states=True
    )
    pool = windows.clone()
    slots, flags = torch.arange(5, dtype=torch.int32, device="cuda"), torch.ones(5, dtype=torch.bool, device="cuda")
    served = serving_conv.causal_conv1d_fn(x[0], weight, pool, offsets, slots, flags)
    assert torch.equal(out[0], served) and torch.equal(final, pool)


def test_a_training_step_does_not_wait_for_the_device() -> None:
    x = torch.randn(1, 300, 64, device="cuda").bfloat16().requires_grad_()
    weight = torch.randn(64, 4, device="cuda").bfloat16().requires_grad_()
    numbers = (torch.arange(300, device="cuda") // 70).int()[None]

    def step() -> None:
        out = causal_conv1d(x, weight, None, "silu", seq_idx=numbers)
        out.sum().backward()

    step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_captured_steps_follow_their_buffers() -> None:
    x, dout = (torch.randn(1, 300, 64, device="cuda").bfloat16() for _ in range(2))
    weight, bias = torch.randn(64, 4, device="cuda").bfloat16(), torch.randn(64, device="cuda").bfloat16()
    offsets = torch.tensor([0, 100, 300], dtype=torch.int32, device="cuda")

    def step() -> tuple[Tensor | None, ...]:
        return gradients(
            *(dout, x, weight, bias, None, offsets, None),
            activation="silu",
            deterministic=True,
            wanted=(True, True, True, False),
        )

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = step()
    for cut in (1, 100, 299):
        for tensor in (x, dout, weight, bias):
            tensor.copy_(torch.randn(tensor.shape))
        offsets.copy_(torch.tensor([0, cut, 300]))
        graph.replay()
        for got, want in zip(found, step(), strict=True):
            assert got is None or (want is not None and torch.equal(got, want))


# A process of its own, since nothing may be kept before. Replays overwrite whatever lies in the graphs' pool.
_REDUCED_OVERHEAD = """
import torch
from serving_conv import causal_conv1d
from serving_conv.faults import fault_flag
from serving_conv.training import kernels

torch.use_deterministic_algorithms(True)
device = torch.empty(0, device="cuda").device
offsets = torch.tensor([0, 100, 300], dtype=torch.int32, device=device)
windows = torch.randn(2, 64, 3, device=device).bfloat16()
taps = torch.randn(64, 4, device=device).bfloat16()

def step(x, weight, **given):
    return causal_conv1d(x * 2, weight, None, "silu", **given)

fast = torch.compile(step, mode="reduce-overhead", fullgraph=True)
kinds = [((1, 300, 64), {"cu_seqlens": offsets, "initial_states": windows}), ((2, 150, 64), {})]

def both(run, x, given, dout):
    torch.compiler.cudagraph_mark_step_begin()
    leaves = [x.clone().requires_grad_(), taps.clone().requires_grad_()]
    out = run(*leaves, **given)
    found = (out, *torch.autograd.grad(out, leaves, dout))
    return [t.detach().clone() for t in found]

for _ in range(6):
    for shape, given in kinds:
        x, dout = (torch.randn(shape, device=device).bfloat16() for _ in range(2))
        got = both(fast, x, given, dout)
        want = both(step, x, given, dout)
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
assert kernels._kept_metadata.cache_info().misses == 2
kept = [fault_flag(device), *kernels._kept_metadata(device, 2, 2, 2, 300, 300, True)]
kept += kernels._kept_metadata(device, 2, 0, 0, 150, 300, False)
assert kernels._kept_metadata.cache_info().misses == 2, "these are the ones that the steps have used"
pools = [s for s in torch.cuda.memory_snapshot() if tuple(s["segment_pool_id"]) != (0, 0)]
assert pools, "no graph was made"
for tensor in kept:
    for segment in pools:
        begin = segment["address"]
        assert not begin <= tensor.data_ptr() < begin + segment["total_size"], "in a graph's pool"
"""


def test_what_is_kept_lies_outside_the_pools_of_graphs() -> None:
    done = python(_REDUCED_OVERHEAD)
    assert done.returncode == 0, done.stderr[-5000:]


def test_what_is_kept_outlives_its_place_on_another_stream() -> None:
    x, weight = torch.randn(1, 64, 64, device="cuda").bfloat16(), torch.randn(64, 4, device="cuda").bfloat16()
    kernels._kept_metadata.cache_clear()
    want = causal_conv1d(x, weight, None, "silu")
    kernels._kept_metadata.cache_clear()
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(100_000_000)
        got = causal_conv1d(x, weight, None, "silu")
    kernels._kept_metadata.cache_clear()
    # What would get the freed places, and overwrite them while the other stream still sleeps.
    others = [torch.full((2,), 1 << 20, dtype=torch.int32, device="cuda") for _ in range(64)]
    torch.cuda.synchronize()
    assert torch.equal(got, want) and len(others) == 64


def test_rows_beyond_4_gib() -> None:
    pitch, rows, channels = 36_864, 60_000, 64
    x, dout = (
        torch.zeros(rows * pitch, dtype=BF16, device="cuda").as_strided((1, rows, channels), (0, pitch, 1))
        for _ in range(2)
    )
    for tensor in (x, dout):
        tensor.copy_(torch.randn(1, rows, channels))
    weight = torch.randn(channels, 4, device="cuda").bfloat16()
    options: dict[str, Any] = {"activation": "silu", "deterministic": True, "wanted": (True, True, False, False)}
    got = gradients(dout, x, weight, None, None, None, None, **options)
    want = gradients(dout.contiguous(), x.contiguous(), weight, None, None, None, None, **options)
    assert all(a is None or (b is not None and torch.equal(a, b)) for a, b in zip(got, want, strict=True))
    exact, _ = reference.forward(x[:, -50:].double(), weight.double(), None, None, None, activation="silu")
    out = causal_conv1d(x, weight, None, "silu")
    torch.testing.assert_close(out[:, -47:].double(), exact[:, 3:], rtol=1e-2, atol=1e-2)


def test_channels_beyond_the_grid_limit() -> None:
    case = make_case(rows=5, channels=65_536 * 2 + 3)
    found = gradients(
        *(case.dout.cuda(), case.x.cuda(), case.weight.cuda(), on_gpu(case.bias), None, None, None),
        activation="silu",
        deterministic=True,
        wanted=(True, True, True, False),
    )
    case.initial, case.dfinal = None, None
    exact, bounds = exact_and_bounds(case)
    for name, got in zip(("dx", "dweight", "dbias"), found, strict=False):
        assert got is not None and worst(got, getattr(exact, name), getattr(bounds, name)) <= 1


# --- ranks ------------------------------------------------------------------------------------------------------


def _rank(rank: int, size: int, file: str, backend: str, queue: Any) -> None:
    device = torch.device("cuda", rank if backend == "nccl" else 0)
    torch.cuda.set_device(device)
    dist.init_process_group(
        backend, init_method=f"file://{file}", rank=rank, world_size=size, timeout=timedelta(seconds=60)
    )
    answers = [_on_rank(rank, size, rows, documents) for rows, documents in SHARDS]
    # As arrays: a tensor would travel as a file that is gone when this process ends first.
    queue.put((rank, [[tensor.numpy() for tensor in answer] for answer in answers]))
    dist.destroy_process_group()


SHARDS: list[tuple[int, list[int] | None]] = [(700, None), (2, None), (1, None), (64, [50, 70, 8]), (2, [3, 1])]


def _whole(rows: int) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(rows)
    shapes = ((1, rows, 64), (64, 4), (64,), (1, rows, 64))
    return tuple(torch.randn(shape, generator=generator).cuda() for shape in shapes)


def _numbers(documents: list[int] | None) -> Tensor | None:
    if documents is None:
        return None
    return torch.arange(len(documents)).repeat_interleave(torch.tensor(documents)).int()[None].cuda()


def _on_rank(rank: int, size: int, rows: int, documents: list[int] | None) -> list[Tensor]:
    x, weight, bias, dout = _whole(rows * size)
    shard = slice(rank * rows, (rank + 1) * rows)
    leaves = [x[:, shard].clone().requires_grad_(), weight.requires_grad_(), bias.requires_grad_()]
    out = serving_conv.causal_conv1d_cp(*leaves, "silu", dist.group.WORLD, _numbers(documents))
    grads = torch.autograd.grad(out, leaves, dout[:, shard])
    return [tensor.detach().cpu() for tensor in (out, *grads)]


@pytest.mark.parametrize("backend", ["gloo", "nccl"])
def test_ranks_agree_with_one_device(backend: str) -> None:
    size = 2
    if backend == "nccl" and torch.cuda.device_count() < size:
        pytest.skip(f"NCCL wants a device a rank: {torch.cuda.device_count()} here, {size} wanted")
    answers = _spawn(_rank, size, backend)
    for case, (rows, documents) in enumerate(SHARDS):
        x, weight, bias, dout = _whole(rows * size)
        leaves = [x.requires_grad_(), weight.requires_grad_(), bias.requires_grad_()]
        out = causal_conv1d(*leaves, "silu", seq_idx=_numbers(documents))
        dx, dweight, dbias = torch.autograd.grad(out, leaves, dout)
        parts = [[torch.from_numpy(array) for array in answers[rank][case]] for rank in range(size)]
        assert torch.equal(torch.cat([part[0] for part in parts], 1), out.detach().cpu())
        torch.testing.assert_close(torch.cat([part[1] for part in parts], 1), dx.cpu(), rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(sum(part[2] for part in parts), dweight.cpu(), rtol=1e-5, atol=1e-4)
        torch.testing.assert_close(sum(part[3] for part in parts), dbias.cpu(), rtol=1e-5, atol=1e-4)


def _with_x_on_the_cpu(rank: int, size: int, file: str, backend: str, queue: Any) -> None:
    device = torch.device("cuda", rank if backend == "nccl" else 0)
    torch.cuda.set_device(device)
    dist.init_process_group(
        backend, init_method=f"file://{file}", rank=rank, world_size=size, timeout=timedelta(seconds=60)
    )
    _on_rank(rank, size, *SHARDS[0])  # on which all agree
    queue.put((rank, _said(torch.device("cpu") if rank == 1 else device) if backend == "gloo" or rank == 1 else ""))
    # What a NCCL group's other rank would do is wait for its watchdog.
    os._exit(0) if backend == "nccl" else dist.destroy_process_group()


def _said(device: torch.device) -> str:
    x, weight = torch.randn(1, 8, 64, device=device), torch.randn(64, 4, device=device)
    try:
        serving_conv.causal_conv1d_cp(x, weight, None, "silu", dist.group.WORLD)
    except serving_conv.ContractError as error:
        return str(error)
    return "no error"


def test_one_rank_with_its_x_on_the_cpu() -> None:
    for said in _spawn(_with_x_on_the_cpu, 2, "gloo").values():
        assert "device of x" in said


def test_nccl_cannot_carry_an_x_on_the_cpu() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip(f"NCCL wants a device a rank: {torch.cuda.device_count()} here, 2 wanted")
    assert "nccl" in _spawn(_with_x_on_the_cpu, 2, "nccl")[1]


def _spawn(function: Callable[..., None], size: int, backend: str) -> dict[int, Any]:
    context = processes.get_context("spawn")
    queue = context.Queue()
    file = tempfile.mktemp(prefix="ranks-")
    started = [context.Process(target=function, args=(rank, size, file, backend, queue)) for rank in range(size)]
    for process in started:
        process.start()
    try:
        return dict(queue.get(timeout=180) for _ in range(size))
    finally:
        for process in started:
            process.join(30)
            if process.is_alive():
                process.kill()
        if os.path.exists(file):
            os.unlink(file)
