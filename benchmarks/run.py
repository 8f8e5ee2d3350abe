"""Gate, then time, then one JSON line for each row and method: the only command of the benchmarks to remember.

Every row first runs once on our kernels and is held against the float64 reference: with one red row nothing is
timed and the exit code is 1. Then each method is timed by replaying a CUDA graph over a rotation of buffers and
slots that is larger than three L2 caches ("cold"), beside a copy kernel that moves the same bytes. Decode and
speculative rows are timed a second time with a foreign kernel before every call, as in an engine: the time of the
pair less that of the foreign kernel alone.
"""

from __future__ import annotations

import gc
import json
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console

if __package__ in (None, ""):  # run as a file
    sys.path.append(str(Path(__file__).resolve().parents[1]))

from benchmarks import environment, warm_up
from benchmarks.gate import WRONG, Expected, Gate, expect, gate, relative_error
from benchmarks.peers import Ours, Peer, PeerAbsent, choose_peers
from benchmarks.rows import ROWS, Row, Work, choose_rows, make_work, rotation
from benchmarks.timing import Call, CopyTimer, GraphTimer, Timer, Timing

__all__ = ["absent_line", "line", "measure", "run_gate"]

SCHEMA = 1
WARM_CALLS = 16  # of a rotation that stays in the L2 cache
DEFAULT_FOLDER = Path(__file__).resolve().parents[1] / "build" / "peers"
Line = dict[str, Any]


