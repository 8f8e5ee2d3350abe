"""Times the pool's bookkeeping on the host, call by call, in a pool of many slots.

Bookkeeping is all that an operation does except copying windows: `fork`, `publish` and `take_prefix` run as they
are, but the function that copies a slot is replaced by an empty one. It is timed on its own, on the smallest layer
there is, so that its row and the operation's add up to a real call. The clock's own cost is part of every figure.
"""

from __future__ import annotations

import json
import os
import platform
import random
import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from typing import Annotated, Any
from unittest import mock

import torch
import typer
from rich.console import Console
from rich.table import Table

from serving_conv.pool import LayerState, StatePool
from serving_conv.pool.copies import TorchCopies

TARGET = 5.0  # microseconds at the median, for take, free and fork
BLOCKS, BLOCK_TOKENS = 64, 16  # block hashes of a prompt of 1,024 tokens


@dataclass(frozen=True)
class Row:
    """Microseconds of one operation.

    Attributes:
        operation: public name, or what was left out of the others.
        case: what makes it cheap or dear.
        median: of all calls.
        p99: 99th percentile.
        calls: how many were timed.
    """

    operation: str
    case: str
    median: float
    p99: float
    calls: int


def _time(operation: str, case: str, call: Callable[[Any], object], arguments: Iterable[object]) -> Row:
    clock, taken = time.perf_counter_ns, []
    for argument in arguments:
        begin = clock()
        call(argument)
        taken.append((clock() - begin) / 1000)
    return Row(operation, case, statistics.median(taken), statistics.quantiles(taken, n=100)[-1], len(taken))


def _time_slots(slots: int, calls: int) -> list[Row]:
    """Take, free and fork in a pool that is half live."""
    pool = StatePool(slots, [LayerState(1, 2)])
    live: list[Any] = [pool.take() for _ in range(slots // 2)]
    random.Random(0).shuffle(live)
    return [
        _time("take", "a slot is free", lambda _: live.append(pool.take()), range(calls)),
        _time("commit", "plain step", lambda slot: pool.commit(slot, 1), live[-calls:]),
        _time("free", "last taken first", pool.free, [live.pop() for _ in range(calls)]),
        _time("fork", "a slot is free", lambda slot: live.append(pool.fork(slot)), live[:calls]),
        _time("free", "random order", pool.free, live[:calls]),
    ]


def _time_prefixes(slots: int, calls: int) -> list[Row]:
    """Publish and take_prefix in a pool of checkpoints, first with free slots and then without."""
    pool = StatePool(slots, [LayerState(1, 2)])
    slot: Any = pool.take()
    pool.commit(slot, BLOCK_TOKENS)
    taken: list[Any] = []

    def publish(key: object) -> None:
        assert pool.publish(slot, key, BLOCK_TOKENS)

    def ask(keys: list[tuple[object, int]]) -> None:
        taken.append(pool.take_prefix(keys))

    rows = [_time("publish", "a slot is free", publish, range(calls))]
    for key in range(calls, slots - 2):
        publish(key)
    rows.append(_time("publish", "evicts", publish, range(slots, slots + calls)))
    short: list[tuple[object, int]] = [("first", BLOCK_TOKENS)]
    long = [*short, *((("missing", block), BLOCK_TOKENS * block) for block in range(2, BLOCKS + 1))]
    for case, keys in (("1 block", short), (f"the first of {BLOCKS} blocks", long)):
        publish("first")
        rows.append(_time("take_prefix", f"{case}, evicts", ask, [keys] * calls))
        while taken:
            pool.free(taken.pop()[0])
        for key in range(calls):  # fill up again, so that the next case evicts too
            publish((case, key))
    return rows


def _no_copy(*_: object, **__: object) -> None:
    """Stands in for the copy of a slot."""


def measure(slots: int, calls: int) -> list[Row]:
    """Time every operation `calls` times."""
    with mock.patch.object(TorchCopies, "copy", new=_no_copy):
        rows = _time_slots(slots, calls) + _time_prefixes(slots, calls)
    copies = TorchCopies(StatePool(slots, [LayerState(1, 2)]).states)
    pairs = [(source, slots - source) for source in range(1, min(calls, slots // 2 - 1) + 1)]
    return [*rows, _time("(slot copy)", "1 layer of 1 value", lambda pair: copies.copy(*pair), pairs)]


def main(
    slots: Annotated[int, typer.Option(min=1000, help="Slots of the pool.")] = 100_000,
    calls: Annotated[int, typer.Option(min=100, help="Calls of each operation.")] = 20_000,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Time the state pool's bookkeeping; exit code 1 if take, free or fork misses its target."""
    calls = min(calls, slots // 4)
    rows = measure(slots, calls)
    missed = [row for row in rows if row.operation in ("take", "free", "fork") and row.median >= TARGET]
    if as_json:
        machine = {"python": platform.python_version(), "torch": torch.__version__, "cores": os.cpu_count()}
        print(json.dumps({"slots": slots, **machine, "microseconds": [asdict(row) for row in rows]}, indent=1))
    else:
        table = Table(title=f"State pool bookkeeping, {slots:,} slots, {calls:,} calls each", title_justify="left")
        table.add_column("operation")
        table.add_column("case")
        table.add_column("median µs", justify="right")
        table.add_column("p99 µs", justify="right")
        for row in rows:
            style = "bold red" if row in missed else None
            table.add_row(row.operation, row.case, f"{row.median:.2f}", f"{row.p99:.2f}", style=style)
        Console().print(table)
    raise typer.Exit(bool(missed))


if __name__ == "__main__":
    typer.run(main)
