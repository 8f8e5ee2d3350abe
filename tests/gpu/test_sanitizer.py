"""compute-sanitizer over KIT-6, a fresh process a tool."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(shutil.which("compute-sanitizer") is None, reason="compute-sanitizer is not on the path"),
]


@pytest.mark.parametrize("tool", ["memcheck", "racecheck", "initcheck"])
def test_no_finding(tool: str) -> None:
    worker = Path(__file__).with_name("kit6_worker.py")
    command = ["compute-sanitizer", "--tool", tool, "--error-exitcode", "9"]
    if tool == "memcheck":
        command += ["--report-api-errors", "no"]  # the driver's own probing for optional symbols
    if tool != "initcheck":  # which must see all that writes
        command += ["--kernel-name", "kns=conv_"]
    done = subprocess.run([*command, sys.executable, str(worker)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
    assert "all lengths ran" in done.stdout
