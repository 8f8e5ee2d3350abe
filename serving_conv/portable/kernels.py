"""Triton kernels of packed steps (prompt chunks, decode rows, drafts) and of decode and speculative steps.

A value is a vector over a tile of channels, `[CHANNELS]`, and a program holds one such vector for each row. With four
channels of 16 bits a thread, every access to a row is one word of eight bytes, and no value moves between threads. Time
lies in tuples that the compiler unrolls, so the window of the last W-1 inputs is a renaming of registers: a row is
loaded once, however many taps meet it.

Device values are never trusted: the order of the tests is that of `serving_conv.reference`. Whoever reads a slot's old
window also writes the new one, behind a barrier, since Triton may give a load and a store of one address to different
threads.

Sizes and strides are plain values: nothing about them is compiled in. What is:
    WIDTH, SILU, LAYOUT   taps, activation, which axis of a slot is contiguous
    VEC                   what the host found to divide the channels and the strides, which arrive divided by it
    CHANNELS, EVEN        channels of a tile; whether tiles divide all channels, so that no access needs a mask for them
    TAP_WORD              bytes of the words that taps are loaded in, or 0
    PTX                   the target is an NVIDIA GPU
    DEPENDENT             programmatic dependent launch: a program may start while the kernel before still runs, and
                          waits for its end after it has read weights and bias, which are constants of the model
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

__all__ = ["conv_prefill", "conv_update"]

FAULT_OFFSETS = tl.constexpr(1)
FAULT_SLOT = tl.constexpr(2)
FAULT_ACCEPTED_COUNT = tl.constexpr(4)
FAULT_STATE_TRUNCATED = tl.constexpr(8)
FAULT_CHECKPOINT = tl.constexpr(16)

CHANNELS_CONTIGUOUS = tl.constexpr(0)
POSITIONS_CONTIGUOUS = tl.constexpr(1)

# Their values, and the alignment of what a step slices out of its own buffers, never make another kernel.
_SIZES = (
    "x_row_stride", "out_row_stride", "slot_stride", "channel_stride", "position_stride", "slots_stride",
    "rows", "channels", "sequences", "slot_count", "positions", "pad_slot_id", "checkpoints",
)  # fmt: skip
_UNALIGNED = (
    "cu_seqlens", "slots", "flags", "counts", "fault_flag", "drafts", "checkpoint_offsets", "checkpoint_tokens",
    "checkpoint_slots",
)  # fmt: skip


class Sequences(NamedTuple):
    """What a call says about its sequences.

    Attributes:
        cu_seqlens: int32 `[N+1]`, or None for one row a sequence.
        slots: int32 `[N]`, `slots_stride` apart.
        slots_stride: elements.
        flags: uint8 `[N]`, whether there is history, or None.
        counts: int32 `[N]`, tokens of the step before that were kept, or None.
        drafts: uint8 `[N]`, whether the tokens are drafts, or None.
        rows: of x.
        count: N.
        slot_count: slots of the pool.
        positions: of a slot.
        pad_slot_id: slot number that marks padding.
    """

    cu_seqlens: Any
    slots: Any
    slots_stride: Any
    flags: Any
    counts: Any
    drafts: Any
    rows: Any
    count: Any
    slot_count: Any
    positions: Any
    pad_slot_id: Any


class Checkpoints(NamedTuple):
    """Windows to write to further slots: int32 offsets `[N+1]`, or None; tokens and slots `[K]`; K."""

    offsets: Any
    tokens: Any
    slots: Any
    count: Any


class Tile(NamedTuple):
    """The channels of a program, and where they lie.

    Attributes:
        first_channel: the number of the first.
        channel: `[CHANNELS]`, their numbers.
        exists: `[CHANNELS]`, the mask of those below the channels of a row.
        at_channel: int64 `[CHANNELS]`, their offsets in a slot.
        x: pointer, rows `x_row_stride` apart.
        x_row_stride: elements.
        out: pointer, rows `out_row_stride` apart.
        out_row_stride: elements.
        state: pointer, slots `slot_stride` apart.
        slot_stride: elements.
        position_stride: elements.
    """

    first_channel: Any
    channel: Any
    exists: Any
    at_channel: Any
    x: Any
    x_row_stride: Any
    out: Any
    out_row_stride: Any
    state: Any
    slot_stride: Any
    position_stride: Any


# --- memory


@triton.jit
def _tile(
    number, x, out, conv_state, x_row_stride, out_row_stride, slot_stride, channel_stride, position_stride, channels,
    LAYOUT: tl.constexpr, VEC: tl.constexpr, CHANNELS: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """Tile `number`. All sizes arrive divided by what divides them: the product tells the compiler so."""
    channel = number * CHANNELS + tl.arange(0, CHANNELS)
    if EVEN:
        exists = tl.full([CHANNELS], True, tl.int1)  # the compiler drops it
    else:
        exists = channel < channels * VEC
    if LAYOUT == CHANNELS_CONTIGUOUS:
        at_channel = channel.to(tl.int64)
        slot_stride *= VEC
        position_stride *= VEC
    else:
        at_channel = channel.to(tl.int64) * channel_stride
        if LAYOUT == POSITIONS_CONTIGUOUS:
            position_stride = 1
    return Tile(
        number * CHANNELS, channel, exists, at_channel, x, x_row_stride * VEC, out, out_row_stride * VEC, conv_state,
        slot_stride, position_stride,
    )  # fmt: skip


@triton.jit
def _at_row(tile, row, more: tl.constexpr = 0):
    """Pointers to row `row + more` of x. Rows of one base share their 64-bit product."""
    return tile.x + row.to(tl.int64) * tile.x_row_stride + more * tile.x_row_stride + tile.channel


@triton.jit
def _at_result(tile, row, more: tl.constexpr = 0):
    """Pointers to row `row + more` of out."""
    return tile.out + row.to(tl.int64) * tile.out_row_stride + more * tile.out_row_stride + tile.channel


@triton.jit
def _at_position(tile, slot, position):
    """Pointers to a position of a slot."""
    return tile.state + slot.to(tl.int64) * tile.slot_stride + position * tile.position_stride + tile.at_channel


@triton.jit
def _store_result(tile, row, more: tl.constexpr, value, where):
    """Write row `row + more`, which nothing reads again soon."""
    value = value.to(tile.out.dtype.element_ty)
    tl.store(_at_result(tile, row, more), value, mask=where, cache_modifier=".cs")


@triton.jit
def _store_input(tile, slot, position, value, where):
    """What a slot keeps of an input: the same bits between equal types."""
    tl.store(_at_position(tile, slot, position), value.to(tile.state.dtype.element_ty), mask=where)


@triton.jit
def _load_taps(weight, tile, WIDTH: tl.constexpr, TAP_WORD: tl.constexpr):
    """The W taps of each channel, fp32 `[CHANNELS]` each.

    They lie side by side, W elements a channel. Where they fill words of TAP_WORD bytes the words are loaded and cut
    up, since loads of single taps would be strided, W times as many.
    """
    element: tl.constexpr = weight.dtype.element_ty
    bits: tl.constexpr = element.primitive_bitwidth
    taps = ()
    if TAP_WORD == 0:
        for tap in tl.static_range(WIDTH):
            at_tap = weight + tile.channel.to(tl.int64) * WIDTH + tap
            taps = taps + (tl.load(at_tap, mask=tile.exists, other=0.0).to(tl.float32),)
    else:
        word: tl.constexpr = tl.int64 if TAP_WORD == 8 else tl.int32
        raw: tl.constexpr = tl.int16 if bits == 16 else tl.int32
        each: tl.constexpr = TAP_WORD * 8 // bits
        at_word = weight.to(tl.pointer_type(word)) + tile.channel.to(tl.int64) * (WIDTH // each)
        words = ()
        for i in tl.static_range(WIDTH // each):
            words = words + (tl.load(at_word + i, mask=tile.exists, other=0),)
        for tap in tl.static_range(WIDTH):
            value = (words[tap // each] >> (tap % each * bits)).to(raw).to(element, bitcast=True)
            taps = taps + (value.to(tl.float32),)
    return taps


@triton.jit
def _load_bias(bias, tile):
    """Bias, fp32 `[CHANNELS]`; zeros if absent."""
    value = tl.zeros([tile.channel.shape[0]], tl.float32)
    if bias is not None:
        value = tl.load(bias + tile.channel, mask=tile.exists, other=0.0).to(tl.float32)
    return value


# --- the arithmetic


@triton.jit
def _silu(value, PTX: tl.constexpr):
    """`v / (1 + exp(-v))`: five instructions of PTX; Triton's `exp` and `/` also serve denormals, by thirteen."""
    if PTX:
        sigmoid = tl.inline_asm_elementwise(
            """
            {
            .reg .f32 t;
            mul.f32 t, $1, 0fBFB8AA3B; // -log2(e)
            ex2.approx.ftz.f32 t, t;
            add.f32 t, t, 0f3F800000;
            rcp.approx.ftz.f32 $0, t;
            }
            """,
            "=f,f",
            [value],
            dtype=tl.float32,
            is_pure=True,
            pack=1,
        )
        result = value * sigmoid
    else:
        result = value / (1.0 + tl.exp(-value))
    return result


