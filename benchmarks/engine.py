"""The real vLLM on a GPU, stock and with the plugin: step times, the convolutions' kernels, host time, tokens.

    python -m benchmarks.engine --out engine.jsonl [--part timed|tokens]

Every engine is a process of its own. Engines start together, for starting takes most of the time; the timed parts
then run one after the other, with all other engines idle. `timed` runs each model stock and with the plugin, with and
without dependent launch. `tokens` runs them with the plugin with and without CUDA graphs, with speculation and with
prefix caching, and compares tokens: between runs of ours with and without graphs they must be equal; against stock the
first difference and its size in log probability is shown.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

if __package__ in (None, ""):  # run as a file
    sys.path.append(str(Path(__file__).resolve().parents[1]))

from benchmarks import environment

SCHEMA = 1
OPTIONS: dict[str, Any] = {
    "dtype": "bfloat16",
    "load_format": "dummy",
    "skip_tokenizer_init": True,
    "seed": 0,
    "max_model_len": 4096,
    "max_num_seqs": 256,
    "max_num_batched_tokens": 8192,
    "gpu_memory_utilization": 0.08,  # the share that must be free at start; what is taken the next line says
    "kv_cache_memory_bytes": 14 << 30,
    "enable_prefix_caching": False,
    "disable_log_stats": False,
    "additional_config": {"gdn_prefill_backend": "triton"},
    "compilation_config": {"cudagraph_capture_sizes": [1, 2, 4, 8, 16, 32, 64, 128, 256]},
}
NO_GRAPHS = {"compilation_config": {"cudagraph_mode": "NONE"}}
FEW = {"max_num_seqs": 16, "max_num_batched_tokens": 6144, "kv_cache_memory_bytes": 3 << 29}
FEW_GRAPHS = {"compilation_config": {"cudagraph_capture_sizes": [1, 2, 4, 8, 16, 32, 64]}}
NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
MTP = {"method": "mtp", "num_speculative_tokens": 2}


@dataclass(frozen=True)
class Run:
    """One engine.

    Attributes:
        name: of the run.
        model: of `engine_models.MODELS`.
        plugin: on; else `SERVING_CONV_VLLM=0`.
        timed: steps are timed.
        options: of vllm.LLM.
        block_scale: see `engine_models.draw_weights`.
        first_configuration: no autotuning, for runs that compare tokens.
        switches: more environment variables.
    """

    name: str
    model: str
    plugin: bool = True
    timed: bool = False
    options: dict[str, Any] = field(default_factory=dict)
    block_scale: float = 1.0
    first_configuration: bool = False
    switches: dict[str, str] = field(default_factory=dict)


def _timed_runs(models: Iterable[str]) -> list[Run]:
    kinds: tuple[tuple[str, bool, dict[str, str]], ...] = (
        ("stock", False, {}),
        ("plugin", True, {}),
        ("plugin, no dependent launch", True, {"SERVING_CONV_DEPENDENT_LAUNCH": "0"}),
    )
    return [
        Run(f"{model} timed {kind}", model, plugin, timed=True, options=OPTIONS, switches=switches)
        for model in models
        for kind, plugin, switches in kinds
    ]


def _token_runs(model: str) -> list[Run]:
    few = OPTIONS | FEW | FEW_GRAPHS
    method, scale = (NGRAM, 0.3) if model == "mamba2" else (MTP, 0.15)
    drafts = few | {"speculative_config": method}
    caching = few | {"enable_prefix_caching": True, "block_size": 256, "kv_cache_memory_bytes": 12 << 30}
    words = f"{model}-words64"
    return [
        Run(f"{model} {kind}", its_model, plugin, options=options, block_scale=block_scale, first_configuration=True)
        for kind, plugin, its_model, options, block_scale in (
            ("stock", False, model, few, 1.0),
            ("graphs", True, model, few, 1.0),
            ("no graphs", True, model, few | NO_GRAPHS, 1.0),
            ("speculation stock", False, words, drafts, scale),
            ("speculation graphs", True, words, drafts, scale),
            ("speculation no graphs", True, words, drafts | NO_GRAPHS, scale),
            ("prefix caching stock", False, model, caching, 1.0),
            ("prefix caching graphs", True, model, caching, 1.0),
        )
    ]


class Wave:
    """Engines that start together.

    Args:
        runs: what to start.
        folder: for the words between the processes, and their logs.
        console: where progress goes.
    """

    def __init__(self, runs: list[Run], folder: Path, console: Console) -> None:
        self._folder, self._console = folder, console
        self._begin = time.monotonic()
        self._runs = runs
        self._processes = {run.name: self._start(run) for run in runs}

    def _start(self, run: Run) -> subprocess.Popen[bytes]:
        (self._folder / f"{run.name}.json").write_text(json.dumps(asdict(run)))
        switches = {"SERVING_CONV_VLLM": str(int(run.plugin)), "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
        with (self._folder / f"{run.name}.log").open("w") as log:
            return subprocess.Popen(
                [sys.executable, "-m", "benchmarks.engine_process", str(self._folder), run.name],
                env=os.environ | switches | run.switches,
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def results(self, limit: float) -> dict[str, dict[str, Any]]:
        """What the engines found, by name; those that died or took over `limit` seconds are left out, and told."""
        alive = [run for run in self._runs if self._wait(run, "ready", limit)]
        found = {}
        for run in alive:
            (self._folder / f"{run.name}.go").touch()
            if self._wait(run, "result", limit):
                found[run.name] = json.loads((self._folder / f"{run.name}.result").read_text())
                self._console.print(f"{time.monotonic() - self._begin:5.0f} s  {run.name}", markup=False)
        for process in self._processes.values():
            process.kill()
            process.wait()
        return found

    def _wait(self, run: Run, word: str, limit: float) -> bool:
        file = self._folder / f"{run.name}.{word}"
        while time.monotonic() - self._begin < limit:
            if file.exists():
                return True
            if self._processes[run.name].poll() is not None and not file.exists():
                break
            time.sleep(0.05)
        log = (self._folder / f"{run.name}.log").read_text(errors="replace").splitlines()
        self._console.print(f"{run.name}: no {word}; its log ends so:", *log[-12:], sep="\n", markup=False)
        return False


def compare_tokens(ours: list[Any], theirs: list[Any]) -> dict[str, Any]:
    """Where two runs of the same prompts part, and by how much.

    Args:
        ours: for each prompt and token its id, log probability, and the next best's log probability.
        theirs: likewise.

    Returns:
        `equal`: all ids are; `differences`: for each prompt that parts, the token's index, the gap in `theirs`
        between its choice and the next best, and the largest difference in log probability up to there;
        `largest_logprob_difference` over all common tokens.
    """
    differences, largest = [], 0.0
    for prompt, (mine, other) in enumerate(zip(ours, theirs, strict=True)):
        parts = next((i for i, (a, b) in enumerate(zip(mine, other, strict=True)) if a[0] != b[0]), None)
        common = len(mine) if parts is None else parts
        by = max((abs(a[1] - b[1]) for a, b in zip(mine[:common], other[:common], strict=True)), default=0.0)
        largest = max(largest, by)
        if parts is not None:
            gap = round(other[parts][1] - other[parts][2], 5)
            differences.append({"prompt": prompt, "token": parts, "gap": gap, "logprob_difference": round(by, 5)})
    return {"equal": not differences, "differences": differences, "largest_logprob_difference": round(largest, 5)}


def _ratios(model: str, kind: str, stock: dict[str, Any], plugin: dict[str, Any]) -> Iterable[dict[str, Any]]:
    rows = [(f"prefill {row}", stock["prefill"][row], plugin["prefill"][row]) for row in stock["prefill"]]
    rows += [(f"decode {row}", stock["decode"][row], plugin["decode"][row]) for row in stock["decode"]]
    rows.append(("mixed 700 + 64", stock["mixed"], plugin["mixed"]))
    for row, theirs, ours in rows:
        yield {
            "what": "engine step",
            "model": model,
            "method": kind,
            "row": row,
            "stock": theirs,
            "plugin": ours,
            "conv_speedup": theirs["conv_us"] / ours["conv_us"],
            "kernel_ratio": ours["kernel_us"] / theirs["kernel_us"],
            "wall_ratio": ours["wall_ms"] / theirs["wall_ms"],
            "host_ratio": ours["conv_host_us"] / ours["conv_host_stock_us"] if "conv_host_us" in ours else None,
        }


def main(
    out: Annotated[Path, typer.Option(help="JSON lines are added to this file")],
    part: Annotated[str, typer.Option(help="timed, tokens, or both, separated by a comma")] = "timed,tokens",
    models: Annotated[str, typer.Option(help="mamba2 and qwen3next, or one of them")] = "mamba2,qwen3next",
    limit: Annotated[float, typer.Option(help="seconds for all engines that start together")] = 300.0,
    keep: Annotated[Path | None, typer.Option(help="folder for logs and results of the engines")] = None,
    commit: Annotated[str, typer.Option(help="recorded where the tree has no version control beside it")] = "",
) -> None:
    """Run the engines and compare them; the exit code is 1 if one did not finish or our own tokens differ."""
    console = Console(soft_wrap=True, highlight=False)
    around = environment.describe(commit or None)
    folder = keep or Path(tempfile.mkdtemp(prefix="engines-"))
    folder.mkdir(parents=True, exist_ok=True)
    names = models.split(",")
    failed = False
    with out.open("a") as lines:

        def write(record: dict[str, Any]) -> None:
            lines.write(json.dumps({"schema": SCHEMA, **record, "environment": around}) + "\n")
            lines.flush()

        waves = [("timed", _timed_runs(names))] + [("tokens", _token_runs(name)) for name in names]
        for which, runs in waves:
            if which not in part.split(","):
                continue
            found = Wave(runs, folder, console).results(limit)
            failed |= len(found) < len(runs)
            for run in runs:
                if (result := found.get(run.name)) is not None:
                    told = {key: value for key, value in result.items() if key not in _TOLD_BY_ROW}
                    write({"what": "engine", "part": which, "run": asdict(run), **told})
            for model in names:
                failed |= not _compare(model, found, write, console)
    raise typer.Exit(1 if failed else 0)


_TOLD_BY_ROW = ("tokens", "prefill", "decode", "mixed")

# Runs whose tokens must be equal: what differs between them is ours to keep equal.
_EQUAL = (("no graphs", "graphs"), ("speculation no graphs", "speculation graphs"))
# Runs that may differ: stock rounds each product of a tap to bfloat16.
_SHOWN = (
    ("timed stock", "timed plugin"),
    ("stock", "graphs"),
    ("speculation stock", "speculation graphs"),
    ("prefix caching stock", "prefix caching graphs"),
)
# Prefix caching changes what a step computes, in stock vLLM too.
_SHOWN_CACHING = (("stock", "prefix caching stock"), ("graphs", "prefix caching graphs"))


def _compare(model: str, by_name: dict[str, Any], write: Any, console: Console) -> bool:
    """Write what two runs of a model show side by side; False if tokens differ that must not."""
    right = True

    def pair(names: tuple[str, str]) -> tuple[Any, Any] | None:
        first, second = (by_name.get(f"{model} {name}") for name in names)
        return None if first is None or second is None else (first, second)

    for names in (*_EQUAL, *_SHOWN, *_SHOWN_CACHING):
        if (both := pair(names)) is None:
            continue
        theirs, ours = both
        compared = compare_tokens(ours["tokens"], theirs["tokens"])
        right &= compared["equal"] or names not in _EQUAL
        write({"what": "engine tokens", "model": model, "first": names[0], "second": names[1], **compared})
        console.print(
            f"{model}, {names[0]} and {names[1]}: {'equal' if compared['equal'] else compared['differences']}, "
            f"log probabilities within {compared['largest_logprob_difference']}",
            markup=False,
        )
    for kind in ("plugin", "plugin, no dependent launch"):
        if (both := pair(("timed stock", f"timed {kind}"))) is None:
            continue
        for record in _ratios(model, kind, *both):
            write(record)
            host = "" if record["host_ratio"] is None else f", host {record['host_ratio']:.2f}"
            before, after = (record[side]["conv_us"] for side in ("stock", "plugin"))
            console.print(
                f"{model} {kind}, {record['row']}: conv {before:.1f} -> {after:.1f} us "
                f"({record['conv_speedup']:.2f}x), kernels {record['kernel_ratio']:.3f}, "
                f"wall {record['wall_ratio']:.3f}{host}",
                markup=False,
            )
    return right


if __name__ == "__main__":
    typer.run(main)
