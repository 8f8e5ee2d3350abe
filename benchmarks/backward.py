"""Gate, then time, then one JSON line for each row and method of the training path: forward, backward, packed or not.

Every row first runs once on our kernels and is held against the float64 reference on some of its channels (channels
do not meet): with one red row nothing is timed and the exit code is 1. Times are of CUDA graphs replayed over a
rotation of buffers larger than three L2 caches. A peer's time holds all that its library does in a call: zeros for
its sums, the sum of its workspace. The floor is a copy of three streams' bytes (x and dout read, dx written).

`--sweep` times launch choices of our kernel instead, `--hash` repeats deterministic backwards under load.
"""

from __future__ import annotations

import hashlib
import json
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from torch import Tensor

if __package__ in (None, ""):  # run as a file
    sys.path.append(str(Path(__file__).resolve().parents[1]))

from benchmarks import environment
from benchmarks.backward_peers import BackwardPeer, choose_backward_peers
from benchmarks.gate import relative_error
from benchmarks.peers import PeerAbsent
from benchmarks.timing import Call, CopyTimer, GraphTimer, Timer
from serving_conv.native import cuda
from serving_conv.native.backward import BackwardBuffers
from serving_conv.native.config import LaunchConfig, choose_backward
from serving_conv.training import reference
from serving_conv.training.kernels import convolve, gradients

SCHEMA = 1
WIDTH = 4
GATE_CHANNELS = 64  # at either end of a row
MOST_NORM = 2.5e-3  # of the error over the float64 values; correct rounding to bf16 gives 1.66e-3
DEFAULT_FOLDER = Path(__file__).resolve().parents[1] / "build" / "peers"
PLENTY = 400_000_000  # bytes of a rotation, or three L2 caches


@dataclass(frozen=True)
class Row:
    """One shape.

    Attributes:
        name: of the row.
        batches: B.
        rows: T of a batch.
        channels: D.
        lengths: of the packed sequences, or empty: every batch is a sequence.
    """

    name: str
    batches: int
    rows: int
    channels: int
    lengths: tuple[int, ...] = ()

    @property
    def stream_bytes(self) -> int:
        """Bytes of x."""
        return self.batches * self.rows * self.channels * 2


