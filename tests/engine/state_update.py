"""The Mamba2 state update of a speculative step in plain torch: that of vLLM's CPU build gives wrong states there."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

__all__ = ["install"]


def install() -> None:
    """Use it for calls that carry accepted counts."""
    from vllm.model_executor.layers.mamba.ops import ssu_dispatch

    plain = ssu_dispatch.selective_state_update

    def update(*arguments: Any, **options: Any) -> Any:
        chosen = plain if options.get("num_accepted_tokens") is None else speculative
        return chosen(*arguments, **options)

    ssu_dispatch.selective_state_update = update


def speculative(
    state: torch.Tensor,
    x: torch.Tensor,
    dt: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    d: torch.Tensor | None,
    dt_bias: torch.Tensor | None,
    *,
    state_batch_indices: torch.Tensor,
    num_accepted_tokens: torch.Tensor,
    cu_seqlens: torch.Tensor,
    out: torch.Tensor,
    dst_state_batch_indices: torch.Tensor | None = None,
    dt_softplus: bool = False,
    z: torch.Tensor | None = None,
    null_block_id: int = 0,
    **unused: Any,
) -> None:
    """Start from the last accepted token's state and leave one state behind for every token of the step.

    x, out `[tokens, heads, dim]`; state `[slots, heads, dim, n]`; b, c `[tokens, groups, n]`; indices `[N, tokens]`.
    """
    targets = state_batch_indices if dst_state_batch_indices is None else dst_state_batch_indices
    heads_per_group = x.shape[1] // b.shape[1]
    offsets = cu_seqlens.tolist()
    for sequence, accepted in enumerate(num_accepted_tokens.tolist()):
        first, last = offsets[sequence], offsets[sequence + 1]
        source = int(state_batch_indices[sequence, accepted - 1])
        if first == last or source == null_block_id:
            continue
        hidden = state[source].float()
        for position, token in enumerate(range(first, last)):
            step = dt[token].float() + (0 if dt_bias is None else dt_bias.float())
            step = F.softplus(step) if dt_softplus else step
            inputs = b[token].float().repeat_interleave(heads_per_group, 0)[:, None]
            readout = c[token].float().repeat_interleave(heads_per_group, 0)[:, None]
            hidden = torch.exp(step[..., None] * a) * hidden + (step * x[token].float())[..., None] * inputs
            result = (hidden * readout).sum(-1)
            if d is not None:
                result = result + d.float() * x[token].float()
            if z is not None:
                result = result * F.silu(z[token].float())
            out[token] = result.to(out.dtype)
            target = int(targets[sequence, position])
            if target != null_block_id:
                state[target] = hidden.to(state.dtype)
