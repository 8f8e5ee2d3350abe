"""Holds every backend, behind the adapters, against vLLM's own Triton kernels; `test_vllm_kernels.py` starts this.

Both sides get the same call in vLLM's own convention and are compared with the oracle, token by token: outputs
within the derived bound, the whole pool to the bit. Where the two contracts differ, the difference has a name below
and is asserted, on both sides.
"""

from __future__ import annotations

import functools
import inspect
import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from serving_conv.engine_integration import vllm_adapter
from serving_conv.engine_integration.vllm_adapter import prefill_adapter, update_adapter
from support import interpreter, vllm_kernels
from support.bounds import FP32_UNIT, assert_within, compare, half_step
from support.cases import same_bits
from support.loop import Expected, expect
from support.memory import pool_strides
from torch import Tensor

from serving_conv import backends, reference
from serving_conv.portable import kernels

interpreter.repair()
FOLDER = vllm_kernels.installed()
assert FOLDER is not None, "vLLM is not installed here"
VLLM = vllm_kernels.load(FOLDER)
# Memory that torch.empty gives then holds NaN, so that it shows what nobody wrote.
torch.use_deterministic_algorithms(True)
NULL_BLOCK = 0
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
LAYOUTS = ("channels", "positions")  # vLLM's SD and DS


@dataclass(frozen=True)
class Call:
    """A call of one of vLLM's two functions.

    Attributes:
        name: for the test id.
        update: of `causal_conv1d_update`, else of `causal_conv1d_fn`.
        lengths: rows of each sequence.
        history: flags of a prefill.
        counts: accepted tokens, or None.
        null: sequences whose block is the null block.
        offsets: an update gets `query_start_loc`; else one row a sequence, or `[sequences, channels, rows]`.
        given_out: an update gets `out`.
        drafts: positions in a slot beyond the window.
        tail: rows past the last sequence.
        slot_gap: elements between slots.
        index_stride: of the tensor of block numbers.
    """

    name: str
    update: bool
    lengths: tuple[int, ...]
    dtype: torch.dtype = torch.float32
    state_dtype: torch.dtype | None = None
    width: int = 4
    channels: int = 70
    layout: str = "channels"
    bias: bool = True
    activation: str | None = "silu"
    history: tuple[bool, ...] = ()
    counts: tuple[int, ...] | None = None
    null: frozenset[int] = frozenset()
    offsets: bool = True
    given_out: bool = False
    drafts: int = 0
    tail: int = 0
    slot_gap: int = 0
    index_stride: int = 1

    def but(self, name: str, **changes: Any) -> Call:
        """This call with some things changed."""
        return replace(self, name=f"{self.name}-{name}", **changes)

    def __str__(self) -> str:
        return self.name


# Chunks of vLLM's prefill are 8 rows: below, at, and beyond one; short ones with and without history, and none.
PREFILL = Call(
    "prefill",
    False,
    (5, 1, 8, 2, 0, 21, 1, 3),
    history=(True, True, False, False, True, True, False, True),
    drafts=2,
)
DECODE = Call("decode", True, (1, 1, 1, 1), offsets=False)
SEVERAL = Call("several", True, (3, 3, 3))
SPECULATIVE = Call("speculative", True, (4, 1, 2, 4, 0, 3), counts=(1, 4, 2, 3, 1, 2), drafts=3)
LONG = Call("long", False, (300,), history=(False,))  # values enough for a bound to be tried
NULL = frozenset({0, 2})


