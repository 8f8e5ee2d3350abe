"""Owns what is fixed when a kernel is compiled, and the one source text that follows from it.

The text is self-contained (no header, no include path) and is the kernel's whole identity: two variants are the
same exactly if their texts are.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path

from serving_conv.errors import BackendError

__all__ = ["CHANNELS_CONTIGUOUS", "POSITIONS_DENSE", "STRIDED", "Variant", "kernel_directory", "source"]

CHANNELS_CONTIGUOUS, POSITIONS_DENSE, STRIDED = 0, 1, 2  # STATE_LAYOUT of kernels/window.cuh

_TYPES = {"bfloat16": "BFloat16", "float16": "Float16", "float32": "Float32"}
_FILES = ("parameters.cuh", "channels.cuh", "window.cuh", "sequence.cuh", "checkpoints.cuh", "singles.cuh")
_BACKWARD_KERNELS = ("conv_backward", "sum_partials")  # these take BackwardParameters


@dataclass(frozen=True, slots=True)
class Variant:
    """One compiled kernel. Fields in capitals in the source; see `kernels/` for what each decides."""

    kernel: str  # conv_prefill, conv_update, conv_backward or sum_partials
    x: str
    weight: str
    state: str
    bias: str
    width: int
    vec: int  # neighbouring channels a thread owns
    threads: int
    min_blocks: int
    state_layout: int
    positions: int  # in a slot; matters to the dense layout alone, else width - 1
    has_bias: bool
    silu: bool
    rows: int = 0  # prefill: packed rows of a block
    packed: bool = False  # update: offsets are given
    speculative: bool = False  # update: accepted counts are given; prefill: sequences may be marked as drafts
    checkpoints: bool = False  # prefill: windows may go to further slots
    ahead: int = 0  # update, packed, and backward: rows loaded before the first is needed
    sequences: int = 0  # update, not packed: sequences of a thread
    ordered: bool = False  # backward: each run's sums have a place of their own


def kernel_directory() -> Path:
    """The folder of the kernel sources: inside the installed package, else beside it in a source tree.

    Raises:
        BackendError: neither exists.
    """
    package = Path(__file__).resolve().parent.parent
    for directory in (package / "kernels", package.parent / "kernels"):
        if (directory / "conv_prefill.cu").is_file():
            return directory
    raise BackendError(
        "kernels", got=f"no kernel sources near {package.name}", wanted="the files of kernels/", remedy="reinstall"
    )


@cache
def read_kernel_file(name: str) -> str:
    """One file of the kernel folder."""
    return (kernel_directory() / name).read_text(encoding="utf-8")


def source(variant: Variant, platform: str) -> str:
    """The translation unit of a variant; `platform` is `cuda` or `host`."""
    header = ["struct BFloat16;", "struct Float16;", "struct Float32;"]
    for alias, name in (("X", "x"), ("Weight", "weight"), ("State", "state"), ("Bias", "bias")):
        header.append(f"typedef {_TYPES[getattr(variant, name)]} {alias};")
    for field in fields(variant):
        value = getattr(variant, field.name)
        if not isinstance(value, str):
            header.append(f"#define {field.name.upper()} {int(value)}")
    parts = [read_kernel_file("platform_cuda.cuh" if platform == "cuda" else "platform_host.h"), "\n".join(header)]
    backward = variant.kernel in _BACKWARD_KERNELS
    files = (*_FILES, "backward_parameters.cuh") if backward else _FILES
    parts += [read_kernel_file(name) for name in (*files, f"{variant.kernel}.cu")]
    if platform == "host":
        parts.append(f"#define KERNEL_PARAMETERS {'BackwardParameters' if backward else 'Parameters'}")
        parts.append(f"#define KERNEL_NAME {variant.kernel}\n" + read_kernel_file("host_entry.cc"))
    return "\n".join(parts)
