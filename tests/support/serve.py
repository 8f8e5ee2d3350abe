"""Owns a toy engine: requests cut into prefill chunks, decode steps and speculative steps, and batched at random.

It only schedules; every number comes from the public entries. A speculative piece of n tokens runs n tokens that
stand and some drafts that are then rejected.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from serving_conv import causal_conv1d_fn, causal_conv1d_update

__all__ = ["KINDS", "Filter", "Piece", "Request", "serve", "solo"]

KINDS = ("prefill", "decode", "rows", "speculative")


@dataclass(frozen=True)
class Piece:
    """The next `tokens` tokens of a request by one way; `drafts` more are run and rejected if speculative."""

    kind: str
    tokens: int
    drafts: int = 0


@dataclass
class Request:
    """One sequence.

    Attributes:
        x: `[T, C]` its tokens.
        pieces: how they are cut; their tokens add up to T.
        slot: where its window lives.
        window: `[C, W-1]` history it starts with, or None.
    """

    x: Tensor
    pieces: Sequence[Piece]
    slot: int
    window: Tensor | None = None
    done: int = 0
    step: int = 0
    count: int = 1
    outputs: list[Tensor] = field(default_factory=list)


@dataclass(frozen=True)
class Filter:
    """What all requests share."""

    weight: Tensor
    bias: Tensor | None
    activation: str | None = "silu"
    pad_slot_id: int = -1


def solo(request: Request, conv: Filter, pool: Tensor) -> tuple[Tensor, Tensor]:
    """Output and final window of a request that runs alone, uninterrupted, as one prefill."""
    width = conv.weight.shape[1]
    own = torch.full((1, pool.shape[1], width - 1), torch.nan, dtype=pool.dtype, device=pool.device)
    if request.window is not None:
        own[0] = request.window
    device = request.x.device
    out = causal_conv1d_fn(
        request.x,
        conv.weight,
        own,
        torch.tensor([0, request.x.shape[0]], dtype=torch.int32, device=device),
        torch.zeros(1, dtype=torch.int32, device=device),
        torch.tensor([request.window is not None], device=device),
        bias=conv.bias,
        activation=conv.activation,
        pad_slot_id=-1,
    )
    return out, own[0]


def serve(requests: Sequence[Request], conv: Filter, pool: Tensor, dice: random.Random, padding: int = 2) -> None:
    """Run all requests to their end. The dice choose batches, orders and where padding goes.

    Args:
        requests: modified: outputs, and the count that the next step would pass.
        conv: weights.
        pool: `[S, C, L]`, updated in place.
        dice: all choices.
        padding: most padding sequences a call gets.
    """
    for request in requests:
        if request.window is not None:
            pool[request.slot, :, : request.window.shape[1]] = request.window
    while waiting := [r for r in requests if r.step < len(r.pieces)]:
        chosen = dice.sample(waiting, dice.randint(1, len(waiting)))
        groups: dict[str, list[Request]] = {}
        for request in chosen:
            groups.setdefault(_entry(request, dice), []).append(request)
        for entry, members in groups.items():
            _call(entry, members, conv, pool, dice, padding)


def _entry(request: Request, dice: random.Random) -> str:
    kind = request.pieces[request.step].kind
    if kind == "prefill":
        # With counts or, where the window starts at 0, without.
        return "prefill" if request.count == 1 and dice.random() < 0.5 else "prefill counts"
    if kind == "speculative" or request.count > 1:
        return "speculative"  # a plain step knows no count, so behind a longer one it becomes speculative
    return kind


def _call(
    entry: str, members: Sequence[Request], conv: Filter, pool: Tensor, dice: random.Random, padding: int
) -> None:
    device = pool.device
    batch: list[Request | None] = [*members, *[None] * dice.randint(0, padding)]
    dice.shuffle(batch)
    rows, lengths = [], []
    for request in batch:
        if request is None:
            # Padding carries garbage rows, or none where a call may be ragged.
            number = 1 if entry == "decode" else dice.randint(0, 2)
            rows.append(torch.full((number, pool.shape[1]), torch.nan, device=device))
        else:
            piece = request.pieces[request.step]
            drafts = torch.full((piece.drafts, pool.shape[1]), 999.0, device=device)
            rows.append(torch.cat([request.x[request.done : request.done + piece.tokens].float(), drafts]))
        lengths.append(rows[-1].shape[0])

    def int32(values: Sequence[int]) -> Tensor:
        return torch.tensor(list(values), dtype=torch.int32, device=device)

    x = torch.cat(rows).to(members[0].x.dtype)
    offsets = int32([0, *itertools.accumulate(lengths)])
    slots = int32([conv.pad_slot_id if r is None else r.slot for r in batch])
    flags = [r is not None and (r.done > 0 or r.window is not None) for r in batch]
    history = torch.tensor(flags, device=device)
    counts = int32([1 if r is None else r.count for r in batch]) if entry in ("prefill counts", "speculative") else None
    common = {
        "bias": conv.bias,
        "activation": conv.activation,
        "num_accepted_tokens": counts,
        "has_initial_state": history,
        "pad_slot_id": conv.pad_slot_id,
    }
    if entry.startswith("prefill"):
        out = causal_conv1d_fn(x, conv.weight, pool, offsets, slots, **common)
    else:
        single = set(lengths) <= {1} and dice.random() < 0.8
        out = causal_conv1d_update(x, conv.weight, pool, slots, cu_seqlens=None if single else offsets, **common)
    begins = offsets.tolist()
    for request, begin, end in zip(batch, begins[:-1], begins[1:], strict=True):
        if request is None:
            assert not bool(out[begin:end].any()), "padding is not zero"
            continue
        piece = request.pieces[request.step]
        request.outputs.append(out[begin : begin + piece.tokens])
        request.done += piece.tokens
        request.step += 1
        request.count = piece.tokens if entry == "speculative" else 1
