"""Steps of 48 conv layers, captured and eager: ours in one launch a layer, vLLM's kernels as its mixers call them.

vLLM's Mamba2 mixer splits a mixed step into decode rows and prompt rows, hands the latter over transposed, and calls
its two kernels. Every layer has weights, inputs, outputs and a pool of its own. Our result of a layer is held against
the float64 reference, the pool bit for bit, and vLLM's against ours, in the same run; nothing else is timed.
"""

from __future__ import annotations

import gc
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from rich.console import Console
from torch import Tensor

if __package__ in (None, ""):  # run as a file
    sys.path.append(str(Path(__file__).resolve().parents[1]))

from benchmarks import environment
from benchmarks.gate import MOST_NORM, WRONG, relative_error
from benchmarks.host import batches
from benchmarks.peers import PeerAbsent, Vllm
from benchmarks.rows import WIDTH, Row
from serving_conv import (
    Checkpoint,
    StepMetadata,
    causal_conv1d_step,
    causal_conv1d_update,
    clear_device_fault,
    device_fault,
    reference,
)

__all__ = ["STEPS", "Step"]

DEFAULT_FOLDER = Path(__file__).resolve().parents[1] / "build" / "peers"
LAYERS, CHANNELS, DRAFTS = 48, 8192, 3
REPETITIONS, SECONDS = 7, 0.05
FILLED = 1000  # sequences of the metadata row


@dataclass(frozen=True)
class Step:
    """One step of an engine.

    Attributes:
        name: as tables spell it.
        decode: sequences that generate.
        tokens: rows of each of them: 1, or 1 + drafts.
        chunks: rows of each prompt chunk.
        checkpoints: token counts of the first chunk after which its window is kept elsewhere.
    """

    name: str
    decode: int = 0
    tokens: int = 1
    chunks: tuple[int, ...] = ()
    checkpoints: tuple[int, ...] = ()

    @property
    def lengths(self) -> list[int]:
        """Rows of each sequence, those that generate first, as vLLM orders a batch."""
        return [self.tokens] * self.decode + list(self.chunks)

    @property
    def speculative(self) -> bool:
        """Whether the generating sequences verify drafts."""
        return self.tokens > 1


STEPS = (
    *(Step(f"decode {n}", decode=n) for n in (1, 8, 64, 256)),
    *(Step(f"speculative {n}", decode=n, tokens=1 + DRAFTS) for n in (1, 8, 64, 256)),
    Step("mixed 2048 + 64", decode=64, chunks=(2048,)),
    Step("mixed 4096 + 200", decode=200, chunks=(4096,)),
    Step("prefill 8192", chunks=(8192,)),
    Step("prefill 8192, 8 checkpoints", chunks=(8192,), checkpoints=tuple(range(1024, 8193, 1024))),
)


class Work:
    """The tensors of a step, for all layers."""

    def __init__(self, step: Step) -> None:
        self.step = step
        generator = torch.Generator("cuda").manual_seed(1)

        def normal(*shape: int) -> Tensor:
            return torch.empty(shape, dtype=torch.bfloat16, device="cuda").normal_(generator=generator)

        lengths = step.lengths
        rows, sequences = sum(lengths), len(lengths)
        positions = WIDTH - 1 + (DRAFTS if step.speculative else 0)
        slots = sequences + len(step.checkpoints) + 1
        self.x = [normal(rows, CHANNELS) for _ in range(LAYERS)]
        self.out = [torch.empty_like(x) for x in self.x]
        self.weight = [normal(CHANNELS, WIDTH) for _ in range(LAYERS)]
        self.bias = [normal(CHANNELS) for _ in range(LAYERS)]
        self.states = [normal(slots, positions, CHANNELS).transpose(1, 2) for _ in range(LAYERS)]
        metadata = StepMetadata(sequences, "cuda", pad_slot_id=0, max_checkpoints=len(step.checkpoints))
        order = torch.randperm(sequences, generator=torch.Generator().manual_seed(2)) + 1
        accepted = [1 + i % step.tokens for i in range(step.decode)] + [1] * len(step.chunks)
        self.arguments = metadata.fill(
            lengths,
            order.tolist(),
            [True] * sequences,
            accepted,
            checkpoints=[Checkpoint(step.decode, t, sequences + 1 + i) for i, t in enumerate(step.checkpoints)],
        )


Layer = Callable[[int], Tensor]


