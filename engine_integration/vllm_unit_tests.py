"""Runs vLLM's own unit tests of its causal conv1d, from a checkout, against the adapters.

    python -m serving_conv.engine_integration.vllm_unit_tests CHECKOUT [--backend host]... [-- PYTEST ARGUMENTS]

Without `--backend`: reference and host on a machine without a GPU, cuda on one with. The tests ask for a CUDA device by
name; where there is none, a copy of the file that asks for the CPU runs. The checkout should be of the version that
is installed, since the tests follow its arguments.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

__all__ = ["main", "on_the_cpu"]

TESTS = Path("tests/kernels/mamba/test_causal_conv1d.py")
# What the copy needs before vLLM's module is imported; the last line fails if the stock functions would be tested.
_PRELUDE = """
from serving_conv.engine_integration.vllm_plugin import register as _register
_register()
from vllm.model_executor.layers.mamba.ops import causal_conv1d as _module
assert hasattr(_module.causal_conv1d_fn, "serving_conv_original"), "causal_conv1d_fn is not ours"
assert hasattr(_module.causal_conv1d_update, "serving_conv_original"), "causal_conv1d_update is not ours"
"""
_FALLBACKS = """

def test_no_call_fell_back():
    from serving_conv import engine_report
    report = engine_report()
    assert report.calls > 0 and report.fallbacks == 0, report.sentence()
"""


def on_the_cpu(text: str) -> str:
    """The tests' source, asking for the CPU wherever it asks for CUDA by name."""
    text = re.sub(r"([\"'])cuda\1", r"\1cpu\1", text)
    text = text.replace("torch.cuda.empty_cache()", "None")
    return text.replace(".cuda()", ".cpu()")


def main() -> int:
    """Run them on each backend; the exit code is the first that is not 0."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("checkout", type=Path, help="of vLLM's repository")
    parser.add_argument("--backend", action="append", choices=("reference", "host", "cuda"))
    parser.add_argument("pytest", nargs="*", help="arguments for pytest, after --")
    options = parser.parse_args()
    source = options.checkout / TESTS
    if not source.is_file():
        parser.error(f"{source} does not exist: give the path of a checkout of vLLM")
    on_gpu = torch.cuda.is_available()
    text = source.read_text(encoding="utf-8")
    head, rest = _after_future_imports(text if on_gpu else on_the_cpu(text))
    worst = 0
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder, "test_vllms_causal_conv1d.py")
        copy.write_text(head + _PRELUDE + rest + _FALLBACKS, encoding="utf-8")
        for backend in options.backend or (["cuda"] if on_gpu else ["reference", "host"]):
            print(f"vLLM's tests on the backend {backend}", flush=True)
            done = subprocess.run(
                [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(copy), *options.pytest],
                env={**os.environ, "SERVING_CONV_BACKEND": backend},
                cwd=folder,
                check=False,
            )
            worst = worst or done.returncode
    return worst


def _after_future_imports(text: str) -> tuple[str, str]:
    lines = text.splitlines(keepends=True)
    last = max((index for index, line in enumerate(lines) if line.startswith("from __future__")), default=-1)
    return "".join(lines[: last + 1]), "".join(lines[last + 1 :])


if __name__ == "__main__":
    sys.exit(main())
