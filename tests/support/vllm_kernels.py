"""Owns vLLM's own Triton kernels on the CPU: the installed file, run by Triton's interpreter, without the engine.

On a CPU vLLM switches Triton off and puts other functions in the place of these. So the file is loaded again, under
another name, with three modules of vLLM standing in for what it imports: the real triton, a platform that is not a
CPU, and the two numbers of the block table, read from vLLM's source. Nothing of vLLM is imported or copied.
"""

from __future__ import annotations

import ast
import importlib.util
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

__all__ = ["installed", "load"]

KERNELS = "model_executor/layers/mamba/ops/causal_conv1d.py"
NUMBERS = "v1/attention/backends/utils.py"


def installed() -> Path | None:
    """The folder of the installed vLLM, which is not imported; None where there is none."""
    spec = importlib.util.find_spec("vllm")
    return None if spec is None or spec.origin is None else Path(spec.origin).parent


def load(folder: Path) -> ModuleType:
    """The module with vLLM's Triton functions, to be run by the interpreter: `TRITON_INTERPRET` must be set.

    Args:
        folder: of vLLM's package.
    """
    import triton
    import triton.language

    assert triton.knobs.runtime.interpret, "set TRITON_INTERPRET=1 before triton is imported"
    platform = SimpleNamespace(is_cpu=lambda: False, is_arch_support_pdl=lambda: False)
    stand_ins = {
        "vllm.triton_utils": _module(triton=triton, tl=triton.language),
        "vllm.platforms": _module(current_platform=platform),
        "vllm.v1.attention.backends.utils": _module(**_numbers(folder / NUMBERS, "NULL_BLOCK_ID", "PAD_SLOT_ID")),
    }
    spec = importlib.util.spec_from_file_location("vllm_triton_causal_conv1d", folder / KERNELS)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with mock.patch.dict(sys.modules, stand_ins):
        spec.loader.exec_module(module)
    for name in ("_causal_conv1d_fwd_kernel", "_causal_conv1d_update_kernel"):
        setattr(module, name, _HostGrid(getattr(module, name)))
    return module


class _HostGrid:
    """Asks for the launch's size with plain tensors, then launches with numbers.

    vLLM's grid function writes the launch's block map; the interpreter would hand it wrapped tensors.
    """

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel

    def __getitem__(self, grid: Callable[[Mapping[str, Any]], tuple[int, ...]]) -> Callable[..., None]:
        def launch(*arguments: Any, **options: Any) -> None:
            named = {**dict(zip(self.kernel.arg_names, arguments, strict=False)), **options}
            size = grid(named)
            self.kernel[size](**named)

        return launch


def _module(**attributes: Any) -> ModuleType:
    module = ModuleType("stand-in")
    module.__dict__.update(attributes)
    return module


def _numbers(source: Path, *names: str) -> dict[str, int]:
    """Numbers that a module assigns to names, without running it."""
    found = {}
    for node in ast.parse(source.read_text()).body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and node.targets[0].id in names:
            found[node.targets[0].id] = ast.literal_eval(node.value)
    assert len(found) == len(names), f"{source} does not assign all of {names}"
    return found
