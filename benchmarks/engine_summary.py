"""Shows the lines of `benchmarks/engine.py` as the README's tables: steps, tokens, starts.

python benchmarks/engine_summary.py benchmarks/results/h200-engine.jsonl
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

__all__ = ["markdown", "read_lines"]

Line = dict[str, Any]


def read_lines(path: Path) -> list[Line]:
    """All lines of a results file."""
    return [json.loads(text) for text in path.read_text().splitlines() if text.strip()]


def _table(head: Sequence[str], body: Iterable[Sequence[str]]) -> list[str]:
    rule = "|---|" + "---:|" * (len(head) - 1)
    return [f"| {' | '.join(head)} |", rule, *(f"| {' | '.join(cells)} |" for cells in body), ""]


def _steps(lines: Sequence[Line]) -> list[str]:
    body = []
    for line in lines:
        stock, ours = line["stock"], line["plugin"]
        host = "-" if line["host_ratio"] is None else f"{line['host_ratio']:.2f}"
        body.append(
            [
                f"{line['model']}, {line['row']}",
                f"{stock['conv_us']:.1f}",
                f"{ours['conv_us']:.1f}",
                f"{line['conv_speedup']:.2f}x",
                f"{100 * stock['conv_share']:.1f} -> {100 * ours['conv_share']:.1f} %",
                f"{line['kernel_ratio']:.3f}",
                host,
            ]
        )
    head = (
        "step",
        "conv, stock us",
        "conv, plugin us",
        "faster",
        "share of kernel time",
        "all kernels",
        "host of conv",
    )
    return _table(head, body)


def _tokens(lines: Sequence[Line]) -> list[str]:
    body = []
    for line in lines:
        parted = line["differences"]
        first = "-" if not parted else ", ".join(str(one["token"]) for one in parted)
        gap = "-" if not parted else f"{max(one['gap'] for one in parted):.3f}"
        body.append(
            [
                f"{line['model']}: {line['first']} and {line['second']}",
                "yes" if line["equal"] else f"{len(parted)} prompts part",
                first,
                gap,
                f"{line['largest_logprob_difference']:.4f}",
            ]
        )
    head = ("runs", "equal tokens", "first differing token", "gap there", "largest log-probability difference before")
    return _table(head, body)


def _starts(lines: Sequence[Line]) -> list[str]:
    body = []
    for line in lines:
        report = line["report"]
        drafts = line["drafts"]
        body.append(
            [
                line["run"]["name"],
                f"{line['plugin_register_seconds'] + line['plugin_load_seconds']:.2f}",
                str(report["calls"]),
                str(report["fallbacks"]),
                str(line["kernels_compiled_after_start"]),
                "-" if not drafts else f"{drafts['num_accepted_tokens']:.0f} of {drafts['num_draft_tokens']:.0f}",
            ]
        )
    head = ("engine", "seconds of the plugin at start", "calls", "fell back", "compiled later", "drafts accepted")
    return _table(head, body)


def markdown(lines: Sequence[Line]) -> str:
    """The README's block."""
    around = lines[0]["environment"]
    text = [
        f"{around['gpu']}; torch {around['torch']}, CUDA {around['cuda']}; commit {around['commit'][:12]}, "
        f"{around['date'][:10]}. vLLM 0.26.0, bf16, full and piecewise CUDA graphs.",
        "",
    ]
    for title, what, table in (
        ("Steps, stock and with the plugin", "engine step", _steps),
        ("Tokens of two runs", "engine tokens", _tokens),
        ("Engines", "engine", _starts),
    ):
        chosen = [line for line in lines if line["what"] == what]
        if what == "engine step":
            chosen = [line for line in chosen if line["method"] == "plugin"]
        text += [f"**{title}**", "", *table(chosen)]
    return "\n".join(text)


def main(results: Annotated[Path, typer.Argument(help="lines of benchmarks/engine.py")]) -> None:
    """Print the README's block."""
    print(markdown(read_lines(results)))


if __name__ == "__main__":
    typer.run(main)
