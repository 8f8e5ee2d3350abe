"""Owns what runs on each rank of the context-parallel tests, and the one-device run it is held against."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import serving_conv

__all__ = [
    "Problem",
    "checkpointed",
    "compiled",
    "digits",
    "joined",
    "leave",
    "leave_without_a_word",
    "on_one_device",
    "on_rank",
    "problem",
    "sleep",
    "under_autocast",
    "wrong_call",
]

Problem = dict[str, Any]


def problem(
    rows: list[int],
    *,
    batches: int = 1,
    channels: int = 6,
    width: int = 4,
    dtype: torch.dtype = torch.float64,
    bias: bool = True,
    activation: str | None = "silu",
    documents: list[int] | None = None,
    seed: int = 0,
) -> Problem:
    """A whole sequence, how it is cut, and the gradient of its output."""
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)

    total = sum(rows)
    numbers = None
    if documents is not None:
        assert sum(documents) == total
        numbers = torch.arange(len(documents)).repeat_interleave(torch.tensor(documents)).int()[None]
    return {
        "rows": rows,
        "x": random(batches, total, channels),
        "weight": random(channels, width),
        "bias": random(channels) if bias else None,
        "activation": activation,
        "seq_idx": numbers,
        "dout": random(batches, total, channels),
    }


def on_one_device(given: Problem) -> dict[str, Tensor]:
    """Output and gradients of the whole sequence."""
    leaves = _leaves(given, given["x"])
    out = serving_conv.causal_conv1d(
        leaves["x"], leaves["weight"], leaves.get("bias"), given["activation"], seq_idx=given["seq_idx"]
    )
    out.backward(given["dout"])
    return _results(out, leaves)


def on_rank(given: Problem, repeats: int = 1, deterministic: bool = False) -> list[dict[str, Tensor]]:
    """Output and gradients of this rank's shard, once or several times over."""
    torch.use_deterministic_algorithms(deterministic)
    try:
        return [_call(given, serving_conv.causal_conv1d_cp) for _ in range(repeats)]
    finally:
        torch.use_deterministic_algorithms(False)


def _leaves(given: Problem, x: Tensor) -> dict[str, Tensor]:
    named = {"x": x, "weight": given["weight"], "bias": given["bias"]}
    return {name: t.clone().requires_grad_() for name, t in named.items() if t is not None}


def _results(out: Tensor, leaves: dict[str, Tensor]) -> dict[str, Tensor]:
    found = {"out": out.detach()}
    for name, leaf in leaves.items():
        assert leaf.grad is not None
        found[f"d{name}"] = leaf.grad
    return found


def joined(shards: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Rows put together, sums of the parameters' gradients added up."""
    found = {}
    for name in shards[0]:
        parts = [shard[name] for shard in shards]
        found[name] = torch.cat(parts, 1) if name in ("out", "dx") else torch.stack(parts).double().sum(0)
    return found


def digits(tokens: list[float], rows: list[int], documents: list[int] | None) -> tuple[list[float], list[float]]:
    """This rank's outputs and dx under the digit filter, with an output gradient of ones everywhere."""
    rank = dist.get_rank()
    begin = sum(rows[:rank])
    x = torch.tensor(tokens)[None, begin : begin + rows[rank], None].requires_grad_()
    numbers = None
    if documents is not None:
        numbers = torch.arange(len(documents)).repeat_interleave(torch.tensor(documents)).int()[None]
    weight = torch.tensor([[1.0, 10, 100, 1000]])
    out = serving_conv.causal_conv1d_cp(x, weight, None, None, dist.group.WORLD, numbers)
    out.sum().backward()
    assert x.grad is not None
    return out.flatten().tolist(), x.grad.flatten().tolist()


def _call(given: Problem, run: Callable[..., Tensor]) -> dict[str, Tensor]:
    rank = dist.get_rank()
    begin = sum(given["rows"][:rank])
    shard = slice(begin, begin + given["rows"][rank])
    leaves = _leaves(given, given["x"][:, shard])
    out = run(
        leaves["x"], leaves["weight"], leaves.get("bias"), given["activation"], dist.group.WORLD, given["seq_idx"]
    )
    out.backward(given["dout"][:, shard].to(out.dtype))
    return _results(out, leaves)


def checkpointed(given: Problem) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Results without and with an activation checkpoint."""

    def again(*arguments: Any) -> Tensor:
        return checkpoint(serving_conv.causal_conv1d_cp, *arguments, use_reentrant=False)

    return _call(given, serving_conv.causal_conv1d_cp), _call(given, again)


def compiled(given: Problem) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Results without and with a compiler that may not break the graph."""
    fast = torch.compile(serving_conv.causal_conv1d_cp, fullgraph=True, backend="aot_eager")
    return _call(given, serving_conv.causal_conv1d_cp), _call(given, fast)


def under_autocast(given: Problem) -> dict[str, torch.dtype]:
    """Types of the results where x comes from a 16-bit layer and parameters are fp32."""
    given = dict(given, x=given["x"].bfloat16())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return {name: tensor.dtype for name, tensor in _call(given, serving_conv.causal_conv1d_cp).items()}


def wrong_call(what: str, only: int | None) -> None:
    """A call with one thing wrong, on every rank or on one."""
    size, rank = dist.get_world_size(), dist.get_rank()
    x, weight, activation = torch.randn(1, 4, 6), torch.randn(6, 4), "silu"
    numbers: Tensor | None = torch.zeros(1, 4 * size, dtype=torch.int32)
    if only is None or only == rank:
        match what:
            case "global_seq_idx shape":
                numbers = torch.zeros(1, 4, dtype=torch.int32)
            case "global_seq_idx type":
                numbers = torch.zeros(1, 4 * size)
            case "global_seq_idx device":
                numbers = torch.zeros(1, 4 * size, dtype=torch.int32, device="meta")
            case "two batches packed":
                x = torch.randn(2, 4, 6)
            case "activation":
                activation = "gelu"
            case "taps":
                weight = torch.randn(6, 1)
            case "float64 taps":
                weight = weight.double()
            case "other batches":
                x, numbers = torch.randn(3, 4, 6), None
            case "other channels":
                x, weight = torch.randn(1, 4, 7), torch.randn(7, 4)
            case "other type":
                x = x.bfloat16()
            case "packed on one":
                numbers = None
            case _:
                raise NotImplementedError(what)
    if what == "other batches":
        numbers = None
    serving_conv.causal_conv1d_cp(x, weight, None, activation, dist.group.WORLD, numbers)


def leave() -> None:
    """Exit as a rank does that meets an error of its own."""
    sys.exit(1)


def leave_without_a_word() -> None:
    """Die at once."""
    os.kill(os.getpid(), signal.SIGKILL)


def sleep() -> None:
    """Hang for longer than the others' patience."""
    time.sleep(30)
