"""The entry point that vLLM loads in each of its processes: waits until a layer that convolves is imported.

A module of its own, beside the package, because importing anything of `serving_conv` imports torch's operators with
it. So a process that runs no such layer (an API server, any other model) pays for this file alone, and so does every
process under `SERVING_CONV_VLLM=0`.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType

__all__ = ["register"]

# Every layer of vLLM that convolves imports this module first.
AWAITED = "vllm.model_executor.layers.mamba.ops.causal_conv1d"

logger = logging.getLogger("vllm.serving_conv")


def register() -> None:
    """Put the operator in place now or as soon as vLLM's functions exist; idempotent, and never raises."""
    if os.environ.get("SERVING_CONV_VLLM") == "0":
        logger.info("serving_conv: off (SERVING_CONV_VLLM=0)")
    elif AWAITED in sys.modules:
        _replace()
    elif not any(isinstance(finder, _Awaiting) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Awaiting())


def _replace() -> None:
    try:
        from serving_conv.engine_integration.vllm_plugin import register as replace
    except Exception:
        logger.exception("serving_conv: cannot be imported, vLLM runs its own functions")
    else:
        replace()


class _Awaiting:
    """Finds one module as the others would, and acts once it has run."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != AWAITED:
            return None
        if self in sys.meta_path:
            sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is None or spec.loader is None:
            return None
        spec.loader.exec_module = _then(spec.loader.exec_module, _replace)  # type: ignore[assignment, method-assign]
        return spec


def _then(run: Callable[[ModuleType], None], act: Callable[[], None]) -> Callable[[ModuleType], None]:
    def both(module: ModuleType) -> None:
        run(module)
        act()

    return both
