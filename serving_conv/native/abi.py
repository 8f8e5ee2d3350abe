"""Owns the one block of parameters that the convolutions take: its order, its C text and its packing.

`kernels/parameters.cuh` and `kernels/backward_parameters.cuh` are these records written out; a test compares them.
"""

from __future__ import annotations

import struct

__all__ = [
    "BACKWARD_FIELDS",
    "BACKWARD_PACKER",
    "FIELDS",
    "PACKER",
    "STEP_SIZES",
    "TENSORS",
    "backward_parameters_header",
    "parameters_header",
]

# (C type, name, meaning); eight-byte fields first, so that nothing is padded. The tensors come first, those of a layer
# before those of a step; then what alike calls share; the sizes of the step are last.
FIELDS: tuple[tuple[str, str, str], ...] = (
    ("const void *", "weight", "[channels, WIDTH]"),
    ("const void *", "bias", "[channels], if HAS_BIAS"),
    ("void *", "conv_state", "[slot_count, channels, positions]"),
    ("const void *", "x", "[rows, channels]"),
    ("void *", "out", "[rows, channels]"),
    ("const int *", "cu_seqlens", "[sequences + 1], or null: one row a sequence"),
    ("const int *", "slots", "[sequences]"),
    ("const unsigned char *", "has_initial_state", "[sequences], or null"),
    ("const int *", "num_accepted_tokens", "[sequences], or null"),
    ("const unsigned char *", "speculative", "[sequences], if SPECULATIVE: the tokens are drafts"),
    ("const int *", "checkpoint_offsets", "[sequences + 1], if CHECKPOINTS"),
    ("const int *", "checkpoint_tokens", "[checkpoints]"),
    ("const int *", "checkpoint_slots", "[checkpoints]"),
    ("int *", "fault_flag", "[1], sticky"),
    ("i64", "x_row_stride", "elements"),
    ("i64", "out_row_stride", "elements"),
    ("i64", "slot_stride", "elements"),
    ("i64", "channel_stride", "elements, in a slot"),
    ("i64", "position_stride", "elements, in a slot"),
    ("i64", "slots_stride", "elements of slots"),
    ("int", "channels", ""),
    ("int", "slot_count", ""),
    ("int", "positions", "in a slot"),
    ("int", "pad_slot_id", ""),
    ("int", "rows", ""),
    ("int", "sequences", ""),
    ("int", "checkpoints", ""),
    ("int", "unused", "the size is a multiple of eight bytes"),
)

_CODES = {"i64": "q", "int": "i"}
PACKER = struct.Struct("<" + "".join(_CODES.get(kind, "Q") for kind, _, _ in FIELDS))
TENSORS = struct.Struct("<" + "Q" * (sum(kind.endswith("*") for kind, _, _ in FIELDS) - 1))  # all but the fault flag
STEP_SIZES = struct.Struct("<4i")  # rows, sequences, checkpoints and what pads the block

# What the backward's kernels take besides the block above, which describes the forward call: there `conv_state` is
# the sequences' initial windows (null: zeros) and a sequence's slot is its number.
BACKWARD_FIELDS: tuple[tuple[str, str, str], ...] = (
    ("const void *", "dout", "[batches, rows_per_batch, channels], any strides"),
    ("void *", "dx", "[batches, rows_per_batch, channels], channels contiguous, or null: not wanted"),
    ("const float *", "dfinal", "[final_count, WIDTH - 1, channels], or null: zeros"),
    ("float *", "dinitial", "[initial_count, WIDTH - 1, channels], or null: not wanted"),
    ("float *", "partials", "[runs, or 1 without ORDERED; taps, then bias; channels], or null: not wanted"),
    ("void *", "dweight", "[channels, WIDTH]"),
    ("void *", "dbias", "[channels], if HAS_BIAS"),
    ("i64", "x_batch_stride", "elements"),
    ("i64", "x_channel_stride", "elements; 1 where a thread owns more than one channel"),
    ("i64", "dout_batch_stride", "elements"),
    ("i64", "dout_row_stride", "elements"),
    ("i64", "dout_channel_stride", "elements; 1 where a thread owns more than one channel"),
    ("i64", "dx_batch_stride", "elements"),
    ("i64", "dx_row_stride", "elements"),
    ("int", "rows_per_batch", ""),
    ("int", "rows_of_run", ""),
    ("int", "runs_per_batch", ""),
    ("int", "runs", "of all batches"),
    ("int", "initial_count", "sequences with a place in dinitial"),
    ("int", "final_count", "sequences with a place in dfinal"),
)
BACKWARD_PACKER = struct.Struct(PACKER.format + "".join(_CODES.get(kind, "Q") for kind, _, _ in BACKWARD_FIELDS))


def parameters_header() -> str:
    """The text of `kernels/parameters.cuh`."""
    return _header("// The parameters of the convolutions.", "Parameters", FIELDS)


def backward_parameters_header() -> str:
    """The text of `kernels/backward_parameters.cuh`."""
    forward = ("Parameters ", "forward", "the call that is differentiated")
    return _header("// The parameters of the backward's kernels.", "BackwardParameters", (forward, *BACKWARD_FIELDS))


def _header(title: str, name: str, fields: tuple[tuple[str, str, str], ...]) -> str:
    lines = [f"{title} Generated from serving_conv/native/abi.py.", f"struct {name} {{"]
    for kind, name, meaning in fields:
        declaration = f"  {kind}{'' if kind.endswith(('*', ' ')) else ' '}{name};"
        lines.append(f"{declaration}  // {meaning}" if meaning else declaration)
    return "\n".join([*lines, "};", ""])
