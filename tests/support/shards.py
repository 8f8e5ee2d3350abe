"""Owns what runs on each rank of the context-parallel tests, and the one-device run it is held against."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import serving_conv

__all__ = ["Problem", "on_one_device", "on_rank"]

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
    assert isinstance(out, Tensor)
    out.backward(given["dout"])
    return _results(out, leaves)


def on_rank(given: Problem, repeats: int = 1) -> list[dict[str, Tensor]]:
    """Output and gradients of this rank's shard, once or several times over."""
    rank = dist.get_rank()
    begin = sum(given["rows"][:rank])
    shard = slice(begin, begin + given["rows"][rank])
    results = []
    for _ in range(repeats):
        leaves = _leaves(given, given["x"][:, shard])
        out = serving_conv.causal_conv1d_cp(
            leaves["x"],
            leaves["weight"],
            leaves.get("bias"),
            given["activation"],
            dist.group.WORLD,
            given["seq_idx"],
        )
        out.backward(given["dout"][:, shard])
        results.append(_results(out, leaves))
    return results


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
