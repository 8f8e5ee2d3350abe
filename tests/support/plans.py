"""Owns calls for the short path on the CPU: kinds that are alike, and what stands for a GPU and its kernels."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import pytest
import torch
from torch import Tensor

from serving_conv.checks import check
from serving_conv.contract import PREFILL, STEP, UPDATE, Entry, prefill_workspace_size
from serving_conv.native import cuda, plan
from serving_conv.native.call import prepare_update
from serving_conv.native.plan import tensor_names

__all__ = ["KINDS", "Kind", "Loaded", "complete", "full_path", "in_order", "make_call", "pretend"]


class Loaded:
    """Stands for a loaded kernel."""

    launches: ClassVar[list[tuple[Any, bytes, tuple[int, int, int], int]]] = []

    def __init__(self, variant: Any) -> None:
        self.variant = variant

    def launch(self, parameters: bytes, grid: tuple[int, int, int], stream: int, *, dependent: bool) -> None:
        self.launches.append((self.variant, parameters, grid, stream))

    def launch_step(self, step: Any, tensors: struct.Struct, addresses: list[int], stream: int) -> None:
        self.launches.append((self.variant, tensors.pack(*addresses) + step.rest, step.grid, stream))


FLAG = torch.zeros(1, dtype=torch.int32)


def pretend(monkeypatch: pytest.MonkeyPatch) -> type[Loaded]:
    """Let the CPU pass for a GPU of 132 multiprocessors, all of whose kernels are loaded."""
    for module in (plan, cuda):
        monkeypatch.setattr(module, "fault_flag", lambda device: FLAG)
        monkeypatch.setattr(module, "load_variant", lambda variant, index: Loaded(variant))
    monkeypatch.setattr(cuda, "_traits_of_device", lambda index: (132, 90))
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: None, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 77, raising=False)
    Loaded.launches.clear()
    return Loaded


@dataclass(frozen=True)
class Kind:
    """Calls that are alike: an entry, and what is given to it."""

    entry: Entry
    given: frozenset[str]
    channels: int = 64
    positions: int = 5
    pool: Literal["channels", "positions"] = "channels"
    pitch: int = 0
    x: torch.dtype = torch.bfloat16
    state: torch.dtype = torch.bfloat16
    activation: str | None = "silu"
    pad_slot_id: int = -1


KINDS: dict[str, Kind] = {
    "decode": Kind(UPDATE, frozenset()),
    "decode in place": Kind(UPDATE, frozenset({"out is x"}), pitch=96),
    "decode with everything": Kind(UPDATE, frozenset({"bias", "out", "has_initial_state", "num_accepted_tokens"})),
    "speculative": Kind(UPDATE, frozenset({"cu_seqlens", "num_accepted_tokens", "out is x"}), positions=6),
    "prefill": Kind(PREFILL, frozenset({"cu_seqlens"})),
    "prefill of a slice": Kind(PREFILL, frozenset({"cu_seqlens", "bias", "has_initial_state"}), pitch=80),
    "prefill with everything": Kind(
        PREFILL,
        frozenset({"cu_seqlens", "bias", "has_initial_state", "num_accepted_tokens", "out", "workspace"}),
        activation=None,
        pad_slot_id=0,
    ),
    "prefill, positions contiguous": Kind(PREFILL, frozenset({"cu_seqlens"}), pool="positions", state=torch.float32),
    "prefill, no words": Kind(PREFILL, frozenset({"cu_seqlens", "bias"}), channels=7, x=torch.float32),
    "step": Kind(STEP, frozenset({"cu_seqlens", "has_initial_state"})),
    "step with drafts": Kind(STEP, frozenset({"cu_seqlens", "num_accepted_tokens", "speculative", "out"})),
    "step with checkpoints": Kind(STEP, frozenset({"cu_seqlens", "bias", "has_initial_state", "checkpoints"})),
}


def make_call(kind: Kind, rows: int, sequences: int, checkpoints: int = 2) -> dict[str, Any]:
    """Arguments of one call, each in memory of its own."""
    channels, positions, given = kind.channels, kind.positions, kind.given
    numbers = lambda count: torch.zeros(count, dtype=torch.int32)  # noqa: E731
    x = torch.zeros(rows, max(channels, kind.pitch), dtype=kind.x)[:, :channels]
    pool = torch.zeros(9, positions, channels, dtype=kind.state).transpose(1, 2)
    arguments: dict[str, Any] = {
        "x": x,
        "weight": torch.zeros(channels, 4, dtype=kind.x),
        "bias": torch.zeros(channels) if "bias" in given else None,
        "conv_state": pool if kind.pool == "channels" else pool.contiguous(),
        "out": x if "out is x" in given else torch.zeros(rows, channels, dtype=kind.x) if "out" in given else None,
        "cu_seqlens": numbers(sequences + 1) if "cu_seqlens" in given else None,
        "slots": numbers(sequences),
        "num_accepted_tokens": numbers(sequences) if "num_accepted_tokens" in given else None,
        "has_initial_state": torch.zeros(sequences, dtype=torch.bool) if "has_initial_state" in given else None,
        "workspace": numbers(prefill_workspace_size(rows, sequences) + 3) if "workspace" in given else None,
    }
    if kind.entry is STEP:
        arguments["speculative"] = torch.zeros(sequences, dtype=torch.bool) if "speculative" in given else None
        named = "checkpoints" in given
        arguments["checkpoint_offsets"] = numbers(sequences + 1) if named else None
        arguments["checkpoint_tokens"] = numbers(checkpoints) if named else None
        arguments["checkpoint_slots"] = numbers(checkpoints) if named else None
    return arguments


def complete(kind: Kind, arguments: dict[str, Any], out: Tensor) -> dict[str, Any]:
    """As the full path has them."""
    slots = "state_indices" if kind.entry is UPDATE else "cache_indices"
    renamed = {slots if name == "slots" else name: value for name, value in arguments.items()}
    if kind.entry is not PREFILL:
        del renamed["workspace"]
    return renamed | {"out": out, "activation": kind.activation, "pad_slot_id": kind.pad_slot_id}


def in_order(kind: Kind, arguments: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(arguments["slots" if name.endswith("_indices") else name] for name in tensor_names(kind.entry))


def full_path(kind: Kind, arguments: dict[str, Any], out: Tensor) -> tuple[Any, bytes, tuple[int, int, int], int]:
    """What the full path launches for a call with this output.

    Raises:
        ContractError: it launches nothing.
    """
    whole = complete(kind, arguments, out)
    check(kind.entry, whole)
    x = whole.pop("x")
    whole.pop("workspace", None)
    launch = prepare_update(x, **whole, fault_flag=FLAG) if kind.entry is UPDATE else cuda.prefill_launch(x, whole)
    assert launch is not None
    return launch.variant, launch.parameters, launch.grid, 77
