"""The conformance suite on the Triton kernels, run on the CPU by Triton's interpreter, in processes of their own."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from serving_conv import backends
from serving_conv.native.cuda import CudaBackend

pytest.importorskip("triton")

TESTS = Path(__file__).resolve().parents[1]


@pytest.mark.parametrize(
    ("file", "chosen", "least"),
    [
        ("test_prefill.py", "test_grid or test_window_is_made", 60),
        ("test_update.py", "test_grid or count or speculative_width_2 or tokens_beyond", 110),
        # Left to GPUs: what only repeats these, and the drawn mixtures.
        ("test_step_entry.py", "linear or half or eight or bad or hostile or fit", 19),
    ],
)
def test_conformance(file: str, chosen: str, least: int) -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "1", "SERVING_CONV_BACKEND": "triton", "OMP_NUM_THREADS": "1"}
    for name in ("PYTEST_XDIST_WORKER", "PYTEST_ADDOPTS"):
        environment.pop(name, None)
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(TESTS), environment.get("PYTHONPATH", "")]))
    options = ("-p", "no:cacheprovider", "-p", "no:xdist", "-p", "portable.exact_fma", "-q", "-k", chosen)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, str(TESTS / file)],
        env=environment,
        cwd=TESTS.parent,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed
    assert int(passed[1]) >= least, done.stdout[-2000:]


def test_serves_where_the_cuda_backend_cannot_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CudaBackend, "supports", lambda *_: False)
    assert backends._select(torch.device("cuda", 0)).name == "triton"
    assert backends._select(torch.device("xpu", 0)).name == "triton"
