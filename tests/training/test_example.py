"""The worked example runs: its losses on one rank and on several are the same."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

EXAMPLE = Path(__file__).resolve().parents[2] / "docs" / "examples" / "train_context_parallel.py"


def test_three_steps_on_one_and_on_four_ranks() -> None:
    path = os.pathsep.join(filter(None, [str(EXAMPLE.parents[2]), os.environ.get("PYTHONPATH", "")]))
    done = subprocess.run(
        [sys.executable, str(EXAMPLE), "--steps", "3", "--ranks", "4"],
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "(same)" in done.stdout