@triton.jit
def _convolve(inputs, first: tl.constexpr, taps, bias, SILU: tl.constexpr, PTX: tl.constexpr):
    """The convolution of one row: bias, then tap 0 (oldest) to tap W-1, fused, in fp32; then SiLU.

    Its window is `inputs[first]` to `inputs[first + W - 1]`, the last one the row itself.
    """
    total = bias
    for tap in tl.static_range(len(taps)):
        total = tl.fma(inputs[first + tap].to(tl.float32), taps[tap], total)
    if SILU:
        total = _silu(total, PTX)
    return total


@triton.jit
def _select(bits, yes, no, PTX: tl.constexpr):
    """`yes` where `bits` are all ones, `no` where they are 0: one instruction for two values of 16 bits.

    By `tl.where` each of them would take a register of its own.
    """
    if PTX and yes.dtype.primitive_bitwidth == 16:
        result = tl.inline_asm_elementwise(
            "lop3.b32 $0, $3, $1, $2, 0xCA;",
            "=r,r,r,r,r",
            [yes, no, bits],
            dtype=yes.dtype,
            is_pure=True,
            pack=2,
        )
    else:
        result = tl.where(bits != 0, yes, no)
    return result


# --- what a sequence is


@triton.jit
def _read_sequence(index, mask, of, WIDTH: tl.constexpr, ABSENT_HISTORY: tl.constexpr):
    """Begin, end, slot, window start, history, live and fault of sequences; `index` is one or a vector."""
    if of.cu_seqlens is None:
        begin = index
        end = index + 1
    else:
        begin = tl.load(of.cu_seqlens + index, mask=mask, other=0)
        end = tl.load(of.cu_seqlens + index + 1, mask=mask, other=0)
    slot = tl.load(of.slots + index.to(tl.int64) * of.slots_stride, mask=mask, other=0)
    accepted = begin * 0 + 1
    if of.counts is not None:
        accepted = tl.load(of.counts + index, mask=mask, other=1)
    padding = slot == of.pad_slot_id
    backwards = end < begin
    bad_offsets = (begin < 0) | backwards | (end > of.rows)
    empty = begin == end
    bad_slot = (slot < 0) | (slot >= of.slot_count)
    bad_count = (accepted < 1) | (accepted > of.positions - WIDTH + 2)
    live = mask & (padding | bad_offsets | empty | bad_slot | bad_count == 0)
    fault = tl.where(bad_slot, FAULT_SLOT, tl.where(bad_count, FAULT_ACCEPTED_COUNT, 0))
    fault = tl.where(bad_offsets, FAULT_OFFSETS, tl.where(empty, 0, fault))
    fault = tl.where((padding & (backwards == 0)) | (mask == 0), 0, fault)
    history = live
    if of.flags is not None:
        history = live & (tl.load(of.flags + index, mask=mask, other=0) != 0)
    elif not ABSENT_HISTORY:
        history = live & (begin != begin)
    return begin, end, slot, accepted - 1, history, live, fault