def ours(work: Work) -> Layer:
    """One layer: the update for a step of generating sequences alone, else the whole step at once."""
    step, arguments = work.step, work.arguments
    if step.chunks:
        keywords = arguments.keywords()
        return lambda i: causal_conv1d_step(
            work.x[i],
            work.weight[i],
            work.states[i],
            **keywords,  # type: ignore[arg-type]
            bias=work.bias[i],
            out=work.out[i],
            pad_slot_id=0,
        )
    return lambda i: causal_conv1d_update(
        work.x[i],
        work.weight[i],
        work.states[i],
        arguments.slots,
        cu_seqlens=arguments.cu_seqlens if step.speculative else None,
        num_accepted_tokens=arguments.num_accepted_tokens if step.speculative else None,
        bias=work.bias[i],
        out=work.out[i],
        pad_slot_id=0,
    )


def vllm_layer(vllm: Vllm, work: Work) -> Layer:
    """One layer as vLLM's mixer runs it."""
    file, step, arguments = vllm.file, work.step, work.arguments
    decode = step.decode
    slots = arguments.slots
    prompt_slots = slots[decode:].clone()
    flags = torch.ones(len(step.chunks), dtype=torch.bool, device="cuda")
    offsets = torch.tensor([0, *accumulate(step.chunks)], dtype=torch.int32, device="cuda")
    metadata = vllm.metadata(Row("chunks", "prefill", step.chunks), slots.device) if step.chunks else None
    speculative: dict[str, Any] = {}
    if step.speculative:
        speculative = {
            "num_accepted_tokens": arguments.num_accepted_tokens[:decode],
            "query_start_loc": arguments.cu_seqlens[: decode + 1],
            "max_query_len": step.tokens,
        }

    def layer(i: int) -> Tensor:
        decoded, prompt = torch.split(work.x[i], [decode * step.tokens, sum(step.chunks)])
        result = work.out[i]
        if step.chunks:
            result = file.causal_conv1d_fn(
                prompt.transpose(0, 1),
                work.weight[i],
                work.bias[i],
                work.states[i],
                offsets,
                cache_indices=prompt_slots,
                has_initial_state=flags,
                activation="silu",
                metadata=metadata,
            ).transpose(0, 1)
        if decode:
            file.causal_conv1d_update(
                decoded,
                work.states[i],
                work.weight[i],
                work.bias[i],
                "silu",
                conv_state_indices=slots[:decode],
                out=work.out[i][: len(decoded)],
                **speculative,
            )
        return result

    return layer


def gate(work: Work) -> dict[str, Any]:
    """Our first layer against the float64 reference."""
    step, arguments = work.step, work.arguments
    before = work.states[0].clone(memory_format=torch.preserve_format)
    state = before.clone(memory_format=torch.preserve_format)
    keywords = arguments.keywords()
    named = [keywords[name] for name in ("checkpoint_offsets", "checkpoint_tokens", "checkpoint_slots")]
    result = reference.causal_conv1d(
        work.x[0],
        work.weight[0],
        state,
        arguments.cu_seqlens,
        arguments.slots,
        bias=work.bias[0],
        activation="silu",
        has_initial_state=True,
        num_accepted_tokens=arguments.num_accepted_tokens,
        speculative=step.speculative,
        pad_slot_id=0,
        checkpoints=(named[0], named[1], named[2]) if step.checkpoints else None,  # type: ignore[arg-type]
        arithmetic=reference.Arithmetic.FLOAT64,
    )
    clear_device_fault("cuda")
    work.out[0].fill_(float("nan"))
    ours(work)(0)
    found: dict[str, Any] = {
        "norm": relative_error(work.out[0], result.values),
        "state_equal": torch.equal(work.states[0], state),
        "fault": int(device_fault("cuda")),
    }
    work.states[0].copy_(before)
    return found | {"passed": found["norm"] < MOST_NORM and found["state_equal"] and found["fault"] == 0}


def agrees(layer: Layer, work: Work) -> float:
    """Relative error of a peer's first layer against ours: its result may lie in two places."""
    before = work.states[0].clone(memory_format=torch.preserve_format)
    ours(work)(0)
    wanted = work.out[0].clone()
    work.states[0].copy_(before)
    work.out[0].fill_(float("nan"))
    prompt = layer(0)
    got = work.out[0].clone()
    if work.step.chunks:
        got[work.step.decode * work.step.tokens :] = prompt
    work.states[0].copy_(before)
    return relative_error(got, wanted.double())


