"""The context-parallel benchmark's parity part, as it runs without a GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_parity_over_two_ranks(tmp_path: Path) -> None:
    out = tmp_path / "parity.jsonl"
    command = [sys.executable, "benchmarks/context_parallel.py", "--out", str(out), "--device", "cpu"]
    done = subprocess.run(
        command, cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert len(lines) == 16  # four cases, two types, two reductions
    assert all(line["right"] and set(line["errors"]) == {"out", "dx", "dweight", "dbias"} for line in lines)
    assert max(line["errors"]["dweight"] for line in lines) > 0, "the parts were never summed apart"
