"""Owns the compiling of peers beforehand: one part of what the first calls of the rows would compile one by one.

`run.py` starts a few of these beside its gate. What they compile is found again in Triton's own disk cache.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import torch
import typer

if __package__ in (None, ""):  # run as a file
    sys.path.append(str(Path(__file__).resolve().parents[1]))

from benchmarks.peers import Fla, Peer, PeerAbsent, choose_peers
from benchmarks.rows import Row, choose_rows, make_work

__all__ = ["tasks"]


def tasks(rows: tuple[Row, ...], peers: tuple[Peer, ...]) -> list[tuple[Peer, Row, str]]:
    """(peer, row, name of what it compiles), each name once, with the smallest row that needs it."""
    found: dict[tuple[str, str], tuple[Peer, Row, str]] = {}
    for row in sorted(rows, key=lambda row: row.useful_bytes):
        for peer in peers:
            if peer.refuses(row) is None:
                for name in peer.compiles(row):
                    found.setdefault((peer.name, name), (peer, row, name))
    return list(found.values())


def main(
    folder: Annotated[Path, typer.Argument(help="the peers' folder")],
    rows: Annotated[str, typer.Option(help="as in run.py")] = "",
    peers: Annotated[str, typer.Option(help="as in run.py")] = "",
    part: Annotated[int, typer.Option(help="which part of the work")] = 0,
    parts: Annotated[int, typer.Option(help="how many parts there are")] = 1,
) -> None:
    """Call each kernel of the peers once, so that it is compiled."""
    for peer, row, name in tasks(choose_rows(rows), choose_peers(peers))[part::parts]:
        if row.kind == "prefill" and row.sequences == 1:
            row = replace(row, lengths=(512,))  # the length is no constant of any kernel
        if isinstance(peer, Fla):
            peer = Fla()
            numerator, denominator = name.rsplit(" ", 1)[1].split("/")
            peer.shard = (int(numerator), int(denominator))
        try:
            peer.load(folder)
            peer.calls(make_work(row, 1, "cuda"))[0]()
            torch.cuda.synchronize()
        except PeerAbsent:
            continue
        except Exception as error:
            # The run itself meets the same error and reports it with its row.
            print(f"warm-up of {peer.name}, {row.name}: {error!r}"[:500], file=sys.stderr)


if __name__ == "__main__":
    typer.run(main)
