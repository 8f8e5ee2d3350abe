"""JSON lines to a table on the terminal, a Markdown block for the README, and a plot of the percent of copy."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

__all__ = ["best_peer", "markdown", "plot", "read_lines", "table"]

Line = dict[str, Any]
OURS = "serving_conv"
OWN = (OURS, "serving_conv_triton")  # neither is a peer of the other
FOREIGN = "after a foreign kernel"
# Ours is the one saturated colour; shapes tell the peers apart without colour too.
_MARKS = {
    OURS: ("o", "#c1121f"),
    "serving_conv_triton": ("h", "#d98880"),
    "vLLM": ("s", "#5b8db8"),
    "vLLM, no PDL": ("D", "#8ab0cf"),
    "FlashInfer": ("^", "#5f8f5a"),
    "causal-conv1d": ("v", "#b08b4f"),
    "fla": ("P", "#8a6fa8"),
    "torch conv1d": ("X", "#8c8c8c"),
}


def read_lines(path: Path) -> list[Line]:
    """All lines of a results file.

    Raises:
        ValueError: a line is not JSON, or lacks what every line has.
    """
    lines = []
    for number, text in enumerate(path.read_text().splitlines(), 1):
        if not text.strip():
            continue
        try:
            found = json.loads(text)
        except json.JSONDecodeError as error:
            raise ValueError(f"{path.name}:{number}: not JSON: {error}") from error
        if not isinstance(found, dict) or not {"what", "row", "method"} <= found.keys():
            raise ValueError(f"{path.name}:{number}: not a line of results")
        lines.append(found)
    return lines


def _ordered(values: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(values))


def _kernel(lines: Sequence[Line], *, cache: str = "cold", setting: str = "alone") -> list[Line]:
    return [
        line
        for line in lines
        if line["what"] == "kernel" and line.get("cache") == cache and line.get("setting") == setting
    ]


def _checked(lines: Sequence[Line], chosen: Sequence[Line]) -> list[Line]:
    """Those chosen whose method has a figure in the cold row too, since only that one was checked."""
    cold = {(line["row"], line["method"]) for line in _kernel(lines) if line.get("us") is not None}
    return [line for line in chosen if (line["row"], line["method"]) in cold]


def _figure(lines: Sequence[Line], row: str, method: str) -> Line | None:
    for line in lines:
        if line["row"] == row and line["method"] == method and line.get("us") is not None:
            return line
    return None


def best_peer(lines: Sequence[Line], row: str) -> Line | None:
    """The fastest peer's line of a row."""
    timed = [line for line in lines if line["row"] == row and line["method"] not in OWN and line.get("us") is not None]
    return min(timed, key=lambda line: float(line["us"]), default=None)


def _number(us: float) -> str:
    return f"{us:.2f}" if us < 10 else f"{us:.1f}" if us < 1000 else f"{us:.0f}"


def _cells(lines: Sequence[Line], methods: Sequence[str], *, with_copy: bool) -> list[list[str]]:
    """One row of text for each row: name, copy, every method, ours of copy, ours against the best peer."""
    result = []
    for row in _ordered(line["row"] for line in lines):
        ours, peer = _figure(lines, row, OURS), best_peer(lines, row)
        cells = [row]
        if with_copy:
            cells.append(_number(ours["copy_us"]) if ours and ours.get("copy_us") else "-")
        for method in methods:
            figure = _figure(lines, row, method)
            cells.append(_number(figure["us"]) if figure else "-")
        if with_copy:
            cells.append(f"{100 * ours['ratio']:.0f} %" if ours and ours.get("ratio") else "-")
        cells.append(f"{peer['us'] / ours['us']:.2f}x" if ours and peer else "-")
        result.append(cells)
    return result


def _head(methods: Sequence[str], *, with_copy: bool) -> list[str]:
    return ["row", *(["copy"] if with_copy else []), *methods, *(["of copy"] if with_copy else []), "best peer / ours"]


