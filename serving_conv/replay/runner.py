"""Owns the step loop: the clock, the steps, and what is measured."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from time import perf_counter

import numpy as np
import torch

from serving_conv.backends import backend_for
from serving_conv.pool import LayerState, StatePool
from serving_conv.replay.check import Checker, ConvLayer
from serving_conv.replay.content import Content
from serving_conv.replay.launch import Launcher
from serving_conv.replay.options import ReplayOptions
from serving_conv.replay.report import Mismatch, ReplayReport, Timeline
from serving_conv.replay.scheduler import Entry, Scheduler, Sequence, Stopwatch, Work
from serving_conv.replay.trace import Trace

__all__ = ["replay_trace"]


def replay_trace(trace: Trace, options: ReplayOptions, progress: Callable[[int], None] | None = None) -> ReplayReport:
    """Play a trace through the operator and the pool.

    Args:
        trace: the requests.
        options: the settings.
        progress: told after each step how many tokens of the trace are done.

    Raises:
        ContractError: the settings do not fit together.
    """
    return _Replay(trace, options).run(progress or (lambda tokens: None))


class _Replay:
    def __init__(self, trace: Trace, options: ReplayOptions) -> None:
        self._trace = trace
        self._options = options
        dtype, channels = options.torch_dtype, options.channels
        most_rows = max(options.max_step_tokens, options.max_sequences)
        self._pool = StatePool(
            options.slots,
            [LayerState(channels, options.width, options.torch_state_dtype)] * options.layers,
            draft_tokens=options.draft_tokens,
            layout="channels" if options.layout == "channels" else "positions",
            device=options.device,
            max_tokens=most_rows,
            max_sequences=options.max_sequences,
        )
        for state in self._pool.states:
            state.fill_(float("nan"))  # an input that no one wrote shows in every output it touches
        self._layers = _make_layers(options)
        self._launcher = Launcher(options, self._pool, self._layers)
        self._content = Content(options.layers, channels, dtype, options.seed)
        self._op_time, self._pool_time = Stopwatch(), Stopwatch()
        self._input_time, self._check_time = Stopwatch(), Stopwatch()
        self._scheduler = Scheduler(options, self._pool, self._content, self._pool_time)
        self._checker = Checker(self._layers, self._content) if options.check else None
        self._mismatches: list[Mismatch] = []
        self._timeline = Timeline(rows={entry: [] for entry in Entry})

    def run(self, progress: Callable[[int], None]) -> ReplayReport:
        started = perf_counter()
        scheduler, options = self._scheduler, self._options
        coming = deque(self._trace.requests)
        clock = 0.0
        while coming or not scheduler.idle:
            if scheduler.idle:
                clock = max(clock, coming[0].arrival)
            while coming and coming[0].arrival <= clock:
                scheduler.arrive(coming.popleft())
            works = scheduler.plan(clock)
            groups = [works] if options.launch != "entries" else [[w for w in works if w.entry is e] for e in Entry]
            for group in groups:
                if group:
                    self._run_group(group)
            clock += options.step_ms / 1e3 + sum(work.tokens for work in works) * options.token_us / 1e6
            for sequence in scheduler.complete(works, clock):
                self._finish(sequence)
            progress(scheduler.done)
            self._note_step(clock, works)
        return self._report(clock, perf_counter() - started)

    def _run_group(self, works: list[Work]) -> None:
        """Run work that is launched together, and record what it gave."""
        pool = self._pool
        with self._input_time:
            inputs = self._content.inputs(np.concatenate([_row_keys(work) for work in works]))
        with self._pool_time:
            slots = [work.sequence.live_slot for work in works]
            history = [pool.has_history(slot) for slot in slots]
            accepted = [pool.accepted(slot) for slot in slots]
        with self._op_time:
            outputs = self._launcher.run(works, inputs, slots, history, accepted)
        if self._checker is not None:
            with self._check_time:
                row = 0
                for work in works:
                    stands = outputs[:, row : row + work.accepted]
                    self._checker.record(work.sequence, work.begin, stands)
                    row += work.tokens

    def _finish(self, sequence: Sequence) -> None:
        if self._checker is not None:
            with self._check_time:
                mismatch = self._checker.finish(sequence)
            if mismatch is not None:
                self._mismatches.append(mismatch)
        assert sequence.finished is not None
        assert sequence.first_token is not None
        timeline, arrival = self._timeline, sequence.request.arrival
        timeline.finished.append(sequence.finished)
        timeline.first_token.append(sequence.first_token - arrival)
        timeline.latency.append(sequence.finished - arrival)

    def _note_step(self, clock: float, works: list[Work]) -> None:
        counts, timeline = self._pool.counts(), self._timeline
        timeline.time.append(clock)
        timeline.live.append(counts.live)
        timeline.cached.append(counts.cached)
        for entry, rows in timeline.rows.items():
            rows.append(sum(work.tokens for work in works if work.entry == entry))

    def _report(self, clock: float, total: float) -> ReplayReport:
        tally, requests, pool = self._scheduler.tally, self._trace.requests, self._pool
        return ReplayReport(
            trace=self._trace.name,
            backend=backend_for(pool.states[0]),
            options=self._options.to_json(),
            requests=len(requests),
            prompt_tokens=sum(request.prompt for request in requests),
            generated_tokens=sum(request.generated for request in requests),
            steps=len(self._timeline.time),
            trace_seconds=clock,
            rows=tally.rows,
            transitions=tally.transitions,
            slots=pool.slots,
            slot_bytes=pool.nbytes // pool.slots,
            slots_high_water=pool.high_water,
            preemptions=tally.preemptions,
            block_tokens=sum(request.prompt for request in requests if request.blocks),
            prefix_tokens_saved=tally.prefix_tokens,
            prefix_hits=tally.prefix_hits,
            resume_prefix_tokens=tally.resume_prefix_tokens,
            checkpoints_evicted=pool.prefix_statistics.evictions,
            checkpoints_unpublished=tally.unpublished,
            drafts=tally.drafts,
            drafts_accepted=tally.drafts_accepted,
            checked=self._options.check,
            mismatches=tuple(self._mismatches),
            seconds={
                "total": total,
                "operator": self._op_time.seconds,
                "pool": self._pool_time.seconds,
                "inputs": self._input_time.seconds,
                "check": self._check_time.seconds,
            },
            timeline=self._timeline,
        )


def _row_keys(work: Work) -> np.ndarray[tuple[int, ...], np.dtype[np.uint64]]:
    """Keys of the work's rows: right ones for those that stand, wrong drafts behind them."""
    keys, begin = work.sequence.keys, work.begin
    right = keys[begin : begin + work.accepted]
    if work.accepted == work.tokens:
        return right
    return np.concatenate([right, Content.wrong(keys[begin + work.accepted : begin + work.tokens])])


def _make_layers(options: ReplayOptions) -> list[ConvLayer]:
    generator = torch.Generator().manual_seed(options.seed)
    return [
        ConvLayer(
            torch.randn(options.channels, options.width, generator=generator).to(options.device),
            torch.randn(options.channels, generator=generator).to(options.device),
        )
        for _ in range(options.layers)
    ]