def calls() -> list[Call]:
    """Each kind of call in every type, layout and width that vLLM has, then one change at a time."""
    found: list[Call] = []
    for base in (PREFILL, DECODE, SPECULATIVE):
        found += [
            base.but(f"{str(dtype).removeprefix('torch.')}-{layout}", dtype=dtype, layout=layout)
            for dtype, layout in itertools.product(DTYPES, LAYOUTS)
        ]
        # All the widths that each kernel is written for, but 4, which the others have.
        found += [base.but(f"width-{width}", width=width) for width in ((2, 3, 5, 6) if base.update else (2, 3))]
        found += [
            base.but("null-block", null=NULL),
            base.but("all-null", null=frozenset(range(len(base.lengths)))),
            base.but("no-bias", bias=False),
            base.but("no-activation", activation=None),
            base.but("two-tiles", channels=300),  # a program of vLLM's has 256 channels
            base.but("slots-apart", slot_gap=48),
            base.but("block-stride", index_stride=3),
        ]
    found += [
        PREFILL.but("all-history", history=(True,) * 8),
        PREFILL.but("no-history", history=(False,) * 8),
        PREFILL.but("tail", tail=3),
        PREFILL.but("one-row", lengths=(1,), history=(False,)),
        DECODE.but("drafts", drafts=3),
        DECODE.but("out", given_out=True),
        SEVERAL,
        SEVERAL.but("batched", offsets=False),
        SPECULATIVE.but("decode", lengths=(1,) * 4, counts=(4, 1, 2, 3)),
        SPECULATIVE.but("batched", lengths=(4,) * 3, counts=(1, 4, 2), offsets=False),
        SPECULATIVE.but("tail", tail=2),
        SPECULATIVE.but("out", given_out=True, null=frozenset({1})),
    ]
    return found


@dataclass(frozen=True)
class Given:
    """What a call is made of, and what it should do; nobody writes to it.

    Attributes:
        x: `[R, C]`.
        pool: `[slots, C, L]`, strided as the call says.
        arguments: all others, by vLLM's names.
        live: bool `[R]`, rows of sequences that are none of padding.
        padded: bool `[R]`, rows of sequences on the null block.
        expected: by the contract.
    """

    x: Tensor
    pool: Tensor
    arguments: dict[str, Any]
    live: Tensor
    padded: Tensor
    expected: Expected

    @property
    def exact(self) -> Tensor:
        """float64 outputs of the live rows."""
        return torch.from_numpy(self.expected.out)[self.live]

    @property
    def magnitude(self) -> Tensor:
        """float64 `|b| + sum |w x|` of the live rows."""
        return torch.from_numpy(self.expected.magnitude)[self.live]


@dataclass(frozen=True)
class Done:
    """What a function made of a call: its result as `[R, C]`, and x and the pool afterwards."""

    out: Tensor
    x: Tensor
    pool: Tensor


def int32(values: Iterable[int]) -> Tensor:
    return torch.tensor(list(values), dtype=torch.int32)


@functools.cache
def given(call: Call) -> Given:
    """Draw a call's values; the same ones each time."""
    generator = torch.Generator().manual_seed(7)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(call.dtype)

    sequences, rows = len(call.lengths), sum(call.lengths) + call.tail
    positions = call.width - 1 + call.drafts
    shape = (sequences + 3, call.channels, positions)
    strides = pool_strides(call.layout, call.channels, positions, slot_gap=call.slot_gap)
    pool = torch.empty_strided(shape, strides, dtype=call.state_dtype or call.dtype)
    pool.copy_(normal(*shape))
    draw = [1 + n for n in torch.randperm(sequences + 2, generator=generator).tolist()]
    slots = [NULL_BLOCK if n in call.null else draw[n] for n in range(sequences)]
    blocks = torch.full((sequences, call.index_stride), 77, dtype=torch.int32)
    blocks[:, 0] = int32(slots)
    offsets = [0, *itertools.accumulate(call.lengths)]
    x, weight = normal(rows, call.channels), normal(call.channels, call.width) / call.width**0.5
    arguments: dict[str, Any] = {"weight": weight, "bias": None, "activation": call.activation}
    if call.bias:
        arguments["bias"] = normal(call.channels)
    if not call.update:
        flags = torch.tensor(call.history)
        arguments |= {"cache_indices": blocks[:, 0], "has_initial_state": flags, "query_start_loc": int32(offsets)}
    else:
        arguments["conv_state_indices"] = blocks[:, 0]
        if call.offsets:
            arguments |= {"query_start_loc": int32(offsets), "max_query_len": max(call.lengths)}
        if call.counts is not None:
            arguments["num_accepted_tokens"] = int32(call.counts)
    expected = expect(
        x,
        weight,
        pool,
        offsets,
        slots,
        history=call.history or (True,) * sequences,
        counts=call.counts,
        speculative=call.counts is not None,
        bias=arguments["bias"],
        activation=call.activation,
        pad_slot_id=NULL_BLOCK,
    )
    live, padded = torch.zeros(rows, dtype=torch.bool), torch.zeros(rows, dtype=torch.bool)
    for n, (begin, end) in enumerate(itertools.pairwise(offsets)):
        (padded if n in call.null else live)[begin:end] = True
    return Given(x, pool, arguments, live, padded, expected)


