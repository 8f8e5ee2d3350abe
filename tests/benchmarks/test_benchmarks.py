"""The benchmarks without a GPU: rows and bytes, gate and exit codes, peers' reasons, the report and the plot."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import Tensor
from typer import Typer
from typer.testing import CliRunner

ROOT = Path(__file__).resolve().parents[2]
if str(ROOT) not in sys.path:
    sys.path.append(str(ROOT))

from benchmarks import fetch_peers, first_use, gate, host, peers, report, run, timing, warm_up  # noqa: E402
from benchmarks.rows import ROWS, Row, choose_rows, make_work, rotation  # noqa: E402

CPU = torch.device("cpu")
L2 = 60_000_000
SMALL = (
    Row("prefill one", "prefill", (37,), channels=16),
    Row("prefill ragged", "prefill", (5, 1, 9), channels=16),
    Row("decode three", "decode", (1, 1, 1), channels=16, warm=True),
    Row("decode positions", "decode", (1, 1), channels=16, layout="positions"),
    Row("speculative", "speculative", (4, 4), channels=16, positions=6),
)


def invoke(command: Callable[..., None], *arguments: str) -> tuple[int, str]:
    app = Typer()
    app.command()(command)
    result = CliRunner().invoke(app, list(arguments))
    return result.exit_code, result.output


class CountingTimer:
    """Makes every call once and says it took as many microseconds as it is told."""

    def __init__(self, us: float = 2.0) -> None:
        self.us, self.calls = us, 0

    def time(
        self, calls: Sequence[timing.Call], before: timing.Call | None = None, least_nodes: int = 8
    ) -> timing.Timing:
        for call in calls:
            if before is not None:
                before()
            call()
        self.calls += len(calls)
        return timing.Timing(self.us + (before is not None), 0.01, max(len(calls), least_nodes), 20)


def measured(rows: Sequence[Row], chosen: Sequence[peers.Peer], **changes: Any) -> list[dict[str, Any]]:
    lines: list[dict[str, Any]] = []
    how: dict[str, Any] = {
        "device": CPU,
        "timer": CountingTimer(),
        "copy": None,
        "l2_bytes": 100,
        "with_foreign": True,
        "deadline": float("inf"),
        "write": lines.append,
        "say": lambda _: None,
    }
    run.measure(rows, run.run_gate(rows, CPU, lambda _: None), chosen, {}, **how | changes)
    return lines


def test_rows_are_those_of_the_anchors() -> None:
    by_name = {row.name: row for row in ROWS}
    assert len(by_name) == len(ROWS) == 26
    assert by_name["prefill 32 ragged"].tokens == 8205
    assert by_name["prefill 256 short"].tokens == 1692
    assert set(by_name["prefill 256 short"].lengths) == set(range(1, 13))
    assert by_name["prefill 4096 + 200x1"].lengths == (4096, *[1] * 200)
    assert by_name["prefill 200x1 + 4096"].lengths == (*[1] * 200, 4096)
    assert by_name["speculative 64"].positions == 6
    for row in ROWS:
        assert (
            row.sequences == 1024
            or row.layout == "positions"
            or f"{row.name} positions" in by_name
            or row.kind == "prefill"
        )


def test_useful_bytes() -> None:
    by_name = {row.name: row for row in ROWS}
    assert by_name["prefill 8192"].stream_bytes == 2 * 8192 * 8192 * 2
    assert by_name["prefill 8192"].useful_bytes == 2 * 8192 * 8192 * 2 + 6 * 8192 * 2
    # x, out, three window rows read and three written.
    assert by_name["decode 64"].useful_bytes == 64 * 8192 * 16
    # x and out of four tokens, a window of three read, six positions written.
    assert by_name["speculative 64"].useful_bytes == 64 * 8192 * 2 * (2 * 4 + 3 + 6)
    assert by_name["decode 64 positions"].useful_bytes == by_name["decode 64"].useful_bytes
    assert all(row.useful_bytes % 32 == 0 for row in ROWS)  # the copy moves whole 16-byte words


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_rotations_are_cold(row: Row) -> None:
    assert rotation(row, L2) * row.useful_bytes > 3 * L2
    assert 8 <= run.least_nodes(row) <= 64


def test_work_uses_every_slot_once_and_never_slot_zero() -> None:
    for row in SMALL:
        work = make_work(row, 3, CPU)
        used = torch.cat(work.slots)
        assert sorted(used.tolist()) == list(range(1, 3 * row.sequences + 1))
        assert work.state.shape == (3 * row.sequences + 1, row.channels, row.positions)
        assert work.state.stride(1 if row.layout == "channels" else 2) == 1
        assert all(slots.data_ptr() % 16 == work.slots[0].data_ptr() % 16 for slots in work.slots)
        assert not work.is_cold(10**9)
        assert work.is_cold(work.row.useful_bytes - 1)


def test_choosing() -> None:
    assert choose_rows("") == ROWS
    assert [row.name for row in choose_rows("prefill 2048,decode 64")] == [
        "prefill 2048",
        "decode 64",
        "decode 64 positions",
    ]
    assert peers.choose_peers("none") == ()
    assert [peer.name for peer in peers.choose_peers("vllm")] == ["vLLM", "vLLM, no PDL"]
    with pytest.raises(ValueError, match="no row starts with"):
        choose_rows("prefil 9")
    with pytest.raises(ValueError, match="no peer starts with"):
        peers.choose_peers("cub")


@pytest.mark.parametrize("row", SMALL, ids=lambda row: row.name)
def test_gate_is_green_on_our_kernels(row: Row) -> None:
    found = gate.gate(row, CPU)
    assert found.passed, found
    assert 1e-3 < found.norm < 2e-3
    assert found.record()["passed"] is True


@pytest.mark.parametrize("damage", ["value", "nan", "state", "bias"])
def test_gate_is_red_on_damage(damage: str, monkeypatch: pytest.MonkeyPatch) -> None:
    honest = peers.Ours.calls

    def damaged(self: peers.Ours, work: Any) -> list[timing.Call]:
        def call() -> Tensor:
            out = honest(self, work)[0]()
            if damage == "value":
                out[3, 5] *= 1.01
            elif damage == "nan":
                out[0, 0] = float("nan")
            elif damage == "bias":
                out += 0.01
            else:
                work.state[0, 0, 0] += 1
            return out

        return [call]

    monkeypatch.setattr(peers.Ours, "calls", damaged)
    assert not gate.gate(SMALL[0], CPU).passed


def test_a_red_gate_ends_the_run_before_any_timing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    red = gate.Gate(norm=0.1, worst=50.0, state_equal=False, fault=0)
    monkeypatch.setattr(run, "gate", lambda *_: red)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(run.environment, "describe", lambda *_: {"gpu": "g", "torch": "t", "cuda": "c", "commit": "c"})
    monkeypatch.setattr(torch, "empty", lambda *_, **__: torch.zeros(0))
    out = tmp_path / "lines.jsonl"
    code, text = invoke(run.main, "--out", str(out), "--rows", "decode 8", "--peers", "none")
    assert code == 1
    assert "RED GATE" in text
    assert not out.exists()


def test_exit_codes_without_a_gpu(tmp_path: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    out = str(tmp_path / "lines.jsonl")
    assert invoke(run.main, "--out", out)[0] == 2
    assert invoke(run.main, "--out", out, "--rows", "nothing")[0] == 2
    assert invoke(run.main, "--out", out, "--peers", "nobody")[0] == 2
    assert invoke(host.main, "--out", out)[0] == 2
    assert invoke(first_use.main)[0] == 2
    code, text = invoke(run.main, "--out", out, "--list")
    assert code == 0
    assert text.splitlines() == [row.name for row in ROWS]


def test_lines_of_a_measurement() -> None:
    lines = measured(SMALL, [peers.TorchConv()])
    ours = [line for line in lines if line["method"] == "serving_conv"]
    assert [line["row"] for line in ours if line["setting"] == "alone" and line["cache"] == "cold"] == [
        r.name for r in SMALL
    ]
    assert all(line["gate"]["passed"] for line in ours)
    after = [line for line in ours if line["setting"] != "alone"]
    assert {line["kind"] for line in after} == {"decode", "speculative"}
    assert all(line["pair_us"] == 3.0 and line["foreign_us"] == 2.0 and line["us"] == 1.0 for line in after)
    assert {line["row"] for line in ours if line["cache"] == "warm"} == {"decode three"}
    theirs = {line["row"]: line for line in lines if line["method"] == "torch conv1d"}
    assert theirs["prefill one"]["error"] < 4e-3
    assert theirs["prefill ragged"]["absent"] == "it knows one sequence"
    assert theirs["decode three"]["absent"] == "it has no state"


def test_a_wrong_or_broken_peer_has_no_speed() -> None:
    class Wrong(peers.TorchConv):
        name = "wrong"

        def calls(self, work: Any) -> list[timing.Call]:
            return [lambda: work.out[0].zero_()] * 2

    class Broken(Wrong):
        name = "broken"

        def calls(self, work: Any) -> list[timing.Call]:
            raise RuntimeError("no")

    lines = measured(SMALL[:1], [Wrong(), Broken()])
    found = {line["method"]: line for line in lines}
    assert found["wrong"]["us"] is None
    assert "wrong result" in found["wrong"]["absent"]
    assert "RuntimeError" in found["broken"]["absent"]


def test_a_decode_step_is_checked_from_its_windows() -> None:
    class PrefillsFromZeros(peers.TorchConv):  # as causal-conv1d, whose decode step has a pool
        name = "zeros"

        def refuses(self, row: Any) -> str | None:
            return None

        def calls(self, work: Any) -> list[timing.Call]:
            return peers.Ours().calls(work)

    decode = next(row for row in SMALL if row.kind == "decode")
    lines = measured([decode], [PrefillsFromZeros()])
    found = [line for line in lines if line["method"] == "zeros"]
    assert found
    assert all(line["absent"] is None and line["error"] < 4e-3 for line in found if line["cache"] == "cold")


def test_a_peer_refused_cold_is_not_timed_warm() -> None:
    class Wrong(peers.TorchConv):
        name = "wrong"

        def refuses(self, row: Any) -> str | None:
            return None

        def calls(self, work: Any) -> list[timing.Call]:
            return [lambda: work.out[0].zero_()] * 2

    warm = next(row for row in SMALL if row.warm)
    lines = measured([warm], [Wrong()])
    assert {line["cache"] for line in lines if line["method"] == "wrong"} == {"cold"}
    assert {line["cache"] for line in lines if line["method"] == "serving_conv"} == {"cold", "warm"}


def test_the_report_leaves_out_warm_figures_without_a_check() -> None:
    lines = [
        {"what": "kernel", "row": "decode 1", "method": method, "cache": cache, "setting": "alone", "us": us}
        for method, cache, us in (
            ("serving_conv", "cold", 2.0),
            ("serving_conv", "warm", 1.0),
            ("causal-conv1d", "cold", None),
            ("causal-conv1d", "warm", 1.5),
        )
    ]
    titles = {title: body for title, _, body in report._sections(lines)}
    assert titles["Microseconds a call, warm in L2"] == [["decode 1", "1.00", "-"]]


def test_after_the_deadline_only_ours_is_timed() -> None:
    lines = measured(SMALL[:1], [peers.TorchConv()], deadline=0.0)
    assert [line["absent"] for line in lines] == [None, "the run's time was spent"]


def test_a_line_takes_the_foreign_kernel_off() -> None:
    copy = (timing.Timing(3.0, 0.0, 8, 20), 2.5)
    alone = run.line(SMALL[0], "m", timing.Timing(4.0, 0.1, 8, 20), copy, cold=True, calls=2)
    assert (alone["us"], alone["ratio"], alone["ratio_best"]) == (4.0, 0.75, 0.625)
    pair = run.line(SMALL[0], "m", timing.Timing(4.0, 0.1, 8, 20), None, cold=False, calls=2, foreign=1.5)
    assert (pair["us"], pair["pair_us"], pair["ratio"], pair["cache"]) == (2.5, 4.0, None, "warm")


@pytest.mark.parametrize("peer", peers.PEERS, ids=lambda peer: peer.name)
def test_absent_peers_say_why(peer: peers.Peer, tmp_path: Path) -> None:
    if isinstance(peer, peers.OursTriton | peers.TorchConv):  # nothing to fetch
        return
    reason = run.load_peers([peer], tmp_path)[peer.name]
    assert "fetch_peers" in reason or "Triton" in reason


def test_refusals_are_sentences() -> None:
    for peer in peers.PEERS:
        for row in ROWS:
            reason = peer.refuses(row)
            assert reason is None or " " in reason
    assert peers.Dao().refuses(next(row for row in ROWS if row.kind == "speculative"))


def test_warm_up_names_each_kernel_once() -> None:
    found = warm_up.tasks(ROWS, peers.PEERS)
    names = [(peer.name, name) for peer, _, name in found]
    assert len(names) == len(set(names))
    assert sum(peer == "vLLM" for peer, _ in names) == 13
    assert sum(peer == "fla" for peer, _ in names) == 20
    assert all(row.tokens <= 8205 for _, row, _ in found)


def test_torch_conv_and_ours_agree_without_history() -> None:
    work = make_work(SMALL[0], 2, CPU)
    wanted = gate.expect(work, history=False)
    assert gate.relative_error(peers.TorchConv().calls(work)[0](), wanted.values) < 4e-3


def test_vllm_metadata_covers_every_token() -> None:
    row = replace(SMALL[1], lengths=(17, 1, 8))
    metadata = peers.Vllm.metadata(row, CPU)
    assert metadata.nums_dict[8]["tot"] == 5
    assert metadata.batch_ptr.tolist() == [0, 0, 0, 1, 2]
    assert metadata.token_chunk_offset_ptr.tolist() == [0, 1, 2, 0, 0]


def test_the_copy_kernels_are_named_by_their_variant() -> None:
    source = timing.copy_source()
    for threads, each in timing.COPY_VARIANTS:
        assert f"COPY({threads}, {each})" in source
    assert timing.COPY_VARIANTS[0] == (256, 4)


def test_host_batches_alternate() -> None:
    made: list[str] = []
    value = torch.zeros(1)

    def method(name: str) -> timing.Call:
        return lambda: made.append(name) or value  # type: ignore[func-returns-value]

    found = host.batches({"a": [method("a")], "b": [method("b")]}, lambda: None, calls=2, count=3)
    assert "".join(made) == "aabb" * 8
    assert [len(times) for times in found.values()] == [3, 3]
    assert host.host_line("row", "a", [1.0, 2.0, 3.0])["us"] == 2.0


def results() -> list[dict[str, Any]]:
    """Made-up lines of every kind."""
    around = {
        "gpu": "NVIDIA H200",
        "torch": "2.11",
        "cuda": "13.0",
        "commit": "abc",
        "date": "2026-12-01T00:00:00",
        "clocks": {"driver_version": "580", "clocks.sm": "1980", "clocks.mem": "3201"},
    }
    lines: list[dict[str, Any]] = []
    methods = ("serving_conv", *(peer.name for peer in peers.PEERS))
    for number, row in enumerate(ROWS):
        copy = (timing.Timing(row.useful_bytes / 4e6 + 1, 0.01, 8, 20), row.useful_bytes / 4.1e6 + 1)
        for rank, method in enumerate(methods):
            refused = None if rank == 0 else peers.PEERS[rank - 1].refuses(row)
            if refused:
                lines.append(run.absent_line(row, method, refused))
                continue
            us = copy[0].us * (1.05 + 0.13 * rank + 0.01 * number)
            timed = timing.Timing(us, 0.02, 8, 20)
            lines.append(run.line(row, method, timed, copy, cold=True, calls=8))
            if row.kind != "prefill":
                lines.append(run.line(row, method, replace(timed, us=us + 3), None, cold=True, calls=8, foreign=3.0))
            if row.warm:
                lines.append(run.line(row, method, timed, None, cold=False, calls=16))
    lines += [host.host_line("decode 1", name, [us, us, us]) for name, us in (("serving_conv", 14.0), ("vLLM", 50.0))]
    lines += first_use.first_use_lines({"backend": 0.2, "prefill": 1.2}, "cold")
    lines += first_use.first_use_lines({"backend": 0.2, "prefill": 0.1}, "warm")
    return [line | {"environment": around} for line in lines]


@pytest.fixture
def results_file(tmp_path: Path) -> Path:
    path = tmp_path / "lines.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in results()))
    return path


def test_report_reads_what_run_writes(results_file: Path) -> None:
    lines = report.read_lines(results_file)
    assert lines == results()
    peer = report.best_peer(report._kernel(lines), "decode 64")
    assert peer is not None
    assert peer["method"] == "vLLM"


def test_report_table_and_markdown(results_file: Path) -> None:
    lines = report.read_lines(results_file)
    console = Console(width=200, record=True, file=io.StringIO())
    report.table(lines, console)
    text = console.export_text()
    for row in ROWS:
        assert row.name in text
    assert "absent: torch conv1d: it has no state" in text
    assert "NVIDIA H200; driver 580" in text
    block = report.markdown(lines, "plot.png")
    assert "![Percent of a copy" in block
    assert "| prefill 8192 |" in block
    assert "| decode 1 | 14.0 | 50.0 | 0.28 |" in block
    assert "| prefill | 1.200 | 0.100 |" in block
    # Every table line has as many cells as its head.
    for section in block.split("**")[2::2]:
        assert len({text.count("|") for text in section.splitlines() if text.startswith("|")}) == 1


def test_report_command_writes_plot_and_block(results_file: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    picture, block = tmp_path / "plot.png", tmp_path / "block.md"
    code, text = invoke(report.main, str(results_file), "--plot", str(picture), "--markdown", str(block))
    assert code == 0, text
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert picture.stat().st_size > 20_000
    assert block.read_text().startswith("NVIDIA H200")


@pytest.mark.parametrize("content", ["", "not json\n", '{"row": 1}\n', "[]\n"])
def test_report_refuses_what_is_no_result(content: str, tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    path.write_text(content)
    code, _ = invoke(report.main, str(path))
    assert code == 2


def test_fetch_refuses_an_unknown_peer(tmp_path: Path) -> None:
    code, text = invoke(fetch_peers.main, str(tmp_path / "peers"), "--only", "nobody")
    assert code == 2
    assert "no peer" in text


def test_the_readme_shows_the_committed_results() -> None:
    folder = Path(report.__file__).parent
    text = (folder / "README.md").read_text()
    shown = text.split("<!-- results -->\n")[1].split("<!-- /results -->")[0]
    assert shown == report.markdown(report.read_lines(folder / "results" / "h200.jsonl"), "results/h200.png")
