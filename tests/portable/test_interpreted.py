"""The conformance suite on the Triton kernels, run on the CPU by Triton's interpreter, in processes of their own."""

from __future__ import annotations

import pytest
import torch
from support.process import interpreted_tests

from serving_conv import backends
from serving_conv.native.cuda import CudaBackend

pytest.importorskip("triton")


@pytest.mark.parametrize(
    ("file", "chosen", "least"),
    [
        ("test_prefill.py", "test_grid or test_window_is_made or bfloat16-bfloat16", 71),
        ("test_update.py", "test_grid or count or speculative_width_2 or tokens_beyond or bfloat16-bfloat16", 127),
        ("test_hostile.py", "padding or offsets or garbage", 20),
        # Left to GPUs: what only repeats these, and the drawn mixtures.
        ("test_step_entry.py", "linear or half or eight or bad or hostile or fit", 19),
    ],
)
def test_conformance(file: str, chosen: str, least: int) -> None:
    assert interpreted_tests(file, chosen, SERVING_CONV_BACKEND="triton") >= least


def test_serves_where_the_cuda_backend_cannot_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CudaBackend, "supports", lambda *_: False)
    assert backends._select(torch.device("cuda", 0)).name == "triton"
    assert backends._select(torch.device("xpu", 0)).name == "triton"
