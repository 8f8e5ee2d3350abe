"""Owns fresh interpreters, for what is decided at import: settings, log lines, CUDA contexts."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

__all__ = ["python"]

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
