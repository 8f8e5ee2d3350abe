"""Owns the scheduling: who waits, who runs, who has which slot, and what each step computes.

A step is a list of `Work`: decodes and speculative steps first, then prompt chunks as far as the step's rows go, then
admissions. Everything is decided by the trace, the options and the clock, so a replay can be repeated.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field
from enum import StrEnum
from time import perf_counter

import numpy as np
from numpy.typing import NDArray

from serving_conv.pool import Slot, SlotPackage, StatePool
from serving_conv.replay.content import Content, block_digests
from serving_conv.replay.options import ReplayOptions
from serving_conv.replay.trace import BLOCK_TOKENS, Request

__all__ = ["Entry", "Scheduler", "Sequence", "Stopwatch", "Work"]

SPECULATING = 0.75  # share of decode steps that verify drafts; the others let plain steps follow speculative ones
DETOUR = 0.125  # share of plain one-token steps that come through prefill, as a mixed step may have it
QUANTUM = 32  # new tokens that a request computes, at least, between admission and preemption: no livelock


class Entry(StrEnum):
    """Which call of the operator a piece of work goes through."""

    PREFILL = "prefill"  # causal_conv1d_fn, with accepted counts
    VERIFY = "verify"  # causal_conv1d_update with offsets and accepted counts: a speculative step
    DECODE = "decode"  # causal_conv1d_update without counts: one row each


class Stopwatch:
    """Adds up the seconds spent in its `with` blocks."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def __enter__(self) -> None:
        self._start = perf_counter()

    def __exit__(self, *_: object) -> None:
        self.seconds += perf_counter() - self._start


def _no_numbers() -> NDArray[np.uint64]:
    return np.empty(0, dtype=np.uint64)


@dataclass(slots=True, eq=False)
class Sequence:
    """A request on its way.

    Attributes:
        request: what it is.
        keys: content key of every position.
        chances: random bits of every position.
        prefixes: pool key and length of every prefix that a checkpoint may stand for, shortest first.
        checkpoints: lengths at which a prompt chunk ends and a checkpoint is published.
        slot: its slot while it runs.
        position: tokens in the slot's history.
        furthest: tokens computed so far, in this admission or an earlier one.
        admitted: `furthest` when it was last admitted.
        package: its exported slot, if it was preempted that way.
        last_entry: the call its latest step went through.
        first_token: trace time at which the prompt was done; None before.
        finished: trace time at which the last token was done; None before.
    """

    request: Request
    keys: NDArray[np.uint64] = field(default_factory=_no_numbers)
    chances: NDArray[np.uint64] = field(default_factory=_no_numbers)
    prefixes: list[tuple[tuple[int, int], int]] = field(default_factory=list)
    checkpoints: tuple[int, ...] = ()
    slot: Slot | None = None
    position: int = 0
    furthest: int = 0
    admitted: int = 0
    package: SlotPackage | None = None
    last_entry: Entry | None = None
    first_token: float | None = None
    finished: float | None = None

    @property
    def live_slot(self) -> Slot:
        """The slot; only while it runs."""
        assert self.slot is not None
        return self.slot

    @property
    def known(self) -> int:
        """Tokens that are known before they are computed: the prompt, and after a preemption all that were computed."""
        return max(self.request.prompt, self.furthest)

    def chance(self, position: int, bits: int) -> float:
        """A number in [0, 1) that belongs to a position; each of the four `bits` gives another one."""
        return (int(self.chances[position]) >> 16 * bits & 0xFFFF) / 0x10000


@dataclass(frozen=True, slots=True)
class Work:
    """What a step does for one sequence: `tokens` rows from its position on, of which `accepted` stand."""

    sequence: Sequence
    entry: Entry
    tokens: int
    accepted: int

    @property
    def begin(self) -> int:
        """Position of the first row."""
        return self.sequence.position


@dataclass(slots=True)
class Tally:
    """What happened, in numbers that do not depend on the machine."""

    preemptions: Counter[str] = field(default_factory=Counter)  # by the way the request resumes
    prefix_hits: int = 0
    prefix_tokens: int = 0
    resume_prefix_tokens: int = 0
    unpublished: int = 0
    drafts: int = 0
    drafts_accepted: int = 0
    rows: Counter[str] = field(default_factory=Counter)  # by entry
    transitions: Counter[str] = field(default_factory=Counter)  # "verify>prefill": one call followed the other


