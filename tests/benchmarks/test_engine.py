"""The engine benchmark's own arithmetic: which runs it starts, and what it says of two runs' tokens."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
if str(ROOT) not in sys.path:
    sys.path.append(str(ROOT))

from benchmarks.engine import _timed_runs, _token_runs, compare_tokens  # noqa: E402
from benchmarks.engine_models import MODELS  # noqa: E402
from benchmarks.engine_summary import markdown, read_lines  # noqa: E402


def _steps(*ids: int, logprob: float = -1.0, second: float = -1.5) -> list[Any]:
    return [[number, logprob, second] for number in ids]


def test_equal_tokens() -> None:
    found = compare_tokens([_steps(1, 2, 3)], [_steps(1, 2, 3, logprob=-1.25)])
    assert found == {"equal": True, "differences": [], "largest_logprob_difference": 0.25}


def test_where_tokens_part() -> None:
    ours = [_steps(1, 2, 3), _steps(4, 5, 6, logprob=-1.125)]
    theirs = [_steps(1, 2, 3), _steps(4, 7, 6, second=-1.0625)]
    found = compare_tokens(ours, theirs)
    assert not found["equal"]
    assert found["differences"] == [{"prompt": 1, "token": 1, "gap": 0.0625, "logprob_difference": 0.125}]


def test_a_first_token_may_differ() -> None:
    found = compare_tokens([_steps(1)], [_steps(2)])
    assert found["differences"] == [{"prompt": 0, "token": 0, "gap": 0.5, "logprob_difference": 0.0}]


def test_every_model_runs_stock_and_with_the_plugin() -> None:
    runs = [*_timed_runs(["mamba2", "qwen3next"]), *_token_runs("mamba2"), *_token_runs("qwen3next")]
    assert len({run.name for run in runs}) == len(runs)
    assert {run.model for run in runs} == set(MODELS)
    for model in MODELS:
        assert {run.plugin for run in runs if run.model == model} == {False, True}
    assert all(run.options["kv_cache_memory_bytes"] for run in runs)


def test_the_readme_shows_the_committed_results() -> None:
    folder = ROOT / "benchmarks"
    shown = (folder / "README.md").read_text().split("<!-- engine -->\n")[1].split("<!-- /engine -->")[0]
    assert shown.strip() == markdown(read_lines(folder / "results" / "h200-engine.jsonl")).strip()


def test_our_own_runs_of_the_committed_results_agree() -> None:
    lines = read_lines(ROOT / "benchmarks" / "results" / "h200-engine.jsonl")
    own = [line for line in lines if line["what"] == "engine tokens" and "no graphs" in line["first"]]
    assert len(own) == 4
    assert all(line["equal"] for line in own)
    assert all(line["kernels_compiled_after_start"] == 0 for line in lines if line["what"] == "engine")
