"""Owns what runs on each rank where the group itself is tested: parts of it, its agreement, the order of blocks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from support.shards import Problem, on_rank
from torch import Tensor
from torch._subclasses import FakeTensorMode

import serving_conv
from serving_conv import ContractError
from serving_conv.backends import choose_backend
from serving_conv.native import host
from serving_conv.native.config import choose_backward
from serving_conv.training import kernels
from serving_conv.training.agreement import _agreed, agree
from serving_conv.training.halo import Neighbours

__all__ = [
    "agree_after_another_start",
    "agree_in_turn",
    "agree_with_tensors_elsewhere",
    "differentiate_twice",
    "in_parts",
    "shapes_on_one_rank",
    "under_any_order_of_blocks",
]


def in_parts(parts: list[list[int]], problems: list[Problem], compiled: bool) -> dict[str, Tensor]:
    """Output and gradients of this rank's shard of its part's problem, all parts at once.

    Args:
        parts: ranks of each part.
        problems: of each part.
        compiled: through a compiler that may not break the graph.
    """
    groups = [dist.new_group(ranks) for ranks in parts]
    mine = next(number for number, ranks in enumerate(parts) if dist.get_rank() in ranks)
    group, given = groups[mine], problems[mine]
    begin = sum(given["rows"][: group.rank()])
    shard = slice(begin, begin + given["rows"][group.rank()])
    named = {"x": given["x"][:, shard], "weight": given["weight"], "bias": given["bias"]}
    leaves = {name: tensor.clone().requires_grad_() for name, tensor in named.items()}
    run = serving_conv.causal_conv1d_cp
    if compiled:
        run = torch.compile(run, fullgraph=True, backend="aot_eager")
    out = run(*leaves.values(), given["activation"], group, given["seq_idx"])
    gradients = torch.autograd.grad(out, list(leaves.values()), given["dout"][:, shard])
    for each in groups:
        if each is not dist.GroupMember.NON_GROUP_MEMBER:
            dist.destroy_process_group(each)
    return {"out": out.detach(), **{f"d{name}": found for name, found in zip(leaves, gradients, strict=True)}}


def under_any_order_of_blocks(given: Problem, repeats: int, deterministic: bool) -> list[dict[str, Tensor]]:
    """As `on_rank`, on the host backend, its blocks in order and in reverse by turns: a GPU's come in any order."""
    assert choose_backend(given["x"].device).name == "host"
    plain = kernels._BACKWARD_KERNELS["host"]

    def choose(**sizes: Any) -> Any:
        return choose_backward(**sizes)._replace(rows=16)  # several blocks for each sum

    found = []
    try:
        for repeat in range(repeats):
            turned = partial(host.run_backward, reverse=repeat % 2 == 1, choose=choose)
            kernels._BACKWARD_KERNELS["host"] = turned
            found += on_rank(given, 1, deterministic)
    finally:
        kernels._BACKWARD_KERNELS["host"] = plain
    return found


def differentiate_twice(how: str) -> None:
    """A second derivative of a call that goes through the dispatcher."""
    run = serving_conv.causal_conv1d_cp
    if how == "compiled":
        run = torch.compile(run, fullgraph=True, backend="eager")
    with FakeTensorMode() if how == "fake" else torch.device("cpu"):
        x, weight = torch.randn(1, 5, 3).requires_grad_(), torch.randn(3, 4)
        out = run(x, weight, None, "silu", dist.group.WORLD)
        (gradient,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        gradient.square().sum().backward()


def shapes_on_one_rank() -> list[int]:
    """What a fake call says, on the last rank alone: it must not wait for the others."""
    if dist.get_rank() + 1 < dist.get_world_size():
        return []
    with FakeTensorMode():
        out = serving_conv.causal_conv1d_cp(
            torch.randn(1, 5, 3), torch.randn(3, 4), None, "silu", dist.group.WORLD, None
        )
    return list(out.shape)


# --- agreement --------------------------------------------------------------------------------------------------


@contextmanager
def _as_if_on_devices() -> Iterator[None]:
    """The group counts as one whose exchanges the hosts take no part in, as NCCL's."""
    plain = Neighbours.__dict__.get("host_takes_part")
    Neighbours.host_takes_part = False  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        if plain is not None:
            Neighbours.host_takes_part = plain  # type: ignore[method-assign]


def _agree(*, wrong: bool = False, batches: int = 1, device: str = "meta") -> str:
    """What `agree` says of one call."""
    x, weight = torch.empty(batches, 4, 6, device=device), torch.empty(6, 4, device=device)
    error = ContractError("x", got="mine", wanted="another") if wrong else None
    try:
        agree(dist.group.WORLD, error, x, weight, None, None, None, always=False)
    except ContractError as found:
        return str(found)
    return "agreed"


def agree_in_turn() -> list[str]:
    """Calls of a group on devices: two that fail, on rank 1; one that all agree on; one more that fails."""
    one = dist.get_rank() == 1
    _agreed.discard(dist.group.WORLD)
    with _as_if_on_devices():
        return [
            _agree(batches=2 if one else 1),
            _agree(wrong=one),
            _agree(),
            _agree(wrong=one),
        ]


def agree_with_tensors_elsewhere() -> list[str]:
    """A call on which all agree, and one where the x of rank 1 lies on another kind of device."""
    return [_agree(), _agree(device="cpu" if dist.get_rank() == 1 else "meta")]


def agree_after_another_start(file: str) -> list[str]:
    """A call on which all agree, then a first call that fails on rank 1, in a new group of the same name."""
    rank, size = dist.get_rank(), dist.get_world_size()
    with _as_if_on_devices():
        before, name = _agree(), dist.group.WORLD.group_name
        dist.destroy_process_group()
        dist.init_process_group(
            "gloo", init_method=f"file://{file}", rank=rank, world_size=size, timeout=timedelta(seconds=60)
        )
        assert dist.group.WORLD.group_name == name
        return [before, _agree(wrong=rank == 1)]
