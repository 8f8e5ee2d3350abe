"""Owns fresh processes, for what is decided at import: settings, log lines, CUDA contexts, Triton's interpreter."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

__all__ = ["interpreted_tests", "python"]

TESTS = str(Path(__file__).resolve().parents[1])


def python(code: str, *options: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run code in a new interpreter that can import `serving_conv` and `support`.

    Args:
        code: what to run.
        options: of the interpreter.
        environment: variables to set; `SERVING_CONV_DEBUG` is not inherited.
    """
    kept = {name: value for name, value in os.environ.items() if name != "SERVING_CONV_DEBUG"}
    path = os.pathsep.join(filter(None, [TESTS, kept.get("PYTHONPATH", "")]))
    return subprocess.run(
        [sys.executable, *options, "-c", code],
        env={**kept, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **environment},
        capture_output=True,
        text=True,
        timeout=300,
    )


_INTERPRETED = """
import sys
import pytest
from support import interpreter
interpreter.repair()
sys.exit(pytest.main(sys.argv[1:]))
"""


def interpreted_tests(file: str, chosen: str = "", **environment: str) -> int:
    """Run tests in a new process in which Triton's interpreter, repaired, runs its kernels; all must pass.

    Args:
        file: of the tests, from this folder's parent.
        chosen: what pytest's `-k` takes.
        environment: variables to set.

    Returns:
        The number of tests that passed.
    """
    kept = {name: value for name, value in os.environ.items() if name not in ("PYTEST_XDIST_WORKER", "PYTEST_ADDOPTS")}
    path = os.pathsep.join(filter(None, [TESTS, kept.get("PYTHONPATH", "")]))
    options = ("-p", "no:cacheprovider", "-p", "no:xdist", "-q", "-k", chosen)
    done = subprocess.run(
        [sys.executable, "-c", _INTERPRETED, *options, str(Path(TESTS, file))],
        env={**kept, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "TRITON_INTERPRET": "1", **environment},
        cwd=Path(TESTS).parent,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed, done.stdout[-2000:]
    return int(passed[1])
