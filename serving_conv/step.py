"""Owns the step's metadata on the device: offsets, slots, flags and counts at fixed addresses, refilled in place.

One staging buffer and one copy a step; no allocation, no read of the device. On a GPU the staging buffer is
pinned and the copy asynchronous; two buffers alternate, so that a step may be filled while the last one's copy is
still under way.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from serving_conv.contract import INT32_LIMIT
from serving_conv.errors import ContractError

__all__ = ["StepArguments", "StepMetadata"]


@dataclass(frozen=True, slots=True)
class StepArguments:
    """Views for one call of an entry; valid until the next `fill`.

    Attributes:
        cu_seqlens: int32 `[N+1]`.
        slots: int32 `[N]`.
        has_initial_state: bool `[N]`.
        num_accepted_tokens: int32 `[N]`.
        rows: number of packed rows, on the host.
    """

    cu_seqlens: Tensor
    slots: Tensor
    has_initial_state: Tensor
    num_accepted_tokens: Tensor
    rows: int


class StepMetadata:
    """Device metadata of up to `max_sequences` sequences.

    Args:
        max_sequences: capacity.
        device: where the kernels read it.
        pad_slot_id: slot number given to sequences that pad a step up to a bucket.

    Raises:
        ContractError: a capacity below 1.
    """

    def __init__(self, max_sequences: int, device: torch.device | str = "cpu", *, pad_slot_id: int = -1) -> None:
        if max_sequences < 1:
            raise ContractError("max_sequences", got=max_sequences, wanted="1 or more")
        _check_int32("pad_slot_id", [pad_slot_id])
        self.max_sequences = max_sequences
        self.pad_slot_id = pad_slot_id
        self._device = torch.device(device)
        self._asynchronous = self._device.type == "cuda"
        # One int32 block: offsets [n+1], slots [n], counts [n], then n flags of one byte.
        self._words = 3 * max_sequences + 1
        size = 4 * self._words + max_sequences
        self._on_device = torch.zeros(size, dtype=torch.uint8, device=self._device)
        self._staging = [
            torch.zeros(size, dtype=torch.uint8, pin_memory=self._asynchronous)
            for _ in range(2 if self._asynchronous else 1)
        ]
        self._copied: list[torch.cuda.Event | None] = [None] * len(self._staging)
        self._turn = 0

    def fill(
        self,
        lengths: Sequence[int],
        slots: Sequence[int],
        has_initial_state: Sequence[bool],
        num_accepted_tokens: Sequence[int] | None = None,
        *,
        bucket: int | None = None,
    ) -> StepArguments:
        """Describe the next step.

        Args:
            lengths: rows of each sequence.
            slots: slot of each sequence.
            has_initial_state: whether each sequence's window is read from its slot.
            num_accepted_tokens: count of each sequence; 1 for all if absent.
            bucket: pad with empty sequences up to this many, as captured graphs need.

        Raises:
            ContractError: lists of unequal lengths, a negative row count, a number outside int32, or more sequences
                than the capacity.
        """
        count = len(lengths)
        padded = count if bucket is None else bucket
        if not count <= padded <= self.max_sequences:
            raise ContractError(
                "bucket" if bucket is not None else "lengths",
                got=f"{count} sequences padded to {padded}",
                wanted=f"at most {self.max_sequences} and no fewer than the sequences",
                remedy="build StepMetadata with a larger max_sequences",
            )
        accepted = [1] * count if num_accepted_tokens is None else num_accepted_tokens
        for name, values in (
            ("slots", slots),
            ("has_initial_state", has_initial_state),
            ("num_accepted_tokens", accepted),
        ):
            if len(values) != count:
                raise ContractError(name, got=f"{len(values)} values", wanted=f"{count}, one a sequence")
        if count and min(lengths) < 0:
            raise ContractError("lengths", got=min(lengths), wanted="0 or more rows")
        if sum(lengths) > INT32_LIMIT:
            raise ContractError("lengths", got=f"{sum(lengths)} rows", wanted=f"at most {INT32_LIMIT} in a step")
        _check_int32("slots", slots)
        _check_int32("num_accepted_tokens", accepted)
        staging = self._next_staging()
        raw = staging.numpy()
        words = raw[: 4 * self._words].view(np.int32)
        n = self.max_sequences
        words[0] = 0
        words[1 : count + 1] = np.cumsum(lengths, dtype=np.int64)
        words[count + 1 : padded + 1] = words[count]
        words[n + 1 : n + 1 + count] = slots
        words[n + 1 + count : n + 1 + padded] = self.pad_slot_id
        words[2 * n + 1 : 2 * n + 1 + count] = accepted
        words[2 * n + 1 + count : 2 * n + 1 + padded] = 1
        raw[4 * self._words : 4 * self._words + count] = has_initial_state
        raw[4 * self._words + count : 4 * self._words + padded] = False
        self._on_device.copy_(staging, non_blocking=self._asynchronous)
        if self._asynchronous:
            event = self._copied[self._turn] or torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record()
            self._copied[self._turn] = event
        return self._views(padded, int(words[count]))

    def _next_staging(self) -> Tensor:
        self._turn = (self._turn + 1) % len(self._staging)
        event = self._copied[self._turn]
        if event is not None:
            event.synchronize()  # the copy of two steps ago, done long since unless the device is far behind
        return self._staging[self._turn]

    def _views(self, count: int, rows: int) -> StepArguments:
        n = self.max_sequences
        words = self._on_device[: 4 * self._words].view(torch.int32)
        flags = self._on_device[4 * self._words :].view(torch.bool)
        return StepArguments(
            cu_seqlens=words[: count + 1],
            slots=words[n + 1 : n + 1 + count],
            has_initial_state=flags[:count],
            num_accepted_tokens=words[2 * n + 1 : 2 * n + 1 + count],
            rows=rows,
        )


def _check_int32(name: str, values: Sequence[int]) -> None:
    if values and not -INT32_LIMIT - 1 <= min(values) <= max(values) <= INT32_LIMIT:
        raise ContractError(name, got=f"{min(values)} to {max(values)}", wanted="numbers within int32")