@triton.jit
def _first_above(offsets, start, count, row):
    """The first of `count` offsets from number `start` on that lies above `row` (one or a vector of them), by halving.

    Whatever the offsets hold, a later row never gets an earlier one.
    """
    low = row * 0 + start
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
        tl.atomic_or(flag, code, sem="relaxed")


@triton.jit
def _report_faults(flag, of, WIDTH: tl.constexpr):
    """Sticky codes of a packed step: one program looks at every sequence."""
    if tl.load(of.cu_seqlens) != 0:
        tl.atomic_or(flag, FAULT_OFFSETS, sem="relaxed")
    first = of.count * 0
    while first < of.count:
        index = first + tl.arange(0, 256)
        mask = index < of.count
        begin, end, _, _, _, live, fault = _read_sequence(index, mask, of, WIDTH, False)
        if of.drafts is not None:
            marked = live & (tl.load(of.drafts + index, mask=mask, other=0) != 0)
            fault |= tl.where(marked & (end - begin > of.positions - WIDTH + 2), FAULT_STATE_TRUNCATED, 0)
        tl.atomic_or(flag + index * 0, fault, mask=fault != 0, sem="relaxed")
        first += 256


# --- packed steps

LANES = tl.constexpr(32)  # of vectors over the rows of a program


class Places(NamedTuple):
    """Where the rows of a program lie in their sequences.

    Sets of rows are bits of one number, bit i for row `row0 + i`.

    Attributes:
        row: int32 `[LANES]`, their numbers.
        slot: int32 `[LANES]`, of each row's sequence.
        start: int32 `[LANES]`, position of the slot where its window starts.
        end: int32 `[LANES]`, behind its sequence's last row.
        live: set of the rows that have a result; others are zero.
        history: set of the live rows whose sequences have any.
        writes: set of the rows that this program writes.
        begins: set of the live rows that are their sequence's first.
        ends: set of the rows that are the last of a sequence that begins in these rows, and keeps its last inputs.
        drafts: set of the rows that are the first of several drafts.
        holder: slot of the sequence that began before these rows and lives in the first of them, or -1.
        spilled: how many rows behind these this program computes too.
        spilled_end: behind the last row of the last row's sequence.
        last_slot: of the last row's sequence.
        last_keeps: whether that sequence begins in these rows, ends behind them, and keeps its last inputs.
    """

    row: Any
    slot: Any
    start: Any
    end: Any
    live: Any
    history: Any
    writes: Any
    begins: Any
    ends: Any
    drafts: Any
    holder: Any
    spilled: Any
    spilled_end: Any
    last_slot: Any
    last_keeps: Any


@triton.jit
def _of_row(values, places, row):
    """The element of a vector over rows that belongs to one row."""
    return tl.sum(tl.where(places.row == row, values, 0), axis=0)


@triton.jit
def _set_of(condition):
    """The set of rows, as bits of one number, that a vector over rows says yes to."""
    return tl.sum(condition.to(tl.int32) << tl.arange(0, LANES), axis=0)


