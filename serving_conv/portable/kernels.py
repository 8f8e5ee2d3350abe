"""Triton kernels of packed prefill and of decode and speculative steps. Importing this needs triton.

A program owns a tile of channels and either packed rows (prefill) or one sequence (update). Device values are never
trusted: the order of the tests is that of `serving_conv.reference`. Whoever reads a slot's old window also writes
the new one, behind a barrier, since Triton may give a load and a store of one address to different threads.

Sizes and strides are plain values: nothing about them is compiled in. `VEC` is what the host found to divide the
channels and the strides; those arrive divided by it.
"""

import triton
import triton.language as tl

__all__ = ["conv_prefill", "conv_update"]

FAULT_OFFSETS = tl.constexpr(1)
FAULT_SLOT = tl.constexpr(2)
FAULT_ACCEPTED_COUNT = tl.constexpr(4)
FAULT_STATE_TRUNCATED = tl.constexpr(8)

CHANNELS_CONTIGUOUS = tl.constexpr(0)
POSITIONS_CONTIGUOUS = tl.constexpr(1)

# Their values, and the alignment of what a step slices out of its own buffers, never make another kernel.
_SIZES = (
    "x_row_stride", "out_row_stride", "slot_stride", "channel_stride", "position_stride", "slots_stride",
    "rows", "channels", "sequences", "slot_count", "positions", "pad_slot_id",
)  # fmt: skip
_UNALIGNED = ("weight", "bias", "cu_seqlens", "slots", "flags", "counts", "fault_flag")


@triton.jit
def _read_sequence(
    index,
    mask,
    cu_seqlens,
    slots,
    slots_stride,
    flags,
    counts,
    rows,
    slot_count,
    positions,
    pad_slot_id,
    WIDTH: tl.constexpr,
    ABSENT_HISTORY: tl.constexpr,
):
    """Begin, end, slot, window start, history, live and fault of sequences; `index` is one or a vector."""
    if cu_seqlens is None:
        begin = index
        end = index + 1
    else:
        begin = tl.load(cu_seqlens + index, mask=mask, other=0)
        end = tl.load(cu_seqlens + index + 1, mask=mask, other=0)
    slot = tl.load(slots + index.to(tl.int64) * slots_stride, mask=mask, other=0)
    accepted = begin * 0 + 1
    if counts is not None:
        accepted = tl.load(counts + index, mask=mask, other=1)
    padding = slot == pad_slot_id
    bad_offsets = (begin < 0) | (end < begin) | (end > rows)
    empty = begin == end
    bad_slot = (slot < 0) | (slot >= slot_count)
    bad_count = (accepted < 1) | (accepted > positions - WIDTH + 2)
    live = mask & (padding | bad_offsets | empty | bad_slot | bad_count == 0)
    fault = tl.where(bad_slot, FAULT_SLOT, tl.where(bad_count, FAULT_ACCEPTED_COUNT, 0))
    fault = tl.where(bad_offsets, FAULT_OFFSETS, tl.where(empty, 0, fault))
    fault = tl.where(padding | (mask == 0), 0, fault)
    history = live
    if flags is not None:
        history = live & (tl.load(flags + index, mask=mask, other=0) != 0)
    elif not ABSENT_HISTORY:
        history = live & (begin != begin)
    return begin, end, slot, accepted - 1, history, live, fault


@triton.jit
def _silu(value):
    return value / (1.0 + tl.exp(-value))


@triton.jit
def _first_above(offsets, count, row):
    """How many offsets, from the first on, are at or below `row` (one or a vector of them), by halving."""
    low = row * 0
    high = low + count
    remaining = count
    while remaining > 0:
        middle = low + (high - low) // 2
        searching = low < high
        below = tl.load(offsets + middle, mask=searching, other=0) <= row
        low = tl.where(searching & below, middle + 1, low)
        high = tl.where(searching & (below == 0), middle, high)
        remaining = remaining // 2
    return low


@triton.jit
def _raise_fault(flag, code):
    if code != 0:
        tl.atomic_or(flag, code)


@triton.jit
def _report_faults(
    fault_flag, cu_seqlens, slots, slots_stride, flags, counts, rows, sequences, slot_count, positions, pad_slot_id,
    WIDTH: tl.constexpr,
):  # fmt: skip
    """Sticky codes of a prefill: one program looks at every sequence."""
    if tl.load(cu_seqlens) != 0:
        tl.atomic_or(fault_flag, FAULT_OFFSETS)
    first = rows * 0
    while first < sequences:
        index = first + tl.arange(0, 256)
        _, _, _, _, _, _, fault = _read_sequence(
            index, index < sequences, cu_seqlens, slots, slots_stride, flags, counts, rows, slot_count, positions,
            pad_slot_id, WIDTH, False,
        )  # fmt: skip
        for code in tl.static_range(3):
            found = tl.max((fault == (1 << code)).to(tl.int32), axis=0)
            _raise_fault(fault_flag, found << code)
        first += 256


