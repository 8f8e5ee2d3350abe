"""The command `serving-conv warmup`: compile and load what a layer needs, before an engine starts."""

from __future__ import annotations

import json
import sys
import time
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from serving_conv.backends import choose_backend
from serving_conv.contract import FLOAT_TYPES
from serving_conv.errors import ContractError
from serving_conv.settings import SETTINGS
from serving_conv.warmup import warmup as load_kernels

__all__ = ["warmup"]


def _dtype(name: str, option: str) -> torch.dtype:
    if name not in FLOAT_TYPES:
        raise ContractError(option, got=name, wanted=" or ".join(FLOAT_TYPES))
    kind: torch.dtype = getattr(torch, name)
    return kind


def _cache(device: str, architecture: str | None) -> str:
    """Where the compiled kernels are kept."""
    if architecture is None and choose_backend(torch.empty(0, device=device).device).name == "triton":
        import triton

        return str(triton.knobs.cache.dir)
    return str(SETTINGS.cache_directory)


def warmup(
    channels: Annotated[int, typer.Argument(help="Channels of the convolution on one rank.")],
    width: Annotated[int, typer.Option(help="Taps.")] = 4,
    dtype: Annotated[str, typer.Option(help="Type of the rows.")] = "bfloat16",
    weight_dtype: Annotated[str | None, typer.Option(help="Type of weight and bias, if another.")] = None,
    state_dtype: Annotated[str | None, typer.Option(help="Type of the pool, if another.")] = None,
    bias: Annotated[bool, typer.Option(help="The layer has a bias.")] = True,
    silu: Annotated[bool, typer.Option(help="SiLU follows.")] = True,
    layout: Annotated[str, typer.Option(help="What is contiguous in the pool: channels or positions.")] = "channels",
    draft_tokens: Annotated[int, typer.Option(help="Draft tokens of a speculative step.")] = 0,
    steps: Annotated[bool, typer.Option("--steps", help="Also mixed steps with drafts or checkpoints.")] = False,
    device: Annotated[str, typer.Option(help="As cuda:1 or xpu: whose backend's kernels to load.")] = "cuda",
    architecture: Annotated[
        str | None, typer.Option(help="As sm_90: only compile CUDA kernels into the disk cache; needs no GPU.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Compile and load the kernels of one layer, so that serving compiles nothing."""
    started = time.perf_counter()
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), disable=not sys.stderr.isatty()) as bar:
        task = bar.add_task("kernels", total=None)
        kernels = load_kernels(
            channels,
            width=width,
            dtype=_dtype(dtype, "--dtype"),
            weight_dtype=None if weight_dtype is None else _dtype(weight_dtype, "--weight-dtype"),
            state_dtype=None if state_dtype is None else _dtype(state_dtype, "--state-dtype"),
            bias=bias,
            activation="silu" if silu else None,
            layout=layout,
            draft_tokens=draft_tokens,
            steps=steps,
            device=device,
            architecture=architecture,
            progress=lambda done, total: bar.update(task, completed=done, total=total),
        )
    seconds = time.perf_counter() - started
    cache = _cache(device, architecture)
    if as_json:
        typer.echo(json.dumps({"kernels": kernels, "seconds": round(seconds, 3), "cache": cache}))
    else:
        typer.echo(f"{kernels} kernels ready in {seconds:.1f} s, cached in {cache}")
