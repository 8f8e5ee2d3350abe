"""From a checked call to a launch: grids that cover, words that are aligned, layouts that fit, parameters by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from serving_conv.contract import INT32_LIMIT, MAX_WIDTH, MIN_WIDTH
from serving_conv.native import call
from serving_conv.native.abi import FIELDS, PACKER
from serving_conv.native.call import Launch, prepare_prefill, prepare_update
from serving_conv.native.variant import CHANNELS_CONTIGUOUS, POSITIONS_DENSE, STRIDED

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
SIZES = st.one_of(
    st.integers(1, 300),
    st.integers(0, 30).flatmap(lambda power: st.integers(max(1, 2**power - 1), 2**power + 1)),
    st.integers(1, INT32_LIMIT),
)


def meta(*shape: int, dtype: torch.dtype = torch.bfloat16, strides: tuple[int, ...] | None = None) -> Tensor:
    """A tensor of any size that holds nothing; its address is 0."""
    if strides is None:
        return torch.empty(shape, dtype=dtype, device="meta")
    return torch.empty_strided(shape, strides, dtype=dtype, device="meta")


def int32(size: int, device: str = "meta") -> Tensor:
    return torch.zeros(size, dtype=torch.int32, device=device)


def prefill(x: Tensor, weight: Tensor, pool: Tensor, **options: Any) -> Launch | None:
    sequences = options.pop("sequences", 3)
    device = x.device.type
    given = {
        "cu_seqlens": int32(sequences + 1, device),
        "cache_indices": int32(sequences, device),
        "has_initial_state": None,
        "bias": None,
        "activation": "silu",
        "num_accepted_tokens": None,
        "out": x,
        "pad_slot_id": -1,
        "fault_flag": int32(1, device),
        "multiprocessors": 132,
    }
    return prepare_prefill(x, weight, pool, **{**given, **options})


def update(x: Tensor, weight: Tensor, pool: Tensor, **options: Any) -> Launch | None:
    device = x.device.type
    packed = options.pop("packed", False)
    sequences = options.pop("sequences", x.shape[0])
    counted = options.pop("counted", False)
    given = {
        "state_indices": int32(sequences, device),
        "cu_seqlens": int32(sequences + 1, device) if packed else None,
        "num_accepted_tokens": int32(sequences, device) if counted else None,
        "has_initial_state": None,
        "bias": None,
        "activation": "silu",
        "out": x,
        "pad_slot_id": -1,
        "fault_flag": int32(1, device),
    }
    return prepare_update(x, weight, pool, **{**given, **options})


def legal_grid(launch: Launch) -> None:
    x, y, z = launch.grid
    assert 1 <= x < 2**31
    assert 1 <= y <= 65535
    assert 1 <= z <= 65535


# --- grids ---------------------------------------------------------------------------------------------------


@settings(max_examples=400)
@given(rows=SIZES, channels=SIZES, width=st.integers(MIN_WIDTH, MAX_WIDTH), dtype=st.sampled_from(DTYPES))
def test_a_prefill_grid_covers_every_row_and_channel(rows: int, channels: int, width: int, dtype: torch.dtype) -> None:
    assume(rows * channels < 2**60)  # what torch can describe
    pool = meta(2, channels, width - 1, dtype=dtype, strides=(channels * (width - 1), 1, channels))
    launch = prefill(meta(rows, channels, dtype=dtype), meta(channels, width, dtype=dtype), pool)
    assert launch is not None
    legal_grid(launch)
    tile, (x, y, z) = launch.variant.threads * launch.variant.vec, launch.grid
    assert (x - 1) * tile < channels <= x * tile
    blocks = -(-rows // launch.variant.rows)
    assert blocks <= y * z < blocks + y, "every row, and less than one idle sweep"
    assert y * z * launch.variant.rows < 2**32, "the kernel counts rows in 32 bits"


@settings(max_examples=400)
@given(
    sequences=SIZES,
    channels=SIZES,
    width=st.integers(MIN_WIDTH, MAX_WIDTH),
    dtype=st.sampled_from(DTYPES),
    packed=st.booleans(),
)
def test_an_update_grid_covers_every_sequence_and_channel(
    sequences: int, channels: int, width: int, dtype: torch.dtype, packed: bool
) -> None:
    assume(sequences * channels < 2**60)  # what torch can describe
    pool = meta(2, channels, width - 1, dtype=dtype, strides=(channels * (width - 1), 1, channels))
    launch = update(meta(sequences, channels, dtype=dtype), meta(channels, width, dtype=dtype), pool, packed=packed)
    assert launch is not None
    legal_grid(launch)
    tile, (x, y, z) = launch.variant.threads * launch.variant.vec, launch.grid
    together = 1 if packed else launch.variant.sequences
    assert (x - 1) * together < sequences <= x * together
    tiles = -(-channels // tile)
    assert tiles <= y * z < tiles + y
    assert y * z < 2**32, "the kernel counts tiles in 32 bits"


@pytest.mark.parametrize(("rows", "channels"), [(0, 8), (8, 0), (0, 0)])
def test_nothing_to_compute_is_no_launch(rows: int, channels: int) -> None:
    x, weight, pool = meta(rows, channels), meta(channels, 4), meta(2, channels, 3)
    assert prefill(x, weight, pool) is None
    assert update(x, weight, pool) is None
    assert update(x, weight, pool, packed=True) is None


# --- vectors -------------------------------------------------------------------------------------------------


def word(run: int, vec: int, item: int) -> int:
    """`word_bytes` of kernels/channels.cuh, as it is written there."""
    if vec == 1:
        return item
    size = 16
    while run % size:
        size //= 2
    return size


def accesses(vec: int, x: Tensor, weight: Tensor, bias: Tensor | None, pool: Tensor, out: Tensor) -> bool:
    """Whether every access of threads with `vec` channels is aligned: all rows, slots and threads, one by one."""
    channels, width = weight.shape
    positions = pool.shape[2]
    layout = call.state_layout(pool)
    if channels % vec:
        return False
    for channel in range(0, channels, vec):
        for rows in (x, out):
            size = rows.element_size()
            for row in range(rows.shape[0]):
                if (rows.data_ptr() + (row * rows.stride(0) + channel) * size) % word(vec * size, vec, size):
                    return False
        size = weight.element_size()
        if (weight.data_ptr() + channel * width * size) % word(vec * width * size, vec, size):
            return False
        if bias is not None:
            size = bias.element_size()
            if (bias.data_ptr() + channel * size) % word(vec * size, vec, size):
                return False
        size = pool.element_size()
        for slot in range(pool.shape[0]):
            at = pool.data_ptr() + (slot * pool.stride(0) + channel * pool.stride(1)) * size
            if layout == CHANNELS_CONTIGUOUS:
                step = word(vec * size, vec, size)
                if any((at + position * pool.stride(2) * size) % step for position in range(positions)):
                    return False
            elif layout == POSITIONS_DENSE and at % word(vec * positions * size, vec, size):
                return False
    return True


@st.composite
def placed(draw: st.DrawFn) -> tuple[Tensor, Tensor, Tensor | None, Tensor, Tensor]:
    """x, weight, bias, pool and out with odd and even sizes, pitches and addresses."""
    x_type, weight_type, pool_type, bias_type = (draw(st.sampled_from(DTYPES)) for _ in range(4))
    rows, slots, width = draw(st.integers(1, 3)), draw(st.integers(1, 3)), draw(st.integers(MIN_WIDTH, MAX_WIDTH))
    channels = draw(st.sampled_from([1, 2, 3, 4, 6, 8, 12, 16, 24]))
    positions = width - 1 + draw(st.integers(0, 3))
    even = st.sampled_from([0, 0, 0, 8, 16, 4, 2, 1])

    def place(shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        extent = 1 + sum((n - 1) * s for n, s in zip(shape, strides, strict=True))
        start = draw(even)
        buffer = torch.zeros(start + extent + 64, dtype=dtype)
        buffer = buffer[-buffer.data_ptr() % 64 // buffer.element_size() :]
        return buffer.as_strided(shape, strides, buffer.storage_offset() + start)

    x = place((rows, channels), (channels + draw(even), 1), x_type)
    out = place((rows, channels), (channels + draw(even), 1), x_type)
    weight = place((channels, width), (width, 1), weight_type)
    bias = place((channels,), (1,), bias_type) if draw(st.booleans()) else None
    layout = draw(st.sampled_from(["channels", "positions", "padded"]))
    if layout == "channels":
        pitch = channels + draw(even)
        pool = place((slots, channels, positions), (positions * pitch + draw(even), 1, pitch), pool_type)
    else:
        run = positions + (draw(st.integers(1, 4)) if layout == "padded" else 0)
        pool = place((slots, channels, positions), (channels * run + draw(even), run, 1), pool_type)
    return x, weight, bias, pool, out


@settings(max_examples=600)
@given(tensors=placed(), entry=st.sampled_from(["prefill", "update", "rows"]))
def test_vec_is_the_widest_that_every_access_allows(
    tensors: tuple[Tensor, Tensor, Tensor | None, Tensor, Tensor], entry: str
) -> None:
    x, weight, bias, pool, out = tensors
    if entry == "prefill":
        launch = prefill(x, weight, pool, bias=bias, out=out, multiprocessors=0)
        widest = prefill(meta(64, 8192, dtype=x.dtype), meta(8192, weight.shape[1], dtype=weight.dtype),
                         meta(2, 8192, weight.shape[1] - 1, dtype=pool.dtype), multiprocessors=0)  # fmt: skip
    else:
        launch = update(x, weight, pool, bias=bias, out=out, packed=entry == "rows")
        widest = update(meta(1, 64, dtype=x.dtype), meta(64, weight.shape[1], dtype=weight.dtype),
                        meta(2, 64, weight.shape[1] - 1, dtype=pool.dtype))  # fmt: skip
    assert launch is not None
    assert widest is not None
    vec = launch.variant.vec
    assert accesses(vec, x, weight, bias, pool, out)
    # The stride of an axis of size 1 is looked at too, though nothing depends on it.
    if vec < widest.variant.vec and min(x.shape[0], pool.shape[0], pool.shape[2]) > 1:
        assert not accesses(2 * vec, x, weight, bias, pool, out)


def test_one_odd_address_is_enough() -> None:
    buffer = torch.zeros(4 * 64 + 64, dtype=torch.bfloat16)
    x = buffer[:256].view(4, 64)
    weight, pool = torch.zeros(64, 4, dtype=torch.bfloat16), torch.zeros(3, 3, 64, dtype=torch.bfloat16).transpose(1, 2)
    good = prefill(x, weight, pool, multiprocessors=0)
    odd = prefill(x, weight, pool, out=buffer[1:257].view(4, 64), multiprocessors=0)
    half = prefill(x, weight, pool, out=buffer[2:258].view(4, 64), multiprocessors=0)
    assert good is not None
    assert odd is not None
    assert half is not None
    assert [launch.variant.vec for launch in (good, half, odd)] == [4, 2, 1]


# --- layouts -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "strides", "layout"),
    [
        ((5, 8, 3), (24, 1, 8), CHANNELS_CONTIGUOUS),
        ((5, 8, 3), (600_000, 1, 8), CHANNELS_CONTIGUOUS),  # slots far apart
        ((5, 8, 3), (36, 1, 12), CHANNELS_CONTIGUOUS),  # padded rows of a slot
        ((5, 8, 3), (25, 1, 8), CHANNELS_CONTIGUOUS),  # odd slots
        ((5, 8, 3), (24, 3, 1), POSITIONS_DENSE),
        ((5, 8, 3), (600_001, 3, 1), POSITIONS_DENSE),
        ((5, 8, 16), (128, 16, 1), POSITIONS_DENSE),
        ((5, 8, 17), (136, 17, 1), STRIDED),  # more than a thread holds
        ((5, 8, 3), (32, 4, 1), STRIDED),  # a window of longer slots
        ((5, 1, 3), (3, 3, 1), CHANNELS_CONTIGUOUS),  # one channel: its stride means nothing
        ((5, 1, 3), (16, 99, 4), CHANNELS_CONTIGUOUS),
        ((5, 8, 1), (8, 1, 1), CHANNELS_CONTIGUOUS),  # one position: likewise
        ((5, 8, 1), (8, 1, 77), CHANNELS_CONTIGUOUS),
        ((5, 8, 1), (40, 5, 1), STRIDED),
        ((1, 8, 3), (1, 3, 1), POSITIONS_DENSE),  # one slot
    ],
)
def test_state_layout(shape: tuple[int, ...], strides: tuple[int, ...], layout: int) -> None:
    pool = meta(*shape, strides=strides)
    channels, width = shape[1], min(shape[2] + 1, 4)
    x, weight = meta(6, channels), meta(channels, width)
    for launch in (prefill(x, weight, pool), update(x, weight, pool), update(x, weight, pool, packed=True)):
        assert launch is not None
        assert launch.variant.state_layout == layout
        # The number of positions is part of a kernel only where it holds a slot whole.
        assert launch.variant.positions == (shape[2] if layout == POSITIONS_DENSE else width - 1)


@pytest.mark.parametrize("counted", [False, True])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("drafts", [0, 1, 3, 9])
def test_speculation_is_a_matter_of_packed_calls_with_counts(drafts: int, packed: bool, counted: bool) -> None:
    pool = meta(5, 64, 3 + drafts, strides=(64 * (3 + drafts), 1, 64))
    launch = update(meta(6, 64), meta(64, 4), pool, packed=packed, counted=counted)
    assert launch is not None
    variant = launch.variant
    assert variant.packed == packed
    assert variant.speculative == (packed and counted)
    assert (variant.sequences > 0) == (not packed)
    if packed:
        assert 1 <= variant.ahead <= 8
        assert variant.ahead <= drafts + 1 or not counted, "no more rows than a step may have"
    else:
        assert variant.ahead == 0


def test_calls_that_differ_in_sizes_alone_share_a_kernel() -> None:
    def launch(rows: int, slots: int, drafts: int) -> Any:
        pool = meta(slots, 8192, 3 + drafts, strides=(8192 * (3 + drafts), 1, 8192))
        made = prefill(meta(rows, 8192), meta(8192, 4), pool)
        assert made is not None
        return made.variant

    assert len({launch(8192, 64, 0), launch(8193, 64, 0), launch(32768, 1000, 0), launch(9999, 7, 5)}) == 1


def test_bias_has_its_own_type_or_none() -> None:
    x, weight, pool = meta(4, 8), meta(8, 4, dtype=torch.float32), meta(5, 8, 3)
    for bias, name in ((None, "float32"), (meta(8, dtype=torch.float16), "float16")):
        launch = prefill(x, weight, pool, bias=bias)
        assert launch is not None
        assert (launch.variant.has_bias, launch.variant.bias) == (bias is not None, name)


@pytest.mark.parametrize(("activation", "silu"), [("silu", True), ("swish", True), (None, False)])
def test_activation(activation: str | None, silu: bool) -> None:
    launch = update(meta(4, 8), meta(8, 4), meta(5, 8, 3), activation=activation)
    assert launch is not None
    assert launch.variant.silu == silu


# --- parameters ----------------------------------------------------------------------------------------------


@settings(max_examples=100)
@given(tensors=placed(), pad_slot_id=st.integers(-(2**31), 2**31 - 1), stride=st.integers(1, 3), full=st.booleans())
def test_parameters_by_name(
    tensors: tuple[Tensor, Tensor, Tensor | None, Tensor, Tensor], pad_slot_id: int, stride: int, full: bool
) -> None:
    x, weight, bias, pool, out = tensors
    assume(pool.shape[2] >= weight.shape[1] - 1)
    sequences = 3
    slots = torch.zeros(sequences * stride, dtype=torch.int32)[::stride]
    offsets, counts, flag = int32(sequences + 1, "cpu"), int32(sequences, "cpu"), int32(1, "cpu")
    flags = torch.zeros(sequences, dtype=torch.bool)
    options: dict[str, Any] = {
        "cu_seqlens": offsets,
        "num_accepted_tokens": counts if full else None,
        "has_initial_state": flags if full else None,
        "bias": bias,
        "out": out,
        "pad_slot_id": pad_slot_id,
        "fault_flag": flag,
    }
    wanted = {
        "x": x.data_ptr(),
        "weight": weight.data_ptr(),
        "bias": 0 if bias is None else bias.data_ptr(),
        "conv_state": pool.data_ptr(),
        "out": out.data_ptr(),
        "cu_seqlens": offsets.data_ptr(),
        "slots": slots.data_ptr(),
        "has_initial_state": flags.data_ptr() if full else 0,
        "num_accepted_tokens": counts.data_ptr() if full else 0,
        "fault_flag": flag.data_ptr(),
        "speculative": 0,
        "checkpoint_offsets": 0,
        "checkpoint_tokens": 0,
        "checkpoint_slots": 0,
        "x_row_stride": x.stride(0),
        "out_row_stride": out.stride(0),
        "slot_stride": pool.stride(0),
        "channel_stride": pool.stride(1),
        "position_stride": pool.stride(2),
        "slots_stride": stride,
        "rows": x.shape[0],
        "channels": x.shape[1],
        "sequences": sequences,
        "slot_count": pool.shape[0],
        "positions": pool.shape[2],
        "pad_slot_id": pad_slot_id,
        "checkpoints": 0,
        "unused": 0,
    }
    launches = [
        prefill(x, weight, pool, cache_indices=slots, **options),
        update(x, weight, pool, state_indices=slots, packed=True, sequences=sequences, **options),
    ]
    names = [name for _, name, _ in FIELDS]
    for launch in launches:
        assert launch is not None
        assert dict(zip(names, PACKER.unpack(launch.parameters), strict=True)) == wanted


@pytest.mark.parametrize(
    ("channels", "stride", "shift", "vec"),
    [(8, 8, 0, 4), (6, 8, 0, 2), (5, 8, 0, 1), (8, 10, 0, 2), (8, 9, 0, 1), (8, 8, 2, 2), (8, 8, 1, 1), (8, 8, 4, 4)],
)
def test_channels_strides_and_addresses_decide_the_vector(channels: int, stride: int, shift: int, vec: int) -> None:
    memory = torch.zeros(64, dtype=torch.bfloat16)
    assert memory.data_ptr() % 16 == 0
    rows = memory[shift:].as_strided((3, channels), (stride, 1))
    assert call.aligned_vec(4, channels, [(rows, 2, (stride,))]) == vec