class Scheduler:
    """Queue, running sequences, and the slots they hold.

    Args:
        options: limits and chances.
        pool: where the slots come from.
        content: keys and chances of the requests.
        pool_time: runs while the pool works.
    """

    def __init__(self, options: ReplayOptions, pool: StatePool, content: Content, pool_time: Stopwatch) -> None:
        self._options = options
        self._pool = pool
        self._content = content
        self._pool_time = pool_time
        self._waiting: deque[Sequence] = deque()
        self._running: list[Sequence] = []
        self._seen: set[int] = set()  # digests of the blocks of every request that came so far
        self._head: tuple[Sequence | None, float] = (None, 0.0)  # first of the queue, and since when
        self.tally = Tally()
        self.done = 0  # tokens of the trace, computed or saved

    @property
    def idle(self) -> bool:
        """Nobody waits or runs."""
        return not (self._waiting or self._running)

    def arrive(self, request: Request) -> None:
        """Put a request at the end of the queue."""
        self._waiting.append(Sequence(request))

    def _prepare(self, sequence: Sequence) -> None:
        """Make what a sequence needs to run; at its first admission, for a long queue would be large otherwise."""
        request = sequence.request
        digests = block_digests(request)
        sequence.keys = self._content.row_keys(request, digests)
        sequence.chances = self._content.chances(request)
        if digests:
            every = self._options.checkpoint_every
            # The last prompt token is always computed, so no prefix reaches it.
            sequence.prefixes = [
                ((digests[(end - 1) // BLOCK_TOKENS], end), end) for end in range(every, request.prompt, every)
            ]
            sequence.checkpoints = self._place_checkpoints(request.prompt, digests)

    def _place_checkpoints(self, prompt: int, digests: tuple[int, ...]) -> tuple[int, ...]:
        """Where a later request is likely to leave this prompt.

        At its last full block, if a conversation goes on; where the prompt itself left an earlier one, since others
        may begin like those two; and close to its end, if it came before and so may come again.
        """
        full = (prompt - 1) // BLOCK_TOKENS
        seen = next((n for n, digest in enumerate(digests) if digest not in self._seen), len(digests))
        self._seen.update(digests)
        branch = min(seen, full) * BLOCK_TOKENS
        if seen == len(digests):
            branch = (prompt - 1) // self._options.checkpoint_every * self._options.checkpoint_every
        return tuple(sorted({full * BLOCK_TOKENS, branch} - {0}))

    def plan(self, clock: float) -> list[Work]:
        """What the step at this time computes; empty only if nobody waits or runs."""
        self._preempt_for_head(clock)
        works: list[Work] = []
        rows = self._options.max_step_tokens
        decoding = [s for s in self._running if s.position >= s.known]
        prefilling = [s for s in self._running if s.position < s.known]
        for sequence in decoding + prefilling:
            if not rows:
                return works
            works.append(self._work(sequence, rows))
            rows -= works[-1].tokens
        while rows and self._waiting and self._has_room():
            sequence = self._waiting.popleft()
            if sequence.last_entry is None:
                self._prepare(sequence)
            with self._pool_time:
                self._admit(sequence)
            self._running.append(sequence)
            works.append(self._work(sequence, rows))
            rows -= works[-1].tokens
        return works

    def _work(self, sequence: Sequence, rows: int) -> Work:
        options, begin = self._options, sequence.position
        if begin < sequence.known:
            stop = next((stop for stop in sequence.checkpoints if stop > begin), sequence.known)
            tokens = min(stop - begin, rows)
        elif options.draft_tokens and sequence.chance(begin, 0) < SPECULATING:
            tokens = min(options.draft_tokens + 1, sequence.request.tokens - begin, rows)
            accepted = 1
            while accepted < tokens and sequence.chance(begin + accepted, 1) < options.acceptance:
                accepted += 1
            return Work(sequence, Entry.VERIFY, tokens, accepted)
        else:
            tokens = 1
        # A plain decode takes no accepted count, so behind accepted drafts a single token is a one-token chunk.
        plain = tokens == 1 and self._pool.accepted(sequence.live_slot) == 1 and sequence.chance(begin, 2) >= DETOUR
        return Work(sequence, Entry.DECODE if plain else Entry.PREFILL, tokens, tokens)

    def _has_room(self) -> bool:
        counts = self._pool.counts()
        return counts.free + counts.cached > 0 and len(self._running) < self._options.max_sequences

    def _admit(self, sequence: Sequence) -> None:
        """Give the sequence a slot, of which there is one, with as much history as can be had."""
        if sequence.package is not None:
            slots = self._pool.import_(sequence.package)
            assert slots is not None
            sequence.slot, sequence.package = slots[0], None
        else:
            found = self._pool.take_prefix(sequence.prefixes) if sequence.prefixes else None
            if found is not None:
                sequence.slot, sequence.position = found
                self._count_prefix(sequence)
            else:
                sequence.slot, sequence.position = self._pool.take(), 0
        self._advance(sequence)
        sequence.admitted = sequence.furthest

    def _count_prefix(self, sequence: Sequence) -> None:
        if sequence.last_entry is not None:  # it ran before
            self.tally.resume_prefix_tokens += sequence.position
        else:
            self.tally.prefix_hits += 1
            self.tally.prefix_tokens += sequence.position

    def _preempt_for_head(self, clock: float) -> None:
        """Free the slot of the request that was served most, if the head of the queue lost patience."""
        head = self._waiting[0] if self._waiting else None
        if head is not self._head[0]:
            self._head = (head, clock)
        if head is None or clock - self._head[1] < self._options.patience or self._has_room():
            return
        victim = max(self._running, key=lambda s: s.furthest - s.admitted)
        if victim.furthest - victim.admitted < QUANTUM:
            return
        resume = self._options.resume
        if resume == "alternate":
            resume = ("recompute", "import")[self.tally.preemptions.total() % 2]
        self.tally.preemptions[resume] += 1
        with self._pool_time:
            if resume == "import":
                victim.package = self._pool.export([victim.live_slot])
            self._pool.free(victim.live_slot)
        victim.slot = None
        self._running.remove(victim)
        self._waiting.append(victim)

    def complete(self, works: list[Work], clock: float) -> list[Sequence]:
        """Account for a step that ended at this time.

        Returns:
            The sequences that are done; their slots are free.
        """
        finished = []
        with self._pool_time:
            for work in works:
                sequence, slot = work.sequence, work.sequence.live_slot
                self._pool.commit(slot, work.tokens, work.accepted if work.entry is Entry.VERIFY else None)
                sequence.position += work.accepted
                if sequence.position in sequence.checkpoints:
                    key, tokens = sequence.prefixes[sequence.position // self._options.checkpoint_every - 1]
                    self.tally.unpublished += not self._pool.publish(slot, key, tokens)
                if sequence.position == sequence.request.tokens:
                    self._pool.free(slot)
                    sequence.slot = None
                    finished.append(sequence)
        for work in works:
            self._account(work, clock)
        if finished:
            self._running = [s for s in self._running if s.slot is not None]
        return finished

    def _advance(self, sequence: Sequence) -> None:
        before = sequence.furthest
        sequence.furthest = max(before, sequence.position)
        self.done += sequence.furthest - before

    def _account(self, work: Work, clock: float) -> None:
        sequence, tally = work.sequence, self.tally
        self._advance(sequence)
        if sequence.first_token is None and sequence.position >= sequence.request.prompt:
            sequence.first_token = clock
        if sequence.slot is None:
            sequence.finished = clock
        if sequence.last_entry is not None:
            tally.transitions[f"{sequence.last_entry}>{work.entry}"] += 1
        sequence.last_entry = work.entry
        tally.rows[work.entry] += work.tokens
        if work.entry is Entry.VERIFY:
            tally.drafts += work.tokens - 1
            tally.drafts_accepted += work.accepted - 1
