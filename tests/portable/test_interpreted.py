"""The conformance grid on the Triton kernels, run on the CPU by Triton's interpreter, in a process of its own.

The interpreter multiplies and adds in two roundings, so outputs are held to the derived bound, and slots to the bit.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from support.process import python

from serving_conv import backends
from serving_conv.native.cuda import CudaBackend

pytest.importorskip("triton")

TESTS = Path(__file__).resolve().parents[1]


@pytest.mark.parametrize(
    ("file", "chosen", "least"),
    [
        ("test_prefill.py", "test_grid or test_window_is_made", 60),
        ("test_update.py", "test_grid or count or speculative_width_2 or tokens_beyond", 110),
    ],
)
def test_conformance(file: str, chosen: str, least: int) -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "1", "SERVING_CONV_BACKEND": "triton", "OMP_NUM_THREADS": "1"}
    for name in ("PYTEST_XDIST_WORKER", "PYTEST_ADDOPTS"):
        environment.pop(name, None)
    options = ("-p", "no:cacheprovider", "-p", "no:xdist", "-q", "-k", chosen)
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


STEP = """
import pytest, torch
import serving_conv
from serving_conv import BackendError
from support.calls import call, valid
from serving_conv.contract import PREFILL, STEP

given = valid(STEP, torch.device("cpu"))
for name in ("speculative", "checkpoint_tokens"):
    arguments = dict(given)
    if name == "checkpoint_tokens":
        arguments["speculative"] = None
    with pytest.raises(BackendError, match=name):
        call(STEP, arguments)
plain = {**given, **dict.fromkeys(("speculative", "checkpoint_offsets", "checkpoint_tokens", "checkpoint_slots"))}
pool = plain["conv_state"].clone()
out = call(STEP, plain).clone()
fn = {name: plain[name] for name in plain if not name.startswith(("speculative", "checkpoint"))}
assert torch.equal(call(PREFILL, {**fn, "conv_state": pool}), out)
assert torch.equal(pool, plain["conv_state"])
"""


def test_a_step_without_drafts_and_checkpoints() -> None:
    result = python(STEP, TRITON_INTERPRET="1", SERVING_CONV_BACKEND="triton")
    assert result.returncode == 0, result.stderr


def test_serves_where_the_cuda_backend_cannot_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CudaBackend, "supports", lambda *_: False)
    assert backends._select(torch.device("cuda", 0)).name == "triton"
    assert backends._select(torch.device("xpu", 0)).name == "triton"