@triton.jit
def _place_rows(row0, row1, first, of, WIDTH: tl.constexpr, ROWS: tl.constexpr):
    """Where rows row0 to row1-1 lie in their sequences, and what their program does to each.

    `first` is the number of the first offset above row0.
    That program alone touches the slots of sequences that begin in its rows, so it also computes their first W-1 rows
    where they spill over into the rows behind, and leaves out those that spilled over from before.
    """
    row = row0 + tl.arange(0, LANES)
    # ROWS rows have no more owners than that, but for empty sequences.
    near = first + (ROWS - 1)
    remaining = of.count + 1 - first
    above = tl.load(of.cu_seqlens + near, mask=near <= of.count, other=0x7FFFFFFF) >= row1
    owner = _first_above(of.cu_seqlens, first, tl.where(above, tl.minimum(remaining, ROWS - 1), remaining), row) - 1
    owned = (row < row1) & (owner >= 0) & (owner < of.count)
    begin, end, slot, start, history, live, _ = _read_sequence(owner, owned, of, WIDTH, False)
    live = live & (begin <= row) & (row < end)  # only offsets that go backwards lead to a row outside: zero
    begins_here = live & (begin >= row0)
    keeps_last = begins_here
    drafts = row0 * 0
    if of.drafts is not None:
        several = live & (end - begin > 1) & (tl.load(of.drafts + owner, mask=owned, other=0) != 0)
        keeps_last = keeps_last & (several == 0)
        drafts = _set_of(several & (row == begin))
    last = row == row1 - 1
    spilled = tl.minimum(begin + (WIDTH - 1), end) - row1
    return Places(
        row,
        slot,
        start,
        end,
        live=_set_of(live),
        history=_set_of(live & history),
        writes=_set_of(owned & ((live & (begin < row0) & (row - begin < WIDTH - 1)) == 0)),
        begins=_set_of(live & (begin == row)),
        ends=_set_of(keeps_last & (row == end - 1)),
        drafts=drafts,
        holder=tl.sum(tl.where(live & (row == row0) & (begin < row0), slot + 1, 0), axis=0) - 1,
        spilled=tl.sum(tl.where(last & begins_here, tl.maximum(spilled, 0), 0), axis=0),
        spilled_end=tl.sum(tl.where(last, end, 0), axis=0),
        last_slot=tl.sum(tl.where(last, slot, 0), axis=0),
        last_keeps=tl.sum(tl.where(last & keeps_last & (end > row1), 1, 0), axis=0) != 0,
    )


@triton.jit
def _prefetch_windows(
    tile, places, WIDTH: tl.constexpr, LAYOUT: tl.constexpr, EVEN: tl.constexpr, CHANNELS: tl.constexpr,
    COUNTED: tl.constexpr,
):  # fmt: skip
    """Starts the old windows of all sequences that begin in these rows on their way to the L2 cache (sm_90).

    One thread a row asks for a position's whole tile of channels. Slots that lie unaligned, or whose channels are not
    contiguous, go without.
    """
    if LAYOUT == CHANNELS_CONTIGUOUS and EVEN:
        size: tl.constexpr = CHANNELS * tile.state.dtype.element_ty.primitive_bitwidth // 8
        reads = (places.begins & places.history) >> tl.arange(0, LANES) & 1
        start = places.start.to(tl.int64) if COUNTED else 0
        for tap in tl.static_range(WIDTH - 1):
            at = tile.state + places.slot.to(tl.int64) * tile.slot_stride + (start + tap) * tile.position_stride
            at = (at + tile.first_channel).to(tl.int64)
            tl.inline_asm_elementwise(
                """
                {
                .reg .pred p;
                .reg .b32 t;
                mov.u32 t, %tid.x;
                setp.lt.u32 p, t, 32;
                setp.ne.and.s32 p, $2, 0, p;
                @p cp.async.bulk.prefetch.L2.global [$1], $3;
                mov.b32 $0, 0;
                }
                """,
                "=r,l,r,r",
                [at, tl.where(at % 16 == 0, reads, 0), size],
                dtype=tl.int32,
                is_pure=False,
                pack=1,
            )


@triton.jit
def _fetch_windows(
    tile, places, row0, FIRST: tl.constexpr, GROUP: tl.constexpr, WIDTH: tl.constexpr, KEEP: tl.constexpr,
    COUNTED: tl.constexpr,
):  # fmt: skip
    """The slots of rows FIRST to FIRST + GROUP - 1 of a program, and the old windows of those that begin a sequence."""
    slots = ()
    windows = ()
    for u in tl.static_range(FIRST, FIRST + GROUP):
        slot = _of_row(places.slot, places, row0 + u)
        start = _of_row(places.start, places, row0 + u).to(tl.int64) if COUNTED else 0
        where = tile.exists & ((places.begins & places.history) >> u & 1 != 0)
        for tap in tl.static_range(WIDTH - 1):
            old = tl.load(_at_position(tile, slot, start + tap), mask=where, other=0.0)
            windows = windows + (old.to(KEEP),)
        slots = slots + (slot,)
    return slots, windows


