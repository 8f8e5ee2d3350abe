"""Owns the `replay` command: flags, progress, what goes to which stream, and the exit code."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from serving_conv.replay.options import ReplayOptions
from serving_conv.replay.plot import check_plot, write_plot
from serving_conv.replay.report import ReplayReport
from serving_conv.replay.runner import replay_trace
from serving_conv.replay.trace import DEFAULT_TRACE, Trace, read_trace

__all__ = ["replay"]

_DEFAULTS = ReplayOptions()
_SMALL = 2**18  # elements of a step's inputs, below which threads of torch cost more than they bring


def replay(
    trace: Annotated[
        Path | None,
        typer.Argument(help="Azure CSV or Mooncake jsonl; the shipped Mooncake excerpt if left out."),
    ] = None,
    requests: Annotated[int | None, typer.Option(help="Play the first so many requests.")] = None,
    max_context: Annotated[int | None, typer.Option(help="Cut prompts to so many tokens.")] = None,
    max_generated: Annotated[int | None, typer.Option(help="Cut generated tokens to so many.")] = None,
    check: Annotated[bool, typer.Option(help="Compare every output with the request's solo run.")] = _DEFAULTS.check,
    json_output: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
    plot: Annotated[Path | None, typer.Option(metavar="FILE.png", help="Draw slots, steps and latency.")] = None,
    layers: Annotated[int, typer.Option(help="Conv layers.")] = _DEFAULTS.layers,
    channels: Annotated[int, typer.Option(help="Channels of a layer.")] = _DEFAULTS.channels,
    width: Annotated[int, typer.Option(help="Taps, 2 to 8.")] = _DEFAULTS.width,
    dtype: Annotated[str, typer.Option(help="bfloat16, float16 or float32.")] = _DEFAULTS.dtype,
    state_dtype: Annotated[str | None, typer.Option(help="Type of the pool; that of the inputs if left out.")] = None,
    layout: Annotated[str, typer.Option(help="Contiguous axis of the pool: channels or positions.")] = _DEFAULTS.layout,
    slots: Annotated[int, typer.Option(help="Slots of the pool; one is reserved.")] = _DEFAULTS.slots,
    max_sequences: Annotated[int, typer.Option(help="Requests that run at once.")] = _DEFAULTS.max_sequences,
    max_step_tokens: Annotated[int, typer.Option(help="Rows of a step.")] = _DEFAULTS.max_step_tokens,
    draft_tokens: Annotated[int, typer.Option(help="Drafts of a speculative step; 0: none.")] = _DEFAULTS.draft_tokens,
    acceptance: Annotated[float, typer.Option(help="Probability that a draft is right.")] = _DEFAULTS.acceptance,
    checkpoint_every: Annotated[
        int, typer.Option(help="Granularity of prefix checkpoints in tokens; divides 512.")
    ] = _DEFAULTS.checkpoint_every,
    resume: Annotated[str, typer.Option(help="After a preemption: recompute, import or alternate.")] = _DEFAULTS.resume,
    patience: Annotated[
        float, typer.Option(help="Trace seconds that the head of the queue waits for a place before it preempts.")
    ] = _DEFAULTS.patience,
    step_ms: Annotated[float, typer.Option(help="Trace time of a step, before its rows.")] = _DEFAULTS.step_ms,
    token_us: Annotated[float, typer.Option(help="Trace time of each row.")] = _DEFAULTS.token_us,
    device: Annotated[str, typer.Option(help="cpu, or a CUDA device.")] = _DEFAULTS.device,
    one_launch: Annotated[
        bool, typer.Option("--one-launch", help="One causal_conv1d_step a layer for the whole step; graphs always do.")
    ] = False,
    eager: Annotated[bool, typer.Option("--eager", help="No captured graphs on a CUDA device.")] = False,
    seed: Annotated[int, typer.Option(help="Of weights, inputs and acceptance.")] = _DEFAULTS.seed,
) -> None:
    """Play a request trace through the operator and the state pool, and check every output.

    Chunked prefill, mixed steps, decode, speculative steps with random acceptance, preemption and resume, prefix
    checkpoints. Exit code 1 if an output differs, 2 if the input is bad.
    """
    options = ReplayOptions(
        layers=layers,
        channels=channels,
        width=width,
        dtype=dtype,
        state_dtype=state_dtype,
        layout=layout,
        slots=slots,
        max_sequences=max_sequences,
        max_step_tokens=max_step_tokens,
        draft_tokens=draft_tokens,
        acceptance=acceptance,
        step_ms=step_ms,
        token_us=token_us,
        patience=patience,
        resume=resume,
        checkpoint_every=checkpoint_every,
        device=device,
        launch=_launch(device, one_launch=one_launch, eager=eager),
        check=check,
        seed=seed,
    )
    if plot is not None:
        check_plot(plot)
    played = read_trace(trace or DEFAULT_TRACE, requests=requests, max_context=max_context, max_generated=max_generated)
    if max_step_tokens * channels < _SMALL:
        torch.set_num_threads(1)
    report = _replay_with_progress(played, options)
    if json_output:
        typer.echo(json.dumps(report.to_json(), indent=2))
    else:
        Console().print(report.table())
    if plot is not None:
        write_plot(report, plot)
    if report.mismatches:
        raise typer.Exit(1)


def _launch(device: str, *, one_launch: bool, eager: bool) -> str:
    """How the layers are launched: graphs where there are any, else entry by entry unless asked otherwise."""
    if device.startswith("cuda") and not eager:
        return "graphs"
    return "step" if one_launch else "entries"


def _replay_with_progress(trace: Trace, options: ReplayOptions) -> ReplayReport:
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        TaskProgressColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task(trace.name, total=sum(request.tokens for request in trace.requests))
        return replay_trace(trace, options, lambda done: progress.update(task, completed=done))
