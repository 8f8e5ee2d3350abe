"""The kernels' source under AddressSanitizer and UndefinedBehaviorSanitizer: the fuzz, and the conformance suite.

The sanitizers must be in the process before anything else, so each test starts a fresh interpreter with them.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from support.fuzz_specs import SILENT_MUTANTS, SPECS

TESTS = Path(__file__).resolve().parents[1]
CASES = 40_000  # of all specs
PARTS = 2
# Left out for time alone: hundreds of type combinations, a kernel each, calls of 2^31 elements, bugs on purpose.
CONFORMANCE = "not type_combinations and not 65537 and not beyond_two_to and not planted"


def sanitized(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run an interpreter whose host kernels are sanitized."""
    library = subprocess.run(
        ["gcc", "-print-file-name=libasan.so"], capture_output=True, text=True, check=True
    ).stdout.strip()
    assert Path(library).is_absolute(), "AddressSanitizer's library is not installed beside gcc"
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, [str(TESTS), os.environ.get("PYTHONPATH", "")])),
        "OMP_NUM_THREADS": "1",
        "LD_PRELOAD": library,
        # Python itself never frees what it interns.
        "ASAN_OPTIONS": "detect_leaks=0",
        "SERVING_CONV_BACKEND": "host",
        # Unoptimised: it compiles three times as fast, and no read is optimised away.
        "SERVING_CONV_HOST_FLAGS": "-O0 -fsanitize=address,undefined -fno-sanitize-recover=all",
    }
    return subprocess.run(
        [sys.executable, "-m", *arguments],
        env=environment,
        cwd=TESTS.parent,
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )


@pytest.mark.parametrize("part", range(PARTS))
def test_fuzz(part: int) -> None:
    specs = range(part, len(SPECS), PARTS)
    chosen = [option for spec in specs for option in ("--spec", str(spec))]
    done = sanitized("support.fuzz", "--exact", "--cases", str(CASES * len(specs) // len(SPECS)), *chosen)
    assert done.returncode == 0, done.stdout + done.stderr
    count = int(re.findall(r"^(\d+) cases in", done.stdout, re.MULTILINE)[0])
    print(done.stdout)
    assert count >= 20_000 // PARTS


@pytest.mark.parametrize("name", SILENT_MUTANTS)
def test_a_read_without_consequence_is_found(name: str) -> None:
    done = sanitized("support.fuzz", "--exact", "--cases", "512", "--mutant", name)
    assert done.returncode != 0
    assert "heap-buffer-overflow" in done.stderr


@pytest.mark.parametrize(
    ("name", "least"),
    [
        ("test_probes", 200),
        ("test_prefill", 150),
        ("test_update", 150),
        ("test_step_entry", 30),
        ("pool/test_kernel_copies", 40),
        ("training/test_kernel", 60),
    ],
)
def test_conformance(name: str, least: int) -> None:
    done = sanitized("pytest", "-q", "-p", "no:cacheprovider", "-k", CONFORMANCE, str(TESTS / f"{name}.py"))
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-6000:]
    print(done.stdout[-200:])
    assert int(re.findall(r"(\d+) passed", done.stdout)[0]) >= least
