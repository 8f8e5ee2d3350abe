"""Owns the gate: our result of a row against the float64 reference, and a peer's against the same."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from benchmarks.peers import Ours
from benchmarks.rows import WIDTH, Row, Work, make_work
from benchmarks.timing import Call
from serving_conv import clear_device_fault, device_fault, reference

__all__ = ["WRONG", "Expected", "Gate", "expect", "gate", "relative_error"]

WRONG = 1e-2  # relative norm error from which a peer's result is called wrong; bf16 products give 2.3e-3
MOST_NORM = 2e-3  # correct rounding to bf16 gives 1.66e-3 on many values; the bound below is the sharp test
_BF16_BITS = 8
_FP32_UNIT = 2.0**-24


@dataclass(frozen=True)
class Expected:
    """What a call must give.

    Attributes:
        values: float64 `[tokens, channels]`.
        magnitude: float64 `|b| + sum |w x|`.
        state: the pool after the call, bit for bit.
    """

    values: Tensor
    magnitude: Tensor
    state: Tensor


@dataclass(frozen=True)
class Gate:
    """How our result of a row compares.

    Attributes:
        norm: relative norm error against float64; 1.66e-3 is what correct rounding to bf16 costs.
        worst: largest error over its bound (below).
        state_equal: the whole pool, slots of others included, is bit for bit the reference's.
        fault: the device's sticky code.
    """

    norm: float
    worst: float
    state_equal: bool
    fault: int

    @property
    def passed(self) -> bool:
        """Whether speed may be shown."""
        return self.norm < MOST_NORM and self.worst <= 1 and self.state_equal and self.fault == 0

    def record(self) -> dict[str, Any]:
        """For a line of results."""
        return asdict(self) | {"passed": self.passed}


def expect(work: Work, *, history: bool) -> Expected:
    """The reference's result of the first call of a rotation; the pool of `work` is left alone."""
    state = work.state.clone(memory_format=torch.preserve_format)
    result = reference.causal_conv1d(
        work.x[0],
        work.weight[0],
        state,
        work.cu_seqlens,
        work.slots[0],
        bias=work.bias[0],
        activation="silu",
        has_initial_state=history,
        num_accepted_tokens=work.accepted,
        speculative=work.row.kind == "speculative",
        pad_slot_id=-1,
        arithmetic=reference.Arithmetic.FLOAT64,
    )
    assert result.magnitude is not None
    return Expected(result.values, result.magnitude, state)


def relative_error(out: Tensor, values: Tensor) -> float:
    """Norm of the error over the norm of the float64 values; NaN if `out` holds one."""
    return float((out.double() - values).norm() / values.norm())


def _worst(out: Tensor, expected: Expected) -> float:
    """Largest error over its bound: W+1 fp32 roundings of the sum, exp and division, one rounding to bf16."""
    exact = expected.values.abs()
    before = 1.1 * (WIDTH + 1) * _FP32_UNIT * expected.magnitude + 8 * _FP32_UNIT * exact + 1e-30
    # Half a step of bf16 in the binade that the computed value may reach.
    _, exponent = torch.frexp((exact + before).clamp(min=torch.finfo(torch.bfloat16).tiny))
    bound = before + torch.ldexp(torch.ones_like(exact), exponent - _BF16_BITS - 1)
    error = (out.double() - expected.values).abs()
    return float((error / bound).nan_to_num(float("inf")).max())


def gate(row: Row, device: torch.device) -> Gate:
    """Run our kernel once on a row and compare."""
    work = make_work(row, 1, device)
    expected = expect(work, history=True)
    clear_device_fault(device)
    work.out[0].fill_(float("nan"))
    call: Call = Ours().calls(work)[0]
    out = call()
    return Gate(
        norm=relative_error(out, expected.values),
        worst=_worst(out, expected),
        state_equal=torch.equal(work.state, expected.state),
        fault=int(device_fault(device)),
    )