def run(call: Call, function: Callable[..., Tensor]) -> Done:
    """Make a call in vLLM's convention, on copies of x and the pool."""
    here = given(call)
    x, pool = here.x.clone(), here.pool.clone(memory_format=torch.preserve_format)
    if not call.update:
        out = function(x=x.transpose(0, 1), conv_states=pool, **here.arguments)
        return Done(out.transpose(0, 1), x, pool)
    arguments = dict(here.arguments)
    batched = not call.offsets and call.lengths[0] > 1
    rows = x.view(len(call.lengths), -1, call.channels).transpose(1, 2) if batched else x
    if call.given_out:
        if "out" not in inspect.signature(VLLM.causal_conv1d_update).parameters:
            pytest.skip("this version of vLLM has no argument `out`: from 0.29 on")
        arguments["out"] = torch.full_like(x, torch.nan)
    out = function(x=rows, conv_state=pool, **arguments)
    assert not call.given_out or out.data_ptr() == arguments["out"].data_ptr()
    return Done(out.transpose(1, 2).reshape(x.shape) if batched else out, x, pool)


@functools.cache
def by_vllm(call: Call) -> Done:
    """What vLLM's kernels do."""
    return run(call, VLLM.causal_conv1d_update if call.update else VLLM.causal_conv1d_fn)


def by_us(call: Call) -> Done:
    """What the plugin puts in their place does, on the backend of the moment."""
    original = VLLM.causal_conv1d_update if call.update else VLLM.causal_conv1d_fn

    @functools.wraps(original)
    def fall_back(*_: Any, **__: Any) -> Tensor:
        raise RuntimeError("the adapter left the call to vLLM's own function")

    return run(call, (update_adapter if call.update else prefill_adapter)(fall_back, "conv"))


def check(call: Call) -> None:
    """Both sides are right, and leave the same pool."""
    here, vllm, ours = given(call), by_vllm(call), by_us(call)
    options: dict[str, Any] = {"width": call.width, "activation": call.activation}
    theirs = products_rounded(here.magnitude, call.width, call.dtype)
    assert_within(vllm.out[here.live], here.exact, theirs, **options)
    assert_within(ours.out[here.live], here.exact, here.magnitude, **options)
    assert same_bits(ours.pool, vllm.pool), "the pools differ"
    assert same_bits(ours.pool, here.expected.pool(here.pool)), "both pools differ from the oracle"
    assert not bool(ours.out[here.padded].any()), "a row of padding is not zero"
    # Rows past the last sequence belong to nobody: in a buffer that is the caller's, neither side writes them.
    nobodys = ~here.live & ~here.padded
    if call.update:
        untouched = torch.full_like(here.x, torch.nan) if call.given_out else here.x
        for side in (vllm, ours):
            assert same_bits(side.out[nobodys], untouched[nobodys])


def products_rounded(magnitude: Tensor, width: int, dtype: torch.dtype) -> Tensor:
    """The magnitude for which the bound's sum also holds one rounding of each product to `dtype`.

    A product p errs by half a step: at most a unit of `dtype` times |p|, or half its smallest step below the normal
    range. In fp32 nothing is added: the W+1 units of the magnitude that the bound counts are those of W additions and
    of the W products, which are one magnitude together.
    """
    if dtype == torch.float32:
        return magnitude
    one = torch.ones((), dtype=torch.float64)
    errors = magnitude * half_step(one, dtype) + width * half_step(one * 0, dtype)
    return magnitude + errors + errors / ((width + 1) * FP32_UNIT)


