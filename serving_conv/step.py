"""Owns the step's metadata on the device: offsets, slots, flags and counts at fixed addresses, refilled in place.

One staging buffer and one copy a step, for all layers and all groups of layers; no allocation, no read of the device.
On a GPU the staging buffers are pinned and the copy is asynchronous; they go round in two halves, so that a step may
be filled while the last ones' copies are still under way. No map from blocks to sequences is needed: a block of the
kernel finds its sequence in two probes of the offsets, while its rows are on their way.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from serving_conv.contract import INT32_LIMIT
from serving_conv.errors import ContractError

__all__ = ["Checkpoint", "StepArguments", "StepMetadata"]

_STAGING = 8  # buffers on a GPU; an event costs 2 us, and one each half round is enough

Numbers = Sequence[int] | NDArray[Any]
"""One number a sequence. int32 arrays cost least: their values need no look."""

Flags = Sequence[bool] | NDArray[np.bool_]


class Checkpoint(NamedTuple):
    """A window to keep: that of `sequence` after so many of its `tokens` in this step, in slot `slot` of each group."""

    sequence: int
    tokens: int
    slot: int | tuple[int, ...]


@dataclass(frozen=True, slots=True)
class StepArguments:
    """Views for one step; valid until the next `fill`.

    Attributes:
        cu_seqlens: int32 `[N+1]`.
        slots: int32 `[N]`, of the first group.
        has_initial_state: bool `[N]`.
        num_accepted_tokens: int32 `[N]`.
        rows: number of packed rows, on the host.
        group_slots: int32 `[N]` for each group.
        speculative: bool `[N]`, or None if the metadata was built without drafts.
        checkpoint_offsets: int32 `[N+1]`, or None if it was built without checkpoints.
        checkpoint_tokens: int32 `[K]`, K its capacity, or None.
        group_checkpoint_slots: int32 `[K]` for each group; empty without checkpoints.
    """

    cu_seqlens: Tensor
    slots: Tensor
    has_initial_state: Tensor
    num_accepted_tokens: Tensor
    rows: int
    group_slots: tuple[Tensor, ...]
    speculative: Tensor | None
    checkpoint_offsets: Tensor | None
    checkpoint_tokens: Tensor | None
    group_checkpoint_slots: tuple[Tensor, ...]

    def keywords(self, group: int = 0) -> dict[str, Tensor | None]:
        """The step's part of the arguments of `causal_conv1d_step`, by name, for the layers of one group."""
        return {
            "cu_seqlens": self.cu_seqlens,
            "cache_indices": self.group_slots[group],
            "has_initial_state": self.has_initial_state,
            "num_accepted_tokens": self.num_accepted_tokens,
            "speculative": self.speculative,
            "checkpoint_offsets": self.checkpoint_offsets,
            "checkpoint_tokens": self.checkpoint_tokens,
            "checkpoint_slots": self.group_checkpoint_slots[group] if self.group_checkpoint_slots else None,
        }


