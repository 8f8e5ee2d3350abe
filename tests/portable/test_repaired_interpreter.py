"""What the repairs of Triton's interpreter claim: bfloat16 is torch's, and sums have the reference's bits."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from support import interpreter
from support.process import python

pytest.importorskip("triton")


def test_bfloat16_is_torchs() -> None:
    every = np.arange(1 << 16, dtype=np.uint16)
    widened = torch.from_numpy(interpreter._to_float32(every))
    expected = torch.from_numpy(every.view(np.int16)).view(torch.bfloat16).float()
    assert torch.equal(widened.view(torch.int32), expected.view(torch.int32))

    # Around every bfloat16 number: itself, its neighbours in fp32, and both sides of the tie above it.
    offsets = np.array([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF], dtype=np.uint32)
    values = ((every.astype(np.uint32) << np.uint32(16))[:, None] + offsets).view(np.float32)
    rounded = torch.from_numpy(interpreter._to_bfloat16(values).view(np.int16)).view(torch.bfloat16)
    expected = torch.from_numpy(values).to(torch.bfloat16)
    assert torch.equal(rounded.isnan(), expected.isnan())
    number = ~expected.isnan()
    assert torch.equal(rounded.view(torch.int16)[number], expected.view(torch.int16)[number])


SUMS = """
import torch
from support import interpreter
from support.cases import play, same_bits, variants
interpreter.repair()
from serving_conv import backends

cpu = torch.device("cpu")
named = {backend.name: backend for backend in backends._BACKENDS}
for entry in ("causal_conv1d_fn", "causal_conv1d_update"):
    for row in variants(entry):
        case = row.but(row.name, activation=None)
        outcomes = []
        for name in ("triton", "reference"):
            backends._chosen[cpu] = named[name]
            outcomes.append(play(case, cpu))
        triton, reference = outcomes
        assert same_bits(triton.out, reference.out), case
        stored = triton.stored[:, None].expand(triton.pool.shape)
        assert same_bits(triton.pool[stored], reference.pool[stored]), case
        print(case.name)
"""


def test_sums_have_the_references_bits() -> None:
    # Without SiLU, whose exponential is the library's of each: one order, one rounding a step, on every backend.
    done = python(SUMS, TRITON_INTERPRET="1")
    assert done.returncode == 0, done.stdout[-500:] + done.stderr[-2000:]
    assert len(done.stdout.splitlines()) > 100
