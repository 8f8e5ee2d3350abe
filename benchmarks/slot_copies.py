"""Times the pool's copies of all layers on a GPU: the one launch beside torch's copy a layer.

`device` is a copy in a captured graph of many, `host` an eager call while the device is idle. torch's moves cannot
be captured, for they wait.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.table import Table

if __package__ in (None, ""):  # run as a file
    sys.path.append(str(Path(__file__).resolve().parents[1]))

from serving_conv.pool import LayerState, PoolLayout, SlotMove, SlotPackage, StatePool
from serving_conv.pool.copies import SlotCopies, TorchCopies, copies_of

COPIES, REPEATS = 20, 30
REPEATS_OF_TORCH = 3  # whose copies of 48 layers are thousands of launches


@dataclass(frozen=True)
class Row:
    """Medians of one operation.

    Attributes:
        operation: what is copied.
        layout: of the pool.
        method: kernel or torch.
        host: microseconds of an eager call.
        device: microseconds of a copy in a graph, or None.
        megabytes: read and written.
    """

    operation: str
    layout: str
    method: str
    host: float
    device: float | None
    megabytes: float


def _host(call: Callable[[int], object], repeats: int) -> float:
    times = []
    for _ in range(repeats):
        torch.cuda.synchronize()
        begin = time.perf_counter_ns()
        for turn in range(COPIES):
            call(turn)
        times.append((time.perf_counter_ns() - begin) / 1e3 / COPIES)
    return statistics.median(times)


def _device(call: Callable[[int], object], repeats: int) -> float:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for turn in range(COPIES):
            call(turn)
    times: list[float] = []
    for _ in range(repeats):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(float(begin.elapsed_time(end)) * 1e3 / COPIES)
    return statistics.median(times)


def measure(layers: int, channels: int, layout: PoolLayout) -> list[Row]:
    """Every operation both ways; the turns of a graph use different slots, past what L2 holds."""
    states = [LayerState(channels, 4, torch.bfloat16)] * layers
    pool = StatePool(2 * 16 * COPIES + 1, states, draft_tokens=2, layout=layout, device="cuda")
    megabytes = pool.nbytes / pool.slots / 1e6
    window = 3 / pool.positions
    package = SlotPackage.zeros([1] * 16, pool.layers, "cuda")

    def slots(turn: int) -> range:
        return range(1 + 32 * turn, 33 + 32 * turn)

    def fork(copies: SlotCopies, turn: int) -> None:
        copies.copy(*slots(turn)[:2])

    def checkpoint(copies: SlotCopies, turn: int) -> None:
        copies.copy(slots(turn)[0], slots(turn)[1], shift=1)

    def swap(copies: SlotCopies, turn: int) -> None:
        first, second = slots(turn)[:2]
        copies.move([SlotMove(first, second), SlotMove(second, first)])

    def export(copies: SlotCopies, turn: int) -> None:
        copies.pack(package, [(slot, 0) for slot in slots(turn)[:16]])

    def import_(copies: SlotCopies, turn: int) -> None:
        copies.unpack(package, slots(turn)[:16])

    operations: dict[str, tuple[Callable[[SlotCopies, int], None], float]] = {
        "fork": (fork, 2),
        "checkpoint, shifted": (checkpoint, 2 * (pool.positions - 1) / pool.positions),
        "swap": (swap, 4),
        "export 16": (export, 32 * window),
        "import 16": (import_, 32 * window),
    }
    methods: dict[str, SlotCopies] = {"kernel": copies_of(pool.states, pool.layers), "torch": TorchCopies(pool.states)}
    rows = []
    for (method, copies), (operation, (call, slots_moved)) in product(methods.items(), operations.items()):
        turn_of = partial(call, copies)
        turn_of(0)
        waits = method == "torch" and operation == "swap"
        repeats = REPEATS_OF_TORCH if method == "torch" else REPEATS
        device = None if waits else _device(turn_of, repeats)
        rows.append(Row(operation, layout, method, _host(turn_of, repeats), device, slots_moved * megabytes))
    return rows


def main(
    layers: Annotated[int, typer.Option(min=1, help="Layers of the pool.")] = 48,
    channels: Annotated[int, typer.Option(min=1, help="Channels of a layer.")] = 8192,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Time the pool's copies on a GPU."""
    console = Console(soft_wrap=True, highlight=False)
    if not torch.cuda.is_available():
        console.print("these figures need a CUDA device, and torch sees none")
        raise typer.Exit(2)
    rows = [*measure(layers, channels, "channels"), *measure(layers, channels, "positions")]
    if as_json:
        print(json.dumps([asdict(row) for row in rows]))
        return
    table = Table("operation", "layout", "method", "host us", "device us", "GB/s")
    for row in rows:
        device = "-" if row.device is None else f"{row.device:.1f}"
        speed = "-" if row.device is None else f"{row.megabytes / row.device * 1e3:.0f}"
        table.add_row(row.operation, row.layout, row.method, f"{row.host:.1f}", device, speed)
    console.print(table)


if __name__ == "__main__":
    typer.run(main)
