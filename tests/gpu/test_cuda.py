"""What only a GPU can show: capture, races between blocks, far addresses, and the same bits as the host build."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

import serving_conv
from serving_conv import CaptureError, ContractError, reference
from serving_conv.faults import fault_flag
from serving_conv.native import cuda, host
from serving_conv.native.call import prepare_prefill, prepare_update

pytestmark = pytest.mark.gpu


def offsets(lengths: list[int]) -> torch.Tensor:
    return torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32, device="cuda")


def make(lengths: list[int], channels: int, *, positions: int = 3, slots: int | None = None) -> dict[str, torch.Tensor]:
    rows, count = sum(lengths), len(lengths)
    pool = torch.randn(slots or count + 1, positions, channels, device="cuda").bfloat16().transpose(1, 2)
    return {
        "x": torch.randn(rows, channels, device="cuda").bfloat16(),
        "weight": torch.randn(channels, 4, device="cuda").bfloat16(),
        "conv_state": pool,
        "cu_seqlens": offsets(lengths),
        "cache_indices": torch.randperm(pool.shape[0], device="cuda")[:count].int(),
        "has_initial_state": torch.rand(count, device="cuda") > 0.5,
    }


def expected(call: dict[str, torch.Tensor], pool: torch.Tensor) -> reference.Result:
    return reference.causal_conv1d(
        call["x"],
        call["weight"],
        pool,
        call["cu_seqlens"],
        call["cache_indices"],
        bias=None,
        activation=None,
        has_initial_state=call["has_initial_state"],
        num_accepted_tokens=None,
        speculative=False,
        pad_slot_id=-1,
    )


def test_the_cuda_backend_serves_the_device() -> None:
    assert serving_conv.backend_for(torch.empty(1, device="cuda")) == "cuda"


@pytest.mark.parametrize("repeats", [1, 3])
def test_captured_steps_follow_their_buffers(repeats: int) -> None:
    # Capture once, then change offsets, slots, flags and rows in place: each replay must be the eager answer.
    call = make([5, 1, 9, 1], 512, slots=40)
    out = torch.empty_like(call["x"])
    serving_conv.causal_conv1d_fn(**call, out=out, activation=None)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        serving_conv.causal_conv1d_fn(**call, out=out, activation=None)
    for lengths in ([16, 0, 0, 0], [1, 1, 1, 13], [4, 4, 4, 3])[: repeats + 1]:
        call["cu_seqlens"].copy_(offsets(lengths))
        call["cache_indices"].copy_(torch.randperm(40, device="cuda")[:4])
        call["has_initial_state"].copy_(torch.rand(4, device="cuda") > 0.5)
        call["x"].copy_(torch.randn(16, 512))
        pool = call["conv_state"].clone(memory_format=torch.preserve_format)
        out.fill_(7)
        graph.replay()
        result = expected(call, pool)
        want = torch.full_like(out, 7)
        want[result.rows] = result.values.bfloat16()
        assert torch.equal(out, want)
        assert torch.equal(call["conv_state"], pool)


def test_a_cold_kernel_raises_under_capture() -> None:
    script = """
import torch, serving_conv
x = torch.randn(4, 64, device="cuda")
w = torch.randn(64, 4, device="cuda")
pool = torch.zeros(5, 64, 3, device="cuda")
slots = torch.arange(4, dtype=torch.int32, device="cuda")
serving_conv.device_fault("cuda")
graph = torch.cuda.CUDAGraph()
try:
    with torch.cuda.graph(graph):
        serving_conv.causal_conv1d_update(x, w, pool, slots, out=x)
except serving_conv.CaptureError as error:
    print("refused:", error)
serving_conv.warmup(64, dtype=torch.float32, bias=False, layout="positions")
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    serving_conv.causal_conv1d_update(x, w, pool, slots, out=x)
graph.replay(); torch.cuda.synchronize(); print("captured after warm-up")
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert "refused:" in done.stdout and "captured after warm-up" in done.stdout, done.stdout + done.stderr
    assert CaptureError.__name__  # the name is public


