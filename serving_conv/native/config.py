"""Owns every launch choice: pure functions of sizes, with the measurement beside each threshold.

Measured on one H200 (torch 2.11, CUDA 13.0), bf16, W = 4, C = 8192, in microseconds of a call in a captured graph.
"""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["LaunchConfig", "choose_backward", "choose_prefill", "choose_update"]


class LaunchConfig(NamedTuple):
    """What a launch choice fixes; fields as in `Variant`.

    Attributes:
        vec: most channels a thread may own, before alignment has its say.
        threads: of a block.
        min_blocks: blocks that one multiprocessor must be able to hold, which bounds the registers.
        rows: packed rows of a block (prefill), or of a run (backward).
        sequences: sequences of a thread (update with one row each).
        ahead: rows under way before they are needed (backward).
    """

    vec: int
    threads: int
    min_blocks: int
    rows: int = 0
    sequences: int = 0
    ahead: int = 0


def _widest(bytes_each: int, width: int, most_bytes: int) -> int:
    """Channels of a thread: `most_bytes` of row, and no more taps than registers allow (16 of them, as floats)."""
    return max(1, min(most_bytes // bytes_each, 16 // width if width <= 4 else 2))


def choose_prefill(
    *,
    rows: int,
    channels: int,
    width: int,
    x_bytes: int,
    simple_state: bool,
    multiprocessors: int,
    capability: int = 80,
) -> LaunchConfig:
    """Launch of `conv_prefill`.

    Eight bytes a thread and 16 rows a block: 67.9 for 8192 rows, where four bytes give 75.3, sixteen 72.0, 8 rows a
    block 75.4, 20 rows 68.1 and 32 rows 70.1. Sequences of 1 to 12 tokens, 256 of them: 27.5, with four bytes 31.5,
    sixteen 30.1, 12 rows 31.2, 20 rows 29.1. Too few rows for one wave of such blocks want twice as many smaller
    threads: 512 rows take 6.92 with four bytes and 7.56 with eight.

    Args:
        rows: packed rows.
        channels: of a row.
        width: taps.
        x_bytes: of an element of x.
        simple_state: the pool has channels contiguous; the other layouts hold more of a window in registers.
        multiprocessors: of the device.
        capability: of the device, as 90; before it and from 120 the compiler needs a few registers more.
    """
    threads, block_rows = 128, 16
    vec = _widest(x_bytes, width, 8)
    blocks = -(-channels // (threads * vec)) * -(-rows // block_rows)
    if blocks < 5 * multiprocessors:
        vec = _widest(x_bytes, width, 4)
    # Registers for 8 (4 bytes) or 5 (8 bytes) blocks a multiprocessor leave nothing to spill at W <= 4.
    small = vec * x_bytes <= 4 and vec * width <= 8
    if width <= 4 and simple_state:
        min_blocks = (8 if 90 <= capability < 120 else 7) if small else 5
    else:
        min_blocks = 3 if width <= 4 or simple_state else 2
    return LaunchConfig(vec=vec, threads=threads, min_blocks=min_blocks, rows=block_rows)


def choose_update(
    *, sequences: int, channels: int, width: int, x_bytes: int, packed: bool, simple_state: bool
) -> LaunchConfig:
    """Launch of `conv_update`.

    Latency decides below about 512 blocks: four bytes a thread and blocks of 64 give 1.35 for one sequence and 1.67
    for eight. Then eight bytes: 3.28 for 64 sequences, four 3.95. From about 4096 blocks two sequences a thread share
    their taps: 10.5 against 10.7 for 256, 36.3 against 38.2 for 1024.

    Args:
        sequences: in the call.
        channels: of a row.
        width: taps.
        x_bytes: of an element of x.
        packed: offsets are given, so a thread takes one sequence with all its rows.
        simple_state: the pool has channels contiguous.
    """
    vec = _widest(x_bytes, width, 8)
    blocks = -(-channels // (128 * vec)) * sequences
    if blocks < 512:
        vec, threads, min_blocks, together = _widest(x_bytes, width, 4), 64, 16, 1
    elif blocks < 4096 or packed:
        threads, min_blocks, together = 128, 8, 1
    else:
        threads, min_blocks, together = 128, 6, 2
    if width > 4 or not simple_state or packed:
        min_blocks = 512 // threads  # 128 registers: wide windows and whole slots stay in registers
    return LaunchConfig(vec=vec, threads=threads, min_blocks=min_blocks, sequences=together)


def choose_backward(
    *, rows: int, batches: int, channels: int, width: int, x_bytes: int, multiprocessors: int
) -> LaunchConfig:
    """Launch of `conv_backward`.

    Every run of rows costs the W-1 rows on both its sides again and one set of partial sums, so runs are as long as
    one wave of blocks allows. Three blocks a multiprocessor against four, ordered, in us: 110.2 and 116.5 for 8192
    rows, 801 and 824 for 65536, where three copied streams take 103.5 and 817; 38.6 and 41.8 with 2048 channels. Runs
    of another length, threads with half the channels and 8, 16 or 20 rows ahead are all slower
    (`benchmarks/backward.py --sweep`). The committed results, of another run, have 111.2 and 874 with a spread of 13 %.

    Args:
        rows: of a batch.
        batches: of the call.
        channels: of a row.
        width: taps.
        x_bytes: of an element of x.
        multiprocessors: of the device.
    """
    threads, min_blocks, ahead = 128, 3, 12
    vec = _widest(x_bytes, width, 8)
    tiles = -(-channels // (threads * vec))
    runs = max(1, multiprocessors * min_blocks // (tiles * batches))
    run_rows = -(-rows // runs)
    run_rows = max(16, 4 * -(-run_rows // 4))
    return LaunchConfig(vec=vec, threads=threads, min_blocks=min_blocks, rows=run_rows, ahead=ahead)
