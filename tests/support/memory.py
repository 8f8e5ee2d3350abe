"""Owns guarded memory: strided views inside poisoned buffers, and the proof that nobody wrote outside.

A view sits between two guards. Whatever the strides skip (padding of rows, gaps between slots) and whatever the
caller declares unowned holds poison: an answer that depends on it changes with the poison, and a stray write
changes its bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

__all__ = ["POISONS", "Guarded", "pool_strides"]

POISONS = ("nan", "inf", "777")
GUARD = 67  # elements before and after; odd, so that no view is aligned by accident
_INT_POISON = {"nan": 2**31 - 1, "inf": -(2**31), "777": 777}
_RAW = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Guarded:
    """A view of the given shape and strides inside a poisoned buffer.

    Attributes:
        buffer: the whole allocation, one axis.
        view: the tensor to hand to the operator.
    """

    def __init__(
        self,
        shape: Sequence[int],
        *,
        dtype: torch.dtype,
        device: torch.device,
        poison: str = "nan",
        strides: Sequence[int] | None = None,
        shift: int = 0,
        at_end: bool = False,
    ) -> None:
        """Allocate and poison.

        Args:
            shape: shape of the view.
            dtype: its type.
            device: where it lives.
            poison: one of `POISONS`.
            strides: its strides; contiguous if absent.
            shift: extra elements in front, to move the base address.
            at_end: leave no guard behind, so that an overrun leaves the allocation.
        """
        strides = _contiguous(shape) if strides is None else list(strides)
        extent = 0 if 0 in shape else sum((n - 1) * s for n, s in zip(shape, strides, strict=True)) + 1
        start = GUARD + shift
        size = start + extent + (0 if at_end else GUARD)
        self.buffer = torch.empty(size, dtype=dtype, device=device)
        self._strides, self._start = strides, start
        self.buffer.fill_(_poison(poison, dtype))
        self.view = self.buffer.as_strided(list(shape), strides, start)
        self._before: Tensor | None = None

    @classmethod
    def of(cls, values: Tensor, **options: Any) -> Guarded:
        """A guarded copy of `values`, of their type; options as in the constructor."""
        guarded = cls(tuple(values.shape), dtype=values.dtype, **options)
        guarded.view.copy_(values)
        return guarded

    def arm(self) -> None:
        """Remember every byte; call it when the contents are complete."""
        self._before = self._bytes().clone()

    def assert_untouched(self, *, except_for: Tensor | None = None, name: str = "buffer") -> None:
        """Fail if a byte changed since `arm`, except where the bool mask (of the view's shape) is set."""
        assert self._before is not None, "arm() was not called"
        changed = self._bytes() != self._before
        if except_for is not None:
            allowed = torch.zeros_like(changed)
            if self.view.numel():
                mask = except_for.to(changed.device).expand(self.view.shape)
                allowed.as_strided(self.view.shape, self._strides, self._start).copy_(mask)
            changed = changed & ~allowed
        if bool(changed.any()):
            first = changed.nonzero()[:8, 0].tolist()
            raise AssertionError(
                f"{name}: {int(changed.sum())} elements changed that the call does not own, first at buffer "
                f"elements {first} (the view starts at {self._start}, strides {self._strides})"
            )

    def _bytes(self) -> Tensor:
        return self.buffer.view(_RAW[self.buffer.element_size()])


def pool_strides(layout: str, channels: int, positions: int, *, slot_gap: int = 0, pitch_gap: int = 0) -> list[int]:
    """Strides of a `[S, C, L]` pool.

    Args:
        layout: "channels" or "positions", whichever is contiguous.
        channels: C.
        positions: L.
        slot_gap: elements between two slots.
        pitch_gap: elements between two runs of the contiguous axis.
    """
    if layout == "channels":
        pitch = channels + pitch_gap
        return [positions * pitch + slot_gap, 1, pitch]
    pitch = positions + pitch_gap
    return [channels * pitch + slot_gap, pitch, 1]


def _poison(kind: str, dtype: torch.dtype) -> float | int | bool:
    if dtype == torch.bool:
        return True
    if dtype.is_floating_point:
        return float(kind)
    return _INT_POISON[kind]


def _contiguous(shape: Sequence[int]) -> list[int]:
    strides = [1] * len(shape)
    for axis in range(len(shape) - 2, -1, -1):
        strides[axis] = strides[axis + 1] * max(shape[axis + 1], 1)
    return strides