def test_the_slot_s_reader_is_its_writer() -> None:
    # A busy second stream disturbs the order of blocks; a later block that read the slot would read the new window.
    call = make([2, 17, 1, 3, 40, 1, 1, 2], 2048)
    pool = call.pop("conv_state")
    busy = torch.cuda.Stream()
    noise = torch.randn(1 << 22, device="cuda")
    start = pool.clone(memory_format=torch.preserve_format)
    end = start.clone(memory_format=torch.preserve_format)
    want = torch.empty_like(call["x"])
    result = expected({**call, "conv_state": end}, end)
    want[result.rows] = result.values.bfloat16()
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    for _ in range(10_000):
        with torch.cuda.stream(busy):
            noise.mul_(1.0)
        pool.copy_(start)
        out = serving_conv.causal_conv1d_fn(conv_state=pool, **call, activation=None)
        wrong += (out != want).sum() + (pool != end).sum()
    assert int(wrong) == 0


@pytest.mark.parametrize("entry", ["prefill", "update"])
def test_far_slots(entry: str) -> None:
    # One page of 5 GiB; slots a padded stride apart, the last beyond 4 GiB: 32-bit offsets would wrap.
    channels, stride, slots = 256, 600_000, 4400
    page = torch.zeros(stride * slots, dtype=torch.bfloat16, device="cuda")
    pool = page.as_strided((slots, channels, 3), (stride, 1, channels))
    near = torch.randn(2, channels, 3, device="cuda").bfloat16()
    index = torch.tensor([slots - 1, 3], dtype=torch.int32, device="cuda")
    pool[index.long()] = near
    x = torch.randn(2, channels, device="cuda").bfloat16()
    weight = torch.randn(channels, 4, device="cuda").bfloat16()
    small = near.clone()
    order = torch.arange(2, dtype=torch.int32, device="cuda")
    if entry == "update":
        out = serving_conv.causal_conv1d_update(x, weight, pool, index, activation=None)
        want = serving_conv.causal_conv1d_update(x, weight, small, order, activation=None)
    else:
        flags = torch.ones(2, dtype=torch.bool, device="cuda")
        out = serving_conv.causal_conv1d_fn(x, weight, pool, offsets([1, 1]), index, flags, activation=None)
        want = serving_conv.causal_conv1d_fn(x, weight, small, offsets([1, 1]), order, flags, activation=None)
    assert torch.equal(out, want) and torch.equal(pool[index.long()], small)
    assert int((page != 0).sum()) == int((small != 0).sum())


def test_rows_beyond_4_gib() -> None:
    # 60,000 rows of pitch 36,864: the last rows lie beyond 4 GiB.
    pitch, rows, channels = 36_864, 60_000, 64
    wide = torch.zeros(rows * pitch, dtype=torch.bfloat16, device="cuda")
    x = wide.as_strided((rows, channels), (pitch, 1))
    x.copy_(torch.randn(rows, channels))
    weight = torch.randn(channels, 4, device="cuda").bfloat16()
    slot = torch.zeros(1, dtype=torch.int32, device="cuda")
    pools = [torch.zeros(1, 3, channels, dtype=torch.bfloat16, device="cuda").transpose(1, 2) for _ in range(2)]
    got = serving_conv.causal_conv1d_fn(x, weight, pools[0], offsets([rows]), slot)
    want = serving_conv.causal_conv1d_fn(x.contiguous(), weight, pools[1], offsets([rows]), slot)
    assert torch.equal(got, want) and torch.equal(*pools)