def least_nodes(row: Row) -> int:
    """Nodes of a graph: two gigabytes of traffic, at most 64 calls and at least 8."""
    return max(8, min(64, 2_000_000_000 // row.useful_bytes))


def line(
    row: Row,
    method: str,
    timing: Timing,
    copy: tuple[Timing, float] | None,
    *,
    cold: bool,
    calls: int,
    foreign: float | None = None,
    **more: Any,
) -> Line:
    """One figure.

    Args:
        row: what was called.
        method: who was called.
        timing: microseconds a call, or of a pair if `foreign` is given.
        copy: the copy of the same bytes: plain kernel, and microseconds of the best variant.
        cold: no byte came again within three L2 sizes.
        calls: length of the rotation.
        foreign: microseconds of the foreign kernel alone, taken off.
        **more: fields as they are.
    """
    us = timing.us - (foreign or 0.0)
    return _row_fields(row, method) | {
        "setting": "alone" if foreign is None else "after a foreign kernel",
        "us": us,
        "spread": timing.spread,
        "pair_us": None if foreign is None else timing.us,
        "foreign_us": foreign,
        "copy_us": None if copy is None else copy[0].us,
        "copy_spread": None if copy is None else copy[0].spread,
        "copy_best_us": None if copy is None else copy[1],
        "ratio": None if copy is None else copy[0].us / us,
        "ratio_best": None if copy is None else copy[1] / us,
        "tb_per_s": row.useful_bytes / us / 1e6,
        "cache": "cold" if cold else "warm",
        "rotation": calls,
        "nodes": timing.nodes,
        "replays": timing.replays,
        "absent": None,
        **more,
    }


def absent_line(row: Row, method: str, reason: str) -> Line:
    """A figure there is none of, and why."""
    return _row_fields(row, method) | {"setting": "alone", "us": None, "cache": "cold", "absent": reason}


def _row_fields(row: Row, method: str) -> Line:
    return {
        "schema": SCHEMA,
        "what": "kernel",
        "row": row.name,
        "kind": row.kind,
        "layout": row.layout,
        "channels": row.channels,
        "positions": row.positions,
        "sequences": row.sequences,
        "tokens": row.tokens,
        "bytes": row.useful_bytes,
        "method": method,
    }


def run_gate(rows: Sequence[Row], device: torch.device, say: Callable[[str], None]) -> dict[str, Gate]:
    """Gate every row; the results by row name."""
    results = {}
    for row in rows:
        results[row.name] = found = gate(row, device)
        verdict = "green" if found.passed else "RED"
        say(f"gate {row.name}: {verdict}, norm {found.norm:.2e}, worst {found.worst:.2f}, state {found.state_equal}")
        if device.type == "cuda":
            torch.cuda.empty_cache()
    return results


class _Rows:
    """Measures rows one after another; what they share."""

    def __init__(
        self,
        peers: Sequence[Peer],
        absent: dict[str, str],
        *,
        device: torch.device,
        timer: Timer,
        copy: CopyTimer | None,
        l2_bytes: int,
        with_foreign: bool,
        deadline: float,
        write: Callable[[Line], None],
        say: Callable[[str], None],
    ) -> None:
        self._peers, self._absent = peers, absent
        self._device, self._timer, self._copy = device, timer, copy
        self._l2_bytes, self._deadline = l2_bytes, deadline
        self._write, self._say = write, say
        self._refused: set[tuple[str, str]] = set()  # a warm figure needs the check of the cold one
        self._foreign: Call | None = None
        if with_foreign:
            source = torch.ones(1 << 20, device=device)
            target = torch.empty_like(source)
            self._foreign = lambda: torch.mul(source, 2.0, out=target)

    def measure(self, row: Row, gated: Gate) -> None:
        """All figures of one row, each written when it is known."""
        calls, nodes = rotation(row, self._l2_bytes), least_nodes(row)
        copy = None
        if self._copy is not None:
            copy = self._copy.time(row.useful_bytes, calls, nodes, self._device)
        work = make_work(row, calls, self._device)
        cold = work.is_cold(self._l2_bytes)
        foreign = None
        if self._foreign is not None and row.kind != "prefill":
            foreign = self._timer.time([self._foreign], least_nodes=max(nodes, calls)).us
        pool = work.state.clone(memory_format=torch.preserve_format)
        expected: dict[bool, Expected] = {}
        said = [f"{row.name}: copy {copy[0].us:.2f}" if copy else row.name]
        for peer in (Ours(), *self._peers):
            ours = isinstance(peer, Ours)
            try:
                if not ours:
                    self._may_run(peer, row)
                rotation_of_calls = peer.calls(work)
                more: Line = {"gate": gated.record()}
                if not ours:
                    more = self._check(peer, rotation_of_calls, work, pool, expected)
                timing = self._timer.time(rotation_of_calls, least_nodes=nodes)
                self._write(line(row, peer.name, timing, copy, cold=cold, calls=calls, **more))
                said.append(f"{peer.name} {timing.us:.2f}")
                if foreign is not None and self._foreign is not None:
                    pair = self._timer.time(rotation_of_calls, self._foreign, least_nodes=nodes)
                    self._write(line(row, peer.name, pair, None, cold=cold, calls=calls, foreign=foreign, **more))
                    said.append(f"({pair.us - foreign:.2f})")
            except PeerAbsent as reason:
                self._refused.add((row.name, peer.name))
                self._write(absent_line(row, peer.name, str(reason)))
            except Exception as error:
                if ours:
                    raise
                self._refused.add((row.name, peer.name))
                # One peer that breaks on one row must not cost the other rows.
                self._write(absent_line(row, peer.name, f"failed: {error!r}"[:500]))
                said.append(f"{peer.name} failed")
            finally:
                work.state.copy_(pool)
        if row.warm:
            self._measure_warm(row, gated)
        self._say(", ".join(said))

    def _measure_warm(self, row: Row, gated: Gate) -> None:
        work = make_work(row, WARM_CALLS, self._device)
        for peer in (Ours(), *self._peers):
            if (row.name, peer.name) in self._refused:
                continue
            with suppress(PeerAbsent):  # said in the cold row
                if not isinstance(peer, Ours):
                    self._may_run(peer, row)
                more: Line = {"gate": gated.record()} if isinstance(peer, Ours) else {}
                try:
                    timing = self._timer.time(peer.calls(work), least_nodes=256)
                except Exception:
                    if isinstance(peer, Ours):
                        raise
                    continue  # said in the cold row
                self._write(line(row, peer.name, timing, None, cold=False, calls=WARM_CALLS, **more))

    def _may_run(self, peer: Peer, row: Row) -> None:
        reason = peer.refuses(row) or self._absent.get(peer.name)
        if reason is None and time.monotonic() > self._deadline:
            reason = "the run's time was spent"
        if reason is not None:
            raise PeerAbsent(reason)

    def _check(
        self, peer: Peer, calls: Sequence[Call], work: Work, pool: torch.Tensor, expected: dict[bool, Expected]
    ) -> Line:
        """A peer's result of the first call against float64; a wrong one has no speed."""
        history = peer.reads_pool or work.row.kind != "prefill"
        if history not in expected:
            expected[history] = expect(work, history=history)
        wanted = expected[history]
        calls[1]()  # an autotuner runs its first call many times over, on one and the same state
        work.state.copy_(pool)
        error = relative_error(calls[0](), wanted.values)
        state = torch.equal(work.state, wanted.state) if peer.writes_pool else None
        work.state.copy_(pool)
        if not error < WRONG or state is False:
            raise PeerAbsent(f"wrong result: relative error {error:.2e}, slots as ours: {state}")
        return {"error": error}


def measure(
    rows: Sequence[Row], gates: dict[str, Gate], peers: Sequence[Peer], absent: dict[str, str], **how: Any
) -> None:
    """Measure gated rows; `how` as `_Rows` takes it."""
    measuring = _Rows(peers, absent, **how)
    for row in rows:
        measuring.measure(row, gates[row.name])
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def load_peers(peers: Sequence[Peer], folder: Path) -> dict[str, str]:
    """Load each; the reasons of those that cannot be, by name."""
    absent = {}
    for peer in peers:
        try:
            peer.load(folder)
        except PeerAbsent as reason:
            absent[peer.name] = str(reason)
        except Exception as error:
            absent[peer.name] = f"failed to load: {error!r}"[:500]
    return absent


def _start_warm_up(folder: Path, rows: str, peers: str, processes: int) -> list[subprocess.Popen[bytes]]:
    count = min(processes, len(warm_up.tasks(choose_rows(rows), choose_peers(peers))))
    command = [sys.executable, str(Path(warm_up.__file__)), str(folder), "--rows", rows, "--peers", peers]
    return [subprocess.Popen([*command, "--part", str(part), "--parts", str(count)]) for part in range(count)]


def _wait(processes: Sequence[subprocess.Popen[bytes]], until: float) -> None:
    for process in processes:
        try:
            process.wait(max(0.1, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def main(
    out: Annotated[Path, typer.Option(help="JSON lines go here; an existing file is replaced")],
    rows: Annotated[str, typer.Option(help="comma-separated beginnings of row names; empty: all")] = "",
    peers: Annotated[str, typer.Option(help="comma-separated beginnings of peer names; empty: all; none")] = "",
    folder: Annotated[Path, typer.Option(help="the peers' folder, made by fetch_peers.py")] = DEFAULT_FOLDER,
    quick: Annotated[bool, typer.Option(help="three repetitions instead of seven, no foreign kernel")] = False,
    budget: Annotated[float, typer.Option(help="seconds after which no further peer is timed")] = 600.0,
    compilers: Annotated[int, typer.Option(help="processes that compile peers during the gate")] = 10,
    commit: Annotated[str, typer.Option(help="recorded where the tree has no version control beside it")] = "",
    list_rows: Annotated[bool, typer.Option("--list", help="print the names of the rows and stop")] = False,
) -> None:
    """Gate and time the rows; write JSON lines."""
    console = Console(soft_wrap=True, highlight=False)
    started = time.monotonic()

    def say(text: str) -> None:
        console.print(f"{time.monotonic() - started:6.1f} s  {text}", markup=False)

    if list_rows:
        for row in ROWS:
            console.print(row.name, markup=False)
        raise typer.Exit
    try:
        chosen, wanted = choose_rows(rows), choose_peers(peers)
    except ValueError as error:
        console.print(str(error), markup=False)
        raise typer.Exit(2) from error
    if not torch.cuda.is_available():
        console.print("these figures need a CUDA device, and torch sees none")
        raise typer.Exit(2)
    workers = _start_warm_up(folder, rows, peers, compilers)
    patience = 0.0
    try:
        device = torch.empty(0, device="cuda").device
        around = environment.describe(commit or None)
        say(f"{around['gpu']}, torch {around['torch']}, CUDA {around['cuda']}, commit {around['commit']}")
        gates = run_gate(chosen, device, say)
        red = [name for name, found in gates.items() if not found.passed]
        if red:
            say(f"RED GATE, no speed is measured: {', '.join(red)}")
            raise typer.Exit(1)
        say("gate green; waiting for the peers' compilers")
        patience = 75.0
    finally:
        _wait(workers, started + patience)
    say("the peers are compiled")
    absent = load_peers(wanted, folder)
    for name, reason in absent.items():
        say(f"absent: {name}: {reason}")
    around["clocks"] = environment.record_clocks(device)
    gc.freeze()  # every capture collects garbage: what is loaded by now need not be looked at again
    timer = GraphTimer(3 if quick else 7)
    out.parent.mkdir(parents=True, exist_ok=True)
    with out.open("w") as lines:

        def write(record: Line) -> None:
            lines.write(json.dumps(record | {"environment": around}) + "\n")
            lines.flush()

        measure(
            chosen,
            gates,
            wanted,
            absent,
            device=device,
            timer=timer,
            copy=CopyTimer(timer, GraphTimer(3)),
            l2_bytes=around["l2_bytes"],
            with_foreign=not quick,
            deadline=started + budget,
            write=write,
            say=say,
        )
    say(f"done: {out}")


if __name__ == "__main__":
    typer.run(main)