def _sections(lines: Sequence[Line]) -> list[tuple[str, list[str], list[list[str]]]]:
    """Title, head and body of every table that the lines give."""
    sections = []
    for title, cache, setting, with_copy in (
        ("Microseconds a call, cold", "cold", "alone", True),
        ("Microseconds a call after a foreign kernel, cold", "cold", FOREIGN, False),
        ("Microseconds a call, warm in L2", "warm", "alone", False),
    ):
        chosen = _checked(lines, _kernel(lines, cache=cache, setting=setting))
        timed = [line for line in chosen if line.get("us") is not None]
        if timed:
            methods = _methods(timed)
            sections.append((title, _head(methods, with_copy=with_copy), _cells(timed, methods, with_copy=with_copy)))
    host = [line for line in lines if line["what"] == "host"]
    if host:
        methods = _methods(host)
        body = []
        for row in _ordered(line["row"] for line in host):
            ours, peer = _figure(host, row, OURS), best_peer(host, row)
            figures = [_figure(host, row, method) for method in methods]
            share = f"{ours['us'] / peer['us']:.2f}" if ours and peer else "-"
            body.append([row, *(_number(f["us"]) if f else "-" for f in figures), share])
        sections.append(("Host microseconds of an eager call", ["row", *methods, "ours / peer"], body))
    steps = [line for line in lines if line["what"] == "step"]
    for title, figure in (
        ("Microseconds of a step of 48 layers, captured", "graph_us"),
        ("Microseconds of a step of 48 layers, eager", "eager_us"),
    ):
        # Under the common name, so that one table maker serves all.
        timed = [{**line, "us": line[figure]} for line in steps if line.get(figure) is not None]
        if timed:
            methods = _methods(timed)
            sections.append((title, _head(methods, with_copy=False), _cells(timed, methods, with_copy=False)))
    if steps:
        sections.append(_captures(steps))
    first = [line for line in lines if line["what"] == "first use"]
    if first:
        body = []
        for family in _ordered(line["row"] for line in first):
            seconds = {line["cache"]: line["seconds"] for line in first if line["row"] == family}
            body.append([family, *(f"{seconds[c]:.3f}" if c in seconds else "-" for c in ("cold", "warm"))])
        sections.append(("Seconds of the first use", ["family", "cold disk cache", "warm disk cache"], body))
    return sections


def _captures(steps: Sequence[Line]) -> tuple[str, list[str], list[list[str]]]:
    """What graphs cost, and what a step's metadata costs the host."""
    body = []
    for line in steps:
        if line.get("host_us") is not None:
            body.append([line["row"], line["method"], "-", "-", _number(line["host_us"])])
        elif line.get("capture_s") is not None:
            mebibytes = line["graph_bytes"] / 2**20
            body.append([line["row"], line["method"], f"{1e3 * line['capture_s']:.1f}", f"{mebibytes:.0f}", "-"])
    return "Capture of 48 layers, and metadata", ["row", "method", "ms", "MiB held", "host microseconds"], body


def _methods(lines: Sequence[Line]) -> list[str]:
    found = _ordered(line["method"] for line in lines)
    return [name for name in _MARKS if name in found] + [name for name in found if name not in _MARKS]


def absences(lines: Sequence[Line]) -> list[str]:
    """One sentence for each method and reason, with the rows it covers."""
    reasons: dict[tuple[str, str], list[str]] = {}
    for line in lines:
        if line.get("absent"):
            reasons.setdefault((line["method"], line["absent"]), []).append(line["row"])
    rows = len(_ordered(line["row"] for line in lines if line["what"] == "kernel"))
    return [
        f"{method}: {reason} ({'all rows' if len(names) == rows else ', '.join(names)})"
        for (method, reason), names in reasons.items()
    ]


def _provenance(lines: Sequence[Line]) -> str:
    around = lines[0].get("environment", {})
    clocks = around.get("clocks") or {}
    parts = [
        str(around.get("gpu")),
        f"driver {clocks.get('driver_version', 'unknown')}",
        f"SM {clocks.get('clocks.sm', '?')} MHz, memory {clocks.get('clocks.mem', '?')} MHz",
        f"torch {around.get('torch')}, CUDA {around.get('cuda')}",
        f"commit {str(around.get('commit'))[:12]}, {str(around.get('date'))[:10]}",
    ]
    return "; ".join(parts)


