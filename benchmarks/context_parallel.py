"""A sequence cut over ranks: its results against one device's, and its time against the same shard's alone.

    python benchmarks/context_parallel.py --out cp.jsonl                   # gloo: all ranks share one GPU
    python benchmarks/context_parallel.py --out cp.jsonl --backend nccl    # a GPU each
    python benchmarks/context_parallel.py --out cp.jsonl --device cpu      # parity alone

Parity: every rank also runs the whole sequence on its own device. Times: both steps, forward and backward, run on all
ranks at the same time, so they share a GPU alike; what is left between them is the exchange. The same two exchanges
are timed alone as well, with nothing to hide behind: under gloo they pass through the host. A JSON line for each case
and shape; the exit code is 1 if a result is wrong.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from itertools import product
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
WIDTH = 4
SHAPES = ((8192, 8192), (65536, 8192), (2048, 8192), (8192, 2048))  # rows of a shard, channels
_SECONDS_OF_START = 300

_ORDER = 2e-6  # relative norm error of fp32 sums in another order
_ROUNDING = {torch.float32: 0.0, torch.bfloat16: 2.0**-9}


@dataclass(frozen=True)
class Case:
    """A sequence whose shards must give what the whole gives.

    Attributes:
        name: as lines spell it; the four are those that Megatron-Core tests.
        batches: of the sequence; packed ones have one.
        documents: sizes in shards, as packed; None: unpacked.
    """

    name: str
    batches: int = 1
    documents: tuple[float, ...] | None = None


CASES = (
    Case("BSHD, one batch"),
    Case("BSHD, two batches", batches=2),
    Case("THD, cut at the rank edge", documents=(0.5, 0.5, 1.0)),
    Case("THD, cut inside a rank", documents=(0.25, 1.25, 0.5)),
)


def _documents(case: Case, rows: int, ranks: int, device: torch.device) -> Tensor | None:
    """int32 `[1, ranks * rows]`: each token's document. Two ranks' pattern, and the rest of the ranks' in one."""
    if case.documents is None:
        return None
    sizes = [int(part * rows) for part in case.documents]
    sizes.append(ranks * rows - sum(sizes))
    return torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes)).int()[None].to(device)


def _relative(got: Tensor, wanted: Tensor) -> float:
    wide = wanted.double()
    return float((got.double() - wide).norm() / wide.norm())


def _parity(device: torch.device, group: dist.ProcessGroup, rows: int, channels: int) -> Iterator[dict[str, Any]]:
    """Errors of output and gradients, the largest over the ranks, for each case, type and reduction."""
    rank, ranks = group.rank(), group.size()
    for case, dtype, deterministic in product(CASES, _ROUNDING, (False, True)):
        os.environ["CAUSAL_CONV1D_DETERMINISTIC"] = str(int(deterministic))
        generator = torch.Generator().manual_seed(7)

        def normal(*shape: int, generator: torch.Generator = generator, dtype: torch.dtype = dtype) -> Tensor:
            return torch.randn(shape, generator=generator).to(device, dtype)

        x, dout = normal(case.batches, ranks * rows, channels), normal(case.batches, ranks * rows, channels)
        weight, bias = normal(channels, WIDTH), normal(channels)
        documents = _documents(case, rows, ranks, device)
        shard = slice(rank * rows, (rank + 1) * rows)

        def leaves(x: Tensor, weight: Tensor = weight, bias: Tensor = bias) -> list[Tensor]:
            return [tensor.clone().requires_grad_() for tensor in (x, weight, bias)]

        inputs = leaves(x)
        wanted_out = causal_conv1d(inputs[0], inputs[1], inputs[2], "silu", seq_idx=documents)
        wanted = torch.autograd.grad(wanted_out, inputs, dout)
        inputs = leaves(x[:, shard])
        out = causal_conv1d_cp(inputs[0], inputs[1], inputs[2], "silu", group, documents)
        dx, *parameters = torch.autograd.grad(out, inputs, dout[:, shard])
        errors = {
            "out": _relative(out.detach(), wanted_out.detach()[:, shard]),
            "dx": _relative(dx, wanted[0][:, shard]),
        }
        # The gradient that crosses an edge is added in another order; then dx is rounded once, as on one device.
        bounds = {"out": 0.0, "dx": _ORDER + 2 * _ROUNDING[dtype]}
        for name, part, whole in zip(("dweight", "dbias"), parameters, wanted[1:], strict=True):
            total, size = part.float(), part.double().norm()
            dist.all_reduce(total, group=group)
            dist.all_reduce(size, group=group)
            errors[name] = _relative(total, whole)
            # Each rank rounds its part to the parameter's type, and one device the whole.
            bounds[name] = _ORDER + _ROUNDING[dtype] * float(1 + size / whole.double().norm())
        largest = torch.tensor(list(errors.values()), device=device)
        dist.all_reduce(largest, dist.ReduceOp.MAX, group)
        errors = dict(zip(errors, largest.tolist(), strict=True))
        right = all(errors[name] <= bounds[name] for name in errors)
        yield {
            "what": "context parallel parity",
            "case": case.name,
            "dtype": str(dtype).removeprefix("torch."),
            "deterministic": deterministic,
            "rows": rows,
            "channels": channels,
            "errors": errors,
            "bounds": bounds,
            "right": right,
        }
    os.environ.pop("CAUSAL_CONV1D_DETERMINISTIC")


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


