"""Runs vLLM's own unit tests of its causal conv1d, from a checkout, against the adapters.

    python -m serving_conv.engine_integration.vllm_unit_tests CHECKOUT [--backend host]... [-- PYTEST ARGUMENTS]

Without `--backend`: reference and host on a machine without a GPU, cuda on one with. The tests ask for a CUDA device by
name, and skip where vLLM's own kernels could not run; where there is none, a copy of the file that asks for the CPU
and does not skip runs. The checkout should be of the version that is installed, since the tests follow its arguments.

Tests of what the operator leaves to vLLM (block indices of prefix caching, up to 0.29) test vLLM's own kernel: the
last test says how many calls went there and fails for any other reason than that.
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

def test_no_call_fell_back_but_those_with_block_indices(capsys):
    from serving_conv import engine_report
    report = engine_report()
    with capsys.disabled():
        print("", report.sentence(), sep="\\n")
    assert report.calls > 0, report.sentence()
    reasons = {reason for function in report.functions.values() for reason in function.fallbacks}
    assert reasons <= {"prefix caching passes block indices"}, report.sentence()
"""


def on_the_cpu(text: str) -> str:
    """The tests' source, asking for the CPU wherever it asks for CUDA by name, and not skipping for want of it.

    A condition on the platform inside a test's own mark stays: that test is of vLLM's kernel alone.
    """
    text = re.sub(r"([\"'])cuda\1", r"\1cpu\1", text)
    text = re.sub(r"torch\.(cuda|accelerator)\.empty_cache\(\)", "None", text)
    text = text.replace("torch.cuda.is_available()", "True").replace(".cuda()", ".cpu()")
    return re.sub(r"^pytestmark\b", "_mark_for_vllms_own_kernels", text, flags=re.MULTILINE)


def main() -> int:
    """Run them on each backend; the exit code is the first that is not 0."""
    parser = argparse.ArgumentParser(
        usage="%(prog)s CHECKOUT [--backend BACKEND]... [-- PYTEST ARGUMENTS]",
        description=(__doc__ or "").splitlines()[0],
    )
    parser.add_argument("checkout", type=Path, help="of vLLM's repository")
    parser.add_argument("--backend", action="append", choices=("reference", "host", "cuda"))
    arguments = sys.argv[1:]
    split = arguments.index("--") if "--" in arguments else len(arguments)
    options, for_pytest = parser.parse_args(arguments[:split]), arguments[split + 1 :]
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
                [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(copy), *for_pytest],
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
