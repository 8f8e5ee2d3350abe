"""Owns the memory of the fuzz: every case's buffers, and numbers as raw bits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

__all__ = ["RAW", "RAW_TORCH", "TORCH", "Array", "Memory", "bits_of", "floats_of", "ordered", "typed"]

Array = NDArray[Any]
TORCH = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
RAW = {"bf16": np.int16, "fp16": np.int16, "fp32": np.int32}
RAW_TORCH = {"bf16": torch.int16, "fp16": torch.int16, "fp32": torch.int32}


class Memory:
    """One buffer of every case: a strided view between guards, or at the very end of its own allocation.

    Attributes:
        index: element number of each element of the view, of the view's shape.
        width: elements of a case's piece of memory.
    """

    def __init__(
        self,
        cases: int,
        shape: Sequence[int],
        strides: Sequence[int],
        *,
        raw: Any,
        kind: torch.dtype,
        shift: int = 0,
        guard: int = 0,
        exact: bool,
    ) -> None:
        self.shape, self.strides, self._kind = tuple(shape), tuple(strides), kind
        self._item = np.dtype(raw).itemsize
        extent = 0 if 0 in shape else 1 + sum((n - 1) * s for n, s in zip(shape, strides, strict=True))
        # Guards are whole cache lines, so that the view's alignment is the shift's.
        line = 64 // self._item
        guard = 0 if exact else line * -(-max(guard, line) // line)
        self.start = guard + shift
        self.width = self.start + extent if exact else line * -(-(self.start + extent + guard) // line)
        self.index = np.full(self.shape, self.start, dtype=np.int64)
        for axis, (n, s) in enumerate(zip(self.shape, self.strides, strict=True)):
            self.index += (np.arange(n) * s).reshape([-1 if a == axis else 1 for a in range(len(self.shape))])
        if exact:
            self._pieces = [np.empty(self.width, dtype=raw) for _ in range(cases)]
        else:
            block = np.empty((cases * self.width + line), dtype=raw)
            skip = -block.ctypes.data % 64 // self._item
            self._block = block[skip : skip + cases * self.width].reshape(cases, self.width)
            self._pieces = list(self._block)
        self._exact = exact
        self._tensors = [
            torch.from_numpy(piece).view(kind).as_strided(self.shape, self.strides, self.start)
            for piece in self._pieces
        ]

    def __getitem__(self, case: int) -> Tensor:
        return self._tensors[case]

    def write(self, content: Array) -> None:
        """Fill every case: `[cases, width]`."""
        if self._exact:
            for piece, values in zip(self._pieces, content, strict=True):
                piece[:] = values
        else:
            self._block[:] = content

    def read(self) -> Array:
        """What every case holds: `[cases, width]`."""
        return np.stack(self._pieces) if self._exact else self._block.copy()


def bits_of(values: Array | Sequence[float], kind: str) -> Array:
    """Float32 values in the raw bits of a type."""
    tensor = torch.from_numpy(np.ascontiguousarray(values, dtype=np.float32)).to(TORCH[kind])
    return tensor.view(RAW_TORCH[kind]).numpy()


def floats_of(bits: Array, kind: str) -> Array:
    return torch.from_numpy(np.ascontiguousarray(bits)).view(TORCH[kind]).float().numpy()


def typed(bits: Array, kind: str) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(bits)).view(TORCH[kind])


def ordered(bits: Array) -> Array:
    """Raw bits as integers in the order of the numbers, so that a difference counts steps."""
    wide = bits.astype(np.int64)
    lowest = -(1 << (8 * bits.dtype.itemsize - 1))
    return np.where(wide < 0, lowest - wide, wide)
