"""Warm-up runs every Triton kernel that a layer's calls can run, and no other.

Under the interpreter nothing compiles, but the backend keeps the same list of what a process has run: the one by
which it refuses a cold kernel under graph capture.
"""

from __future__ import annotations

import json

import pytest
from support.process import python

pytest.importorskip("triton")

SERVED = """
import itertools
import torch
import serving_conv
from serving_conv.portable import kernels
from serving_conv.portable.backend import _loaded

CHANNELS, SIZES = 24, (1, 7, 64, 300, 3000)


class Launched:  # which kernels are asked for matters here, and not what they compute
    def __getitem__(self, grid):
        return lambda *arguments, **constants: None


kernels.conv_prefill = kernels.conv_update = Launched()


def int32(*values):
    return torch.tensor(values, dtype=torch.int32)


def serve(rows, *, dtype, state_dtype, bias, activation, layout, draft_tokens, steps):
    positions = serving_conv.state_positions(4, draft_tokens)
    pool = torch.zeros(rows + 1, positions, CHANNELS, dtype=state_dtype).transpose(1, 2)
    pool = pool if layout == "channels" else pool.contiguous()
    x, weight = torch.zeros(rows, CHANNELS, dtype=dtype), torch.zeros(CHANNELS, 4, dtype=dtype)
    options = {"bias": weight[:, 0].contiguous() if bias else None, "activation": activation}
    slots = torch.arange(1, rows + 1, dtype=torch.int32)
    each, one = torch.arange(rows + 1, dtype=torch.int32), int32(0, rows)
    for flagged, counted in itertools.product((False, True), (False, True) if draft_tokens else (False,)):
        for offsets in (None, one, each):
            used = slots[: rows if offsets is None else len(offsets) - 1]
            options["has_initial_state"] = torch.ones(len(used), dtype=torch.bool) if flagged else None
            options["num_accepted_tokens"] = torch.ones_like(used) if counted else None
            for out in (None, x):
                serving_conv.causal_conv1d_update(x, weight, pool, used, cu_seqlens=offsets, out=out, **options)
            if offsets is not None:
                for entry in (serving_conv.causal_conv1d_fn, serving_conv.causal_conv1d_step):
                    entry(x, weight, pool, offsets, used, **options)
                marks, named = {"speculative": torch.ones(len(used), dtype=torch.bool)}, {
                    "checkpoint_offsets": torch.zeros(len(used) + 1, dtype=torch.int32),
                    "checkpoint_tokens": int32(1, 1, 1), "checkpoint_slots": int32(0, 0, 0)}
                for more in ((named, marks, marks | named) if draft_tokens else (named,)) if steps else ():
                    serving_conv.causal_conv1d_step(x, weight, pool, offsets, used, **options, **more)


LAYER = {"dtype": torch.float32, "state_dtype": torch.float32, "bias": True, "activation": "silu",
         "layout": "channels", "draft_tokens": 0, "steps": False}
CHANGES = ({}, {"layout": "positions"}, {"draft_tokens": 3}, {"dtype": torch.float16, "state_dtype": torch.float16},
           {"state_dtype": torch.float16, "draft_tokens": 1}, {"bias": False}, {"activation": None},
           {"steps": True}, {"steps": True, "draft_tokens": 2})
for change in CHANGES:
    layer = {**LAYER, **change}
    _loaded.clear()
    told = []
    count = serving_conv.warmup(CHANNELS, **layer, device="cpu", progress=lambda *done: told.append(done))
    warm = set(_loaded)
    least, more = (12, 12) if layer["draft_tokens"] else (6, 2)
    assert count == len(warm) == least + more * layer["steps"], (change, count, len(warm))
    assert told == [(done, count) for done in range(count + 1)]
    for rows in SIZES:
        serve(rows, **layer)
        assert _loaded == warm, (change, rows, _loaded - warm)
    _loaded.clear()
    serve(7, **layer)
    assert _loaded == warm, (change, "warm-up runs what no call needs", warm - _loaded)
"""


def test_serving_after_warm_up_runs_no_cold_kernel() -> None:
    done = python(SERVED, TRITON_INTERPRET="1", SERVING_CONV_BACKEND="triton")
    assert done.returncode == 0, done.stderr[-3000:]


COMMAND = """
import sys
from serving_conv.cli import main
from support import interpreter
interpreter.repair()
sys.argv = {arguments}
main()
"""


def test_the_command() -> None:
    arguments = ["serving-conv", "warmup", "24", "--device", "cpu", "--draft-tokens", "2", "--json"]
    done = python(COMMAND.format(arguments=arguments), TRITON_INTERPRET="1", SERVING_CONV_BACKEND="triton")
    assert done.returncode == 0, done.stderr[-3000:]
    told = json.loads(done.stdout)
    assert told["kernels"] == 12
    assert "triton" in told["cache"]


def test_what_has_no_kernels_is_refused() -> None:
    code = """
import pytest, serving_conv
for device, why in (("cpu", "the reference serves"), ("meta", "torch does not see")):
    with pytest.raises(serving_conv.BackendError, match=why):
        serving_conv.warmup(24, device=device)
with pytest.raises(serving_conv.ContractError, match="width"):
    serving_conv.warmup(24, width=9, architecture="sm_90")
"""
    done = python(code, SERVING_CONV_BACKEND="")
    assert done.returncode == 0, done.stderr[-3000:]


def test_values_are_checked_before_anything_runs() -> None:
    code = """
import pytest, torch, serving_conv
from serving_conv.portable.backend import _loaded
for wrong in ({"width": 9}, {"layout": "rows"}, {"dtype": torch.int8}, {"activation": "gelu"}):
    with pytest.raises(serving_conv.ContractError):
        serving_conv.warmup(24, device="cpu", **wrong)
assert not _loaded
"""
    done = python(code, TRITON_INTERPRET="1", SERVING_CONV_BACKEND="triton")
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.gpu
def test_a_graph_captures_after_warm_up() -> None:
    code = """
import pytest, torch, serving_conv
x, weight = torch.randn(4, 64, device="cuda"), torch.randn(64, 4, device="cuda")
pool = torch.zeros(5, 64, 3, device="cuda")
slots = torch.arange(4, dtype=torch.int32, device="cuda")
serving_conv.device_fault("cuda")


def capture():
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        serving_conv.causal_conv1d_update(x, weight, pool, slots, out=x)
    return graph


with pytest.raises(serving_conv.CaptureError):
    capture()
assert serving_conv.warmup(64, dtype=torch.float32, bias=False, layout="positions") == 6
capture().replay()
torch.cuda.synchronize()
"""
    done = python(code, SERVING_CONV_BACKEND="triton")
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.parametrize(("switch", "expected"), [("1", "True"), ("0", "False")])
def test_dependent_launch_can_be_switched_off(switch: str, expected: str) -> None:
    code = """
import torch
from serving_conv.portable import backend
torch.cuda.get_device_capability = lambda device: (9, 0)
print(backend._launches_dependently(torch.device("cuda", 0)))
"""
    assert python(code, SERVING_CONV_DEPENDENT_LAUNCH=switch).stdout.split() == [expected]