class _Block:
    """One block of bytes cut into the step's arrays: int32 ones first, then those of one byte."""

    def __init__(self, sequences: int, checkpoints: int, groups: int) -> None:
        self._cuts: dict[str, slice] = {}
        at = 0
        sizes = {"cu_seqlens": sequences + 1, "num_accepted_tokens": sequences}
        sizes |= {f"slots {group}": sequences for group in range(groups)}
        if checkpoints:
            sizes |= {"checkpoint_offsets": sequences + 1, "checkpoint_tokens": checkpoints}
            sizes |= {f"checkpoint_slots {group}": checkpoints for group in range(groups)}
        for name, size in sizes.items():
            # Sixteen bytes each: no array begins in the middle of a word that a kernel may read.
            self._cuts[name] = slice(4 * at, 4 * (at + size))
            at += -(-size // 4) * 4
        for place, name in enumerate(("has_initial_state", "speculative")):
            self._cuts[name] = slice(4 * at + place * sequences, 4 * at + (place + 1) * sequences)
        self.nbytes = 4 * at + 2 * sequences

    def tensors(self, block: Tensor) -> dict[str, Tensor]:
        return {name: block[cut].view(_type(name)) for name, cut in self._cuts.items()}


def _type(name: str) -> torch.dtype:
    return torch.bool if name in ("has_initial_state", "speculative") else torch.int32


class StepMetadata:
    """Device metadata of up to `max_sequences` sequences.

    Args:
        max_sequences: capacity.
        device: where the kernels read it.
        pad_slot_id: slot number given to sequences that pad a step up to a bucket.
        groups: groups of layers, each with slot numbers of its own; lengths are common to all.
        drafts: steps may hold speculative sequences next to others (`causal_conv1d_step`).
        max_checkpoints: most checkpoints of a step; 0: steps name none.

    Raises:
        ContractError: a capacity out of range.
    """

    def __init__(
        self,
        max_sequences: int,
        device: torch.device | str = "cpu",
        *,
        pad_slot_id: int = -1,
        groups: int = 1,
        drafts: bool = False,
        max_checkpoints: int = 0,
    ) -> None:
        for name, size, least in (
            ("max_sequences", max_sequences, 1),
            ("groups", groups, 1),
            ("max_checkpoints", max_checkpoints, 0),
        ):
            if size < least:
                raise ContractError(name, got=size, wanted=f"{least} or more")
        if not -INT32_LIMIT - 1 <= pad_slot_id <= INT32_LIMIT:
            raise ContractError("pad_slot_id", got=pad_slot_id, wanted="a number within int32")
        self.max_sequences = max_sequences
        self.max_checkpoints = max_checkpoints
        self.groups = groups
        self.drafts = drafts
        self.pad_slot_id = pad_slot_id
        block = _Block(max_sequences, max_checkpoints, groups)
        self._asynchronous = torch.device(device).type == "cuda"
        self._on_device = torch.zeros(block.nbytes, dtype=torch.uint8, device=device)
        self._tensors = block.tensors(self._on_device)
        self._staging = [
            torch.zeros(block.nbytes, dtype=torch.uint8, pin_memory=self._asynchronous)
            for _ in range(_STAGING if self._asynchronous else 1)
        ]
        self._arrays = [{n: t.numpy() for n, t in block.tensors(staging).items()} for staging in self._staging]
        self._copied: list[torch.cuda.Event | None] = [None, None]  # of each half
        self._filled = [(-1, -1)] * len(self._staging)  # sequences, and with padding, of each buffer's last step
        self._turn = -1
        self._views: dict[int, dict[str, Any]] = {}

    def fill(
        self,
        lengths: Numbers,
        slots: Numbers | Sequence[Numbers],
        has_initial_state: Flags,
        num_accepted_tokens: Numbers | None = None,
        *,
        speculative: Flags | None = None,
        checkpoints: Sequence[Checkpoint] = (),
        bucket: int | None = None,
    ) -> StepArguments:
        """Describe the next step.

        Args:
            lengths: rows of each sequence.
            slots: slot of each sequence; with several groups, one such list for each.
            has_initial_state: whether each sequence's window is read from its slot.
            num_accepted_tokens: count of each sequence; 1 for all if absent.
            speculative: whether each sequence's tokens are drafts; none if absent.
            checkpoints: windows to keep, in any order.
            bucket: pad with empty sequences up to this many, as captured graphs need.

        Raises:
            ContractError: lists of unequal lengths, a negative row count, a number outside int32, more sequences or
                checkpoints than the capacity, or a checkpoint of no sequence of the step.
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
        if speculative is not None and not self.drafts:
            raise ContractError("speculative", got="flags", wanted="None", remedy="build StepMetadata with drafts=True")
        rows_of_each = _numbers("lengths", lengths, count)
        if count and (least := np.minimum.reduce(rows_of_each)) < 0:
            raise ContractError("lengths", got=int(least), wanted="0 or more rows")
        ends = np.add.accumulate(rows_of_each, dtype=np.int64)
        rows = int(ends[-1]) if count else 0
        if rows > INT32_LIMIT:
            raise ContractError("lengths", got=f"{rows} rows", wanted=f"at most {INT32_LIMIT} in a step")
        # Checked before the first write, so that a refused step leaves the last one as it was.
        by_group: Any = (slots,) if self.groups == 1 else slots
        if len(by_group) != self.groups:
            raise ContractError("slots", got=f"{len(by_group)} lists", wanted=f"{self.groups}, one a group")
        given: list[tuple[str, Any, Any]] = [
            (f"slots {group}", _numbers("slots", values, count), self.pad_slot_id)
            for group, values in enumerate(by_group)
        ]
        _check_count("has_initial_state", has_initial_state, count)
        given.append(("has_initial_state", has_initial_state, False))
        if num_accepted_tokens is not None:
            counts = _numbers("num_accepted_tokens", num_accepted_tokens, count)
            given.append(("num_accepted_tokens", counts, 1))
        if speculative is not None:
            _check_count("speculative", speculative, count)
            given.append(("speculative", speculative, False))
        kept = self._checkpoints(checkpoints, count) if checkpoints else None
        arrays, staging = self._next_staging()
        offsets = arrays["cu_seqlens"]
        offsets[1 : count + 1] = ends
        offsets[count + 1 : padded + 1] = rows
        same = self._filled[self._turn] == (count, padded)  # then what pads this buffer is there already
        self._filled[self._turn] = (count, padded)
        for name, values, padding in given:
            array = arrays[name]
            array[:count] = values
            if not same:
                array[count:padded] = padding
        if num_accepted_tokens is None:
            arrays["num_accepted_tokens"][:padded] = 1
        if speculative is None and self.drafts:
            arrays["speculative"][:padded] = False
        if kept is None:
            if self.max_checkpoints:
                arrays["checkpoint_offsets"][: padded + 1] = 0
        else:
            arrays["checkpoint_offsets"][: count + 1] = kept[0]
            arrays["checkpoint_offsets"][count + 1 : padded + 1] = len(checkpoints)
            arrays["checkpoint_tokens"][: len(checkpoints)] = kept[1]
            for group, numbers in enumerate(kept[2]):
                arrays[f"checkpoint_slots {group}"][: len(checkpoints)] = numbers
        self._on_device.copy_(staging, non_blocking=self._asynchronous)
        half, place = divmod(self._turn, _STAGING // 2)
        if self._asynchronous and place == _STAGING // 2 - 1:
            event = self._copied[half] or torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record()
            self._copied[half] = event
        return StepArguments(rows=rows, **self._views_of(padded))

    def view(self, bucket: int, rows: int) -> StepArguments:
        """The arguments of any step padded to `bucket` sequences, as a graph captures them; nothing is filled.

        Raises:
            ContractError: a bucket outside the capacity.
        """
        if not 1 <= bucket <= self.max_sequences:
            raise ContractError("bucket", got=bucket, wanted=f"1 to {self.max_sequences}")
        return StepArguments(rows=rows, **self._views_of(bucket))

    def _checkpoints(self, checkpoints: Sequence[Checkpoint], count: int) -> tuple[Any, Any, list[Any]]:
        """Offsets, token counts, and slots of each group, in the order of the sequences."""
        if len(checkpoints) > self.max_checkpoints:
            raise ContractError(
                "checkpoints",
                got=len(checkpoints),
                wanted=f"at most {self.max_checkpoints}",
                remedy="build StepMetadata with a larger max_checkpoints",
            )
        ordered = sorted(checkpoints)
        if not 0 <= ordered[0].sequence <= ordered[-1].sequence < count:
            raise ContractError(
                "checkpoints",
                got=f"sequences {ordered[0].sequence} to {ordered[-1].sequence}",
                wanted=f"0 to {count - 1}, the sequences of the step",
            )
        named = np.bincount([one.sequence for one in ordered], minlength=count)
        slots = [(one.slot,) if isinstance(one.slot, int) else one.slot for one in ordered]
        if any(len(of_one) != self.groups for of_one in slots):
            raise ContractError("checkpoints", got="slots of other groups", wanted=f"{self.groups}, one a group")
        offsets = np.concatenate([[0], np.cumsum(named)])
        tokens = _numbers("checkpoints", [one.tokens for one in ordered], len(ordered))
        by_group = [_numbers("checkpoints", [s[group] for s in slots], len(ordered)) for group in range(self.groups)]
        return offsets, tokens, by_group

    def _next_staging(self) -> tuple[dict[str, Any], Tensor]:
        self._turn = (self._turn + 1) % len(self._staging)
        half, place = divmod(self._turn, _STAGING // 2)
        event = self._copied[half] if place == 0 else None
        if event is not None:
            event.synchronize()  # copies of four steps ago and more, done long since unless the device is far behind
        return self._arrays[self._turn], self._staging[self._turn]

    def _views_of(self, count: int) -> dict[str, Any]:
        views = self._views.get(count)
        if views is None:
            tensors = self._tensors
            checkpoints = self.max_checkpoints > 0
            slots = tuple(tensors[f"slots {group}"][:count] for group in range(self.groups))
            views = self._views[count] = {
                "cu_seqlens": tensors["cu_seqlens"][: count + 1],
                "slots": slots[0],
                "has_initial_state": tensors["has_initial_state"][:count],
                "num_accepted_tokens": tensors["num_accepted_tokens"][:count],
                "group_slots": slots,
                "speculative": tensors["speculative"][:count] if self.drafts else None,
                "checkpoint_offsets": tensors["checkpoint_offsets"][: count + 1] if checkpoints else None,
                "checkpoint_tokens": tensors["checkpoint_tokens"] if checkpoints else None,
                "group_checkpoint_slots": tuple(
                    tensors[f"checkpoint_slots {group}"] for group in range(self.groups) if checkpoints
                ),
            }
        return views


def _numbers(name: str, values: Numbers, count: int) -> NDArray[Any]:
    """An array of one number a sequence, all within int32."""
    _check_count(name, values, count)
    if isinstance(values, np.ndarray):
        array = values
        if array.dtype == np.int32:
            return array
        if array.dtype.kind not in "iu":
            raise ContractError(name, got=str(array.dtype), wanted="integers")
    else:
        _check_int32(name, values)
        return np.array(values, dtype=np.int64)
    if count:
        _check_int32(name, (int(array.min()), int(array.max())))
    return array


def _check_count(name: str, values: Numbers | Flags, count: int) -> None:
    if len(values) != count:
        raise ContractError(name, got=f"{len(values)} values", wanted=f"{count}, one a sequence")


def _check_int32(name: str, values: Sequence[int]) -> None:
    if values and not -INT32_LIMIT - 1 <= min(values) <= max(values) <= INT32_LIMIT:
        raise ContractError(name, got=f"{min(values)} to {max(values)}", wanted="numbers within int32")