@triton.jit
def _convolve_places(
    tile, places, inputs, row0, row1, taps, bias, WIDTH: tl.constexpr, SILU: tl.constexpr, PTX: tl.constexpr,
    ROWS: tl.constexpr, GROUP: tl.constexpr, KEEP: tl.constexpr, COUNTED: tl.constexpr,
):  # fmt: skip
    """All rows of a program, whatever sequences they belong to, and the slots of the sequences that begin in them.

    The window slides over the rows, and is the old one of a slot where a sequence begins. GROUP rows are computed
    together while the old windows of the next are on their way.
    """
    window = ()
    for i in tl.static_range(WIDTH - 1):
        window = window + (inputs[i].to(KEEP),)
    holder = places.holder
    is_short = row1 - row0 < ROWS  # then `inputs` are not these rows
    slots, windows = _fetch_windows(tile, places, row0, 0, GROUP, WIDTH, KEEP, COUNTED)
    spilled = ()
    finals = ()
    for first in tl.static_range(0, ROWS, GROUP):
        next_slots = ()
        next_windows = ()
        if first + GROUP < ROWS:
            next_slots, next_windows = _fetch_windows(
                tile, places, row0, first + GROUP, GROUP, WIDTH, KEEP, COUNTED
            )  # fmt: skip
        else:
            for i in tl.static_range(WIDTH - 2):
                behind = tl.load(_at_row(tile, row1, i), mask=tile.exists & (i < places.spilled), other=0.0)
                spilled = spilled + (behind.to(KEEP),)
            ends_later = places.last_keeps & (places.spilled_end > row1 + places.spilled)
            for i in tl.static_range(WIDTH - 1):
                at_final = _at_row(tile, places.spilled_end, i - (WIDTH - 1))
                finals = finals + (tl.load(at_final, mask=tile.exists & ends_later, other=0.0),)
        fetched = ()
        for u in tl.static_range(first, first + GROUP):
            missing = tile.exists & is_short & (row0 + u < row1)
            input = tl.load(_at_row(tile, row0, u), mask=missing, other=inputs[u + WIDTH - 1])
            fetched = fetched + (input.to(KEEP),)
        # Every thread has its part of the old windows before any thread overwrites a slot.
        tl.debug_barrier()
        sound = ()
        kept = ()
        for u in tl.static_range(GROUP):
            begins = -(places.begins >> (first + u) & 1)
            slid = ()
            for tap in tl.static_range(WIDTH - 1):
                slid = slid + (_select(begins, windows[u * (WIDTH - 1) + tap], window[tap], PTX),)
            slid = slid + (fetched[u],)
            # Where offsets go backwards a row may follow another sequence's window: it is zero, its slot untouched.
            holder = tl.where(begins != 0, slots[u], holder)
            sound = sound + (holder == slots[u],)
            live = tl.where(sound[u], -(places.live >> (first + u) & 1), 0)
            result = _convolve(slid, 0, taps, bias, SILU, PTX).to(tile.out.dtype.element_ty)
            result = _select(live, result, tl.zeros_like(result), PTX)
            _store_result(tile, row0, first + u, result, tile.exists & (places.writes >> (first + u) & 1 != 0))
            window = slid[1:]
            kept = kept + (window,)
        for u in tl.static_range(GROUP):
            if sound[u] & (places.ends >> (first + u) & 1 != 0):
                for position in tl.static_range(WIDTH - 1):
                    _store_input(tile, slots[u], position, kept[u][position], tile.exists)
        slots = next_slots
        windows = next_windows
    if holder == places.last_slot:
        if places.spilled > 0:
            for i in tl.static_range(WIDTH - 2):
                slid = window + (spilled[i],)
                value = _convolve(slid, 0, taps, bias, SILU, PTX)
                _store_result(tile, row1, i, value, tile.exists & (i < places.spilled))
                window = slid[1:]
                ends = places.last_keeps & (row1 + i == places.spilled_end - 1) & (i < places.spilled)
                for position in tl.static_range(WIDTH - 1):
                    _store_input(tile, places.last_slot, position, window[position], tile.exists & ends)
        if ends_later:
            for position in tl.static_range(WIDTH - 1):
                _store_input(tile, places.last_slot, position, finals[position], tile.exists)


@triton.jit
def _store_final_inputs(tile, slot, end, WIDTH: tl.constexpr):
    """The W-1 inputs before row `end`, all of one sequence, become the window in a slot."""
    for position in tl.static_range(WIDTH - 1):
        value = tl.load(_at_row(tile, end, position - (WIDTH - 1)), mask=tile.exists)
        _store_input(tile, slot, position, value, tile.exists)


@triton.jit
def _store_drafts(tile, slot, begin, end, start, history, positions, WIDTH: tl.constexpr):
    """A sequence of drafts keeps the last W-2 inputs of its window, then all of its tokens that fit."""
    window = ()
    for tap in tl.static_range(1, WIDTH - 1):
        at_tap = _at_position(tile, slot, (start + tap).to(tl.int64))
        window = window + (tl.load(at_tap, mask=tile.exists & history, other=0.0),)
    tl.debug_barrier()
    for tap in tl.static_range(1, WIDTH - 1):
        _store_input(tile, slot, tap - 1, window[tap - 1], tile.exists)
    token = begin * 0
    while token < tl.minimum(end - begin, positions - (WIDTH - 2)):
        value = tl.load(_at_row(tile, begin + token), mask=tile.exists)
        _store_input(tile, slot, (token + (WIDTH - 2)).to(tl.int64), value, tile.exists)
        token += 1


