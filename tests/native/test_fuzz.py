"""The kernels' source under g++, fed hostile metadata in guarded memory: see `support.fuzz`."""

from __future__ import annotations

import time

import pytest
from support.fuzz import FuzzFailure, run
from support.fuzz_specs import MUTANTS, ORDER_MUTANT, SILENT_MUTANTS, SPECS, Spec

CASES = 6720  # of a spec
LEAST = 200_000  # of all specs


def test_enough_cases() -> None:
    assert CASES * len(SPECS) >= LEAST
    print(f"{len(SPECS)} specs of at least {CASES} cases: {CASES * len(SPECS)}")


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_no_foreign_byte_and_every_result(spec: Spec) -> None:
    started = time.perf_counter()
    done = run(spec, CASES)
    print(f"{done} cases, {done / (time.perf_counter() - started):.0f} a second")
    assert done >= CASES


# A fuzz that finds nothing must be able to find something.


@pytest.mark.parametrize("name", sorted(set(MUTANTS) - set(SILENT_MUTANTS)))
def test_a_planted_bug_is_found(name: str) -> None:
    mutant = MUTANTS[name]
    with pytest.raises(FuzzFailure):
        run(SPECS[mutant.spec], 2048, near=True, edits=mutant.edits)


def test_only_the_reverse_order_of_blocks_shows_a_late_write_to_a_slot() -> None:
    mutant = MUTANTS[ORDER_MUTANT]
    assert run(SPECS[mutant.spec], 2048, near=True, edits=mutant.edits, reverse=False) >= 2048
    with pytest.raises(FuzzFailure):
        run(SPECS[mutant.spec], 2048, near=True, edits=mutant.edits, reverse=True)
