"""Owns the ranks' comparing of notes before an exchange: if one raises, all raise, and none waits for another."""

from __future__ import annotations

import zlib

import torch
import torch.distributed as dist
from torch import Tensor

from serving_conv.errors import ContractError
from serving_conv.training.halo import Neighbours

__all__ = ["agree"]

_agreed: set[str] = set()  # names of groups on GPUs that have made one call
_WHAT = ("batches", "channels", "taps", "type of x, activation and which arguments are given", "rows (packed)")


def agree(
    group: dist.ProcessGroup,
    error: ContractError | None,
    x: object,
    weight: object,
    bias: object,
    activation: object,
    global_seq_idx: object,
    *,
    always: bool,
) -> None:
    """Raise on every rank if one has an error, or if the ranks' calls differ.

    The comparison is one small collective. Where tensors are on a GPU it would wait for the device, so there only
    the first call of a group, and every call with `always`, makes it.

    Args:
        group: the process group.
        error: what this rank's own checks found.
        x: of the call, as are the others; they may be of any kind if there is an error.
        weight: see x.
        bias: see x.
        activation: see x.
        global_seq_idx: see x.
        always: compare on every call.

    Raises:
        ContractError: this rank's own error, another rank's, or what they differ in.
        CommunicationError: a rank is gone, or silent for longer than the group's timeout.
    """
    if group.size() == 1:
        if error is not None:
            raise error
        return
    neighbours = Neighbours(group)
    device = neighbours.any_device()
    cheap = device.type == "cpu" and (not isinstance(x, Tensor) or x.device.type == "cpu")
    if not (cheap or always or group.group_name not in _agreed):
        if error is not None:
            raise error
        return
    mine = torch.tensor(_facts(error, x, weight, bias, activation, global_seq_idx), dtype=torch.int64, device=device)
    every = [torch.empty_like(mine) for _ in range(group.size())]
    with neighbours.named("comparing its call with the other ranks'"):
        dist.all_gather(every, mine, group=group)
    _agreed.add(group.group_name)
    facts = torch.stack(every).tolist()
    if error is not None:
        raise error
    wrong = [rank for rank, found in enumerate(facts) if found[0]]
    if wrong:
        raise ContractError(
            "cp_group",
            got=f"an error in the arguments on rank {', '.join(map(str, wrong))}",
            wanted="a correct call on every rank",
            remedy="see the error of that rank",
        )
    for place, what in enumerate(_WHAT, 1):
        values = [found[place] for found in facts]
        if len(set(values)) > 1:
            got = f"{what} that differ between ranks" + ("" if place == 4 else f": {values}")
            raise ContractError("cp_group", got=got, wanted="the same on every rank")


def _facts(
    error: ContractError | None, x: object, weight: object, bias: object, activation: object, global_seq_idx: object
) -> list[int]:
    if error is not None or not isinstance(x, Tensor) or not isinstance(weight, Tensor):
        return [1, *[0] * len(_WHAT)]
    packed = global_seq_idx is not None
    kind = f"{x.dtype} {bias is None} {activation is None} {packed}"
    return [0, x.shape[0], x.shape[2], weight.shape[1], zlib.crc32(kind.encode()), x.shape[1] if packed else -1]
