"""The command: streams, exit codes, JSON, plot, and nothing half done."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from serving_conv.cli import app, main
from serving_conv.errors import ContractError
from serving_conv.replay import ReplayOptions, plot
from serving_conv.replay.command import _launch

SMALL = ["--requests", "6", "--max-context", "150", "--max-generated", "20", "--channels", "2"]

SCHEMA = {
    "trace": str,
    "backend": str,
    "options": dict,
    "requests": int,
    "tokens": {"total": int, "prompt": int, "generated": int},
    "steps": int,
    "rows": dict,
    "transitions": dict,
    "slots": {"total": int, "bytes_each": int, "high_water": int},
    "preemptions": dict,
    "prefix": {
        "block_tokens": int,
        "tokens_saved": int,
        "share_saved": float,
        "hits": int,
        "tokens_saved_on_resume": int,
        "evicted": int,
        "unpublished": int,
    },
    "drafts": {"verified": int, "accepted": int, "share_accepted": float},
    "trace_time": {
        "total_s": float,
        "latency_s": {"mean": float, "p50": float, "p95": float, "max": float},
        "first_token_s": {"mean": float, "p50": float, "p95": float, "max": float},
    },
    "wall_time": {
        "total_s": float,
        "operator_s": float,
        "pool_s": float,
        "inputs_s": float,
        "check_s": float,
        "tokens_per_second": float,
    },
    "checked": bool,
    "mismatches": int,
    "mismatch_details": list,
}


def run(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, ["replay", *map(str, arguments)])


def conforms(value: object, schema: object) -> bool:
    if isinstance(schema, dict):
        return isinstance(value, dict) and value.keys() == schema.keys() and all(
            conforms(value[name], part) for name, part in schema.items()
        )  # fmt: skip
    assert isinstance(schema, type)
    return type(value) is schema


def test_json_is_all_of_stdout_and_keeps_its_names() -> None:
    result = run(*SMALL, "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert conforms(found, SCHEMA)
    assert found["requests"] == 6
    assert found["tokens"]["prompt"] == 900
    assert found["options"]["channels"] == 2


def test_the_table_names_everything() -> None:
    result = run(*SMALL)
    assert result.exit_code == 0
    for name in (
        "requests", "tokens", "steps", "tokens per second", "operator", "pool", "slots at high water", "preemptions",
        "prefix tokens saved", "drafts accepted", "mismatches",
    ):  # fmt: skip
        assert name in result.stdout
    assert "100%" in result.stderr
    assert "100%" not in result.stdout


def test_no_check_says_so() -> None:
    assert "not checked" in run(*SMALL, "--no-check").stdout
    assert json.loads(run(*SMALL, "--no-check", "--json").stdout)["mismatches"] is None


def test_flags_arrive() -> None:
    flags = {
        "layers": 1, "channels": 3, "width": 3, "dtype": "float16", "state_dtype": "float32", "layout": "positions",
        "slots": 9, "max_sequences": 4, "max_step_tokens": 77, "draft_tokens": 2, "acceptance": 0.5, "step_ms": 5.0,
        "token_us": 1.0, "patience": 0.5, "resume": "import", "checkpoint_every": 32, "seed": 5,
    }  # fmt: skip
    arguments = [part for name, value in flags.items() for part in (f"--{name.replace('_', '-')}", str(value))]
    result = run(*SMALL, "--json", *arguments)
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["options"] == {**flags, "device": "cpu", "launch": "entries", "check": True}


def test_one_launch_a_layer() -> None:
    result = run(*SMALL, "--json", "--one-launch")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found["options"]["launch"] == "step"
    assert found["mismatches"] == 0


def test_graphs_need_a_cuda_device() -> None:
    assert _launch("cuda", one_launch=False, eager=False) == _launch("cuda:1", one_launch=True, eager=False) == "graphs"
    assert _launch("cuda", one_launch=False, eager=True) == _launch("cpu", one_launch=False, eager=False) == "entries"
    assert _launch("cpu", one_launch=True, eager=False) == _launch("cuda", one_launch=True, eager=True) == "step"
    with pytest.raises(ContractError, match="launch"):
        ReplayOptions(launch="graphs")


def test_plot(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="optional package")
    file = tmp_path / "replay.png"
    result = run(*SMALL, "--plot", file)
    assert result.exit_code == 0, result.output
    assert file.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")


def test_a_plot_of_one_step(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="optional package")
    trace = tmp_path / "$one$_[red].csv"  # neither mathematics nor markup
    trace.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46,5,0\n")
    result = run(trace, "--plot", tmp_path / "replay.png")
    assert result.exit_code == 0, result.output
    assert trace.name in result.stdout
    assert (tmp_path / "replay.png").exists()


def assert_one_line(result: Result, *parts: str) -> None:
    assert result.exit_code == 2
    assert result.stdout == ""
    assert result.stderr.startswith("serving-conv: ")
    assert result.stderr.count("\n") == 1
    for part in parts:
        assert part in result.stderr


def test_a_bad_trace_writes_nothing(tmp_path: Path, write: Callable[[str], Path]) -> None:
    trace = write("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46,5,5\n2023-11-16 18:15:47,x,5\n")
    result = run(trace, "--plot", tmp_path / "replay.png", "--requests", "1", "--json")
    assert_one_line(result, f"{trace}:3", "ContextTokens 'x'", "wanted")
    assert list(tmp_path.iterdir()) == [trace]


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["no such file.csv"], ["no such file.csv", "No such file"]),
        (["--slots", "1"], ["slots", "2 or more", "Remedy"]),
        (["--width", "9"], ["width", "2 to 8"]),
        (["--dtype", "int8"], ["dtype", "bfloat16"]),
        (["--requests", "0"], ["requests", "1 or more"]),
        (["--plot", "replay.pdf"], ["--plot", ".png"]),
        (["--plot", "no such folder/replay.png"], ["--plot", "folder"]),
    ],
)
def test_bad_values(arguments: list[str], parts: list[str]) -> None:
    assert_one_line(run(*arguments), *parts)


def test_plot_without_matplotlib(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(plot, "find_spec", lambda name: None)
    assert_one_line(run(*SMALL, "--plot", tmp_path / "replay.png"), "matplotlib", "pip install 'serving-conv[plot]'")


def test_unknown_flags_and_text_for_numbers_are_usage_errors() -> None:
    assert run("--nonsense").exit_code == 2
    assert run("--slots", "many").exit_code == 2


def test_the_console_script(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["serving-conv", "replay", "no such file.csv"])
    with pytest.raises(SystemExit) as left:
        main()
    assert left.value.code == 2
    assert capsys.readouterr().err.startswith("serving-conv: no such file.csv: ")