@triton.jit
def _read_checkpoint(index, checkpoints, of, sequence_tokens):
    """Tokens and slot of a checkpoint, the fault that it leaves or 0, and whether it may be written."""
    tokens = tl.load(checkpoints.tokens + index)
    slot = tl.load(checkpoints.slots + index)
    padding = slot == of.pad_slot_id
    bad_tokens = (tokens < 1) | (tokens > sequence_tokens)
    bad_slot = (slot < 0) | (slot >= of.slot_count)
    fault = tl.where(bad_tokens, FAULT_CHECKPOINT, tl.where(bad_slot, FAULT_SLOT, 0))
    fault = tl.where(padding, 0, fault)
    return tokens, slot, fault, (padding == 0) & (fault == 0)


@triton.jit
def _store_early_checkpoints(tile, checkpoints, of, sequence, row0, row1, WIDTH: tl.constexpr):
    """Checkpoints after fewer than W-1 tokens of the sequences that begin in rows row0 to row1-1.

    They need the old window, which the program of a sequence's first row alone may read, before it writes the new one.
    `sequence` owns row0, or is -1.
    """
    # None are named behind the last one: the sequences at the end of a padded step are skipped.
    named = tl.load(checkpoints.offsets + of.count)
    index = tl.maximum(sequence, 0)
    searching = index < of.count
    while searching:
        first = tl.load(checkpoints.offsets + index)
        begin, end, slot, start, history, live, _ = _read_sequence(index, True, of, WIDTH, False)
        searching = (begin < row1) & (first < named)
        last = tl.minimum(tl.load(checkpoints.offsets + index + 1), checkpoints.count)
        checkpoint = tl.maximum(first, 0)
        while searching & live & (begin >= row0) & (checkpoint < last):
            tokens, to_slot, _, sound = _read_checkpoint(checkpoint, checkpoints, of, end - begin)
            if sound & (tokens < WIDTH - 1):
                for position in tl.static_range(WIDTH - 1):
                    row = begin + tokens + position - (WIDTH - 1)
                    fresh = row >= begin
                    value = tl.load(_at_row(tile, row), mask=tile.exists & fresh, other=0.0)
                    at_old = _at_position(tile, slot, (start + tokens + position).to(tl.int64))
                    old = tl.load(at_old, mask=tile.exists & history & (fresh == 0), other=0.0)
                    kept = tl.where(fresh, value.to(old.dtype), old)
                    _store_input(tile, to_slot, position, kept, tile.exists)
            checkpoint += 1
        index += 1
        searching = searching & (index < of.count)


@triton.jit
def _store_checkpoint(tile, index, checkpoints, of, fault_flag, report, WIDTH: tl.constexpr):
    """One checkpoint after W-1 tokens or more, which holds rows alone; its fault too, whatever its count."""
    sequence = _first_above(checkpoints.offsets, 0, of.count + 1, index) - 1
    owned = (sequence >= 0) & (sequence < of.count)  # else nobody's, as behind the last of a padded step
    begin, end, _, _, _, live, _ = _read_sequence(sequence, owned, of, WIDTH, False)
    if live:
        tokens, slot, fault, sound = _read_checkpoint(index, checkpoints, of, end - begin)
        if report:
            _raise_fault(fault_flag, fault)
        if sound & (tokens >= WIDTH - 1):
            _store_final_inputs(tile, slot, begin + tokens, WIDTH)


