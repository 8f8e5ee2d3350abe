"""Seconds of the first call of each kernel family in a new process, with an empty and with a filled disk cache.

Each process imports torch, makes a CUDA context and its tensors first; then it times the choice of the backend
(cuda-python is imported there) and, one after another, the first call of prefill, decode and speculative decoding,
until the device is done.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console

if __package__ in (None, ""):  # run as a file
    sys.path.append(str(Path(__file__).resolve().parents[1]))

from benchmarks import environment
from benchmarks.peers import Ours
from benchmarks.rows import ROWS, make_work

FAMILIES = {"prefill": "prefill 512", "decode": "decode 64", "speculative": "speculative 64"}


def time_first_calls() -> dict[str, float]:
    """Seconds by family, in this process; `backend` is what the first of them pays for all."""
    from serving_conv import backend_for

    works = [next(row for row in ROWS if row.name == name) for name in FAMILIES.values()]
    calls = [Ours().calls(make_work(row, 1, "cuda"))[0] for row in works]
    torch.cuda.synchronize()
    taken = {}
    begin = time.perf_counter()
    backend_for(torch.empty(0, device="cuda"))
    taken["backend"] = time.perf_counter() - begin
    for family, call in zip(FAMILIES, calls, strict=True):
        begin = time.perf_counter()
        call()
        torch.cuda.synchronize()
        taken[family] = time.perf_counter() - begin
    return taken


def first_use_lines(taken: dict[str, float], cache: str) -> list[dict[str, Any]]:
    """Lines of one process."""
    return [
        {
            "schema": 1,
            "what": "first use",
            "row": family,
            "method": "serving_conv",
            "cache": cache,
            "seconds": seconds,
            "absent": None,
        }
        for family, seconds in taken.items()
    ]


def main(
    out: Annotated[Path | None, typer.Option(help="JSON lines are added to this file")] = None,
    commit: Annotated[str, typer.Option(help="recorded where the tree has no version control beside it")] = "",
    inner: Annotated[bool, typer.Option(hidden=True)] = False,
) -> None:
    """Time the first use of each kernel family; add JSON lines."""
    console = Console(soft_wrap=True, highlight=False)
    if not torch.cuda.is_available():
        console.print("these figures need a CUDA device, and torch sees none")
        raise typer.Exit(2)
    if inner:
        print(json.dumps(time_first_calls()))
        return
    around = environment.describe(commit or None)
    records = []
    with tempfile.TemporaryDirectory() as cache:
        for state in ("cold", "warm"):
            # The driver keeps a cache of its own, which must not help the cold process.
            settings = {"SERVING_CONV_CACHE": cache, "CUDA_CACHE_DISABLE": "1"}
            result = subprocess.run(
                [sys.executable, __file__, "--inner"],
                env=os.environ | settings,
                capture_output=True,
                text=True,
                timeout=120,
            )
            if result.returncode != 0:
                console.print(result.stderr[-2000:], markup=False)
                raise typer.Exit(1)
            taken = json.loads(result.stdout.splitlines()[-1])
            records += first_use_lines(taken, state)
            console.print(
                f"{state} cache: " + ", ".join(f"{name} {seconds:.3f} s" for name, seconds in taken.items()),
                markup=False,
            )
    if out is not None:
        with out.open("a") as lines:
            for record in records:
                lines.write(json.dumps(record | {"environment": around}) + "\n")


if __name__ == "__main__":
    typer.run(main)
