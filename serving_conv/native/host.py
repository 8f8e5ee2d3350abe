"""The `host` backend: the CUDA kernels' own source, compiled by g++ and run thread after thread on the CPU.

It exists to test the kernels where there is no GPU, under sanitizers too (`SERVING_CONV_HOST_FLAGS`), not to be
fast. Compiled libraries are cached on disk under a hash of source, compiler and flags.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from serving_conv.errors import BackendError
from serving_conv.faults import fault_flag
from serving_conv.native.backward import prepare_backward
from serving_conv.native.call import Launch, prepare_prefill, prepare_update
from serving_conv.native.variant import AnyVariant, source
from serving_conv.settings import SETTINGS

__all__ = ["MULTIPROCESSORS", "HostBackend", "load_variant", "run_backward"]

_FLAGS = ("-std=c++17", "-O1", "-fPIC", "-shared", "-ffp-contract=off", "-w")
MULTIPROCESSORS = 4  # of the machine that the launch choice imagines; both of its branches are then common


class HostBackend:
    """Runs the kernels' source on the CPU; asked for, never chosen by device alone."""

    name = "host"

    def supports(self, device: torch.device) -> bool:
        """CPU tensors, where g++ is."""
        return device.type == "cpu" and shutil.which("g++") is not None

    def prefill(self, *, x: Tensor, workspace: Tensor | None, **arguments: Any) -> None:
        """`causal_conv1d_fn`; the kernel needs no scratch."""
        self.step(x=x, **arguments)

    def step(self, *, x: Tensor, **arguments: Any) -> None:
        """`causal_conv1d_step`."""
        flag = fault_flag(x.device)
        _run(prepare_prefill(x, **arguments, fault_flag=flag, multiprocessors=MULTIPROCESSORS))

    def update(self, *, x: Tensor, **arguments: Any) -> None:
        """`causal_conv1d_update`."""
        _run(prepare_update(x, **arguments, fault_flag=fault_flag(x.device)))


def run_backward(*arguments: Any, reverse: bool = False, **options: Any) -> None:
    """Run one backward; arguments as of `prepare_backward`. `reverse`: blocks from the last to the first."""
    launches, scratch = prepare_backward(*arguments, **options, multiprocessors=MULTIPROCESSORS)
    for launch in launches:
        _run(launch, reverse=reverse)
    del scratch


def _run(launch: Launch | None, *, reverse: bool = False) -> None:
    if launch is not None:
        function = _load(launch.variant)
        function(ctypes.c_char_p(launch.parameters), *launch.grid, int(reverse))


def load_variant(variant: AnyVariant) -> None:
    """Compile and load one kernel ahead of its first call."""
    _load(variant)


@cache
def _load(variant: AnyVariant) -> Any:
    library = ctypes.CDLL(str(_compiled(source(variant, "host"))))
    function = library.launch
    function.argtypes = [ctypes.c_char_p, ctypes.c_uint, ctypes.c_uint, ctypes.c_uint, ctypes.c_int]
    function.restype = None
    return function


def _compiled(text: str) -> Path:
    """Path of the compiled library, from the cache or freshly made; published by one rename."""
    flags = (*_FLAGS, *SETTINGS.host_flags)
    digest = hashlib.sha256("\0".join((text, _compiler_version(), *flags)).encode()).hexdigest()
    library = SETTINGS.cache_directory / "host" / f"{digest[:32]}.so"
    if library.is_file():
        return library
    library.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=library.parent) as scratch:
        code = Path(scratch, "kernel.cc")
        code.write_text(text, encoding="utf-8")
        made = Path(scratch, "kernel.so")
        done = subprocess.run(
            ["g++", *flags, "-o", str(made), str(code), "-lm"], capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise BackendError("host kernel", got=done.stderr[-2000:], wanted="a clean compilation by g++")
        os.replace(made, library)
    return library


@cache
def _compiler_version() -> str:
    return subprocess.run(["g++", "--version"], capture_output=True, text=True, check=True).stdout
