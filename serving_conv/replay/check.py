"""Owns the comparison: every output of every request, bit for bit, with its solo run and with its own recomputation."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from serving_conv import ops
from serving_conv.contract import state_positions
from serving_conv.replay.content import Content
from serving_conv.replay.report import Mismatch
from serving_conv.replay.scheduler import Sequence

__all__ = ["Checker", "ConvLayer"]


@dataclass(frozen=True, slots=True)
class ConvLayer:
    """Parameters of one layer: weight `[C, W]` and bias `[C]`, fp32."""

    weight: Tensor
    bias: Tensor


@dataclass(slots=True)
class _Record:
    outputs: Tensor  # [layers, tokens, C]
    known: NDArray[np.bool_]  # [tokens]; rows that a prefix checkpoint stood for are never computed
    mismatch: Mismatch | None = None


class Checker:
    """Keeps the outputs of running requests until they can be compared.

    Args:
        layers: parameters of the stack.
        content: its inputs.
    """

    def __init__(self, layers: list[ConvLayer], content: Content) -> None:
        self._layers = layers
        self._content = content
        self._records: dict[int, _Record] = {}

    def record(self, sequence: Sequence, begin: int, outputs: Tensor) -> None:
        """Keep outputs `[layers, rows, C]` of the positions from `begin` on; compare those that were kept before."""
        record = self._records.get(sequence.request.index)
        if record is None:
            tokens = sequence.request.tokens
            shape = (outputs.shape[0], tokens, outputs.shape[2])
            record = _Record(outputs.new_empty(shape), np.zeros(tokens, dtype=np.bool_))
            self._records[sequence.request.index] = record
        rows = slice(begin, begin + outputs.shape[1])
        if record.known[rows].any():
            again = begin + record.known[rows].nonzero()[0]
            self._compare(sequence, record, again, outputs[:, again - begin], "recomputed")
        record.outputs[:, rows] = outputs
        record.known[rows] = True

    def finish(self, sequence: Sequence) -> Mismatch | None:
        """Compare a request that is done with its solo run, and forget it."""
        record = self._records.pop(sequence.request.index)
        inputs = self._content.inputs(sequence.keys).to(self._layers[0].weight.device)
        solo = torch.stack([self._solo(layer, inputs[:, index]) for index, layer in enumerate(self._layers)])
        known = record.known.nonzero()[0]
        self._compare(sequence, record, known, solo[:, known], "solo")
        return record.mismatch

    def _compare(
        self, sequence: Sequence, record: _Record, positions: NDArray[np.int64], wanted: Tensor, against: str
    ) -> None:
        got = record.outputs[:, positions]
        if record.mismatch is None and not torch.equal(got, wanted):
            # NaN differs from itself: an output that depends on what no one wrote is wrong.
            layer, row, channel = (int(axis[0]) for axis in (got != wanted).nonzero(as_tuple=True))
            record.mismatch = Mismatch(sequence.request.index, against, layer, int(positions[row]), channel)

    @staticmethod
    def _solo(layer: ConvLayer, x: Tensor) -> Tensor:
        """One uninterrupted call over the whole request, from zero history: `[tokens, C]`."""
        channels, width = layer.weight.shape
        return ops.causal_conv1d_fn(
            x,
            layer.weight,
            x.new_zeros(1, channels, state_positions(width)),
            torch.tensor([0, len(x)], dtype=torch.int32, device=x.device),
            torch.zeros(1, dtype=torch.int32, device=x.device),
            bias=layer.bias,
        )
