"""Microseconds that one eager call costs the host: ours and vLLM's side by side, everything preallocated.

Batches of a few calls alternate between the two, and the device is idle before each batch, so that the launch
queue never blocks. vLLM's prefill allocates its output, as it always does; its metadata is built beforehand.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console

if __package__ in (None, ""):  # run as a file
    sys.path.append(str(Path(__file__).resolve().parents[1]))

from benchmarks import environment
from benchmarks.peers import Ours, Peer, PeerAbsent, Vllm
from benchmarks.rows import ROWS, make_work

__all__ = ["batches"]

DEFAULT_FOLDER = Path(__file__).resolve().parents[1] / "build" / "peers"
HOST_ROWS = ("decode 1", "decode 64", "speculative 64", "prefill 512", "prefill 256 short")
CALLS, BATCHES = 24, 60


def batches(
    methods: Mapping[str, Sequence[Callable[[], object]]],
    synchronize: Callable[[], None],
    calls: int = CALLS,
    count: int = BATCHES,
) -> dict[str, list[float]]:
    """Microseconds a call of each method, one figure a batch, batches of the methods in turn."""
    found: dict[str, list[float]] = {name: [] for name in methods}
    for batch in range(count + 5):
        for name, rotation in methods.items():
            batch_of_calls = [rotation[i % len(rotation)] for i in range(calls)]
            synchronize()
            begin = time.perf_counter_ns()
            for call in batch_of_calls:
                call()
            taken = (time.perf_counter_ns() - begin) / 1e3 / calls
            synchronize()
            if batch >= 5:  # the first ones warm caches up
                found[name].append(taken)
    return found


def main(
    out: Annotated[Path, typer.Option(help="JSON lines are added to this file")],
    folder: Annotated[Path, typer.Option(help="the peers' folder, made by fetch_peers.py")] = DEFAULT_FOLDER,
    commit: Annotated[str, typer.Option(help="recorded where the tree has no version control beside it")] = "",
) -> None:
    """Time eager calls on the host; add JSON lines."""
    console = Console(soft_wrap=True, highlight=False)
    if not torch.cuda.is_available():
        console.print("these figures need a CUDA device, and torch sees none")
        raise typer.Exit(2)
    around = environment.describe(commit or None)
    peers: list[Peer] = [Ours()]
    vllm = Vllm(dependent_launch=True)
    try:
        vllm.load(folder)
        peers.append(vllm)
    except PeerAbsent as reason:
        console.print(f"absent: vLLM: {reason}", markup=False)
    with out.open("a") as lines:
        for name in HOST_ROWS:
            row = next(row for row in ROWS if row.name == name)
            work = make_work(row, 4, "cuda")
            found = batches({peer.name: peer.calls(work) for peer in peers}, torch.cuda.synchronize)
            for method, times in found.items():
                record = host_line(name, method, times)
                lines.write(json.dumps(record | {"environment": around}) + "\n")
            console.print(
                f"{name}: " + ", ".join(f"{m} {statistics.median(t):.1f}" for m, t in found.items()), markup=False
            )


def host_line(row: str, method: str, times: Sequence[float]) -> dict[str, Any]:
    """One figure: the median batch, the lower and upper quartile."""
    low, middle, high = statistics.quantiles(times, n=4)
    return {
        "schema": 1,
        "what": "host",
        "row": row,
        "method": method,
        "us": middle,
        "quartiles": [low, high],
        "batches": len(times),
        "absent": None,
    }


if __name__ == "__main__":
    typer.run(main)
