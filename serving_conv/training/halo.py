"""Owns the exchange between neighbours: the W-1 rows before a shard come from the left, their gradient goes back.

Every message is W-1 rows, however short a shard is: a rank sends the last W-1 rows of (what it received, its own
shard). A shard of at least W-1 rows need not wait before it sends; a shorter one hands on part of what it received,
so a halo may span any number of ranks, and no rank needs to know the length of another's shard.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from serving_conv.errors import CommunicationError, ContractError

__all__ = ["Message", "Neighbours", "resolve_group"]


def resolve_group(name: str) -> dist.ProcessGroup:
    """The process group of a name, which is all that an operator's schema can carry.

    Raises:
        RuntimeError: this process knows no group of that name, or it has been destroyed.
    """
    resolve: Any = dist.distributed_c10d._resolve_process_group  # type: ignore[attr-defined]
    group: dist.ProcessGroup = resolve(name)
    return group


@dataclass(slots=True)
class Message:
    """Rows under way, in both directions at once; keeps their buffers alive.

    Attributes:
        works: what to wait for, each with what it does, for the error text.
        arriving: where the received rows lie after `wait`, or None.
        staged: the pinned buffer that they pass through, where the group cannot reach the device's memory.
        kept: outgoing buffers.
    """

    works: list[tuple[str, Any]]
    arriving: Tensor | None
    staged: Tensor | None
    kept: list[Tensor]


class Neighbours:
    """A rank's two neighbours in a group whose ranks are ordered by sequence shard.

    Args:
        group: the process group.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.rank: int = group.rank()
        self.size: int = group.size()

    @property
    def has_left(self) -> bool:
        """Whether a shard lies before this one."""
        return self.rank > 0

    @property
    def has_right(self) -> bool:
        """Whether a shard lies behind this one."""
        return self.rank + 1 < self.size

    def stage(self, rows: Tensor) -> Tensor:
        """Rows where the group can send them from: pinned host memory under gloo, on their way there afterwards.

        Called before long work is queued on the current stream, so that the copy does not wait for it.

        Args:
            rows: `[B, W-1, D]` of any type, any strides.

        Returns:
            The same shape and type, contiguous.
        """
        if not self.needs_staging(rows.device):
            return rows.contiguous()
        stream = _side_stream(rows.device)
        stream.wait_stream(torch.cuda.current_stream(rows.device))
        with torch.cuda.stream(stream):
            staged = torch.empty(rows.shape, dtype=rows.dtype, pin_memory=True)
            staged.copy_(rows, non_blocking=True)
        rows.record_stream(stream)
        return staged

    def start(self, *, send: Tensor | None, to_right: bool, receive: Tensor | None, device: torch.device) -> Message:
        """Post a send and a receive that go the same way: both towards higher ranks, or both towards lower ones.

        Args:
            send: rows as `stage` returned them, or None.
            to_right: the direction.
            receive: a contiguous tensor that tells shape and type and, unless staged, takes the rows; or None.
            device: where the rows are needed.

        Raises:
            CommunicationError: the group's backend refuses, or finds a neighbour gone.
        """
        message = Message([], receive, None, [])
        operations, said = [], []
        target = self.rank + (1 if to_right else -1)
        source = self.rank - (1 if to_right else -1)
        if send is not None:
            if send.device.type == "cpu" and device.type == "cuda":
                _side_stream(device).synchronize()
            message.kept.append(send)
            operations.append(self._operation(dist.isend, send, target))
            said.append(f"sending a halo to rank {target}")
        if receive is not None:
            buffer = receive
            if self.needs_staging(device):
                buffer = message.staged = torch.empty(receive.shape, dtype=receive.dtype, pin_memory=True)
            operations.append(self._operation(dist.irecv, buffer, source))
            said.append(f"receiving a halo from rank {source}")
        if operations:
            with self.named(" and ".join(said)):
                works = dist.batch_isend_irecv(operations)
            # NCCL answers with one work for all.
            message.works = list(zip(said if len(works) == len(said) else [" and ".join(said)], works, strict=False))
        return message

    def wait(self, message: Message) -> Tensor | None:
        """Wait until the rows are there (on NCCL: let the current stream wait), and return them.

        Returns:
            `receive` of `start`, filled; None if nothing was to come.

        Raises:
            CommunicationError: gloo finds a neighbour gone, or silent for longer than the group's timeout. NCCL says so
                to its watchdog instead, which ends the process.
        """
        for said, work in message.works:
            with self.named(said):
                work.wait()
        message.works = []
        message.kept = []
        if message.staged is not None and message.arriving is not None:
            # Pinned memory must outlive the copy; the caching host allocator sees to that.
            message.arriving.copy_(message.staged, non_blocking=True)
        return message.arriving

    def _operation(self, kind: Any, tensor: Tensor, peer: int) -> dist.P2POp:
        return dist.P2POp(kind, tensor, dist.get_global_rank(self.group, peer), self.group)

    def needs_staging(self, device: torch.device) -> bool:
        """Whether rows of this device go through host memory, and the host waits for them."""
        return device.type == "cuda" and self._backend(device).name() == "gloo"

    def _backend(self, device: torch.device) -> Any:
        return self.group._get_backend(device)

    @property
    def host_takes_part(self) -> bool:
        """Whether hosts wait for each other in every exchange: the group is gloo's, or carries host memory alone."""
        try:
            self._backend(torch.device("cpu"))
        except RuntimeError:
            return False
        try:
            return bool(self._backend(torch.device("cuda")).name() == "gloo")
        except RuntimeError:
            return True

    def check_device(self, x: Tensor) -> None:
        """Whether the group can carry rows of x `[B, T, D]`.

        Raises:
            ContractError: it has no backend for the device of x.
        """
        try:
            self._backend(x.device)
        except RuntimeError:
            device = self.any_device()
            raise ContractError(
                "x",
                got=f"device {x.device} with a process group of {self._backend(device).name()}",
                wanted=f"a {device.type} tensor, which the group can carry",
                remedy=f"move x to this rank's {device.type} device, or give a group of gloo",
            ) from None

    def any_device(self, near: torch.device | None = None) -> torch.device:
        """A device whose tensors the group can carry: the CPU if it can, else a GPU.

        Args:
            near: the GPU to take if it is one, since the current one need not be this rank's; without it the group's
                own, or the current one.
        """
        try:
            self._backend(torch.device("cpu"))
        except RuntimeError:
            if near is not None and near.type == "cuda":
                return near
            bound: torch.device | None = self.group.bound_device_id
            return torch.device("cuda", torch.cuda.current_device()) if bound is None else bound
        return torch.device("cpu")

    def timeout(self) -> timedelta | None:
        """After which the group's backend gives up, if it says."""
        return getattr(getattr(self._backend(self.any_device()), "options", None), "_timeout", None)

    def named(self, doing: str) -> AbstractContextManager[None]:
        """Turn an error of the communication library into one that says what this rank did, and for how long.

        Raises:
            CommunicationError: in place of a RuntimeError or ValueError from inside the context.
        """
        return _named(self, doing)


@contextmanager
def _named(neighbours: Neighbours, doing: str) -> Iterator[None]:
    try:
        yield
    except (RuntimeError, ValueError) as error:
        raise CommunicationError(
            "cp_group",
            got=f"{str(error).strip()[:500]!r} while rank {neighbours.rank} of {neighbours.size} was {doing}",
            wanted=f"an answer within the group's timeout of {neighbours.timeout()}",
            remedy="look for the first error on the other ranks: one of them is gone, stuck or made another call",
        ) from error


_side_streams: dict[torch.device, torch.cuda.Stream] = {}


def _side_stream(device: torch.device) -> torch.cuda.Stream:
    stream = _side_streams.get(device)
    if stream is None:
        stream = _side_streams.setdefault(device, torch.cuda.Stream(device))  # type: ignore[no-untyped-call]
    return stream
