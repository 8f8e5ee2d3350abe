"""Owns the prefix checkpoints: which key stands for which cached slot and token count, and which one goes first.

Plain integers and keys; no tensors. A checkpoint exists once its key is in the one table here, so it cannot be half
published. What is in use counts as recently used: eviction steps over it by moving it to the young end.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterator, Sequence
from operator import itemgetter
from typing import NamedTuple, TypeAlias

from serving_conv.errors import ContractError

__all__ = ["Checkpoint", "PrefixIndex", "PrefixKey", "PrefixStatistics"]

PrefixKey: TypeAlias = Hashable
"""Names a prefix of tokens; in engines the digest of the chained block hashes."""

_NO_KEY = object()


class Checkpoint(NamedTuple):
    """A cached slot whose window, at position 0, follows exactly `tokens` tokens."""

    slot: int
    tokens: int


class PrefixStatistics(NamedTuple):
    """Totals since the pool was built; an operation that was interrupted may have counted."""

    hits: int
    misses: int
    evictions: int


class PrefixIndex:
    """Published checkpoints by key, least recently used first, with pin counts."""

    def __init__(self) -> None:
        # OrderedDict, not dict: the oldest entry is found in constant time after any number of removals.
        self._entries: OrderedDict[PrefixKey, Checkpoint] = OrderedDict()
        self._holds: dict[PrefixKey, int] = {}
        self.hits = self.misses = self.evictions = 0

    def __len__(self) -> int:
        return len(self._entries)

    def __getitem__(self, key: PrefixKey) -> Checkpoint:
        found = self._entries.get(key)
        if found is None:
            raise ContractError("key", got=repr(key), wanted="a published key", remedy="it may have been evicted")
        return found

    def slots(self) -> Iterator[int]:
        """The cached slots."""
        return (checkpoint.slot for checkpoint in self._entries.values())

    def find(self, key: PrefixKey, tokens: int) -> bool:
        """Whether the key is published; if so it becomes the most recently used.

        Raises:
            ContractError: it is published for another number of tokens.
        """
        found = self._entries.get(key)
        if found is None:
            return False
        if found.tokens != tokens:
            raise ContractError(
                "tokens",
                got=f"{tokens} for key {key!r}",
                wanted=f"{found.tokens}, with which the key is published",
                remedy="count tokens, not blocks, and derive the key from all of them",
            )
        self._entries.move_to_end(key)
        return True

    def longest(self, keys: Sequence[tuple[PrefixKey, int]]) -> tuple[PrefixKey, int] | None:
        """The published `(key, tokens)` with the most tokens; it becomes the most recently used."""
        published = [pair for pair in keys if pair[0] in self._entries]
        longest = max(published, key=itemgetter(1), default=None)
        return longest if longest and self.find(*longest) else None

    def insert(self, key: PrefixKey, slot: int, tokens: int) -> bool:
        """Publish: the slot becomes cached, in one step."""
        return self._entries.setdefault(key, Checkpoint(slot, tokens)).slot == slot

    def hold(self, key: PrefixKey) -> None:
        """Pin the checkpoint once more; while pinned it is not evicted."""
        self[key]  # raises if it is not published
        self._holds[key] = self._holds.get(key, 0) + 1

    def release(self, key: PrefixKey) -> None:
        """Undo one `hold`.

        Raises:
            ContractError: the key is not held.
        """
        holds = self._holds.get(key, 0)
        if not holds:
            raise ContractError("key", got=repr(key), wanted="a held key", remedy="release once for each hold")
        self._entries.move_to_end(key)
        if holds > 1:
            self._holds[key] = holds - 1
        else:
            del self._holds[key]

    def evictable(self, keep: PrefixKey = _NO_KEY) -> int:
        """How many checkpoints could be evicted while `keep` stays.

        A `keep` that has just been found is the youngest, so that it is the last that `evict` would come to.
        """
        return len(self._entries) - len(self._holds) - (keep in self._entries and keep not in self._holds)

    def evict(self) -> int:
        """Forget the least recently used checkpoint that is not held, of which there must be one.

        Returns:
            The slot that is no longer cached.
        """
        key = next(iter(self._entries))
        while key in self._holds:
            self._entries.move_to_end(key)
            key = next(iter(self._entries))
        self.evictions += 1
        return self._entries.pop(key).slot

    def drop(self, key: PrefixKey) -> int:
        """Forget one checkpoint.

        Returns:
            The slot that is no longer cached.

        Raises:
            ContractError: the key is not published, or held.
        """
        self[key]  # raises if it is not published
        if key in self._holds:
            raise ContractError(
                "key", got=f"{key!r}, held {self._holds[key]} times", wanted="no holds", remedy="release it first"
            )
        return self._entries.pop(key).slot
