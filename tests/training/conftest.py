"""Owns the groups of processes that the context-parallel tests share: one of each size, started once."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from support.ranks import Ranks


@pytest.fixture(scope="session")
def ranks() -> Iterator[Callable[[int], Ranks]]:
    """A group of so many gloo processes; the same one for every test."""
    known: dict[int, Ranks] = {}

    def group(size: int) -> Ranks:
        if size not in known:
            known[size] = Ranks(size)
        return known[size]

    yield group
    for each in known.values():
        each.close()