def _times(
    device: torch.device, group: dist.ProcessGroup, rows: int, channels: int, steps: int, repetitions: int
) -> dict[str, Any]:
    torch.manual_seed(dist.get_rank())
    x, dout = (torch.randn(1, rows, channels, device=device, dtype=torch.bfloat16) for _ in range(2))
    torch.manual_seed(0)
    weight = torch.randn(channels, WIDTH, device=device).bfloat16().requires_grad_()
    bias = torch.randn(channels, device=device).bfloat16().requires_grad_()
    x.requires_grad_()
    edge = WIDTH - 1

    def alone() -> tuple[Tensor, ...]:
        out = causal_conv1d(x, weight, bias, "silu")
        return torch.autograd.grad(out, (x, weight, bias), dout)

    def shared() -> tuple[Tensor, ...]:
        out = causal_conv1d_cp(x, weight, bias, "silu", group)
        return torch.autograd.grad(out, (x, weight, bias), dout)

    neighbours = Neighbours(group)
    halo = x.detach()[:, :edge].contiguous()

    def exchange() -> None:
        for to_right in (True, False):
            sends, receives = neighbours.has_right, neighbours.has_left
            if not to_right:
                sends, receives = receives, sends
            send = neighbours.stage(halo) if sends else None
            receive = torch.empty_like(halo) if receives else None
            neighbours.wait(neighbours.start(send=send, to_right=to_right, receive=receive, device=device))

    # Between its first and last W-1 rows a shard has the gradient it has alone.
    right = torch.equal(alone()[0][:, edge:-edge], shared()[0][:, edge:-edge])
    times = [[_time(work, steps) for work in (alone, shared, exchange)] for _ in range(repetitions)]
    convolution, step, bare = (statistics.median(each) for each in zip(*times, strict=True))
    return {
        "what": "context parallel",
        "rows": rows,
        "channels": channels,
        "convolution_us": convolution,
        "exchange_us": bare,
        "step_us": step,
        "ratio": step / convolution,
        "right": right,
    }


def _rank(rank: int, size: int, backend: str, device: str, file: str, quick: bool, queue: Any) -> None:
    on = torch.device(device, rank if backend == "nccl" else 0) if device == "cuda" else torch.device("cpu")
    if device == "cuda":
        torch.cuda.set_device(on)
    dist.init_process_group(
        backend, init_method=f"file://{file}", rank=rank, world_size=size, timeout=timedelta(seconds=120)
    )
    group = dist.group.WORLD
    if group is None:
        raise RuntimeError("no process group")

    def tell(found: dict[str, Any]) -> None:
        if rank == 0:
            queue.put(found)

    for found in _parity(on, group, *((1024, 512) if device == "cuda" else (32, 16))):
        tell(found)
    for rows, channels in SHAPES if device == "cuda" else ():
        tell(_times(on, group, rows, channels, 10 if quick else 30, 3 if quick else 7))
        torch.cuda.empty_cache()
    if rank == 0:
        queue.put(None)
    dist.destroy_process_group()


def _sentence(found: dict[str, Any]) -> str:
    if found["what"] == "context parallel":
        text = (
            f"{found['rows']} rows of {found['channels']} on each rank: convolution {found['convolution_us']:.0f} us, "
            f"exchange {found['exchange_us']:.0f} us, step {found['step_us']:.0f} us, ratio {found['ratio']:.3f}"
        )
    else:
        errors = ", ".join(f"{name} {error:.1e}" for name, error in found["errors"].items())
        ordered = "ordered" if found["deterministic"] else "fast"
        text = f"{found['case']}, {found['dtype']}, {ordered} sums: {errors}"
    return text if found["right"] else f"{text}, WRONG"


def main(
    out: Annotated[Path, typer.Option(help="JSON lines go here; an existing file is replaced")],
    ranks: Annotated[int, typer.Option(min=2, help="processes")] = 2,
    backend: Annotated[str, typer.Option(help="gloo: all on one device; nccl: a GPU each")] = "gloo",
    device: Annotated[str, typer.Option(help="cuda, or cpu for parity alone")] = "cuda",
    quick: Annotated[bool, typer.Option(help="fewer steps and repetitions")] = False,
    commit: Annotated[str, typer.Option(help="recorded where the tree has no version control beside it")] = "",
) -> None:
    """Compare and time; write JSON lines."""
    console = Console(soft_wrap=True, highlight=False)
    if device == "cuda" and not torch.cuda.is_available():
        console.print("these figures need a CUDA device, and torch sees none")
        raise typer.Exit(2)
    if backend == "nccl" and torch.cuda.device_count() < ranks:
        console.print(f"nccl wants a GPU a rank: {torch.cuda.device_count()} here, {ranks} wanted")
        raise typer.Exit(2)
    around = environment.describe(commit or None)
    context = processes.get_context("spawn")
    queue = context.Queue()
    wrong = False
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
        file = str(Path(folder) / "rendezvous")
        started = [
            context.Process(target=_rank, args=(rank, ranks, backend, device, file, quick, queue), daemon=True)
            for rank in range(ranks)
        ]
        for process in started:
            process.start()
        with out.open("w") as lines:
            while (found := queue.get(timeout=_SECONDS_OF_START)) is not None:
                wrong |= not found["right"]
                record = {"schema": SCHEMA, **found, "backend": backend, "ranks": ranks, "environment": around}
                lines.write(json.dumps(record) + "\n")
                console.print(_sentence(found), markup=False)
        for process in started:
            process.join(30)
    raise typer.Exit(1 if wrong else 0)


if __name__ == "__main__":
    typer.run(main)