def _documents(rows: int, length: int) -> tuple[int, ...]:
    return (*[length] * (rows // length), *([rows % length] if rows % length else []))


ROWS = (
    Row("8192", 1, 8192, 8192),
    Row("8192 packed 1000", 1, 8192, 8192, _documents(8192, 1000)),
    Row("8192 packed 37", 1, 8192, 8192, _documents(8192, 37)),
    Row("65536", 1, 65536, 8192),
    Row("65536 packed 1000", 1, 65536, 8192, _documents(65536, 1000)),
    Row("8192 D2048", 1, 8192, 2048),
    Row("2048", 1, 2048, 8192),
    Row("4x2048", 4, 2048, 8192),
)


@dataclass
class Work:
    """The tensors of a row; call `i` uses the i-th of each list."""

    row: Row
    x: list[Tensor]
    dout: list[Tensor]
    weight: Tensor
    bias: Tensor
    cu_seqlens: Tensor | None
    seq_idx: Tensor | None


def make_work(row: Row, calls: int, device: torch.device) -> Work:
    """Random tensors."""
    torch.manual_seed(0)
    shape = (row.batches, row.rows, row.channels)

    def streams() -> list[Tensor]:
        return [torch.randn(shape, device=device, dtype=torch.bfloat16) for _ in range(calls)]

    offsets = torch.tensor([0, *row.lengths]).cumsum(0).int()
    numbers = torch.arange(len(row.lengths)).repeat_interleave(torch.tensor(row.lengths, dtype=torch.int64))
    return Work(
        row=row,
        x=streams(),
        dout=streams(),
        weight=torch.randn(row.channels, WIDTH, device=device).bfloat16(),
        bias=torch.randn(row.channels, device=device).bfloat16(),
        cu_seqlens=offsets.to(device) if row.lengths else None,
        seq_idx=numbers.int()[None].contiguous().to(device) if row.lengths else None,
    )


def our_gradients(work: Work, i: int, *, deterministic: bool) -> tuple[Tensor, Tensor, Tensor]:
    """dx, dweight and dbias of one buffer, by our backward."""
    dx, dweight, dbias, _ = gradients(
        work.dout[i],
        work.x[i],
        work.weight,
        work.bias,
        None,
        work.cu_seqlens,
        None,
        activation="silu",
        deterministic=deterministic,
        wanted=(True, True, True, False),
    )
    if dx is None or dweight is None or dbias is None:
        raise RuntimeError("a gradient is missing")
    return dx, dweight, dbias


def backward_calls(work: Work, deterministic: bool) -> list[Call]:
    """Our backward, one call for each buffer."""

    def make(i: int) -> Call:
        def call() -> Tensor:
            return our_gradients(work, i, deterministic=deterministic)[0]

        return call

    return [make(i) for i in range(len(work.x))]


def forward_calls(work: Work) -> list[Call]:
    """Our forward, one call for each buffer."""

    def make(i: int) -> Call:
        return lambda: convolve(
            work.x[i], work.weight, work.bias, None, work.cu_seqlens, activation="silu", want_final=False
        )[0]

    return [make(i) for i in range(len(work.x))]


def sweep_calls(work: Work, config: LaunchConfig, deterministic: bool) -> list[Call]:
    """Our kernel under a launch choice of its own."""

    def make(i: int) -> Call:
        dx = torch.empty_like(work.x[i])
        buffers = BackwardBuffers(dx, torch.empty_like(work.weight), torch.empty_like(work.bias), None)

        def call() -> Tensor:
            cuda.run_backward(
                work.dout[i],
                work.x[i],
                work.weight,
                work.bias,
                None,
                work.cu_seqlens,
                None,
                buffers,
                activation="silu",
                ordered=deterministic,
                choose=lambda **_: config,
            )
            return dx

        return call

    return [make(i) for i in range(len(work.x))]


def gate(row: Row, device: torch.device) -> dict[str, float]:
    """Relative errors of our forward and of both our backwards, on the first and last channels."""
    work = make_work(row, 1, device)
    errors: dict[str, float] = {}
    out, _ = convolve(work.x[0], work.weight, work.bias, None, work.cu_seqlens, activation="silu", want_final=False)
    for deterministic in (True, False):
        found = our_gradients(work, 0, deterministic=deterministic)
        for part in (slice(0, GATE_CHANNELS), slice(-GATE_CHANNELS, None)):
            x, weight, bias = work.x[0][..., part].double(), work.weight[part].double(), work.bias[part].double()
            want_out, _ = reference.forward(x, weight, bias, None, work.cu_seqlens, activation="silu")
            want = reference.backward(
                work.dout[0][..., part].double(), x, weight, bias, None, work.cu_seqlens, None, activation="silu"
            )
            dx, dweight, dbias = found
            pairs = (
                ("out", out[..., part], want_out),
                ("dx", dx[..., part], want.dx),
                ("dweight", dweight[part], want.dweight),
                ("dbias", dbias[part], want.dbias),
            )
            for name, got, exact in pairs:
                errors[name] = max(errors.get(name, 0.0), relative_error(got, exact))
    return errors


def passed(errors: dict[str, float]) -> bool:
    """Whether speed may be shown; NaN is red."""
    return all(error < MOST_NORM for error in errors.values())


def rotation(row: Row, l2_bytes: int) -> int:
    """Buffers so many that none is found in the cache when it comes again."""
    return max(2, -(-max(3 * l2_bytes, PLENTY) // (3 * row.stream_bytes)))


def least_nodes(row: Row) -> int:
    """Calls of a graph."""
    return max(4, min(32, 4_000_000_000 // (3 * row.stream_bytes)))


def sweep(row: Row) -> Iterator[LaunchConfig]:
    """Launch choices worth a measurement: runs, bytes of a thread, rows ahead, blocks a multiprocessor."""
    multiprocessors = torch.cuda.get_device_properties(0).multi_processor_count
    chosen = choose_backward(
        rows=row.rows,
        batches=row.batches,
        channels=row.channels,
        width=WIDTH,
        x_bytes=2,
        multiprocessors=multiprocessors,
    )
    yield chosen
    for rows in (32, 64, 128, 256, 512, 1024):
        if rows < row.rows:
            yield chosen._replace(rows=rows)
    for vec, min_blocks in ((4, 2), (4, 3), (4, 4), (2, 4), (2, 6), (2, 8)):
        tiles = -(-row.channels // (chosen.threads * vec))
        runs = max(1, multiprocessors * min_blocks // (tiles * row.batches))
        rows = max(16, 4 * -(-row.rows // (4 * runs)))
        for ahead in (8, 12) if vec == 2 else (8, 12, 16, 20):
            yield chosen._replace(vec=vec, min_blocks=min_blocks, rows=rows, ahead=ahead)


def hash_repeats(row: Row, repeats: int) -> str:
    """One hash over so many deterministic backwards, while another stream keeps the GPU busy."""
    work = make_work(row, 1, torch.device("cuda"))
    busy, noise = torch.cuda.Stream(), torch.randn(1 << 26, device="cuda")  # type: ignore[no-untyped-call]
    found = hashlib.sha256()
    for _ in range(repeats):
        with torch.cuda.stream(busy):
            noise.mul_(1.0000001)
        for grad in our_gradients(work, 0, deterministic=True):
            # Every bit counts in the sum of the words; order does not, and both runs add the same way.
            words = grad.view(torch.int16).long()
            place = torch.arange(words.numel(), device="cuda").view(words.shape) % 8191 + 1
            found.update(str(int((words * place).sum())).encode())
    return found.hexdigest()


def main(
    out: Annotated[Path, typer.Option(help="JSON lines go here; an existing file is replaced")],
    rows: Annotated[str, typer.Option(help="comma-separated names of rows; empty: all")] = "",
    peers: Annotated[str, typer.Option(help="comma-separated beginnings of peer names; empty: all; none")] = "",
    folder: Annotated[Path, typer.Option(help="the peers' folder, made by fetch_peers.py")] = DEFAULT_FOLDER,
    quick: Annotated[bool, typer.Option(help="three repetitions instead of seven")] = False,
    with_sweep: Annotated[bool, typer.Option("--sweep", help="time launch choices of our kernel instead")] = False,
    repeats: Annotated[int, typer.Option("--hash", help="hash so many deterministic backwards instead")] = 0,
    commit: Annotated[str, typer.Option(help="recorded where the tree has no version control beside it")] = "",
) -> None:
    """Gate and time the rows; write JSON lines."""
    console = Console(soft_wrap=True, highlight=False)
    started = time.monotonic()

    def say(text: str) -> None:
        console.print(f"{time.monotonic() - started:6.1f} s  {text}", markup=False)

    names = [name.strip() for name in rows.split(",") if name.strip()]
    unknown = set(names) - {row.name for row in ROWS}
    if unknown:
        console.print(f"no rows {sorted(unknown)}; there are: {', '.join(row.name for row in ROWS)}", markup=False)
        raise typer.Exit(2)
    chosen = [row for row in ROWS if not names or row.name in names]
    try:
        wanted = choose_backward_peers(peers)
    except ValueError as error:
        console.print(str(error), markup=False)
        raise typer.Exit(2) from error
    if not torch.cuda.is_available():
        console.print("these figures need a CUDA device, and torch sees none")
        raise typer.Exit(2)
    around = environment.describe(commit or None)
    say(f"{around['gpu']}, torch {around['torch']}, commit {around['commit']}")
    device = torch.empty(0, device="cuda").device
    gates = {row.name: gate(row, device) for row in chosen}
    for name, errors in gates.items():
        say(f"gate {name}: {'green' if passed(errors) else 'RED'}, {errors}")
    if not all(passed(errors) for errors in gates.values()):
        say("RED GATE, no speed is measured")
        raise typer.Exit(1)
    out.parent.mkdir(parents=True, exist_ok=True)
    with out.open("w") as lines:

        def write(record: dict[str, Any]) -> None:
            lines.write(json.dumps({"schema": SCHEMA, **record, "environment": around}) + "\n")
            lines.flush()

        if repeats:
            for row in chosen[:1]:
                found = hash_repeats(row, repeats)
                say(f"{row.name}: {repeats} deterministic backwards under load: {found}")
                write({"what": "backward hash", "row": row.name, "repeats": repeats, "sha256": found})
            return
        around["clocks"] = environment.record_clocks(device)
        timer = GraphTimer(3 if quick else 7)
        copy = CopyTimer(timer, GraphTimer(3))
        absent = load(wanted, folder)
        for name, reason in absent.items():
            say(f"absent: {name}: {reason}")
        for row in chosen:
            measure(
                row,
                gates[row.name],
                wanted,
                absent,
                device=device,
                timer=timer,
                copy=copy,
                l2_bytes=around["l2_bytes"],
                with_sweep=with_sweep,
                write=write,
                say=say,
            )
            torch.cuda.empty_cache()
    say(f"done: {out}")


def load(peers: tuple[BackwardPeer, ...], folder: Path) -> dict[str, str]:
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


def measure(
    row: Row,
    errors: dict[str, float],
    peers: tuple[BackwardPeer, ...],
    absent: dict[str, str],
    *,
    device: torch.device,
    timer: Timer,
    copy: CopyTimer | None,
    l2_bytes: int,
    with_sweep: bool,
    write: Callable[[dict[str, Any]], None],
    say: Callable[[str], None],
) -> None:
    """All figures of one row, each written when it is known."""
    calls, nodes = rotation(row, l2_bytes), least_nodes(row)
    floor = best = None
    if copy is not None:
        timing, best = copy.time(3 * row.stream_bytes, calls, nodes, device)
        floor = timing.us
        torch.cuda.empty_cache()
    work = make_work(row, calls, device)
    about = {"row": row.name, "batches": row.batches, "rows": row.rows, "channels": row.channels}

    def record(what: str, method: str, rotation_of_calls: list[Call], **more: Any) -> None:
        timing = timer.time(rotation_of_calls, least_nodes=nodes)
        write(
            {
                "what": what,
                **about,
                "method": method,
                "us": timing.us,
                "spread": timing.spread,
                "copy_us": floor,
                "copy_best_us": best,
                "ratio": None if floor is None else floor / timing.us,
                **more,
            }
        )
        say(f"{row.name}: {what} {method} {timing.us:.1f} us (three streams copied: {floor}) {more}")

    if with_sweep:
        for config in sweep(row):
            try:
                record("backward sweep", "ordered", sweep_calls(work, config, True), config=repr(config))
            except Exception as error:
                say(f"{config}: {error!r}"[:300])
        return
    record("forward", "serving_conv", forward_calls(work), gate=errors)
    record("backward", "serving_conv ordered", backward_calls(work, True), gate=errors)
    record("backward", "serving_conv fast", backward_calls(work, False), gate=errors)
    for peer in peers:
        for mode in peer.modes:
            try:
                if peer.name in absent:
                    raise PeerAbsent(absent[peer.name])
                rotation_of_calls = peer.calls(work, mode)
                # Ours is gated, so a peer may be held against it.
                apart = relative_error(rotation_of_calls[0](), backward_calls(work, True)[0]().double())
                if not apart < 1e-2:
                    raise PeerAbsent(f"wrong result: relative error {apart:.2e}")
                record("backward", f"{peer.name} {mode}", rotation_of_calls)
            except PeerAbsent as reason:
                write({"what": "backward", **about, "method": f"{peer.name} {mode}", "us": None, "absent": str(reason)})
            except Exception as error:
                text = f"failed: {error!r}"[:500]
                write({"what": "backward", **about, "method": f"{peer.name} {mode}", "us": None, "absent": text})
                say(f"{row.name}: {peer.name} {mode} {text}")


if __name__ == "__main__":
    typer.run(main)
