"""Owns plain valid calls to break: a small one for each entry, by argument name, with everything present."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

import serving_conv
from serving_conv.contract import ENTRIES, PREFILL, STEP, UPDATE, Entry

__all__ = ["ENTRY_IDS", "call", "snapshot", "valid"]

ENTRY_IDS = [entry.name for entry in ENTRIES]


def valid(entry: Entry, device: torch.device, *, optional: bool = True) -> dict[str, Any]:
    """Arguments of a valid call: 3 sequences, 6 rows, 5 channels, 4 taps, 9 slots of 5 positions.

    Args:
        entry: which call.
        device: where.
        optional: with every optional tensor, else with none.
    """

    def int32(*values: int) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    slots = "state_indices" if entry is UPDATE else "cache_indices"
    arguments: dict[str, Any] = {
        "x": torch.randn(6, 5, device=device),
        "weight": torch.randn(5, 4, device=device),
        "conv_state": torch.randn(9, 5, 5, device=device),
        slots: int32(1, 7, 3),
        "cu_seqlens": int32(0, 2, 3, 6),
    }
    if optional:
        arguments |= {
            "has_initial_state": torch.ones(3, dtype=torch.bool, device=device),
            "bias": torch.randn(5, device=device),
            "num_accepted_tokens": int32(1, 2, 3),
            "out": torch.full((6, 5), 77.0, device=device),
            "activation": "silu",
            "pad_slot_id": -1,
        }
        if entry is PREFILL:
            arguments["workspace"] = torch.full((64,), 77, dtype=torch.int32, device=device)
        if entry is STEP:
            arguments |= {
                "speculative": torch.tensor([True, False, True], device=device),
                "checkpoint_offsets": int32(0, 1, 1, 3),
                "checkpoint_tokens": int32(1, 2, 3),
                "checkpoint_slots": int32(4, 5, 6),
            }
    elif entry is UPDATE:
        del arguments["cu_seqlens"]
        arguments["x"] = torch.randn(3, 5, device=device)
    return arguments


def call(entry: Entry, arguments: Mapping[str, Any]) -> Tensor:
    function: Callable[..., Tensor] = getattr(serving_conv, entry.name)
    return function(**arguments)


def snapshot(arguments: Mapping[str, Any]) -> dict[str, Tensor]:
    """Copies of the whole storage of every tensor, to show that nothing was written."""
    return {
        name: torch.empty(0, dtype=torch.uint8, device=value.device).set_(value.untyped_storage()).clone()
        for name, value in arguments.items()
        if isinstance(value, Tensor) and value.layout == torch.strided and value.device.type != "meta"
    }
