"""Owns the life of the slots: which are free, live, cached or reserved, and the history counts of the live ones.

Plain integers; no tensors. A slot is live while the table of occupants lists it, cached while a prefix checkpoint
names it, and free otherwise, so the counts add up by construction. Every operation prepares on a slot that is still
free and ends on one line that changes one table: an exception anywhere leaves everything as it was. The list of
free slots is only a shortcut; an exception at a bad moment can make it forget a slot, and `room` then rebuilds it.
"""

from __future__ import annotations

from typing import NamedTuple

from serving_conv.errors import ContractError
from serving_conv.pool.prefix import PrefixIndex, PrefixKey

__all__ = ["RESERVED_SLOT", "Ledger", "Occupant", "Slot", "SlotCounts"]

RESERVED_SLOT = 0


class Slot(int):
    """A slot number that remembers which take it came from, so that a stale one is told from its successor.

    Attributes:
        generation: number of the take, unique within a pool.
    """

    generation: int

    def __new__(cls, number: int, generation: int) -> Slot:
        """Make the handle; the pool does, callers do not."""
        slot = int.__new__(cls, number)
        slot.generation = generation
        return slot

    def __getnewargs__(self) -> tuple[int, int]:  # type: ignore[override]
        """Let copies and pickles keep the generation."""
        return int(self), self.generation

    def __repr__(self) -> str:
        return f"Slot({int(self)}, generation={self.generation})"

    __str__ = int.__repr__


class SlotCounts(NamedTuple):
    """Slots in each state; the sum is the number of slots of the pool."""

    free: int
    live: int
    cached: int
    reserved: int


class Occupant(NamedTuple):
    """What a live slot holds: `tokens` of history, and the window at position `accepted - 1`."""

    handle: Slot
    tokens: int
    accepted: int


class Ledger:
    """The slots of one pool, of which slot 0 is reserved.

    Args:
        slots: number of slots, at least 2.
        prefixes: the checkpoints, which own the cached slots.

    Raises:
        ContractError: fewer than 2 slots.
    """

    def __init__(self, slots: int, prefixes: PrefixIndex) -> None:
        if slots < 2:
            raise ContractError("slots", got=slots, wanted="2 or more", remedy="one of them is reserved")
        self.slots = slots
        self._prefixes = prefixes
        self._live: dict[int, Occupant] = {}
        self._free = list(range(slots - 1, RESERVED_SLOT, -1))  # popped from the end: low numbers first
        self._takes = 0
        self._peak = 0

    def counts(self) -> SlotCounts:
        """Slots in each state."""
        live, cached = len(self._live), len(self._prefixes)
        return SlotCounts(self.slots - 1 - live - cached, live, cached, 1)

    @property
    def high_water(self) -> int:
        """Most slots ever live at once."""
        return max(self._peak, len(self._live))

    @property
    def vacant(self) -> int:
        """The free slot that the next `claim` or `publish` makes use of; `room` must have said yes."""
        return self._free[-1]

    def occupant(self, slot: int) -> Occupant:
        """What a live slot holds.

        Raises:
            ContractError: the slot is not live, or the handle is stale.
        """
        found = self._live.get(slot)
        if found is None or (isinstance(slot, Slot) and slot.generation != found.handle.generation):
            raise ContractError(
                "slot",
                got=f"slot {int(slot)}, {self._state_of(slot)}",
                wanted="a live slot",
                remedy="free a slot once, and never use it afterwards",
            )
        return found

    def _state_of(self, slot: int) -> str:
        if slot in self._live:
            return "freed and taken again since"
        if slot == RESERVED_SLOT:
            return "reserved"
        if not 0 < slot < self.slots:
            return f"outside the pool of {self.slots}"
        return "cached" if slot in self._prefixes.slots() else "free"

    def room(self, wanted: int = 1, *keep: PrefixKey) -> bool:
        """Have `wanted` slots free, or change nothing and say no.

        Evicts checkpoints if it must, but not `keep`, which must just have been found.
        """
        if len(self._free) >= wanted:
            return True
        free = self.counts().free
        if free + self._prefixes.evictable(*keep) < wanted:
            return False
        if len(self._free) < free:
            used = {RESERVED_SLOT, *self._live, *self._prefixes.slots()}
            self._free = [slot for slot in range(self.slots - 1, 0, -1) if slot not in used]
        while len(self._free) < wanted:
            self._free.append(self._prefixes.evict())
        return True

    def claim(self, tokens: int = 0, accepted: int = 1) -> Slot:
        """Make the vacant slot live. `room` must have said yes."""
        self._takes += 1
        occupant = Occupant(Slot(self._free[-1], self._takes), tokens, accepted)
        # One line changes the table and returns: a slot that became live always reaches its taker.
        return self._live.setdefault(self._free.pop(), occupant).handle

    def publish(self, key: PrefixKey, tokens: int) -> bool:
        """Make the vacant slot cached. `room` must have said yes."""
        return self._prefixes.insert(key, self._free.pop(), tokens)

    def record(self, slot: int, tokens: int, accepted: int) -> None:
        """Set the history counts of a live slot."""
        self._live[slot] = Occupant(self.occupant(slot).handle, tokens, accepted)

    def free(self, slot: int) -> None:
        """Make a live slot free."""
        self.occupant(slot)
        self._peak = self.high_water
        self.unclaim(slot)

    def unclaim(self, slot: int) -> None:
        """Undo a claim whose slot nobody has been given."""
        self._free.append(int(self._live.pop(slot).handle))

    def drop(self, key: PrefixKey) -> None:
        """Make a checkpoint's slot free."""
        self._free.append(self._prefixes.drop(key))

    def replace(self, slot: int, savepoint: int) -> None:
        """Give the savepoint's history counts to the slot and free the savepoint, both or neither."""
        before, saved = self.occupant(slot), self.occupant(savepoint)
        try:
            self.record(slot, saved.tokens, saved.accepted)
            self.free(savepoint)
        except BaseException:
            self._live[slot] = before
            raise
