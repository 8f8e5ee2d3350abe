"""Owns the oracle: the operator contract once more, token by token, in NumPy float64.

Written from the text of the contract and sharing nothing with the package, so that a misreading there shows here.
float64 holds every value of the accepted types, every product of two of them, and far more of their sums than
fp32 does; the error that is left is below a thousandth of the bounds that compare against it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Float64 = npt.NDArray[np.float64]

__all__ = ["Expected", "expect", "silu64"]


@dataclass
class Expected:
    """What the contract promises for one call.

    Attributes:
        out: `[R, C]` exact result; 0 for padding and faulty sequences.
        magnitude: `[R, C]` `|b| + sum |w x|`.
        written: bool `[R]`; false for rows of no sequence (at and past the last offset), which keep their bytes.
        contested: bool `[R]`; rows that hostile offsets give to several sequences: what they hold is open.
        state: `[S, C, L]` pool after the call, exact values, before rounding to the pool's type.
        stored: bool `[S, L]`; positions the call writes. All others keep their bytes.
    """

    out: Float64
    magnitude: Float64
    written: npt.NDArray[np.bool_]
    contested: npt.NDArray[np.bool_]
    state: Float64
    stored: npt.NDArray[np.bool_]

    def pool(self, before: Tensor) -> Tensor:
        """The pool after the call, in its own type: `before` with the stored positions replaced."""
        after = before.detach().cpu().clone(memory_format=torch.contiguous_format)
        mask = torch.from_numpy(self.stored)[:, None, :].expand(after.shape)
        return torch.where(mask, torch.from_numpy(self.state).to(after.dtype), after)


def silu64(value: Float64) -> Float64:
    """`v * sigmoid(v)` without overflow on either side."""
    decay = np.exp(-np.abs(value))
    return np.where(value >= 0, value / (1 + decay), value * decay / (1 + decay))


def expect(
    x: Tensor,
    weight: Tensor,
    conv_state: Tensor,
    offsets: Sequence[int],
    slots: Sequence[int],
    *,
    history: Sequence[bool],
    counts: Sequence[int] | None = None,
    speculative: bool = False,
    bias: Tensor | None = None,
    activation: str | None = "silu",
    pad_slot_id: int = -1,
) -> Expected:
    """Play one call, sequence by sequence and token by token.

    Args:
        x: `[R, C]`, any type.
        weight: `[C, W]`.
        conv_state: `[S, C, L]` as before the call; not modified.
        offsets: N+1 offsets; may be hostile.
        slots: N slots; may be hostile.
        history: N flags: read the window from the slot.
        counts: N accepted counts, or None for windows at position 0.
        speculative: keep what a speculative step keeps.
        bias: `[C]` or None.
        activation: "silu" or None.
        pad_slot_id: the sentinel.
    """
    tokens, taps, state = _float64(x), _float64(weight), _float64(conv_state)
    rows, channels = tokens.shape
    width = taps.shape[1]
    pool_slots, _, positions = state.shape
    offset = np.zeros(channels) if bias is None else _float64(bias)
    out = np.zeros((rows, channels))
    magnitude = np.zeros((rows, channels))
    stored = np.zeros((pool_slots, positions), dtype=bool)
    claims = np.zeros(rows, dtype=int)
    for sequence, slot in enumerate(slots):
        begin, end = offsets[sequence], offsets[sequence + 1]
        claims[max(begin, 0) : max(end, 0)] += 1
        count = 1 if counts is None else counts[sequence]
        padding = slot == pad_slot_id
        sound = 0 <= begin <= end <= rows and 0 <= slot < pool_slots and 1 <= count <= positions - width + 2
        if padding or not sound or begin == end:
            continue
        if history[sequence]:
            window = [state[slot, :, count - 1 + i] for i in range(width - 1)]
        else:
            window = [np.zeros(channels) for _ in range(width - 1)]
        inputs = [tokens[row] for row in range(begin, end)]
        stream = window + inputs
        for token, row in enumerate(range(begin, end)):
            total = offset.copy()
            size = np.abs(offset)
            for tap in range(width):
                total = total + taps[:, tap] * stream[token + tap]
                size = size + np.abs(taps[:, tap] * stream[token + tap])
            out[row] = total if activation is None else silu64(total)
            magnitude[row] = size
        keep = window[1:] + inputs if speculative else stream[-(width - 1) :]
        for position, value in enumerate(keep[:positions]):
            state[slot, :, position] = value
            stored[slot, position] = True
    return Expected(out, magnitude, claims > 0, claims > 1, state, stored)


def _float64(tensor: Tensor) -> Float64:
    # A copy in C order: the oracle writes to it.
    return tensor.detach().cpu().double().contiguous().numpy().copy()
