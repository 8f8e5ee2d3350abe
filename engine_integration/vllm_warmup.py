"""Finds the convolutions of a loaded vLLM model and loads their kernels, so that no request and no capture compiles."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from serving_conv.backends import choose_backend
from serving_conv.contract import MAX_WIDTH, MIN_WIDTH
from serving_conv.engine_report import COUNTERS
from serving_conv.warmup import warmup

__all__ = ["Convolution", "find_convolutions", "load_kernels"]

logger = logging.getLogger("vllm.serving_conv")


@dataclass(frozen=True, slots=True)
class Convolution:
    """What decides which kernels a layer runs.

    Attributes:
        channels: on this rank.
        width: taps.
        positions: in a slot.
        dtype: of the rows.
        weight_dtype: of the taps.
        state_dtype: of the pool.
        bias: the layer has one.
        activation: as in the entries.
        channels_contiguous: in the pool; else positions are.
        device: of the weights.
    """

    channels: int
    width: int
    positions: int
    dtype: torch.dtype
    weight_dtype: torch.dtype
    state_dtype: torch.dtype
    bias: bool
    activation: str | None
    channels_contiguous: bool
    device: torch.device


def find_convolutions(vllm_config: Any) -> Iterator[Convolution]:
    """Every distinct convolution among the layers that vLLM has given a state cache.

    Args:
        vllm_config: of a worker whose caches exist; its `static_forward_context` lists the layers.
    """
    dtype = vllm_config.model_config.dtype
    seen: set[Convolution] = set()
    for layer in vllm_config.compilation_config.static_forward_context.values():
        cache = getattr(layer, "kv_cache", None)
        if not isinstance(cache, (list, tuple)) or not hasattr(layer, "named_children"):
            continue
        states = [state for state in cache if isinstance(state, Tensor) and state.ndim == 3]
        for name, child in layer.named_children():
            weight = getattr(child, "weight", None)
            if "conv" not in name or not isinstance(weight, Tensor) or weight.ndim not in (2, 3):
                continue
            plain: Tensor = getattr(child, "_cpu_unpacked_conv_weight", weight)
            found = _convolution(layer, child, plain.flatten(1), states, dtype)
            if found is not None and found not in seen:
                seen.add(found)
                yield found


def _convolution(
    layer: Any, child: Any, weight: Tensor, states: list[Tensor], dtype: torch.dtype
) -> Convolution | None:
    channels, width = weight.shape
    if not MIN_WIDTH <= width <= MAX_WIDTH:
        return None
    for state in states:
        # [slots, positions, channels] by default, [slots, channels, positions] with vLLM's layout DS.
        for channels_contiguous, (c, positions) in ((True, (state.shape[2], state.shape[1])), (False, state.shape[1:])):
            if c == channels and width - 1 <= positions <= width + 64:
                short = type(layer).__name__ == "ShortConv"
                activation = getattr(layer, "activation", None if short else "silu")
                return Convolution(
                    channels,
                    width,
                    positions,
                    dtype,
                    weight.dtype,
                    state.dtype,
                    getattr(child, "bias", None) is not None,
                    "silu" if activation in ("silu", "swish", True) else None,
                    channels_contiguous,
                    weight.device,
                )
    return None


def load_kernels(vllm_config: Any) -> int:
    """Load what the model's convolutions can run, whatever the number of tokens and sequences.

    Returns:
        The number of kernels loaded; 0 where the backend has none.
    """
    started = time.perf_counter()
    loaded = 0
    for convolution in find_convolutions(vllm_config):
        traits: dict[str, Any] = {
            "width": convolution.width,
            "dtype": convolution.dtype,
            "weight_dtype": convolution.weight_dtype,
            "state_dtype": convolution.state_dtype,
            "bias": convolution.bias,
            "activation": convolution.activation,
            "layout": "channels" if convolution.channels_contiguous else "positions",
            "draft_tokens": convolution.positions - (convolution.width - 1),
        }
        if choose_backend(convolution.device).name != "reference":
            loaded += warmup(convolution.channels, **traits, device=convolution.device)
    if loaded:
        COUNTERS.kernels_loaded += loaded
        logger.info("serving_conv: %d kernels ready in %.1f s", loaded, time.perf_counter() - started)
    return loaded