@triton.jit(do_not_specialize=_SIZES, do_not_specialize_on_alignment=_UNALIGNED)
def conv_prefill(
    x, weight, bias, conv_state, out, cu_seqlens, slots, flags, counts, fault_flag,
    drafts, checkpoint_offsets, checkpoint_tokens, checkpoint_slots,
    x_row_stride: tl.int64, out_row_stride: tl.int64, slot_stride: tl.int64, channel_stride: tl.int64,
    position_stride: tl.int64, slots_stride: tl.int64,
    rows: tl.int32, channels: tl.int32, sequences: tl.int32, slot_count: tl.int32, positions: tl.int32,
    pad_slot_id: tl.int32, checkpoints: tl.int32,
    WIDTH: tl.constexpr, SILU: tl.constexpr, LAYOUT: tl.constexpr, VEC: tl.constexpr, CHANNELS: tl.constexpr,
    EVEN: tl.constexpr, TAP_WORD: tl.constexpr, PTX: tl.constexpr, DEPENDENT: tl.constexpr, ROWS: tl.constexpr,
    GROUP: tl.constexpr,
):  # fmt: skip
    """Packed steps. Grid: channel tiles, which run fastest, then ranges of ROWS rows (y, and z as a high digit).

    A program owns ROWS rows of a tile of channels, whatever sequences lie in them: the grid follows from sizes that
    the host knows. All its rows are on their way before it knows whose they are. If they belong to one sequence that
    began at least W-1 rows earlier, nothing but rows is touched; else they go GROUP by GROUP, each row with a place of
    its own. Sequences marked in `drafts` keep (the last W-2 of the window, all tokens) instead of the last W-1 inputs.
    Checkpoints after W-1 tokens or more have programs of their own, behind those of the rows.
    """
    if DEPENDENT:
        tl.extra.cuda.gdc_launch_dependents()
    tile = _tile(
        tl.program_id(0), x, out, conv_state, x_row_stride, out_row_stride, slot_stride, channel_stride,
        position_stride, channels, LAYOUT, VEC, CHANNELS, EVEN,
    )  # fmt: skip
    taps = _load_taps(weight, tile, WIDTH, TAP_WORD)
    bias_value = _load_bias(bias, tile)
    if DEPENDENT:
        tl.extra.cuda.gdc_wait()
    of = Sequences(
        cu_seqlens, slots, slots_stride, flags, counts, drafts, rows, sequences, slot_count, positions, pad_slot_id
    )
    named = Checkpoints(checkpoint_offsets, checkpoint_tokens, checkpoint_slots, checkpoints)
    block = tl.program_id(2) * tl.num_programs(1) + tl.program_id(1)
    row_blocks = (rows - 1) // ROWS + 1
    if block >= row_blocks:
        if checkpoint_offsets is not None:
            if block - row_blocks < checkpoints:
                _store_checkpoint(tile, block - row_blocks, named, of, fault_flag, tl.program_id(0) == 0, WIDTH)
        return
    row0 = block * ROWS
    row1 = row0 + tl.minimum(rows - row0, ROWS)

    # inputs[i] is row row0 - (W-1) + i. Where one of them is missing none is used, and all are row0, by a step of 0: a
    # mask for each row would cost more than its load.
    back = tl.where(row0 >= WIDTH - 1, tile.x_row_stride, 0)
    step = tl.where(rows - row0 >= ROWS, tile.x_row_stride, 0)
    inputs = ()
    for i in tl.static_range(WIDTH - 1):
        inputs = inputs + (tl.load(_at_row(tile, row0) - (WIDTH - 1 - i) * back, mask=tile.exists),)
    for i in tl.static_range(ROWS):
        inputs = inputs + (tl.load(_at_row(tile, row0) + i * step, mask=tile.exists),)

    if (tl.program_id(0) == 0) & (block == 0):
        _report_faults(fault_flag, of, WIDTH)
    sequence = _first_above(cu_seqlens, 0, sequences + 1, row0) - 1
    owned = (sequence >= 0) & (sequence < sequences)
    begin, end, _, _, _, live, _ = _read_sequence(sequence, owned, of, WIDTH, False)
    if live & (row0 - begin >= WIDTH - 1) & (end - row0 >= ROWS):
        for i in tl.static_range(ROWS):
            _store_result(tile, row0, i, _convolve(inputs, i, taps, bias_value, SILU, PTX), tile.exists)
        return

    if checkpoint_offsets is not None:
        _store_early_checkpoints(tile, named, of, sequence, row0, row1, WIDTH)
    places = _place_rows(row0, row1, sequence + 1, of, WIDTH, ROWS)
    if DEPENDENT:
        _prefetch_windows(tile, places, WIDTH, LAYOUT, EVEN, CHANNELS, counts is not None)
    # Raw inputs keep their type, and their bits, where pool and x agree; fp32 holds every accepted type exactly.
    keep: tl.constexpr = x.dtype.element_ty if x.dtype.element_ty == conv_state.dtype.element_ty else tl.float32
    _convolve_places(
        tile, places, inputs, row0, row1, taps, bias_value, WIDTH, SILU, PTX, ROWS, GROUP, keep, counts is not None
    )  # fmt: skip
    if drafts is not None:
        tl.debug_barrier()
        row = row0
        while row < row1:
            if places.drafts >> (row - row0) & 1 != 0:
                slot, start = _of_row(places.slot, places, row), _of_row(places.start, places, row)
                end = _of_row(places.end, places, row)
                history = places.history >> (row - row0) & 1 != 0
                _store_drafts(tile, slot, row, end, start, history, positions, WIDTH)
            row += 1


# --- decode and speculative steps


@triton.jit
def _update_singles(
    tile, of, fault_flag, report, taps, bias, WIDTH: tl.constexpr, SILU: tl.constexpr, PTX: tl.constexpr,
    SEQUENCES: tl.constexpr, KEEP: tl.constexpr,
):  # fmt: skip
    """SEQUENCES sequences of one row each: all their loads are in flight together, and they share the taps.

    A step that counts accepted tokens leaves the same slot as a plain one, since it has one token.
    """
    first = tl.program_id(0) * SEQUENCES
    rows = ()
    for i in tl.static_range(SEQUENCES):
        where = tile.exists & (first + i < of.count)
        rows = rows + (tl.load(_at_row(tile, first, i), mask=where, other=0.0).to(KEEP),)
    windows = ()
    lives = ()
    slots = ()
    for i in tl.static_range(SEQUENCES):
        exists = first + i < of.count
        _, _, slot, start, history, live, fault = _read_sequence(first + i, exists, of, WIDTH, True)
        for tap in tl.static_range(WIDTH - 1):
            at_tap = _at_position(tile, slot, (start + tap).to(tl.int64))
            windows = windows + (tl.load(at_tap, mask=tile.exists & history, other=0.0).to(KEEP),)
        windows = windows + (rows[i],)
        lives = lives + (live,)
        slots = slots + (slot,)
        if report:
            _raise_fault(fault_flag, fault)
    # Every thread has read rows and windows before any thread overwrites them: `out` may be x.
    tl.debug_barrier()
    for i in tl.static_range(SEQUENCES):
        result = tl.where(lives[i], _convolve(windows, i * WIDTH, taps, bias, SILU, PTX), 0.0)
        _store_result(tile, first, i, result, tile.exists & (first + i < of.count))
        for position in tl.static_range(WIDTH - 1):
            _store_input(tile, slots[i], position, windows[i * WIDTH + position + 1], tile.exists & lives[i])


