"""Owns the step's metadata on the device: offsets, slots, flags and counts at fixed addresses, refilled in place.

One staging buffer and one copy a step, for all layers and all groups of layers; no allocation, no read of the device.
On a GPU the staging buffers are pinned and the copy is asynchronous; they go round in two halves, so that a step may
be filled while the last ones' copies are still under way. No map from blocks to sequences is needed: a block of the
kernel finds its sequence in two probes of the offsets, while its rows are on their way.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from serving_conv.contract import INT32_LIMIT
from serving_conv.errors import ContractError
from serving_conv.native.upload import copier

__all__ = ["Checkpoint", "StepArguments", "StepMetadata"]

_HALF = 16  # half the buffers on a GPU: torch records an event in 9 us, so one each half round
_INT32, _BOOL = np.dtype(np.int32), np.dtype(np.bool_)

Numbers = Sequence[int] | NDArray[Any]
"""One number a sequence. int32 arrays cost least: their values need no look."""

Flags = Sequence[bool] | NDArray[np.bool_]


class Checkpoint(NamedTuple):
    """A window to keep: that of `sequence` after so many of its `tokens` in this step, in slot `slot` of each group."""

    sequence: int
    tokens: int
    slot: int | tuple[int, ...]


class StepArguments(NamedTuple):
    """Views for one step; valid until the next `fill`.

    Attributes:
        rows: number of packed rows, on the host.
        cu_seqlens: int32 `[N+1]`.
        slots: int32 `[N]`, of the first group.
        has_initial_state: bool `[N]`.
        num_accepted_tokens: int32 `[N]`.
        group_slots: int32 `[N]` for each group.
        speculative: bool `[N]`, or None if the metadata was built without drafts.
        checkpoint_offsets: int32 `[N+1]`, or None if it was built without checkpoints.
        checkpoint_tokens: int32 `[K]`, K its capacity, or None.
        group_checkpoint_slots: int32 `[K]` for each group; empty without checkpoints.
    """

    rows: int
    cu_seqlens: Tensor
    slots: Tensor
    has_initial_state: Tensor
    num_accepted_tokens: Tensor
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
        sizes |= dict.fromkeys(_slots_of(groups), sequences)
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


def _slots_of(groups: int) -> tuple[str, ...]:
    return tuple(f"slots {group}" for group in range(groups))


class _Staging:
    """A block on the host, pinned if the device copies from it by itself.

    Attributes:
        upload: copies the block to the device.
        ends: of the last step's sequences, their offsets without the leading zero.
        end_of_padding: the offsets of the sequences that pad.
        cut: of each other array with one number a sequence, the part of the last step's sequences. A memoryview, for
            it takes an array in less than half of numpy's time.
        slots: those of the groups' slots.
    """

    def __init__(self, block: _Block, slot_names: Sequence[str], pad_slot_id: int, on_device: Tensor) -> None:
        on_host = torch.zeros(block.nbytes, dtype=torch.uint8, pin_memory=on_device.is_cuda)
        self.upload = copier(on_host, on_device)
        self._arrays: dict[str, NDArray[Any]] = {n: t.numpy() for n, t in block.tensors(on_host).items()}
        self._padding = {name: _default(name, pad_slot_id) for name in self._arrays if _per_sequence(name)}
        self._slot_names = slot_names
        self._defaults: set[str] = set()  # optional arrays that hold what their absence means
        self._sizes = (-1, -1)
        self.resize(0, 0)

    def resize(self, count: int, padded: int) -> None:
        """Make room for a step of so many sequences and pad behind them: next to nothing if the last one was such."""
        if (count, padded) == self._sizes:
            return
        self._sizes = (count, padded)
        self.ends: NDArray[np.int32] = self._arrays["cu_seqlens"][1 : count + 1]
        self.end_of_padding: NDArray[np.int32] = self._arrays["cu_seqlens"][count + 1 : padded + 1]
        self.cut: dict[str, Any] = {name: memoryview(self._arrays[name][:count].data) for name in self._padding}
        self.slots = [self.cut[name] for name in self._slot_names]
        for name, value in self._padding.items():
            self._arrays[name][count:padded] = value
        self._defaults.clear()

    def write_or_default(self, name: str, values: Any) -> None:
        """Write one number a sequence, or what their absence means, unless that is there from the last step."""
        if values is not None:
            self.cut[name][:] = values
            self._defaults.discard(name)
        elif name not in self._defaults:
            self._arrays[name][: self._sizes[0]] = _default(name, 0)
            self._defaults.add(name)

    def write_checkpoints(self, kept: _Kept | None) -> None:
        """Write a step's checkpoints, or that it has none, unless that is there from the last step."""
        if kept is not None:
            count, padded = self._sizes
            offsets, of_step = self._arrays["checkpoint_offsets"], len(kept.tokens)
            offsets[: count + 1] = kept.offsets
            offsets[count + 1 : padded + 1] = of_step
            self._arrays["checkpoint_tokens"][:of_step] = kept.tokens
            for group, numbers in enumerate(kept.slots):
                self._arrays[f"checkpoint_slots {group}"][:of_step] = numbers
            self._defaults.discard("checkpoints")
        elif "checkpoints" not in self._defaults:
            self._arrays["checkpoint_offsets"][:] = 0
            self._defaults.add("checkpoints")