@triton.jit
def _convolve_rows(
    x, weight, bias, conv_state, out, row, write, begin, slot_start, history, live, channel, in_channels,
    x_row_stride, out_row_stride, channel_stride, position_stride,
    WIDTH: tl.constexpr, SILU: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    """Compute and write rows `[rows]` for channels `[channels]`.

    Each tap's input comes from x, from the slot (SLOTS), or is zero, as the row's place in its sequence says: a
    shifted row is read again, from a near cache, rather than moved between threads.
    """
    tile = write[:, None] & in_channels[None, :]
    total = tl.zeros([row.shape[0], channel.shape[0]], tl.float32)
    if bias is not None:
        total += tl.load(bias + channel, mask=in_channels, other=0.0).to(tl.float32)[None, :]
    for tap in tl.static_range(WIDTH):
        source = row - (WIDTH - 1) + tap
        if SLOTS or tap < WIDTH - 1:
            wanted = tile & (live & (source >= begin))[:, None]
        else:
            wanted = tile & live[:, None]
        at = x + (source.to(tl.int64) * x_row_stride)[:, None] + channel[None, :]
        value = tl.load(at, mask=wanted, other=0.0).to(tl.float32)
        if SLOTS and tap < WIDTH - 1:
            old = history & (source < begin)
            position = (source - begin + (WIDTH - 1)).to(tl.int64)
            at_slot = (slot_start + position * position_stride)[:, None] + (channel.to(tl.int64) * channel_stride)[
                None, :
            ]
            value += tl.load(conv_state + at_slot, mask=tile & old[:, None], other=0.0).to(tl.float32)
        taps = tl.load(weight + channel.to(tl.int64) * WIDTH + tap, mask=in_channels, other=0.0).to(tl.float32)
        total = tl.fma(value, tl.broadcast_to(taps[None, :], value.shape), total)
    if SILU:
        total = _silu(total)
    total = tl.where(live[:, None], total, 0.0)
    tl.store(
        out + (row.to(tl.int64) * out_row_stride)[:, None] + channel[None, :], total.to(x.dtype.element_ty), mask=tile
    )


@triton.jit(do_not_specialize=_SIZES, do_not_specialize_on_alignment=_UNALIGNED)
def conv_prefill(
    x, weight, bias, conv_state, out, cu_seqlens, slots, flags, counts, fault_flag,
    x_row_stride: tl.int64, out_row_stride: tl.int64, slot_stride: tl.int64, channel_stride: tl.int64,
    position_stride: tl.int64, slots_stride: tl.int64,
    rows: tl.int32, channels: tl.int32, sequences: tl.int32, slot_count: tl.int32, positions: tl.int32,
    pad_slot_id: tl.int32,
    WIDTH: tl.constexpr, SILU: tl.constexpr, LAYOUT: tl.constexpr, VEC: tl.constexpr, ROWS: tl.constexpr,
    CHANNELS: tl.constexpr,
):  # fmt: skip
    """Packed prefill. Grid: channel tiles, ranges of ROWS rows (y, and z as a high digit)."""
    row0 = (tl.program_id(2) * tl.num_programs(1) + tl.program_id(1)) * ROWS
    if row0 >= rows:
        return
    x_row_stride *= VEC
    out_row_stride *= VEC
    channels *= VEC
    if LAYOUT == CHANNELS_CONTIGUOUS:
        channel_stride = 1
        slot_stride *= VEC
        position_stride *= VEC
    elif LAYOUT == POSITIONS_CONTIGUOUS:
        position_stride = 1
    if (tl.program_id(0) == 0) & (row0 == 0):
        _report_faults(
            fault_flag, cu_seqlens, slots, slots_stride, flags, counts, rows, sequences, slot_count, positions,
            pad_slot_id, WIDTH,
        )  # fmt: skip
    channel = tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS)
    in_channels = channel < channels
    row = row0 + tl.arange(0, ROWS)
    in_rows = row < rows
    row1 = tl.minimum(row0 + ROWS, rows)

    # The sequence of the tile's first row; if it owns the whole tile and began W-1 rows earlier, no slot is needed.
    sequence = _first_above(cu_seqlens, sequences + 1, row0) - 1
    owned = (sequence >= 0) & (sequence < sequences)
    begin, end, slot, start, history, live, _ = _read_sequence(
        sequence, owned, cu_seqlens, slots, slots_stride, flags, counts, rows, slot_count, positions, pad_slot_id,
        WIDTH, False,
    )  # fmt: skip
    if owned & (begin >= 0) & (begin + (WIDTH - 1) <= row0) & (end >= row1) & (end <= rows):
        _convolve_rows(
            x, weight, bias, conv_state, out, row, in_rows, begin, tl.zeros([ROWS], tl.int64), row < 0,
            live & (row >= 0), channel, in_channels, x_row_stride, out_row_stride, channel_stride, position_stride,
            WIDTH, SILU, False,
        )  # fmt: skip
        return

    # Any mixture of sequences: every row finds its own.
    owner = _first_above(cu_seqlens, sequences + 1, row) - 1
    owned_rows = in_rows & (owner >= 0) & (owner < sequences)
    begins, ends, slot_of, starts, histories, lives, _ = _read_sequence(
        owner, owned_rows, cu_seqlens, slots, slots_stride, flags, counts, rows, slot_count, positions, pad_slot_id,
        WIDTH, False,
    )  # fmt: skip
    # Only offsets that go backwards lead to a row outside its sequence: zero.
    lives = lives & (begins <= row) & (row < ends)
    # The program of a sequence's first row alone touches its slot, so it computes every row whose window does too.
    elsewhere = lives & (begins < row0) & (row - begins < WIDTH - 1)
    slot_starts = slot_of.to(tl.int64) * slot_stride + starts.to(tl.int64) * position_stride
    _convolve_rows(
        x, weight, bias, conv_state, out, row, owned_rows & (elsewhere == 0), begins, slot_starts,
        histories & lives & (elsewhere == 0), lives, channel, in_channels, x_row_stride, out_row_stride,
        channel_stride, position_stride, WIDTH, SILU, True,
    )  # fmt: skip

    last = _first_above(cu_seqlens, sequences + 1, row1 - 1) - 1
    begin, end, slot, start, history, live, _ = _read_sequence(
        last, (last >= 0) & (last < sequences), cu_seqlens, slots, slots_stride, flags, counts, rows, slot_count,
        positions, pad_slot_id, WIDTH, False,
    )  # fmt: skip
    if live & (begin >= row0) & (begin < row1) & (end > row1) & (row1 - begin < WIDTH - 1):
        spilled = row1 + tl.arange(0, 8)
        write = (spilled < end) & (spilled - begin < WIDTH - 1)
        _convolve_rows(
            x, weight, bias, conv_state, out, spilled, write, begin,
            tl.zeros([8], tl.int64) + (slot.to(tl.int64) * slot_stride + start.to(tl.int64) * position_stride),
            history & write, live & write, channel, in_channels, x_row_stride, out_row_stride, channel_stride,
            position_stride, WIDTH, SILU, True,
        )  # fmt: skip

    # New windows, by the row that begins each sequence. A sequence of T tokens takes position p from p + T or from
    # x, so in rising order, with a barrier between reading and writing, nothing is overwritten that is still needed.
    first = lives & (begins == row)
    if tl.max(first.to(tl.int32), axis=0) != 0:
        at_channel = (channel.to(tl.int64) * channel_stride)[None, :]
        slot_base = slot_of.to(tl.int64) * slot_stride
        for position in tl.static_range(WIDTH - 1):
            source = ends - (WIDTH - 1) + position
            from_x = first & (source >= begins)
            from_slot = first & histories & (source < begins)
            old_position = (source - begins + (WIDTH - 1)).to(tl.int64) * position_stride
            fresh = tl.load(
                x + (source.to(tl.int64) * x_row_stride)[:, None] + channel[None, :],
                mask=from_x[:, None] & in_channels[None, :],
                other=0.0,
            )
            old = tl.load(
                conv_state + (slot_starts + old_position)[:, None] + at_channel,
                mask=from_slot[:, None] & in_channels[None, :],
                other=0.0,
            )
            kept = tl.where(from_x[:, None], _kept(fresh, conv_state), old)
            tl.debug_barrier()
            tl.store(
                conv_state + (slot_base + position * position_stride)[:, None] + at_channel,
                kept,
                mask=first[:, None] & in_channels[None, :],
            )


