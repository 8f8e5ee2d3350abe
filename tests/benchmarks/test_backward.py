"""The training path's benchmark on the CPU: its gate is green and bites, its lines are complete."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from serving_conv.training import kernels

ROOT = Path(__file__).resolve().parents[2]
if str(ROOT) not in sys.path:
    sys.path.append(str(ROOT))

from benchmarks import backward  # noqa: E402
from benchmarks.backward_peers import PEERS, choose_backward_peers  # noqa: E402
from benchmarks.timing import Call, Timing  # noqa: E402

CPU = torch.device("cpu")
SMALL = (backward.Row("small", 1, 60, 128), backward.Row("packed", 1, 60, 128, (20, 1, 0, 39)))


class OneCall:
    """Makes each call once."""

    def time(self, calls: Sequence[Call], before: Call | None = None, least_nodes: int = 8) -> Timing:
        for call in calls:
            call()
        return Timing(100.0, 0.01, len(calls), 1)


@pytest.mark.parametrize("row", SMALL, ids=lambda row: row.name)
def test_the_gate_is_green_and_bites(row: backward.Row, monkeypatch: pytest.MonkeyPatch) -> None:
    assert backward.passed(backward.gate(row, CPU))

    def off(*arguments: Any, **options: Any) -> Any:
        dx, dweight, dbias, rest = kernels.gradients(*arguments, **options)
        assert dweight is not None
        return dx, dweight * 1.01, dbias, rest

    monkeypatch.setattr(backward, "gradients", off)
    errors = backward.gate(row, CPU)
    assert not backward.passed(errors) and errors["dx"] < backward.MOST_NORM < errors["dweight"]
    assert not backward.passed({"dx": float("nan")})


def test_lines_are_complete(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backward, "PLENTY", 1)
    lines: list[dict[str, Any]] = []
    absent = {peer.name: "not here" for peer in PEERS}
    for row in SMALL:
        backward.measure(
            row,
            {"dx": 0.0},
            PEERS,
            absent,
            device=CPU,
            timer=OneCall(),
            copy=None,
            l2_bytes=1,
            with_sweep=False,
            write=lines.append,
            say=lambda text: None,
        )
    ours = [line for line in lines if line["us"] is not None]
    assert [(line["row"], line["what"], line["method"]) for line in ours] == [
        (row.name, what, method)
        for row in SMALL
        for what, method in (
            ("forward", "serving_conv"),
            ("backward", "serving_conv ordered"),
            ("backward", "serving_conv fast"),
        )
    ]
    assert {line["absent"] for line in lines if line["us"] is None} == {"not here"}
    assert len(lines) - len(ours) == len(SMALL) * sum(len(peer.modes) for peer in PEERS)


def test_peers_are_chosen_by_name_and_say_what_is_missing(tmp_path: Path) -> None:
    assert choose_backward_peers("") == PEERS
    assert choose_backward_peers("none") == ()
    assert [peer.name for peer in choose_backward_peers("causal")] == ["causal-conv1d"]
    with pytest.raises(ValueError, match="vllm"):
        choose_backward_peers("vllm")
    reasons = backward.load(PEERS, tmp_path)
    assert "fetch_peers" in reasons["causal-conv1d"]
    assert set(reasons) == {"causal-conv1d", "fla"}


def test_rows_fill_the_cache_and_the_card() -> None:
    for row in backward.ROWS:
        assert not row.lengths or (row.batches == 1 and sum(row.lengths) == row.rows)
        calls = backward.rotation(row, 50 << 20)
        assert calls * 3 * row.stream_bytes >= 150 << 20
        # x and dout of every call, and a dx of every node.
        held = 2 * calls + max(calls, backward.least_nodes(row))
        assert held * row.stream_bytes < 100e9, row.name
    assert len({row.name for row in backward.ROWS}) == len(backward.ROWS)


def test_a_row_without_documents_is_one() -> None:
    assert backward.make_work(SMALL[0], 1, CPU).cu_seqlens is None
    work = backward.make_work(SMALL[1], 2, CPU)
    assert work.cu_seqlens is not None and work.cu_seqlens.tolist() == [0, 20, 21, 21, 60]
    assert work.seq_idx is not None and work.seq_idx.shape == (1, 60)
    assert len(work.x) == len(work.dout) == 2
    assert replace(SMALL[1], lengths=()).stream_bytes == SMALL[0].stream_bytes
