"""Warm-up knows every kernel that a layer's calls can choose: none is left to compile under a request or a capture."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from serving_conv.contract import state_positions
from serving_conv.native.call import prepare_prefill, prepare_update
from serving_conv.native.variant import Variant
from serving_conv.warmup import model_variants

CHANNELS, DRAFTS, MULTIPROCESSORS = 256, 3, 132
SIZES = (1, 7, 64, 300, 3000)
MODEL: dict[str, Any] = {"channels": CHANNELS, "draft_tokens": DRAFTS, "multiprocessors": MULTIPROCESSORS}


def chosen(rows: int, layout: str, *, drafts: bool, checkpoints: bool) -> set[Variant]:
    """The kernels of a prefill or step, and of every update, with so many rows."""
    pool = torch.empty(2, state_positions(4, DRAFTS), CHANNELS, dtype=torch.bfloat16).transpose(1, 2)
    pool = pool if layout == "channels" else pool.contiguous()
    x = torch.empty(rows, CHANNELS, dtype=torch.bfloat16)
    numbers = torch.zeros(rows, dtype=torch.int32)
    shared: dict[str, Any] = {
        "weight": torch.empty(CHANNELS, 4, dtype=torch.bfloat16),
        "conv_state": pool,
        "has_initial_state": None,
        "bias": torch.empty(CHANNELS, dtype=torch.bfloat16),
        "activation": "silu",
        "out": torch.empty_like(x),
        "pad_slot_id": -1,
        "fault_flag": numbers[:1],
    }
    few: Tensor | None = numbers[:1] if checkpoints else None
    found = [
        prepare_prefill(
            x,
            **shared,
            cu_seqlens=torch.zeros(2, dtype=torch.int32),
            cache_indices=numbers[:1],
            num_accepted_tokens=None,
            speculative=torch.zeros(1, dtype=torch.bool) if drafts else None,
            checkpoint_offsets=few,
            checkpoint_tokens=few,
            checkpoint_slots=few,
            multiprocessors=MULTIPROCESSORS,
            capability=90,
        )
    ]
    for offsets, counts in ((None, None), (numbers, None), (numbers, numbers)):
        found.append(prepare_update(x, **shared, state_indices=numbers, cu_seqlens=offsets, num_accepted_tokens=counts))
    assert all(launch is not None for launch in found)
    return {launch.variant for launch in found if launch is not None}


@pytest.mark.parametrize("layout", ["channels", "positions"])
@pytest.mark.parametrize(("drafts", "checkpoints"), list(itertools.product((False, True), repeat=2)))
def test_every_kernel_of_a_layer_is_known(layout: str, drafts: bool, checkpoints: bool) -> None:
    known = set(model_variants(**MODEL, layout=layout, steps=True))
    for rows in SIZES:
        assert chosen(rows, layout, drafts=drafts, checkpoints=checkpoints) <= known, rows


def test_who_runs_no_mixed_steps_loads_none() -> None:
    plain = model_variants(**MODEL)
    assert not any(v.checkpoints or (v.kernel == "conv_prefill" and v.speculative) for v in plain)
    assert set(plain) < set(model_variants(**MODEL, steps=True))
    for rows in SIZES:
        assert chosen(rows, "channels", drafts=False, checkpoints=False) <= set(plain)


def test_without_drafts_there_are_none() -> None:
    found = model_variants(CHANNELS, steps=True)
    assert any(v.checkpoints for v in found)
    assert not any(v.speculative for v in found)
