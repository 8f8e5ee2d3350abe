"""Owns compilation of the Triton kernels ahead of time, for targets that need not be here."""

from __future__ import annotations

from typing import Any

__all__ = ["compile_ahead"]

_ALIGNED = ("x", "conv_state", "out")


def compile_ahead(
    kernel: str,
    target: tuple[str, int | str, int],
    *,
    dtype: str = "bf16",
    width: int = 4,
    layout: int = 0,
    vec: int = 16,
    packed: bool = True,
    counts: bool = False,
    warps: int = 8,
) -> Any:
    """Compile one kernel as a call with these traits would.

    Args:
        kernel: its name.
        target: Triton's backend, architecture and warp size.
        dtype: of x, weight, bias and pool, as Triton names it.
        width: taps.
        layout: LAYOUT of the pool.
        vec: elements that divide sizes and strides.
        packed: offsets are given.
        counts: accepted counts are given.
        warps: of a block.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from serving_conv.portable import kernels

    function = getattr(kernels, kernel)
    pointers: dict[str, str | None] = dict.fromkeys(("x", "weight", "bias", "conv_state", "out"), f"*{dtype}")
    pointers |= {"cu_seqlens": "*i32" if packed else None, "slots": "*i32", "flags": "*u8", "fault_flag": "*i32"}
    pointers["counts"] = "*i32" if counts else None
    constants = {
        "WIDTH": width,
        "SILU": True,
        "LAYOUT": layout,
        "VEC": vec,
        "CHANNELS": 256,
        "ROWS": 16,
        "SPECULATIVE": counts and packed,
    }
    signature: dict[str, str] = {}
    fixed: dict[tuple[int, ...], Any] = {}
    attributes: dict[tuple[int, ...], Any] = {}
    for i, parameter in enumerate(function.params):
        name = parameter.name
        if name in constants:
            signature[name], fixed[(i,)] = "constexpr", constants[name]
        elif name not in pointers:
            signature[name] = parameter.annotation_type
        elif (pointer := pointers[name]) is None:
            signature[name], fixed[(i,)] = "constexpr", None
        else:
            signature[name] = pointer
            if name in _ALIGNED:
                attributes[(i,)] = [["tt.divisibility", 16]]
    source = ASTSource(fn=function, signature=signature, constexprs=fixed, attrs=attributes)
    return triton.compile(source, target=GPUTarget(*target), options={"num_warps": warps})
