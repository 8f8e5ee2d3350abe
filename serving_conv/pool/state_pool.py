"""Owns the state pool: all layers' tensors, outputs and workspace, and what may be done to the slots.

Every operation that fills a slot copies into one that is still free and lets the ledger hand it over last; so an
exception anywhere loses no slot and publishes nothing by half; an import, one launch for all its slots, gives them
back instead. Nothing here reads the device or keeps a view.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import get_args

import torch
from torch import Tensor

from serving_conv.errors import ContractError
from serving_conv.pool.copies import SlotMove, copies_of
from serving_conv.pool.layout import (
    LayerState,
    PoolLayout,
    allocate,
    check_adopted,
    pool_positions,
    slot_bytes,
    workspace_elements,
)
from serving_conv.pool.ledger import RESERVED_SLOT, Ledger, Slot, SlotCounts
from serving_conv.pool.package import SlotPackage
from serving_conv.pool.prefix import PrefixIndex, PrefixKey, PrefixStatistics

__all__ = ["StatePool"]


class StatePool:
    """Conv windows of many sequences, `[slots, channels, positions]` a layer; all layers share slot numbers.

    Slot 0 is reserved for padding, warm-up and graph capture. Slots are never zeroed: a slot without history must
    not be read, which is what `has_history` tells the operator. Not thread safe.

    Wherever a slot is taken as an argument it may be the `Slot` that the pool returned or its number; only the
    former can be told from a later take of the same number.

    Args:
        slots: S, the reserved one included.
        layers: channels, width and dtype of each layer.
        draft_tokens: most draft tokens of a speculative step.
        positions: L; by default what the widest layer and the drafts need, `state_positions(W, draft_tokens)`.
        layout: which axis is contiguous; "channels" is `[S, L, C]` memory seen transposed.
        device: of all tensors.
        max_tokens: rows of the preallocated outputs; 0 allocates neither outputs nor workspace.
        max_sequences: sequences that the preallocated prefill workspace serves.
        tensors: one `[S, C, L]` a layer, memory of the engine to be used in place; allocated if absent.
        pad_slot_id: the number that marks padding rows, 0 or -1. Such rows are skipped.

    Raises:
        ContractError: too few slots or positions, no layers, unknown layout or sentinel, or unfit tensors.
        BackendError: the kernel that copies slots, which a pool on a GPU loads at once, cannot be compiled.
        CaptureError: it is the first pool of a GPU, and the current stream is capturing.
    """

    def __init__(
        self,
        slots: int,
        layers: Sequence[LayerState],
        *,
        draft_tokens: int = 0,
        positions: int | None = None,
        layout: PoolLayout = "channels",
        device: torch.device | str = "cpu",
        max_tokens: int = 0,
        max_sequences: int = 0,
        tensors: Sequence[Tensor] | None = None,
        pad_slot_id: int = RESERVED_SLOT,
    ) -> None:
        needed = pool_positions(layers, draft_tokens)
        if positions is not None and positions < needed:
            raise ContractError(
                "positions",
                got=positions,
                wanted=f"{needed} or more for {draft_tokens} draft tokens",
                remedy="leave it out, or take fewer draft tokens",
            )
        if layout not in get_args(PoolLayout):
            raise ContractError("layout", got=repr(layout), wanted=" or ".join(get_args(PoolLayout)))
        if pad_slot_id not in (RESERVED_SLOT, -1):
            raise ContractError("pad_slot_id", got=pad_slot_id, wanted=f"{RESERVED_SLOT} or -1")
        for name, size in (("max_tokens", max_tokens), ("max_sequences", max_sequences)):
            if size < 0:
                raise ContractError(name, got=size, wanted="0 or more")
        self._prefixes = PrefixIndex()
        self._ledger = Ledger(slots, self._prefixes)
        self._accepted_limit = draft_tokens + 1
        self.slots = slots
        self.layers = tuple(layers)
        self.positions = positions or needed
        self.layout = layout
        self.device = torch.empty(0, device=device).device  # "cuda" becomes "cuda:0", as tensors say it
        self.reserved_slot = RESERVED_SLOT
        self.pad_slot_id = pad_slot_id
        self.nbytes = slots * slot_bytes(layers, positions=self.positions)
        if tensors is None:
            tensors = [allocate(slots, layer, self.positions, layout, self.device) for layer in layers]
        else:
            check_adopted(tensors, slots, layers, self.positions, layout, self.device)
        self.states = tuple(tensors)
        self._copies = copies_of(self.states, self.layers)
        self.outputs = tuple(
            torch.empty(max_tokens, layer.channels, dtype=layer.dtype, device=self.device)
            for layer in layers
            if max_tokens
        )
        scratch = workspace_elements(max_tokens, max_sequences)
        self.workspace = torch.empty(scratch, dtype=torch.int32, device=self.device)

    # -- slots

    def take(self) -> Slot | None:
        """A slot without history, or None while all are in use. Evicts a prefix checkpoint if it must."""
        return self._ledger.claim() if self._ledger.room() else None

    def free(self, slot: int) -> None:
        """Give a live slot back.

        Raises:
            ContractError: it is not live: freed before, never taken, reserved or cached.
        """
        self._ledger.free(slot)

    def fork(self, slot: int) -> Slot | None:
        """A second slot with the same contents and counts, or None while all are in use."""
        occupant = self._ledger.occupant(slot)
        if not self._ledger.room():
            return None
        self._copies.copy(occupant.handle, self._ledger.vacant)
        return self._ledger.claim(occupant.tokens, occupant.accepted)

    def commit(self, slot: int, tokens: int, accepted: int | None = None) -> None:
        """Count a step that ran on the slot.

        Args:
            slot: a live slot.
            tokens: tokens of the step; 0 changes nothing, as an empty sequence leaves its slot alone.
            accepted: None after a plain step, whose tokens all stand. After a speculative step how many stand, the
                bonus token included; the next step passes this number to the operator.

        Raises:
            ContractError: the slot is not live, or not `1 <= accepted <= tokens <= draft_tokens + 1`.
        """
        before = self._ledger.occupant(slot)
        if accepted is None:
            if tokens < 0:
                raise ContractError("tokens", got=tokens, wanted="0 or more")
            kept, accepted = tokens, 1 if tokens else before.accepted
        elif 1 <= accepted <= tokens <= self._accepted_limit:
            kept = accepted
        else:
            raise ContractError(
                "accepted",
                got=f"{accepted} of {tokens} tokens",
                wanted=f"1 <= accepted <= tokens <= {self._accepted_limit}",
                remedy="a pool for longer speculative steps needs more draft_tokens",
            )
        self._ledger.record(slot, before.tokens + kept, accepted)

    def roll_back(self, slot: int, savepoint: int) -> None:
        """Restore a slot's contents and counts from an earlier fork of it, and free the fork.

        If an exception interrupts the copy the savepoint is still live: roll back again.

        Raises:
            ContractError: either is not live, or they are the same.
        """
        destination, source = self._ledger.occupant(slot).handle, self._ledger.occupant(savepoint).handle
        if source == destination:
            raise ContractError("savepoint", got=f"slot {source} itself", wanted="a fork of the slot")
        self._copies.copy(source, destination)
        self._ledger.replace(slot, savepoint)

    def tokens(self, slot: int) -> int:
        """Exact number of tokens in a live slot's history."""
        return self._ledger.occupant(slot).tokens

    def accepted(self, slot: int) -> int:
        """What the next step passes as `num_accepted_tokens`: 1 after a plain step."""
        return self._ledger.occupant(slot).accepted

    def has_history(self, slot: int) -> bool:
        """What the next step passes as `has_initial_state`."""
        return self._ledger.occupant(slot).tokens > 0

    def counts(self) -> SlotCounts:
        """Free, live, cached and reserved slots; they add up to `slots`."""
        return self._ledger.counts()

    @property
    def high_water(self) -> int:
        """Most slots ever live at once."""
        return self._ledger.high_water

    # -- prefix checkpoints

    def publish(self, slot: int, key: PrefixKey, tokens: int) -> bool:
        """Keep a copy of a live slot's window as the checkpoint `key`.

        Args:
            slot: a live slot, whose last step ended exactly on token `tokens`.
            key: stands for those tokens.
            tokens: length of the prefix.

        Returns:
            True if the checkpoint is there now, also if it was before; False if there is no room.

        Raises:
            ContractError: the slot is not live or its history is of another length, or the key is.
        """
        occupant = self._ledger.occupant(slot)
        if tokens < 1 or tokens != occupant.tokens:
            raise ContractError(
                "tokens",
                got=tokens,
                wanted=f"{occupant.tokens}, where the slot's last step ended" if occupant.tokens else "a history",
                remedy="cut the chunk so that a step ends on the last token of the prefix",
            )
        if self._prefixes.find(key, tokens):
            return True
        if not self._ledger.room():
            return False
        self._copies.copy(occupant.handle, self._ledger.vacant, shift=occupant.accepted - 1)
        return self._ledger.publish(key, tokens)

    def longest_prefix(self, keys: Sequence[tuple[PrefixKey, int]]) -> tuple[PrefixKey, int] | None:
        """The published `(key, tokens)` with the most tokens among `keys`, which becomes the most recently used.

        Raises:
            ContractError: the key is published for another number of tokens.
        """
        return self._prefixes.longest(keys)

    def take_prefix(self, keys: Sequence[tuple[PrefixKey, int]]) -> tuple[Slot, int] | None:
        """Take a slot that starts from the longest published prefix.

        Returns:
            The slot and its token count; None if no key is published or there is no room for a slot beside it.

        Raises:
            ContractError: the key is published for another number of tokens.
        """
        found = self._prefixes.longest(keys)
        if found is None:
            self._prefixes.misses += 1
            return None
        key, tokens = found
        if not self._ledger.room(1, key):
            return None
        self._copies.copy(self._prefixes[key].slot, self._ledger.vacant)
        self._prefixes.hits += 1
        return self._ledger.claim(tokens), tokens

    def hold(self, key: PrefixKey) -> None:
        """Pin a checkpoint against eviction; holds are counted.

        Raises:
            ContractError: the key is not published.
        """
        self._prefixes.hold(key)

    def release(self, key: PrefixKey) -> None:
        """Undo one hold.

        Raises:
            ContractError: the key is not held.
        """
        self._prefixes.release(key)

    def drop(self, key: PrefixKey) -> None:
        """Forget a checkpoint and free its slot.

        Raises:
            ContractError: the key is not published, or is held.
        """
        self._ledger.drop(key)

    @property
    def prefix_statistics(self) -> PrefixStatistics:
        """Hits and misses of `take_prefix`, and checkpoints that had to go."""
        return PrefixStatistics(self._prefixes.hits, self._prefixes.misses, self._prefixes.evictions)

    # -- contents

    def move(self, moves: Sequence[SlotMove]) -> None:
        """Move contents between live slots, all at once; counts stay where they are.

        Raises:
            ContractError: a slot is not live, a destination comes twice, or a shift is outside the slot.
        """
        for move in moves:
            self._ledger.occupant(move.source)
            self._ledger.occupant(move.destination)
        self._copies.move(moves)

    def export(self, slots: Sequence[int]) -> SlotPackage:
        """Windows and token counts of live slots in one contiguous buffer on the pool's device.

        Raises:
            ContractError: a slot is not live.
        """
        occupants = [self._ledger.occupant(slot) for slot in slots]
        package = SlotPackage.empty([occupant.tokens for occupant in occupants], self.layers, self.device)
        # A slot without history is not read.
        windows = [(int(handle), accepted - 1) if tokens else None for handle, tokens, accepted in occupants]
        self._copies.pack(package, windows)
        return package

    def import_(self, package: SlotPackage) -> list[Slot] | None:
        """Take a slot for each entry of a package; all of them, or None and no change if there is no room.

        Raises:
            ContractError: the package's layers are not the pool's.
        """
        if package.layers != self.layers:
            raise ContractError(
                "package", got=f"layers {package.layers}", wanted=f"{self.layers}", remedy="cut or join it by parts"
            )
        if not self._ledger.room(len(package.tokens)):
            return None
        slots: list[Slot] = []
        try:
            # Noted one by one, so that none is lost.
            for tokens in package.tokens:
                slots.append(self._ledger.claim(tokens))  # noqa: PERF401
            self._copies.unpack(package, slots)
            return slots
        except BaseException:
            for slot in slots:
                self._ledger.unclaim(slot)
            raise
