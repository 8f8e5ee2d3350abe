"""Owns the picture of a replay. matplotlib is optional and loaded only here."""

from __future__ import annotations

from importlib.util import find_spec
from io import BytesIO
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from serving_conv.errors import ContractError
from serving_conv.replay.report import ReplayReport
from serving_conv.replay.scheduler import Entry

__all__ = ["check_plot", "write_plot"]

BINS = 240
BLUE, ORANGE, GREEN, GREY = "#3b6ea5", "#e08a3c", "#4f9d69", "#9aa5b1"


def check_plot(path: Path) -> None:
    """See that a plot can be written there, before anything runs.

    Raises:
        ContractError: no matplotlib, a name that is not a PNG's, or no such folder.
    """
    if find_spec("matplotlib") is None:
        raise ContractError(
            "--plot", got="no matplotlib", wanted="matplotlib", remedy="pip install 'serving-conv[plot]'"
        )
    if path.suffix.lower() != ".png":
        raise ContractError("--plot", got=path, wanted="a file name that ends in .png")
    if not path.parent.is_dir() or path.is_dir():
        raise ContractError("--plot", got=path, wanted="a file in a folder that exists")


def write_plot(report: ReplayReport, path: Path) -> None:
    """Draw slots in use, step sizes and request latency over trace time; write a PNG.

    Args:
        report: what to draw.
        path: the file, overwritten.

    Raises:
        ContractError: the file cannot be written.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 8), layout="constrained")
    FigureCanvasAgg(figure)
    slots, rows, latency = figure.subplots(3, 1, sharex=True)
    timeline = report.timeline
    time = np.array(timeline.time)

    in_use = {"requests": timeline.live, "prefix checkpoints": timeline.cached}
    slots.stackplot(time, *in_use.values(), labels=in_use, colors=(BLUE, GREY), step="post")
    slots.axhline(report.slots - 1, color="black", linewidth=0.8, linestyle="--", label="pool")
    slots.set_ylabel("slots in use")

    edges = np.linspace(0.0, time[-1], BINS + 1)
    sizes = [_mean_in_bins(time, timeline.rows[entry], edges) for entry in (Entry.DECODE, Entry.VERIFY, Entry.PREFILL)]
    labels = ("decode", "speculative", "prefill")
    rows.stackplot(edges, *sizes, labels=labels, colors=(GREEN, ORANGE, BLUE), step="post")
    rows.set_ylabel("rows of a step (mean)")

    for values, color, label in (
        (timeline.latency, BLUE, "to last token"),
        (timeline.first_token, ORANGE, "to end of prompt"),
    ):
        latency.scatter(
            timeline.finished, values, s=12, color=color, alpha=0.6, linewidth=0, label=label, clip_on=False
        )
    latency.set_ylabel("latency of requests (s)")
    latency.set_xlabel("trace time (s)")

    for axes in (slots, rows, latency):
        axes.set_xlim(0.0, time[-1])
        axes.set_ylim(bottom=0)
        axes.grid(axis="y", color="#e3e6ea", linewidth=0.8)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False)
    figure.suptitle(f"{report.trace}: {report.requests:,} requests, {report.tokens:,} tokens", parse_math=False)
    image = BytesIO()  # drawn whole before the file is touched
    figure.savefig(image, dpi=150, format="png")
    try:
        path.write_bytes(image.getvalue())
    except OSError as error:
        raise ContractError("--plot", got=f"{path}: {error.strerror}", wanted="a file that can be written") from None


def _mean_in_bins(time: NDArray[np.float64], values: list[int], edges: NDArray[np.float64]) -> NDArray[np.float64]:
    """Mean over the steps that end in each bin, 0 where none does; the last one twice, to close the last bin."""
    steps: NDArray[np.int64] = np.histogram(time, edges)[0]
    sums: NDArray[np.float64] = np.histogram(time, edges, weights=np.array(values))[0]
    means = sums / np.maximum(steps, 1)
    return np.append(means, means[-1])
