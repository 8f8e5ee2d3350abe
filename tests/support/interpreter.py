"""Owns repairs of Triton's interpreter, which computes some things otherwise than a GPU and its own compiler do.

| what | in the interpreter of triton 3.6 (of 3.9) | repaired |
|---|---|---|
| bfloat16 | arithmetic on bit patterns as integers; fp32 is truncated to it (both) | in fp32, then one rounding |
| `tl.fma` | a product and a sum, two roundings (3.9: one) | one rounding |
| comparisons | keep their operands' type, which makes integers of masks (3.9 refuses those) | int1 |
| bounds of `range` | arrays of one element, which numpy from 2.4 on refuses (3.9: right) | their element |

The interpreter is one object a process, so `repair` is for processes that a test starts: no other test sees it.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from serving_conv.reference import fused_multiply_add

__all__ = ["repair", "repaired"]

_repaired = False


def repaired() -> bool:
    """Whether this process's interpreter is repaired."""
    return _repaired


def repair() -> None:
    """Repair the interpreter of this process, for good; harmless when done twice."""
    global _repaired
    if _repaired:
        return
    import triton.language as tl
    from triton.runtime import interpreter

    handle = interpreter.TensorHandle
    builder = interpreter.InterpreterBuilder
    binary_op, cast_impl = builder.binary_op, builder.cast_impl
    patch_tensor = interpreter._patch_lang_tensor

    def is_bfloat16(kind: Any) -> bool:
        return bool(kind.scalar == tl.bfloat16)

    def widened(value: Any) -> Any:
        return handle(_to_float32(value.data), tl.float32) if is_bfloat16(value.dtype) else value

    def rounded(value: Any) -> Any:
        return handle(_to_bfloat16(value.data), tl.bfloat16)

    def cast(self: Any, source: Any, kind: Any) -> Any:
        if is_bfloat16(kind) and not is_bfloat16(source.dtype):
            return rounded(cast_impl(self, source, tl.float32))
        return cast_impl(self, widened(source), kind) if not is_bfloat16(kind) else source

    def binary(self: Any, left: Any, right: Any, operation: Any) -> Any:
        result = binary_op(self, widened(left), widened(right), operation)
        if result.data.dtype == np.bool_:
            return handle(result.data, tl.int1)
        return rounded(result) if is_bfloat16(left.dtype) else result

    def fma(self: Any, a: Any, b: Any, c: Any) -> Any:
        assert all(value.data.dtype == np.float32 for value in (a, b, c)), "the kernels' sums are fp32"
        arrays = np.broadcast_arrays(a.data, b.data, c.data)
        # Copies: torch takes no views of one element that stands for many.
        fused = fused_multiply_add(*(torch.from_numpy(array.copy()) for array in arrays))
        return handle(fused.numpy(), c.dtype)

    def patch(tensor: Any, *scope: Any) -> None:
        patch_tensor(tensor, *scope)
        tensor.__index__ = lambda self: self.handle.data.item()

    builder.binary_op, builder.cast_impl, builder.create_fma = binary, cast, fma
    interpreter._patch_lang_tensor = patch
    _repaired = True


def _to_float32(bits: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """The fp32 numbers that bfloat16 bit patterns stand for: all of them exactly."""
    return np.asarray(bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def _to_bfloat16(values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Bit patterns of fp32 numbers rounded to bfloat16, to nearest, ties to even; NaN stays NaN."""
    bits = np.asarray(values, dtype=np.float32).view(np.uint32)
    nearest = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    return np.where(np.isnan(values), (bits >> np.uint32(16)) | np.uint32(0x40), nearest).astype(np.uint16)
