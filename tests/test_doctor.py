"""`serving-conv doctor`: one line at the end that is right, a code that means something, the same as JSON."""

from __future__ import annotations

import json
import os
from pathlib import Path

from support.process import python

CALL = "import sys; from serving_conv.cli import main; sys.argv = ['serving-conv', *{arguments!r}]; main()"


def doctor(*arguments: str, **environment: str):
    return python(CALL.format(arguments=["doctor", "--no-engine", *arguments]), **environment)


def test_it_ends_with_ready(tmp_path: Path) -> None:
    result = doctor(SERVING_CONV_CACHE=str(tmp_path))
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines()[-1] == "ready"
    assert all(name in result.stdout for name in ("python", "torch", "gpu", "cache", "backend", "vllm"))


def test_it_says_what_to_do(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    result = doctor("--json", SERVING_CONV_CACHE=str(blocked / "cache"))
    found = json.loads(result.stdout)
    assert result.returncode == 1 and not found["ready"]
    assert "SERVING_CONV_CACHE" in found["verdict"]
    (cache,) = (finding for finding in found["findings"] if finding["name"] == "cache")
    assert os.path.basename(blocked) in cache["value"]


def test_a_backend_that_cannot_run_is_named(tmp_path: Path) -> None:
    result = doctor("--json", SERVING_CONV_CACHE=str(tmp_path), SERVING_CONV_BACKEND="no such")
    assert result.returncode == 1
    assert "no such" in result.stdout
