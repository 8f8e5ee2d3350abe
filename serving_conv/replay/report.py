"""Owns what a replay found: numbers, their JSON, and their table."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field

import numpy as np
from rich.markup import escape
from rich.table import Table

__all__ = ["Mismatch", "ReplayReport", "Timeline"]


@dataclass(frozen=True, slots=True)
class Mismatch:
    """First output of a request that differs: from the "solo" run, or from the first one when "recomputed"."""

    request: int
    against: str
    layer: int
    position: int
    channel: int

    def __str__(self) -> str:
        where = f"layer {self.layer}, position {self.position}, channel {self.channel}"
        return f"request {self.request} differs from its {self.against} run at {where}"


@dataclass(slots=True)
class Timeline:
    """One value a step, and one a finished request; for plots.

    Attributes:
        time: trace time at the end of the step, in seconds.
        live: slots of running requests.
        cached: slots of prefix checkpoints.
        rows: rows of the step, by entry.
        finished: trace time at which a request was done.
        first_token: seconds from its arrival to the end of its prompt.
        latency: seconds from its arrival to its last token.
    """

    time: list[float] = field(default_factory=list)
    live: list[int] = field(default_factory=list)
    cached: list[int] = field(default_factory=list)
    rows: dict[str, list[int]] = field(default_factory=dict)
    finished: list[float] = field(default_factory=list)
    first_token: list[float] = field(default_factory=list)
    latency: list[float] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayReport:
    """Everything a replay found. All but `seconds` depends on trace and options alone.

    Attributes:
        trace: name of the file.
        backend: which backend of the operator ran.
        options: the settings.
        requests: requests played.
        prompt_tokens: tokens of their prompts.
        generated_tokens: tokens that follow the prompts.
        steps: steps of the loop.
        trace_seconds: trace time from the first arrival to the last token.
        rows: rows computed by each entry, rejected drafts and recomputation included.
        transitions: how often one entry followed another on the same sequence.
        slots: slots of the pool, the reserved one included.
        slot_bytes: bytes of a slot over all layers.
        slots_high_water: most slots live at once.
        preemptions: by the way the requests resumed.
        block_tokens: prompt tokens that have block hashes.
        prefix_tokens_saved: prompt tokens that a checkpoint stood for at the first admission.
        prefix_hits: requests that began from a checkpoint.
        resume_prefix_tokens: tokens that checkpoints saved after preemptions.
        checkpoints_evicted: checkpoints that made room.
        checkpoints_unpublished: checkpoints for which there was no room.
        drafts: draft tokens verified.
        drafts_accepted: draft tokens that stand.
        checked: outputs were compared.
        mismatches: one for each request with a wrong output.
        seconds: wall time, total and in the operator, the pool, the inputs and the check.
        timeline: for plots.
    """

    trace: str
    backend: str
    options: Mapping[str, object]
    requests: int
    prompt_tokens: int
    generated_tokens: int
    steps: int
    trace_seconds: float
    rows: Mapping[str, int]
    transitions: Mapping[str, int]
    slots: int
    slot_bytes: int
    slots_high_water: int
    preemptions: Mapping[str, int]
    block_tokens: int
    prefix_tokens_saved: int
    prefix_hits: int
    resume_prefix_tokens: int
    checkpoints_evicted: int
    checkpoints_unpublished: int
    drafts: int
    drafts_accepted: int
    checked: bool
    mismatches: tuple[Mismatch, ...]
    seconds: Mapping[str, float]
    timeline: Timeline

    @property
    def tokens(self) -> int:
        """Prompt and generated tokens."""
        return self.prompt_tokens + self.generated_tokens

    @property
    def tokens_per_second(self) -> float:
        """Tokens of the trace per second of wall time, the check left out."""
        return self.tokens / max(self.seconds["total"] - self.seconds["check"], 1e-9)

    def to_json(self) -> dict[str, object]:
        """Plain values under stable names."""
        latency, first_token = self.timeline.latency, self.timeline.first_token
        return {
            "trace": self.trace,
            "backend": self.backend,
            "options": dict(self.options),
            "requests": self.requests,
            "tokens": {
                "total": self.tokens,
                "prompt": self.prompt_tokens,
                "generated": self.generated_tokens,
            },
            "steps": self.steps,
            "rows": dict(self.rows),
            "transitions": dict(self.transitions),
            "slots": {
                "total": self.slots,
                "bytes_each": self.slot_bytes,
                "high_water": self.slots_high_water,
            },
            "preemptions": {"total": sum(self.preemptions.values()), **self.preemptions},
            "prefix": {
                "block_tokens": self.block_tokens,
                "tokens_saved": self.prefix_tokens_saved,
                "share_saved": _share(self.prefix_tokens_saved, self.block_tokens),
                "hits": self.prefix_hits,
                "tokens_saved_on_resume": self.resume_prefix_tokens,
                "evicted": self.checkpoints_evicted,
                "unpublished": self.checkpoints_unpublished,
            },
            "drafts": {
                "verified": self.drafts,
                "accepted": self.drafts_accepted,
                "share_accepted": _share(self.drafts_accepted, self.drafts),
            },
            "trace_time": {
                "total_s": self.trace_seconds,
                "latency_s": _quantiles(latency),
                "first_token_s": _quantiles(first_token),
            },
            "wall_time": {
                **{f"{name}_s": value for name, value in self.seconds.items()},
                "tokens_per_second": self.tokens_per_second,
            },
            "checked": self.checked,
            "mismatches": len(self.mismatches) if self.checked else None,
            "mismatch_details": [asdict(mismatch) for mismatch in self.mismatches[:10]],
        }

    def table(self) -> Table:
        """The numbers for people."""
        table = Table(title=f"Replay of {escape(self.trace)}", show_header=False, title_justify="left")
        table.add_column(style="bold")
        table.add_column()
        for name, text in self._lines():
            table.add_row(name, text)
        return table

    def _lines(self) -> list[tuple[str, str]]:
        seconds = self.seconds
        loop = seconds["total"] - seconds["check"]
        latency, first = _quantiles(self.timeline.latency), _quantiles(self.timeline.first_token)
        pool_mib = self.slots * self.slot_bytes / 2**20
        preempted = ", ".join(f"{count} by {way}" for way, count in sorted(self.preemptions.items()))
        wrong = str(len(self.mismatches)) if self.checked else "not checked"
        if self.mismatches:
            wrong = f"[bold red]{wrong}[/]; {self.mismatches[0]}"
        elif self.checked:
            wrong = "[bold green]0[/], bit for bit against solo runs"
        return [
            ("requests", f"{self.requests:,}"),
            (
                "tokens",
                f"{self.tokens:,} ({self.prompt_tokens:,} prompt, {self.generated_tokens:,} generated)",
            ),
            ("rows computed", ", ".join(f"{count:,} {entry}" for entry, count in sorted(self.rows.items()))),
            ("steps", f"{self.steps:,} in {self.trace_seconds:,.1f} s of trace time"),
            ("latency", f"{latency['p50']:.2f} s median, {latency['p95']:.2f} s at 95 % (trace time)"),
            ("first token", f"{first['p50']:.2f} s median, {first['p95']:.2f} s at 95 % (trace time)"),
            (
                "tokens per second",
                f"{self.tokens_per_second:,.0f} (wall time {loop:.1f} s, and {seconds['check']:.1f} s of check)",
            ),
            (
                "share of wall time",
                f"{_percent(seconds['operator'], loop)} operator ({self.backend}), "
                f"{_percent(seconds['pool'], loop)} pool, {_percent(seconds['inputs'], loop)} making inputs",
            ),
            (
                "slots at high water",
                f"{self.slots_high_water} of {self.slots} ({self.slot_bytes:,} bytes each, {pool_mib:.2f} MiB in all)",
            ),
            ("preemptions", f"{sum(self.preemptions.values()):,}{f' ({preempted})' if preempted else ''}"),
            (
                "prefix tokens saved",
                f"{self.prefix_tokens_saved:,} ({_percent(self.prefix_tokens_saved, self.block_tokens)} of "
                f"{self.block_tokens:,} block tokens, {self.prefix_hits:,} hits)"
                if self.block_tokens
                else "the trace has no block hashes",
            ),
            (
                "drafts accepted",
                f"{self.drafts_accepted:,} of {self.drafts:,} ({_percent(self.drafts_accepted, self.drafts)})",
            ),
            ("mismatches", wrong),
        ]


def _share(part: float, whole: float) -> float:
    return part / whole if whole else 0.0


def _percent(part: float, whole: float) -> str:
    return f"{100 * _share(part, whole):.1f} %"


def _quantiles(values: list[float]) -> dict[str, float]:
    p50, p95, most = (float(value) for value in np.quantile(values, (0.5, 0.95, 1.0)))
    return {"mean": float(np.mean(values)), "p50": p50, "p95": p95, "max": most}
