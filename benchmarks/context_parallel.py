"""Times a training step of a sequence cut over ranks against the convolution of the same shard alone.

The ranks are processes: under gloo all of them share one GPU, under NCCL each has its own. Both steps, forward and
backward, run on all ranks at the same time, so they share the GPU alike; what is left between them is the exchange.
The same two exchanges are timed alone as well, with nothing to hide behind: under gloo they pass through the host.
One JSON line for each shape, with the ratio; the exit code is 1 if a rank's results are wrong.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.distributed as dist
import torch.multiprocessing as processes
import typer
from rich.console import Console
from torch import Tensor

if __package__ in (None, ""):  # run as a file
    sys.path.append(str(Path(__file__).resolve().parents[1]))

from benchmarks import environment
from serving_conv import causal_conv1d, causal_conv1d_cp
from serving_conv.training.halo import Neighbours

SCHEMA = 1
SHAPES = ((2048, 8192), (8192, 8192), (32768, 8192), (8192, 2048))  # rows of a shard, channels


def _time(step: Callable[[], object], steps: int) -> float:
    """Microseconds a step, from a common start to the last rank's end."""
    for _ in range(3):
        step()
    torch.cuda.synchronize()
    dist.barrier()
    begun = time.perf_counter()
    for _ in range(steps):
        step()
    torch.cuda.synchronize()
    dist.barrier()
    return (time.perf_counter() - begun) / steps * 1e6


def _measure(rows: int, channels: int, steps: int, repetitions: int) -> dict[str, Any]:
    device = torch.empty(0, device="cuda").device
    torch.manual_seed(dist.get_rank())
    x, dout = (torch.randn(1, rows, channels, device=device, dtype=torch.bfloat16) for _ in range(2))
    torch.manual_seed(0)
    weight = torch.randn(channels, 4, device=device).bfloat16().requires_grad_()
    bias = torch.randn(channels, device=device).bfloat16().requires_grad_()
    x.requires_grad_()
    group = dist.group.WORLD
    if group is None:
        raise RuntimeError("no process group")

    def alone() -> tuple[Tensor, ...]:
        out = causal_conv1d(x, weight, bias, "silu")
        return torch.autograd.grad(out, (x, weight, bias), dout)

    def shared() -> tuple[Tensor, ...]:
        out = causal_conv1d_cp(x, weight, bias, "silu", group)
        return torch.autograd.grad(out, (x, weight, bias), dout)

    neighbours = Neighbours(group)
    halo = x.detach()[:, :3].contiguous()

    def exchange() -> None:
        for to_right in (True, False):
            sends, receives = neighbours.has_right, neighbours.has_left
            if not to_right:
                sends, receives = receives, sends
            send = neighbours.stage(halo) if sends else None
            receive = torch.empty_like(halo) if receives else None
            neighbours.wait(neighbours.start(send=send, to_right=to_right, receive=receive, device=device))

    # Between its first and last W-1 rows a shard has the gradient it has alone.
    right = torch.equal(alone()[0][:, 3:-3], shared()[0][:, 3:-3])
    times = [[_time(work, steps) for work in (alone, shared, exchange)] for _ in range(repetitions)]
    convolution, step, bare = (statistics.median(each) for each in zip(*times, strict=True))
    figures = {"convolution_us": convolution, "exchange_us": bare, "step_us": step, "ratio": step / convolution}
    return {**figures, "right": right}


def _rank(rank: int, size: int, backend: str, file: str, quick: bool, queue: Any) -> None:
    torch.cuda.set_device(rank if backend == "nccl" else 0)
    dist.init_process_group(
        backend, init_method=f"file://{file}", rank=rank, world_size=size, timeout=timedelta(seconds=120)
    )
    for rows, channels in SHAPES:
        found = _measure(rows, channels, 10 if quick else 30, 3 if quick else 7)
        if rank == 0:
            queue.put({"rows": rows, "channels": channels, **found})
        torch.cuda.empty_cache()
    if rank == 0:
        queue.put(None)
    dist.destroy_process_group()


def main(
    out: Annotated[Path, typer.Option(help="JSON lines go here; an existing file is replaced")],
    ranks: Annotated[int, typer.Option(help="processes")] = 2,
    backend: Annotated[str, typer.Option(help="gloo: all on one GPU; nccl: a GPU each")] = "gloo",
    quick: Annotated[bool, typer.Option(help="fewer steps and repetitions")] = False,
    commit: Annotated[str, typer.Option(help="recorded where the tree has no version control beside it")] = "",
) -> None:
    """Time the step with and without the exchange; write JSON lines."""
    console = Console(soft_wrap=True, highlight=False)
    if not torch.cuda.is_available():
        console.print("these figures need a CUDA device, and torch sees none")
        raise typer.Exit(2)
    if backend == "nccl" and torch.cuda.device_count() < ranks:
        console.print(f"nccl wants a GPU a rank: {torch.cuda.device_count()} here, {ranks} wanted")
        raise typer.Exit(2)
    around = environment.describe(commit or None)
    context = processes.get_context("spawn")
    queue = context.Queue()
    file = tempfile.mktemp(prefix="ranks-")
    started = [
        context.Process(target=_rank, args=(rank, ranks, backend, file, quick, queue), daemon=True)
        for rank in range(ranks)
    ]
    for process in started:
        process.start()
    wrong = False
    out.parent.mkdir(parents=True, exist_ok=True)
    with out.open("w") as lines:
        while (found := queue.get(timeout=300)) is not None:
            wrong |= not found["right"]
            record = {"what": "context parallel", "backend": backend, "ranks": ranks, **found, "environment": around}
            lines.write(json.dumps({"schema": SCHEMA, **record}) + "\n")
            console.print(
                f"{found['rows']} rows of {found['channels']} on each of {ranks} ranks ({backend}): convolution "
                f"{found['convolution_us']:.0f} us, exchange {found['exchange_us']:.0f} us, "
                f"step {found['step_us']:.0f} us, ratio {found['ratio']:.3f}"
                f"{'' if found['right'] else ', WRONG'}"
            )
    for process in started:
        process.join(30)
    if os.path.exists(file):
        os.unlink(file)
    raise typer.Exit(1 if wrong else 0)


if __name__ == "__main__":
    typer.run(main)