@pytest.fixture(params=["reference", "triton", "host"])
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Serve the CPU by each backend in turn."""
    serve(request.param, monkeypatch)
    return str(request.param)


def serve(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (chosen,) = (backend for backend in backends._BACKENDS if backend.name == name)
    monkeypatch.setitem(backends._chosen, torch.device("cpu"), chosen)


@pytest.mark.parametrize("call", calls(), ids=str)
def test_same_as_vllms_kernels(call: Call, backend: str) -> None:
    check(call)


# Where the contracts differ.


@pytest.mark.usefixtures("backend")
def test_vllm_leaves_rows_of_padding_unwritten_and_we_zero_them() -> None:
    prefill = PREFILL.but("null-block", null=NULL)
    padded = given(prefill).padded
    assert int(padded.sum()) == 13
    assert bool(by_vllm(prefill).out[padded].isnan().all()), "its own buffer, as it was allocated"
    assert not bool(by_us(prefill).out[padded].any())
    for base in (DECODE, SPECULATIVE):
        update = base.but("null-block", null=NULL)
        here = given(update)
        assert torch.equal(by_vllm(update).x[here.padded], here.x[here.padded]), "x, which it overwrites elsewhere"
        assert not bool(by_us(update).x[here.padded].any())


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("base", [DECODE, SPECULATIVE], ids=str)
def test_vllm_leaves_rows_of_padding_in_a_given_buffer_and_we_zero_them(base: Call) -> None:
    call = base.but("null-block-out", null=NULL, given_out=True)
    padded = given(call).padded
    assert bool(by_vllm(call).out[padded].isnan().all()), "as the caller filled it"
    assert not bool(by_us(call).out[padded].any())


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_vllm_rounds_each_product_to_the_type_of_x_and_we_round_once(dtype: torch.dtype) -> None:
    call = LONG.but(str(dtype), dtype=dtype, activation=None)
    here = given(call)
    weight, bias = here.arguments["weight"], here.arguments["bias"]
    rows = torch.cat([torch.zeros(3, call.channels, dtype=dtype), here.x])
    total = bias.float().expand(here.x.shape)
    for tap in range(4):
        total = total + (rows[tap : tap + len(here.x)] * weight[:, tap]).float()
    assert torch.equal(by_vllm(call).out, total.to(dtype)), "not what these roundings give, bit for bit"
    options: dict[str, Any] = {"width": 4, "activation": None}
    assert compare(by_vllm(call).out, here.exact, here.magnitude, **options).worst > 1, "within the bound we keep"
    assert_within(by_us(call).out, here.exact, here.magnitude, **options)


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("base", [PREFILL, DECODE, SPECULATIVE], ids=str)
def test_vllm_converts_x_to_the_pools_type_first_and_we_take_it_as_it_is(base: Call) -> None:
    call = base.but("mixed", state_dtype=torch.float16, activation=None)
    here, vllm, ours = given(call), by_vllm(call), by_us(call)
    assert same_bits(ours.pool, vllm.pool), "what is kept is not the same"
    options: dict[str, Any] = {"width": 4, "activation": None}
    assert_within(ours.out[here.live], here.exact, here.magnitude, **options)
    assert compare(vllm.out[here.live], here.exact, here.magnitude, **options).worst > 1
    if call.update:
        # The conversion is a copy, and that is what an update without `out` overwrites.
        assert torch.equal(vllm.x, here.x)
        assert torch.equal(ours.x, ours.out)


@pytest.mark.usefixtures("backend")
def test_vllm_keeps_too_little_of_uneven_steps_without_counts() -> None:
    # It writes fewer positions of a sequence that is shorter than the longest. vLLM's layers pass counts in such steps.
    call = SEVERAL.but("uneven", lengths=(3, 1, 3))
    here, vllm, ours = given(call), by_vllm(call), by_us(call)
    for side in (vllm, ours):
        assert_within(side.out, here.exact, here.magnitude, width=4, activation="silu")
    expected = here.expected.pool(here.pool)
    assert same_bits(ours.pool, expected)
    slot = int(here.arguments["conv_state_indices"][1])
    before, token = here.pool[slot], here.x[3]
    assert torch.equal(expected[slot], torch.stack([before[:, 1], before[:, 2], token], dim=1))
    assert torch.equal(vllm.pool[slot], torch.stack([token, before[:, 1], before[:, 2]], dim=1))
    others = torch.arange(len(expected)) != slot
    assert same_bits(vllm.pool[others], expected[others])


# Faults planted into our side: the comparison must see each of them, and say what it saw.


def changed(name: str, **changes: Any) -> Callable[[pytest.MonkeyPatch], None]:
    """The adapters call an entry with some arguments changed: to a value, or by a function of the right one."""

    def plant(monkeypatch: pytest.MonkeyPatch) -> None:
        entry = getattr(vllm_adapter, name)
        names = list(inspect.signature(entry).parameters)

        def faulty(*arguments: Any, **options: Any) -> Tensor:
            named = {**dict(zip(names, arguments, strict=False)), **options}
            for argument, change in changes.items():
                named[argument] = change(named[argument]) if callable(change) else change
            result: Tensor = entry(**named)
            return result

        monkeypatch.setattr(vllm_adapter, name, faulty)

    return plant


def window_late(name: str) -> Callable[[pytest.MonkeyPatch], None]:
    """An entry leaves its windows one position late."""

    def plant(monkeypatch: pytest.MonkeyPatch) -> None:
        entry = getattr(vllm_adapter, name)

        def faulty(x: Tensor, weight: Tensor, conv_state: Tensor, *arguments: Any, **options: Any) -> Tensor:
            result: Tensor = entry(x, weight, conv_state, *arguments, **options)
            conv_state.copy_(conv_state.roll(1, dims=2))
            return result

        monkeypatch.setattr(vllm_adapter, name, faulty)

    return plant


FN, UPDATE = "causal_conv1d_fn", "causal_conv1d_update"
VALUES, POOLS = "outside the derived bound", "the pools differ"
FAULTS: dict[str, tuple[Call, Callable[[pytest.MonkeyPatch], None], str]] = {
    "taps-reversed": (PREFILL, changed(FN, weight=lambda weight: weight.flip(1)), VALUES),
    "no-bias": (PREFILL, changed(FN, bias=None), VALUES),
    "no-activation": (DECODE, changed(UPDATE, activation=None), VALUES),
    "history-lost": (PREFILL, changed(FN, has_initial_state=torch.zeros_like), VALUES),
    "history-invented": (PREFILL, changed(FN, has_initial_state=torch.ones_like), VALUES),
    "null-block-live": (PREFILL.but("null-block", null=NULL), changed(FN, pad_slot_id=-1), POOLS),
    "null-block-live-decode": (DECODE.but("null-block", null=NULL), changed(UPDATE, pad_slot_id=-1), POOLS),
    "counts-lost": (SPECULATIVE, changed(UPDATE, num_accepted_tokens=None), VALUES),
    "counts-ones": (SPECULATIVE, changed(UPDATE, num_accepted_tokens=torch.ones_like), VALUES),
    "window-late": (PREFILL, window_late(FN), POOLS),
    "window-late-decode": (DECODE, window_late(UPDATE), POOLS),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_above_the_backends_is_found(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    serve("reference", monkeypatch)
    call, plant, complaint = FAULTS[fault]
    check(call)
    plant(monkeypatch)
    with pytest.raises(AssertionError, match=complaint):
        check(call)


def test_a_fault_in_the_arithmetic_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    serve("reference", monkeypatch)

    def rounded(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
        return (a * b).float() + c  # what vLLM does, and its own bound lets pass

    monkeypatch.setattr(reference, "fused_multiply_add", rounded)
    check(LONG)
    with pytest.raises(AssertionError, match=VALUES):
        check(LONG.but("torch.float16", dtype=torch.float16))


def kept_too_large(tile: Any, slot: Any, position: Any, value: Any, where: Any) -> None:
    right(tile, slot, position, value * 1.001, where)


right = kernels._store_input

# What takes the place of a function of the Triton kernels. It gets the arguments that the right one gets.
TRITON_FAULTS: dict[str, tuple[Callable[..., Any], Callable[..., Any], Call, str]] = {
    "activation-decode": (kernels._silu, lambda value, PTX: value, DECODE, VALUES),
    "activation-prefill": (kernels._silu, lambda value, PTX: value, PREFILL, VALUES),
    "kept": (kernels._store_input, kept_too_large, PREFILL, POOLS),
    "owner": (kernels._first_above, lambda offsets, start, count, row: row * 0 + 1, PREFILL, VALUES),
}


@pytest.mark.parametrize("fault", TRITON_FAULTS)
def test_a_fault_in_the_triton_kernels_is_found(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    serve("triton", monkeypatch)
    part, faulty, call, complaint = TRITON_FAULTS[fault]
    assert list(inspect.signature(faulty).parameters) == list(inspect.signature(part.fn).parameters)
    check(call)
    monkeypatch.setattr(kernels, part.fn.__name__, faulty)
    with pytest.raises(AssertionError, match=complaint):
        check(call)