def table(lines: Sequence[Line], console: Console) -> None:
    """Print every table, what is absent and why, and where the figures are from."""
    for title, head, body in _sections(lines):
        printed = Table(title=title)
        for number, name in enumerate(head):
            printed.add_column(name, justify="left" if number == 0 else "right")
        for cells in body:
            printed.add_row(*cells)
        console.print(printed)
    for sentence in absences(lines):
        console.print(f"absent: {sentence}", markup=False, highlight=False)
    console.print(_provenance(lines), markup=False, highlight=False)


def markdown(lines: Sequence[Line], image: str | None = None) -> str:
    """The README's block."""
    text = [f"{_provenance(lines)}. bf16, W = 4, SiLU, bias, C = 8192 unless said.", ""]
    if image:
        text += [f"![Percent of a copy kernel's speed, by row and method]({image})", ""]
    for title, head, body in _sections(lines):
        text += [f"**{title}**", "", f"| {' | '.join(head)} |", f"|---|{'---:|' * (len(head) - 1)}"]
        text += [f"| {' | '.join(cells)} |" for cells in body]
        text.append("")
    return "\n".join(text)


def plot(lines: Sequence[Line], path: Path) -> None:
    """Percent of the copy kernel's speed, one line of dots a row, all methods.

    Raises:
        ValueError: no line has a ratio.
    """
    timed = [line for line in _kernel(lines) if line.get("ratio")]
    if not timed:
        raise ValueError("no figure to plot: no line has a ratio to copy")
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows, methods = _ordered(line["row"] for line in timed), _methods(timed)
    figure, axes = pyplot.subplots(figsize=(9, 1.6 + 0.3 * len(rows)), layout="constrained")
    for method in reversed(methods):  # ours is drawn last, on top
        mark, colour = _MARKS.get(method, ("o", "#8c8c8c"))
        points = [line for line in timed if line["method"] == method]
        axes.scatter(
            [100 * line["ratio"] for line in points],
            [rows.index(line["row"]) for line in points],
            marker=mark,
            color=colour,
            s=62 if method == OURS else 40,
            label=method,
            zorder=4 if method == OURS else 3,
            linewidths=0,
        )
    for number in range(len(rows)):
        axes.axhline(number, color="#e4e4e4", linewidth=0.8, zorder=1)
    axes.axvline(100, color="#444444", linewidth=1.0, zorder=2)
    axes.set_yticks(range(len(rows)), rows)
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.set_xlim(0, max(110.0, 105 * max(line["ratio"] for line in timed)))
    axes.set_xlabel("percent of the copy kernel's speed for the same bytes (100 = as fast as copying)")
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.tick_params(axis="y", length=0)
    handles, names = axes.get_legend_handles_labels()
    figure.legend(handles[::-1], names[::-1], loc="outside upper center", ncols=min(4, len(names)), frameon=False)
    figure.supxlabel(_provenance(lines), fontsize=6, color="#666666")
    figure.savefig(path, dpi=160)
    pyplot.close(figure)


def main(
    results: Annotated[list[Path], typer.Argument(help="files of JSON lines")],
    markdown_file: Annotated[Path | None, typer.Option("--markdown", help="write the README's block here")] = None,
    image: Annotated[str, typer.Option(help="address of the plot in that block")] = "",
    plot_file: Annotated[Path | None, typer.Option("--plot", help="write the plot here")] = None,
) -> None:
    """Show results."""
    console = Console(width=None if sys.stdout.isatty() else 160)
    try:
        lines = [line for path in results for line in read_lines(path)]
        if not lines:
            raise ValueError("no results in these files")
        table(lines, console)
        if markdown_file is not None:
            markdown_file.write_text(markdown(lines, image or None))
        if plot_file is not None:
            plot(lines, plot_file)
    except (OSError, ValueError) as error:
        console.print(str(error), markup=False)
        raise typer.Exit(2) from error


if __name__ == "__main__":
    typer.run(main)
