"""vLLM's own Triton kernels as the oracle, on the CPU: what they and every backend make of the same calls.

The comparison is `against_vllm_kernels.py`, in a process whose Triton interprets; there also stand the differences
between the two contracts, by name, and the faults that the comparison must find.
"""

from __future__ import annotations

import pytest
from support import vllm_kernels
from support.process import interpreted_tests

pytest.importorskip("triton")


@pytest.mark.skipif(vllm_kernels.installed() is None, reason="vLLM is not installed here")
def test_against_vllms_kernels() -> None:
    assert interpreted_tests("engine/against_vllm_kernels.py") >= 210
