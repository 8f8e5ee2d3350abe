"""Owns the ranks' comparing of notes before an exchange: if one raises, all raise, and none waits for another."""

from __future__ import annotations

import weakref
import zlib

import torch
import torch.distributed as dist
from torch import Tensor

from serving_conv.errors import CommunicationError, ContractError
from serving_conv.training.halo import Neighbours

__all__ = ["agree"]

# Groups whose ranks have agreed once. Not by name: a group that is made after another's end may have its name.
_agreed: weakref.WeakSet[dist.ProcessGroup] = weakref.WeakSet()
_KIND = "type and device of x, activation and which arguments are given"
_WHAT = ("batches", "channels", "taps", _KIND, "rows (packed)")


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

    The comparison is one small collective. Where the group exchanges in the device's order it would wait for the
    device, so there only the calls until the first on which all agree, and every call with `always`, make it. Whether
    it is made, and on which kind of device, follows from the group alone: ranks that differ in x must not differ in
    that.

    Args:
        group: the process group.
        error: what this rank's own checks found.
        x: `[B, T, D]` of the call, as are the others; they may be of any kind if there is an error.
        weight: `[D, W]`.
        bias: `[D]` or None.
        activation: "silu", "swish" or None.
        global_seq_idx: int32 `[1, ranks*T]` or None.
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
    if group in _agreed and not (always or neighbours.host_takes_part):
        if error is not None:
            raise error
        return
    device = neighbours.any_device(x.device if isinstance(x, Tensor) else None)
    mine = torch.tensor(_facts(error, x, weight, bias, activation, global_seq_idx), dtype=torch.int64, device=device)
    every = [torch.empty_like(mine) for _ in range(group.size())]
    try:
        with neighbours.named("comparing its call with the other ranks'"):
            dist.all_gather(every, mine, group=group)
    except CommunicationError as failure:
        # What is wrong here may be why, as a device that the group cannot use is.
        if error is not None:
            raise error from failure
        raise
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
            got = f"{what} that differ between ranks" + ("" if what is _KIND else f": {values}")
            raise ContractError("cp_group", got=got, wanted="the same on every rank")
    _agreed.add(group)


def _facts(
    error: ContractError | None, x: object, weight: object, bias: object, activation: object, global_seq_idx: object
) -> list[int]:
    if error is not None or not isinstance(x, Tensor) or not isinstance(weight, Tensor):
        return [1, *[0] * len(_WHAT)]
    packed = global_seq_idx is not None
    kind = f"{x.dtype} {x.device.type} {bias is None} {activation is None} {packed}"
    return [0, x.shape[0], x.shape[2], weight.shape[1], zlib.crc32(kind.encode()), x.shape[1] if packed else -1]
