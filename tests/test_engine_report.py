"""The counts of an engine process: kept in a folder while it lives, told once at its end, begun anew by a fork."""

from __future__ import annotations

import json
from pathlib import Path

from support.process import python

COUNT = """
import logging, os, sys, time
logging.basicConfig(level=logging.INFO, stream=sys.stdout, format="%(message)s")
from serving_conv.engine_report import COUNTERS, engine_report
COUNTERS.start()
COUNTERS.start()
COUNTERS.function("fn").calls += 3
COUNTERS.fall_back("fn", "because")
COUNTERS.fall_back("fn", "because")
"""


def test_told_once_with_the_reason(tmp_path: Path) -> None:
    result = python(COUNT + "COUNTERS.tell()", SERVING_CONV_REPORT=str(tmp_path))
    assert result.returncode == 0, result.stderr
    lines = result.stdout.splitlines()
    assert lines == [
        "serving_conv: fn falls back to the engine's own: because",
        "serving_conv: 3 calls ran here (fn 3), 2 fell back (fn: 2 x because)",
    ]
    (path,) = tmp_path.glob("*.json")
    report = json.loads(path.read_text())
    assert (report["calls"], report["fallbacks"], report["functions"]["fn"]["fallbacks"]) == (3, 2, {"because": 2})


def test_a_killed_process_leaves_its_counts(tmp_path: Path) -> None:
    result = python(COUNT + "time.sleep(1.2); os.kill(os.getpid(), 9)", SERVING_CONV_REPORT=str(tmp_path))
    assert result.returncode == -9
    (path,) = tmp_path.glob("*.json")
    assert json.loads(path.read_text())["calls"] == 3


def test_a_fork_counts_anew() -> None:
    fork = """
child = os.fork()
if child:
    os.waitpid(child, 0)
COUNTERS.start()
COUNTERS.function("fn").calls += 1
print(engine_report().calls, flush=True)
if not child:
    os._exit(0)
"""
    result = python(COUNT + fork)
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines()[1:3] == ["1", "4"], result.stdout
