"""Launch choices: legal over everything the contract allows, and pure functions of sizes."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serving_conv.contract import INT32_LIMIT, MAX_WIDTH, MIN_WIDTH
from serving_conv.native.config import LaunchConfig, choose_backward, choose_prefill, choose_update

WIDTHS = st.integers(MIN_WIDTH, MAX_WIDTH)
X_BYTES = st.sampled_from([2, 4])
# Small sizes as often as large ones, and the edges of powers of two.
SIZES = st.one_of(
    st.integers(1, 300),
    st.integers(0, 30).flatmap(lambda power: st.integers(max(1, 2**power - 1), 2**power + 1)),
    st.integers(1, INT32_LIMIT),
)
REGISTERS, SHARED_BYTES, RESIDENT_THREADS = 65536, 100 * 1024, 1536  # of a multiprocessor, the least from sm_80 on
GROUP = 4  # of kernels/conv_prefill.cu


def legal(config: LaunchConfig, *, x_bytes: int, width: int) -> None:
    assert config.vec in (1, 2, 4, 8)
    assert config.vec * x_bytes <= 16, "one word of a row"
    assert config.vec * width <= 32, "taps in registers"
    assert config.threads % 32 == 0, "a warp searches the offsets together"
    assert 32 <= config.threads <= 1024
    assert config.min_blocks >= 1
    assert config.threads * config.min_blocks <= RESIDENT_THREADS
    assert REGISTERS // (config.threads * config.min_blocks) >= 48, "so few registers could only spill"


@settings(max_examples=1000)
@given(
    rows=SIZES,
    channels=SIZES,
    width=WIDTHS,
    x_bytes=X_BYTES,
    simple_state=st.booleans(),
    multiprocessors=st.sampled_from([1, 4, 46, 108, 132, 148, 1000]),
    capability=st.sampled_from([80, 86, 89, 90, 100, 103, 120, 121]),
)
def test_every_prefill_choice_is_legal(
    rows: int,
    channels: int,
    width: int,
    x_bytes: int,
    simple_state: bool,
    multiprocessors: int,
    capability: int,
) -> None:
    sizes = {"rows": rows, "channels": channels, "width": width, "x_bytes": x_bytes, "simple_state": simple_state}
    config = choose_prefill(**sizes, multiprocessors=multiprocessors, capability=capability)
    legal(config, x_bytes=x_bytes, width=width)
    assert config.rows % GROUP == 0, "rows are computed in whole groups"
    assert config.rows >= width - 1, "a window reaches no farther back than the block before"
    shared = config.rows * config.threads * config.vec * x_bytes
    assert shared <= 48 * 1024, "static shared memory"
    assert shared * config.min_blocks <= SHARED_BYTES
    assert config.sequences == 0
    assert config == choose_prefill(**sizes, multiprocessors=multiprocessors, capability=capability)


@settings(max_examples=1000)
@given(
    sequences=SIZES,
    channels=SIZES,
    width=WIDTHS,
    x_bytes=X_BYTES,
    packed=st.booleans(),
    simple_state=st.booleans(),
)
def test_every_update_choice_is_legal(
    sequences: int, channels: int, width: int, x_bytes: int, packed: bool, simple_state: bool
) -> None:
    config = choose_update(
        sequences=sequences,
        channels=channels,
        width=width,
        x_bytes=x_bytes,
        packed=packed,
        simple_state=simple_state,
    )
    legal(config, x_bytes=x_bytes, width=width)
    assert config.sequences >= 1
    assert config.sequences == 1 or not packed, "with offsets a thread has one sequence"
    assert config.rows == 0


def test_a_larger_call_never_takes_narrower_threads() -> None:
    for width in range(MIN_WIDTH, MAX_WIDTH + 1):
        chosen = [
            choose_update(sequences=n, channels=8192, width=width, x_bytes=2, packed=False, simple_state=True).vec
            for n in (1, 8, 64, 256, 1024, 65536)
        ]
        assert chosen == sorted(chosen)
        chosen = [
            choose_prefill(rows=n, channels=8192, width=width, x_bytes=2, simple_state=True, multiprocessors=132).vec
            for n in (1, 512, 2048, 8192, 32768)
        ]
        assert chosen == sorted(chosen)


@pytest.mark.parametrize("rows", [512, 8192])
def test_the_measured_choices_stand(rows: int) -> None:
    """What the numbers in the module's text were measured with."""
    config = choose_prefill(rows=rows, channels=8192, width=4, x_bytes=2, simple_state=True, multiprocessors=132)
    assert (config.vec, config.threads, config.rows) == ({512: 2, 8192: 4}[rows], 128, 16)
    one, many = (
        choose_update(sequences=n, channels=8192, width=4, x_bytes=2, packed=False, simple_state=True) for n in (1, 256)
    )
    assert (one.vec, one.threads, one.sequences) == (2, 64, 1)
    assert (many.vec, many.threads, many.sequences) == (4, 128, 2)


@settings(max_examples=1000)
@given(
    rows=SIZES, batches=st.integers(1, 64), channels=SIZES, width=WIDTHS, x_bytes=X_BYTES,
    multiprocessors=st.integers(1, 200),
)  # fmt: skip
def test_backward(rows: int, batches: int, channels: int, width: int, x_bytes: int, multiprocessors: int) -> None:
    sizes = {"rows": rows, "batches": batches, "channels": channels, "width": width, "x_bytes": x_bytes}
    config = choose_backward(**sizes, multiprocessors=multiprocessors)
    legal(config, x_bytes=x_bytes, width=width)
    assert config.rows % GROUP == 0 and config.rows >= GROUP
    assert config.ahead % GROUP == 0 and config.ahead >= 2 * GROUP
    # x and dout in flight; every block of a multiprocessor also takes a kilobyte of the system's.
    shared = 2 * config.ahead * config.threads * config.vec * x_bytes
    assert shared <= 48 * 1024
    assert config.min_blocks * (shared + 1024) <= SHARED_BYTES
    # The partial sums stay small beside the streams: a run is no shorter than the device's size asks for.
    runs = batches * -(-rows // config.rows)
    tiles = -(-channels // (config.threads * config.vec))
    assert config.rows == 16 or (runs - batches) * tiles <= multiprocessors * config.min_blocks
    assert config == choose_backward(**sizes, multiprocessors=multiprocessors)