def measure(layer: Layer) -> dict[str, float]:
    """Microseconds of a step, captured and eager; what the graph costs."""

    def step() -> None:
        for i in range(LAYERS):
            layer(i)

    step()
    torch.cuda.synchronize()
    gc.collect()
    torch.cuda.empty_cache()
    free, begin = torch.cuda.mem_get_info()[0], time.perf_counter()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    graph.replay()
    torch.cuda.synchronize()
    found = {"capture_s": time.perf_counter() - begin, "graph_bytes": float(free - torch.cuda.mem_get_info()[0])}
    found["graph_us"] = _time(graph.replay)
    found["eager_us"] = _time(step)
    return found


def _time(step: Callable[[], None]) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    begin.record()
    step()
    end.record()
    torch.cuda.synchronize()
    repeats = max(2, min(50, int(SECONDS * 1e3 / begin.elapsed_time(end))))
    times = []
    for _ in range(REPETITIONS):
        torch.cuda.synchronize()
        begin.record()
        for _ in range(repeats):
            step()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / repeats)  # an eager step's gaps between kernels included
    return float(statistics.median(times))


def fill_us() -> float:
    """Host microseconds to describe a step of 1,000 sequences from the engine's arrays, its copy included."""
    metadata = StepMetadata(1024, "cuda", drafts=True, max_checkpoints=64)
    generator = np.random.default_rng(1)
    lengths = generator.integers(1, 5, FILLED, dtype=np.int32)
    slots = generator.permutation(FILLED).astype(np.int32)
    flags, counts, drafts = np.ones(FILLED, bool), np.ones(FILLED, np.int32), np.zeros(FILLED, bool)

    def fill() -> object:
        return metadata.fill(lengths, slots, flags, counts, speculative=drafts, bucket=1024)

    return statistics.median(batches({"fill": [fill]}, torch.cuda.synchronize)["fill"])


def main(
    out: Annotated[Path, typer.Option(help="JSON lines are added to this file")],
    folder: Annotated[Path, typer.Option(help="the peers' folder, made by fetch_peers.py")] = DEFAULT_FOLDER,
    commit: Annotated[str, typer.Option(help="recorded where the tree has no version control beside it")] = "",
) -> None:
    """Gate and time the steps; add JSON lines."""
    console = Console(soft_wrap=True, highlight=False)
    if not torch.cuda.is_available():
        console.print("these figures need a CUDA device, and torch sees none")
        raise typer.Exit(2)
    around = environment.describe(commit or None)
    around["clocks"] = environment.record_clocks(torch.empty(0, device="cuda").device)
    peers = []
    for dependent_launch in (True, False):
        vllm = Vllm(dependent_launch=dependent_launch)
        try:
            vllm.load(folder)
            peers.append(vllm)
        except PeerAbsent as reason:
            console.print(f"absent: {vllm.name}: {reason}", markup=False)
    with out.open("a") as lines:

        def write(row: str, method: str, **figures: Any) -> None:
            record = {"schema": 1, "what": "step", "row": row, "method": method, "layers": LAYERS, "absent": None}
            lines.write(json.dumps(record | figures | {"environment": around}) + "\n")
            lines.flush()

        us = fill_us()
        write(f"metadata of {FILLED} sequences", "serving_conv", host_us=us)
        console.print(f"metadata of {FILLED} sequences: {us:.1f} us", markup=False)
        for step in STEPS:
            work = Work(step)
            gated = gate(work)
            if not gated["passed"]:
                console.print(f"RED GATE: {step.name}: {gated}", markup=False)
                raise typer.Exit(1)
            figures = measure(ours(work))
            write(step.name, "serving_conv", gate=gated, **figures)
            said = [f"serving_conv {figures['graph_us']:.0f} / {figures['eager_us']:.0f}"]
            for peer in peers if not step.checkpoints else ():
                layer = vllm_layer(peer, work)
                error = agrees(layer, work)
                if not error < WRONG:
                    write(step.name, peer.name, relative_error=error, absent="its result differs from ours")
                    said.append(f"{peer.name} is wrong by {error:.2e}")
                    continue
                figures = measure(layer)
                write(step.name, peer.name, relative_error=error, **figures)
                said.append(f"{peer.name} {figures['graph_us']:.0f} / {figures['eager_us']:.0f}")
            console.print(f"{step.name}: {', '.join(said)}", markup=False)
            del work
            gc.collect()
            torch.cuda.empty_cache()


if __name__ == "__main__":
    typer.run(main)