class _Kept(NamedTuple):
    """A step's checkpoints in the order of its sequences: offsets, token counts, and slots of each group."""

    offsets: NDArray[Any]
    tokens: NDArray[Any]
    slots: list[NDArray[Any]]


def _per_sequence(name: str) -> bool:
    return name in ("has_initial_state", "num_accepted_tokens", "speculative") or name.startswith("slots ")


def _default(name: str, pad_slot_id: int) -> int:
    return pad_slot_id if name.startswith("slots ") else int(name == "num_accepted_tokens")


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
        self._slot_names = _slots_of(groups)
        self._on_device = torch.zeros(block.nbytes, dtype=torch.uint8, device=device)
        self._tensors = block.tensors(self._on_device)
        self._asynchronous = self._on_device.is_cuda
        self._staging = [
            _Staging(block, self._slot_names, pad_slot_id, self._on_device)
            for _ in range(2 * _HALF if self._asynchronous else 1)
        ]
        self._copied: list[torch.cuda.Event | None] = [None, None]  # of each half
        self._turn = -1
        self._views: dict[int, tuple[Any, ...]] = {}

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
        # Checked before the first write, so that a refused step leaves the last one as it was.
        shape = (count,)
        rows_of_each = _numbers("lengths", lengths, shape)
        _check_rows(rows_of_each)
        by_group: Any = (slots,) if self.groups == 1 else slots
        if len(by_group) != self.groups:
            raise ContractError("slots", got=f"{len(by_group)} lists", wanted=f"{self.groups}, one a group")
        slot_numbers = [_numbers("slots", values, shape) for values in by_group]
        has_initial_state = _flags("has_initial_state", has_initial_state, shape)
        if num_accepted_tokens is not None:
            num_accepted_tokens = _numbers("num_accepted_tokens", num_accepted_tokens, shape)
        if speculative is not None:
            speculative = _flags("speculative", speculative, shape)
        kept = self._checkpoints(checkpoints, count) if checkpoints else None

        staging = self._next_staging()
        staging.resize(count, padded)
        rows = 0
        if count:
            np.add.accumulate(rows_of_each, out=staging.ends)
            rows = staging.ends.item(-1)
        staging.end_of_padding.fill(rows)
        for group, numbers in enumerate(slot_numbers):
            staging.slots[group][:] = numbers
        staging.cut["has_initial_state"][:] = has_initial_state
        staging.write_or_default("num_accepted_tokens", num_accepted_tokens)
        if self.drafts:
            staging.write_or_default("speculative", speculative)
        if self.max_checkpoints:
            staging.write_checkpoints(kept)
        staging.upload()
        if self._asynchronous and self._turn % _HALF == _HALF - 1:
            half = self._turn // _HALF
            event = self._copied[half] or torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record()
            self._copied[half] = event
        return StepArguments._make((rows, *self._views_of(padded)))

    def view(self, bucket: int, rows: int) -> StepArguments:
        """The arguments of any step padded to `bucket` sequences, as a graph captures them; nothing is filled.

        Raises:
            ContractError: a bucket outside the capacity.
        """
        if not 1 <= bucket <= self.max_sequences:
            raise ContractError("bucket", got=bucket, wanted=f"1 to {self.max_sequences}")
        return StepArguments(rows, *self._views_of(bucket))

    def _checkpoints(self, checkpoints: Sequence[Checkpoint], count: int) -> _Kept:
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
        tokens = _numbers("checkpoints", [one.tokens for one in ordered], (len(ordered),))
        by_group = [
            _numbers("checkpoints", [of_one[group] for of_one in slots], (len(ordered),))
            for group in range(self.groups)
        ]
        return _Kept(offsets, tokens, by_group)

    def _next_staging(self) -> _Staging:
        self._turn = (self._turn + 1) % len(self._staging)
        if self._turn % _HALF == 0 and (event := self._copied[self._turn // _HALF]) is not None:
            event.synchronize()  # copies of many steps ago, done long since unless the device is far behind
        return self._staging[self._turn]

    def _views_of(self, count: int) -> tuple[Any, ...]:
        """The fields of `StepArguments` behind `rows`."""
        views = self._views.get(count)
        if views is None:
            tensors = self._tensors
            checkpoints = self.max_checkpoints > 0
            slots = tuple(tensors[name][:count] for name in self._slot_names)
            views = self._views[count] = (
                tensors["cu_seqlens"][: count + 1],
                slots[0],
                tensors["has_initial_state"][:count],
                tensors["num_accepted_tokens"][:count],
                slots,
                tensors["speculative"][:count] if self.drafts else None,
                tensors["checkpoint_offsets"][: count + 1] if checkpoints else None,
                tensors["checkpoint_tokens"] if checkpoints else None,
                tuple(tensors[f"checkpoint_slots {group}"] for group in range(self.groups) if checkpoints),
            )
        return views


def _numbers(name: str, values: Numbers, shape: tuple[int]) -> NDArray[np.int32]:
    """An array of one number a sequence."""
    if type(values) is np.ndarray and values.dtype is _INT32 and values.shape == shape:
        return values
    _check_count(name, values, shape)
    if not isinstance(values, np.ndarray):
        _check_int32(name, values)
        return np.array(values, dtype=np.int32)
    if values.dtype.kind not in "iu":
        raise ContractError(name, got=str(values.dtype), wanted="integers")
    if values.size:
        _check_int32(name, (int(values.min()), int(values.max())))
    return values.astype(np.int32)


def _check_rows(lengths: NDArray[np.int32]) -> None:
    """No negative length, and a sum within int32."""
    unsigned = lengths.view(np.uint32)  # in which a negative number is a very large one
    if not lengths.size or unsigned.item(unsigned.argmax()) * lengths.size <= INT32_LIMIT:
        return
    if (least := int(lengths.min())) < 0:
        raise ContractError("lengths", got=least, wanted="0 or more rows")
    if (total := int(lengths.sum(dtype=np.int64))) > INT32_LIMIT:
        raise ContractError("lengths", got=f"{total} rows", wanted=f"at most {INT32_LIMIT} in a step")


def _flags(name: str, values: Flags, shape: tuple[int]) -> NDArray[np.bool_]:
    if type(values) is np.ndarray and values.dtype is _BOOL and values.shape == shape:
        return values
    _check_count(name, values, shape)
    return np.asarray(values, dtype=np.bool_)


def _check_count(name: str, values: Numbers | Flags, shape: tuple[int]) -> None:
    if len(values) != shape[0] or getattr(values, "ndim", 1) != 1:
        raise ContractError(name, got=f"{len(values)} values", wanted=f"{shape[0]}, one a sequence, in one row")


def _check_int32(name: str, values: Sequence[int]) -> None:
    if values and not -INT32_LIMIT - 1 <= min(values) <= max(values) <= INT32_LIMIT:
        raise ContractError(name, got=f"{min(values)} to {max(values)}", wanted="numbers within int32")