@triton.jit
def _update_rows(
    tile, of, fault_flag, report, taps, bias, WIDTH: tl.constexpr, SILU: tl.constexpr, PTX: tl.constexpr,
    SPECULATIVE: tl.constexpr, AHEAD: tl.constexpr, KEEP: tl.constexpr,
):  # fmt: skip
    """One sequence with all its rows, AHEAD of them loaded before the first is needed."""
    index = tl.program_id(0)
    begin, end, slot, start, history, live, fault = _read_sequence(index, index < of.count, of, WIDTH, True)
    if report:
        if (index == 0) & (begin != 0):
            fault |= FAULT_OFFSETS
        if SPECULATIVE:
            fault |= tl.where(live & (end - begin > of.positions - WIDTH + 2), FAULT_STATE_TRUNCATED, 0)
        _raise_fault(fault_flag, fault)
    if live == 0:
        zero = tl.zeros([tile.channel.shape[0]], tl.float32)
        row = tl.maximum(begin, 0)
        while row < tl.minimum(end, of.rows):
            _store_result(tile, row, 0, zero, tile.exists)
            row += 1

    window = ()
    for tap in tl.static_range(WIDTH - 1):
        at_tap = _at_position(tile, slot, (start + tap).to(tl.int64))
        window = window + (tl.load(at_tap, mask=tile.exists & history, other=0.0).to(KEEP),)
    row = begin
    while live & (row < end):
        inputs = window
        for i in tl.static_range(AHEAD):
            where = tile.exists & (row + i < end)
            inputs = inputs + (tl.load(_at_row(tile, row, i), mask=where, other=0.0).to(KEEP),)
        # Every thread has read these rows, and the window, before any thread overwrites them: `out` may be x.
        tl.debug_barrier()
        if SPECULATIVE:
            for tap in tl.static_range(1, WIDTH - 1):
                _store_input(tile, slot, tap - 1, window[tap], tile.exists & (row == begin))
        for i in tl.static_range(AHEAD):
            where = tile.exists & (row + i < end)
            _store_result(tile, row, i, _convolve(inputs, i, taps, bias, SILU, PTX), where)
            if SPECULATIVE:
                position = row + i - begin + (WIDTH - 2)
                where = where & (position < of.positions)
                _store_input(tile, slot, position.to(tl.int64), inputs[i + WIDTH - 1], where)
            else:
                for position in tl.static_range(WIDTH - 1):
                    where = tile.exists & (row + i == end - 1)
                    _store_input(tile, slot, position, inputs[i + 1 + position], where)
        window = inputs[AHEAD:]
        row += AHEAD


@triton.jit(do_not_specialize=_SIZES, do_not_specialize_on_alignment=_UNALIGNED)
def conv_update(
    x, weight, bias, conv_state, out, cu_seqlens, slots, flags, counts, fault_flag,
    x_row_stride: tl.int64, out_row_stride: tl.int64, slot_stride: tl.int64, channel_stride: tl.int64,
    position_stride: tl.int64, slots_stride: tl.int64,
    rows: tl.int32, channels: tl.int32, sequences: tl.int32, slot_count: tl.int32, positions: tl.int32,
    pad_slot_id: tl.int32,
    WIDTH: tl.constexpr, SILU: tl.constexpr, LAYOUT: tl.constexpr, VEC: tl.constexpr, CHANNELS: tl.constexpr,
    EVEN: tl.constexpr, TAP_WORD: tl.constexpr, PTX: tl.constexpr, DEPENDENT: tl.constexpr,
    SPECULATIVE: tl.constexpr, AHEAD: tl.constexpr, SEQUENCES: tl.constexpr,
):  # fmt: skip
    """Decode and linear speculative steps.

    Grid: sequences (SEQUENCES a program if each has one row), then channel tiles (y, and z as a high digit): neighbours
    share their taps in the cache.
    """
    if DEPENDENT:
        tl.extra.cuda.gdc_launch_dependents()
    number = tl.program_id(2) * tl.num_programs(1) + tl.program_id(1)
    tile = _tile(
        number, x, out, conv_state, x_row_stride, out_row_stride, slot_stride, channel_stride, position_stride,
        channels, LAYOUT, VEC, CHANNELS, EVEN,
    )  # fmt: skip
    taps = _load_taps(weight, tile, WIDTH, TAP_WORD)
    bias_value = _load_bias(bias, tile)
    if DEPENDENT:
        tl.extra.cuda.gdc_wait()
    of = Sequences(
        cu_seqlens, slots, slots_stride, flags, counts, None, rows, sequences, slot_count, positions, pad_slot_id
    )
    # Raw inputs keep their type, and their bits, where pool and x agree; fp32 holds every accepted type exactly.
    keep: tl.constexpr = x.dtype.element_ty if x.dtype.element_ty == conv_state.dtype.element_ty else tl.float32
    if cu_seqlens is None:
        _update_singles(tile, of, fault_flag, number == 0, taps, bias_value, WIDTH, SILU, PTX, SEQUENCES, keep)
    else:
        _update_rows(
            tile, of, fault_flag, number == 0, taps, bias_value, WIDTH, SILU, PTX, SPECULATIVE, AHEAD, keep
        )  # fmt: skip
