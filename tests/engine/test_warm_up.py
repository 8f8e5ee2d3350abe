"""Ahead of serving, the plugin loads what a model's convolutions run, on whichever backend serves its device."""

from __future__ import annotations

import pytest
from support.process import python

REPAIRED = "from support import interpreter; interpreter.repair()"

LOADED = """
import types
import torch
import serving_conv
from pathlib import Path

root = Path(serving_conv.__file__).resolve().parent
if not (root / "engine_integration").exists():
    serving_conv.__path__.append(str(root.parent))
from serving_conv.engine_integration.vllm_warmup import find_convolutions, load_kernels
from serving_conv.engine_report import COUNTERS


class Layer(torch.nn.Module):
    def __init__(self, channels, slots, drafts):
        super().__init__()
        self.conv1d = torch.nn.Conv1d(channels, channels, 4, groups=channels)
        self.kv_cache = [slots.new_zeros(5, 3 + drafts, channels)]


layers = [Layer(24, torch.zeros(0), 0), Layer(24, torch.zeros(0), 0), Layer(24, torch.zeros(0), 2)]
config = types.SimpleNamespace(
    model_config=types.SimpleNamespace(dtype=torch.float32),
    compilation_config=types.SimpleNamespace(static_forward_context=dict(enumerate(layers))),
)
assert len(list(find_convolutions(config))) == 2, "equal layers are loaded once"
loaded = load_kernels(config)
assert COUNTERS.kernels_loaded == loaded
print(loaded)
"""


@pytest.mark.parametrize(("backend", "kernels"), [("triton", 6 + 12), ("reference", 0)])
def test_the_kernels_of_a_model_are_loaded(backend: str, kernels: int) -> None:
    if backend == "triton":
        pytest.importorskip("triton")
    first = REPAIRED if backend == "triton" else ""
    done = python(first + LOADED, TRITON_INTERPRET="1", SERVING_CONV_BACKEND=backend)
    assert done.returncode == 0, done.stderr[-3000:]
    assert int(done.stdout) == kernels