@pytest.mark.parametrize(("sequences", "channels"), [(65_536 + 3, 8), (3, 65_536 + 2)])
def test_beyond_the_grid_limit(sequences: int, channels: int) -> None:
    x = torch.randn(sequences, channels, device="cuda")
    weight = torch.randn(channels, 4, device="cuda")
    start = torch.randn(sequences, channels, 3, device="cuda")
    index = torch.randperm(sequences, device="cuda").int()
    flags = torch.ones(sequences, dtype=torch.bool, device="cuda")
    pools = [start.clone() for _ in range(3)]
    decode = serving_conv.causal_conv1d_update(x, weight, pools[0], index, activation=None)
    rows = torch.arange(sequences + 1, dtype=torch.int32, device="cuda")
    prefill = serving_conv.causal_conv1d_fn(x, weight, pools[1], rows, index, flags, activation=None)
    window = torch.cat([pools[2][index.long()], x[:, :, None]], dim=2)
    assert torch.equal(decode, prefill) and torch.equal(pools[0], pools[1])
    assert torch.equal(pools[0][index.long()], window[:, :, 1:])
    assert torch.allclose(decode, (window * weight).sum(2), atol=1e-4)


def test_the_host_build_gives_the_same_bits() -> None:
    # Without SiLU every operation is exact or correctly rounded on both sides.
    for lengths, channels in (([3, 1, 30, 2, 1, 1, 1, 1], 70), ([1] * 24, 64)):
        call = make(lengths, channels)
        flags = call.pop("has_initial_state")
        on_gpu = call["conv_state"].clone(memory_format=torch.preserve_format)
        got = serving_conv.causal_conv1d_fn(**{**call, "conv_state": on_gpu}, has_initial_state=flags, activation=None)
        there = {name: tensor.cpu() for name, tensor in {**call, "has_initial_state": flags}.items()}
        x, out = there.pop("x"), torch.empty_like(call["x"], device="cpu")
        launch = prepare_prefill(
            x,
            **there,
            bias=None,
            activation=None,
            num_accepted_tokens=None,
            out=out,
            pad_slot_id=-1,
            fault_flag=fault_flag(x.device),
            multiprocessors=132,
        )
        host._run(launch)
        assert torch.equal(got.cpu(), out) and torch.equal(on_gpu.cpu(), there["conv_state"])


def test_repeated_calls_are_checked_too() -> None:
    # The second call with one signature takes the short path; what depends on addresses must still be refused.
    call = make([4, 4], 64)
    out = torch.empty_like(call["x"])
    for _ in range(3):
        serving_conv.causal_conv1d_fn(**call, out=out)
    with pytest.raises(ContractError, match="out"):
        serving_conv.causal_conv1d_fn(**call, out=call["x"])
    both = torch.randn(16, 64, device="cuda").bfloat16()
    with pytest.raises(ContractError, match="out"):
        serving_conv.causal_conv1d_fn(**{**call, "x": both[:8]}, out=both[8:])
    index = torch.tensor([0, 1], dtype=torch.int32, device="cuda")
    x = both[:2]
    for _ in range(3):
        serving_conv.causal_conv1d_update(x, call["weight"], call["conv_state"], index, out=x)
        serving_conv.causal_conv1d_update(x, call["weight"], call["conv_state"], index, out=both[4:6])
    with pytest.raises(ContractError, match="out"):
        serving_conv.causal_conv1d_update(x, call["weight"], call["conv_state"], index, out=both[1:3])


def test_a_step_after_the_first_neither_waits_nor_compiles() -> None:
    call = make([1] * 32, 512)
    index, pool = call["cache_indices"], call["conv_state"]
    for _ in range(2):
        serving_conv.causal_conv1d_update(call["x"], call["weight"], pool, index, out=call["x"])
    before = len(cuda._kernels)
    torch.cuda.set_sync_debug_mode("error")
    try:
        serving_conv.causal_conv1d_update(call["x"], call["weight"], pool, index, out=call["x"])
        serving_conv.causal_conv1d_update(call["x"], call["weight"], pool, index)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert len(cuda._kernels) == before
    assert prepare_update is not None