@triton.jit
def _kept(value, conv_state):
    """What a slot keeps of an input: the same bits between equal types."""
    return value.to(conv_state.dtype.element_ty)


@triton.jit(do_not_specialize=_SIZES, do_not_specialize_on_alignment=_UNALIGNED)
def conv_update(
    x, weight, bias, conv_state, out, cu_seqlens, slots, flags, counts, fault_flag,
    x_row_stride: tl.int64, out_row_stride: tl.int64, slot_stride: tl.int64, channel_stride: tl.int64,
    position_stride: tl.int64, slots_stride: tl.int64,
    rows: tl.int32, channels: tl.int32, sequences: tl.int32, slot_count: tl.int32, positions: tl.int32,
    pad_slot_id: tl.int32,
    WIDTH: tl.constexpr, SILU: tl.constexpr, LAYOUT: tl.constexpr, VEC: tl.constexpr, SPECULATIVE: tl.constexpr,
    CHANNELS: tl.constexpr,
):  # fmt: skip
    """Decode and linear speculative steps. Grid: sequences, channel tiles (y, and z as a high digit)."""
    index = tl.program_id(0)
    tile = tl.program_id(2) * tl.num_programs(1) + tl.program_id(1)
    x_row_stride *= VEC
    out_row_stride *= VEC
    channels *= VEC
    if LAYOUT == CHANNELS_CONTIGUOUS:
        channel_stride = 1
        slot_stride *= VEC
        position_stride *= VEC
    elif LAYOUT == POSITIONS_CONTIGUOUS:
        position_stride = 1
    channel = tile * CHANNELS + tl.arange(0, CHANNELS)
    in_channels = channel < channels
    begin, end, slot, start, history, live, fault = _read_sequence(
        index, index < sequences, cu_seqlens, slots, slots_stride, flags, counts, rows, slot_count, positions,
        pad_slot_id, WIDTH, True,
    )  # fmt: skip
    if tile == 0:
        if (index == 0) & (begin != 0):
            fault |= FAULT_OFFSETS
        if SPECULATIVE:
            fault |= tl.where(live & (end - begin > positions - WIDTH + 2), FAULT_STATE_TRUNCATED, 0)
        _raise_fault(fault_flag, fault)
    if live == 0:
        zero = tl.zeros([CHANNELS], x.dtype.element_ty)
        row = tl.maximum(begin, 0)
        while row < tl.minimum(end, rows):
            tl.store(out + row.to(tl.int64) * out_row_stride + channel, zero, mask=in_channels)
            row += 1
        return

    at_slot = conv_state + slot.to(tl.int64) * slot_stride + channel.to(tl.int64) * channel_stride
    # Raw inputs keep their type, and their bits, where pool and x agree; fp32 holds every accepted type exactly.
    keep: tl.constexpr = x.dtype.element_ty if x.dtype.element_ty == conv_state.dtype.element_ty else tl.float32
    window = ()
    for tap in tl.static_range(WIDTH - 1):
        old = tl.load(at_slot + (start + tap).to(tl.int64) * position_stride, mask=in_channels & history, other=0.0)
        window = window + (old.to(keep),)
    bias_value = tl.zeros([CHANNELS], tl.float32)
    if bias is not None:
        bias_value = tl.load(bias + channel, mask=in_channels, other=0.0).to(tl.float32)
    taps = ()
    for tap in tl.static_range(WIDTH):
        at_tap = weight + channel.to(tl.int64) * WIDTH + tap
        taps = taps + (tl.load(at_tap, mask=in_channels, other=0.0).to(tl.float32),)
    # Every thread has its part of the window before any thread overwrites the slot.
    tl.debug_barrier()
    if SPECULATIVE:
        for tap in tl.static_range(1, WIDTH - 1):
            kept = window[tap].to(conv_state.dtype.element_ty)
            tl.store(at_slot + (tap - 1) * position_stride, kept, mask=in_channels)
    row = begin
    while row < end:  # not `range`, whose bounds Triton's interpreter cannot take from a current numpy
        fresh = tl.load(x + row.to(tl.int64) * x_row_stride + channel, mask=in_channels, other=0.0)
        total = bias_value
        for tap in tl.static_range(WIDTH - 1):
            total = tl.fma(window[tap].to(tl.float32), taps[tap], total)
        total = tl.fma(fresh.to(tl.float32), taps[WIDTH - 1], total)
        if SILU:
            total = _silu(total)
        # `out` may be x: the whole row is read before any of it is written.
        tl.debug_barrier()
        tl.store(out + row.to(tl.int64) * out_row_stride + channel, total.to(x.dtype.element_ty), mask=in_channels)
        if SPECULATIVE:
            position = row - begin + (WIDTH - 2)
            kept = fresh.to(conv_state.dtype.element_ty)
            tl.store(at_slot + position.to(tl.int64) * position_stride, kept, mask=in_channels & (position < positions))
        window = window[1:] + (fresh.to(keep),)
        row += 1
    if not SPECULATIVE:
        for tap in tl.static_range(WIDTH - 1):
            kept = window[tap].to(conv_state.dtype.element_ty)
            tl.store(at_slot + tap * position_stride, kept, mask=in_channels)
