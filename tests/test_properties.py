"""One sequence, the same bits: however it is cut, batched, ordered, padded, placed, or speculated on."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.cases import LAYOUTS, same_bits
from support.memory import pool_strides
from support.serve import KINDS, Filter, Piece, Request, serve, solo
from torch import Tensor

from serving_conv import causal_conv1d_fn, causal_conv1d_update

DRAFTS = 4  # a speculative piece runs at most DRAFTS + 1 tokens
TYPES = (torch.bfloat16, torch.float16, torch.float32)
SEEDS = st.integers(0, 2**32 - 1)


@st.composite
def cuts(draw: st.DrawFn, kinds: tuple[str, ...] = KINDS) -> tuple[Piece, ...]:
    """A request's life as pieces of 1 to a few tokens."""
    pieces = []
    for kind in draw(st.lists(st.sampled_from(kinds), min_size=1, max_size=8)):
        if kind == "prefill":
            pieces.append(Piece(kind, draw(st.integers(1, 9))))
        elif kind == "decode":
            pieces.append(Piece(kind, 1))
        elif kind == "rows":
            # Behind a speculative step these become speculative, so they must fit too.
            pieces.append(Piece(kind, draw(st.integers(1, DRAFTS + 1))))
        else:
            tokens = draw(st.integers(1, DRAFTS + 1))
            pieces.append(Piece(kind, tokens, draw(st.integers(0, DRAFTS + 1 - tokens))))
    return tuple(pieces)


def make_pool(
    slots: int, channels: int, positions: int, dtype: torch.dtype, layout: str, device: torch.device
) -> Tensor:
    strides = pool_strides(layout, channels, positions, slot_gap=5)
    storage = torch.full((slots * strides[0],), torch.nan, dtype=dtype, device=device)
    return storage.as_strided((slots, channels, positions), strides)


def tokens_of(pieces: tuple[Piece, ...]) -> int:
    return sum(piece.tokens for piece in pieces)


@settings(max_examples=120)
@given(
    lives=st.lists(cuts(), min_size=1, max_size=5),
    width=st.integers(2, 8),
    channels=st.sampled_from([1, 3, 8]),
    dtype=st.sampled_from(TYPES),
    wide_pool=st.booleans(),
    layout=st.sampled_from(LAYOUTS),
    histories=st.lists(st.booleans(), min_size=5, max_size=5),
    sentinel=st.sampled_from([-1, 0]),
    activation=st.sampled_from(["silu", None]),
    seed=SEEDS,
)
def test_any_life_of_a_request_gives_the_bits_of_its_solo_run(
    lives: list[tuple[Piece, ...]],
    width: int,
    channels: int,
    dtype: torch.dtype,
    wide_pool: bool,
    layout: str,
    histories: list[bool],
    sentinel: int,
    activation: str | None,
    seed: int,
    device: torch.device,
) -> None:
    dice = random.Random(seed)
    torch.manual_seed(seed)
    positions = width - 1 + DRAFTS
    slots = dice.sample(range(1, 9), len(lives))
    pool = make_pool(9, channels, positions, torch.float32 if wide_pool else dtype, layout, device)
    conv = Filter(
        torch.randn(channels, width, device=device), torch.randn(channels, device=device), activation, sentinel
    )
    requests = []
    for pieces, slot, history in zip(lives, slots, histories, strict=False):
        x = torch.randn(tokens_of(pieces), channels, device=device).to(dtype)
        window = torch.randn(channels, width - 1, device=device).to(dtype).to(pool.dtype) if history else None
        requests.append(Request(x, pieces, slot, window))
    serve(requests, conv, pool, dice)
    for request in requests:
        out, window = solo(request, conv, pool)
        assert same_bits(torch.cat(request.outputs).cpu(), out.cpu())
        start = request.count - 1
        assert same_bits(pool[request.slot, :, start : start + width - 1].cpu(), window.cpu())
    free = sorted(set(range(9)) - set(slots))
    assert bool(pool[free].isnan().all()), "a slot that nobody owns was touched"


@given(pieces=cuts(("prefill", "decode", "rows")), width=st.integers(2, 8), seed=SEEDS, layout=st.sampled_from(LAYOUTS))
def test_plain_splits_leave_the_whole_pool_equal(
    pieces: tuple[Piece, ...], width: int, seed: int, layout: str, device: torch.device
) -> None:
    # Without speculation the whole pool is determined, also the positions behind the window.
    torch.manual_seed(seed)
    x = torch.randn(tokens_of(pieces), 6, device=device)
    conv = Filter(torch.randn(6, width, device=device), None)
    results = []
    for life in (pieces, (Piece("prefill", tokens_of(pieces)),)):
        pool = make_pool(3, 6, width + 2, torch.float32, layout, device)
        request = Request(x, life, 1)
        serve([request], conv, pool, random.Random(seed), padding=0)
        results.append((torch.cat(request.outputs).cpu(), pool.cpu()))
    assert same_bits(results[0][0], results[1][0])
    assert same_bits(results[0][1], results[1][1])


@given(tokens=st.integers(1, 30), width=st.integers(2, 8), dtype=st.sampled_from(TYPES), seed=SEEDS)
def test_decode_is_prefill(tokens: int, width: int, dtype: torch.dtype, seed: int, device: torch.device) -> None:
    torch.manual_seed(seed)
    x = torch.randn(tokens, 5, device=device).to(dtype)
    conv = Filter(torch.randn(5, width, device=device).to(dtype), torch.randn(5, device=device))
    pool = make_pool(1, 5, width - 1, dtype, "channels", device)
    request = Request(x, (Piece("decode", 1),) * tokens, 0)
    serve([request], conv, pool, random.Random(0), padding=0)
    out, window = solo(request, conv, pool)
    assert same_bits(torch.cat(request.outputs).cpu(), out.cpu())
    assert same_bits(pool[0].cpu(), window.cpu())


@given(steps=st.lists(st.integers(1, 5), min_size=1, max_size=6), width=st.integers(2, 8), seed=SEEDS)
def test_speculation_fully_accepted_is_plain(steps: list[int], width: int, seed: int, device: torch.device) -> None:
    torch.manual_seed(seed)
    x = torch.randn(sum(steps), 5, device=device)
    conv = Filter(torch.randn(5, width, device=device), torch.randn(5, device=device))
    window = torch.randn(5, width - 1, device=device)
    outcomes = []
    for kind in ("speculative", "rows"):
        pool = make_pool(2, 5, width + 3, torch.float32, "channels", device)
        request = Request(x, [Piece(kind, n) for n in steps], 1, window)
        serve([request], conv, pool, random.Random(0), padding=0)
        start = request.count - 1
        outcomes.append((torch.cat(request.outputs).cpu(), pool[1, :, start : start + width - 1].cpu()))
    assert same_bits(outcomes[0][0], outcomes[1][0])
    assert same_bits(outcomes[0][1], outcomes[1][1])


# --- one call: order, slots, padding -------------------------------------------------------------------------------


class Call:
    """One batch that can be rearranged without changing what it means."""

    def __init__(self, seed: int, kind: str, device: torch.device) -> None:
        self.device, self.kind = device, kind
        dice = random.Random(seed)
        torch.manual_seed(seed)
        self.width, self.channels = dice.randint(2, 8), dice.choice([1, 4, 9])
        self.positions = self.width + 2
        number = dice.randint(1, 7)
        self.lengths = [1 if kind == "decode" else dice.randint(0, 7) for _ in range(number)]
        if kind == "speculative":
            self.lengths = [min(n, 4) for n in self.lengths]
        self.slots = dice.sample(range(9), number)
        self.flags = [dice.random() < 0.7 for _ in range(number)]
        self.counts = [dice.randint(1, 4) for _ in range(number)]
        self.x = [torch.randn(n, self.channels, device=device) for n in self.lengths]
        self.weight = torch.randn(self.channels, self.width, device=device)
        self.bias = torch.randn(self.channels, device=device)
        self.pool = torch.randn(9, self.channels, self.positions, device=device)

    def run(
        self, order: list[int], pool: Tensor, slots: list[int], sentinel: int = -1
    ) -> tuple[dict[int, Tensor], Tensor]:
        """Call with the sequences in this order; -1 stands for a padding sequence of one garbage row."""
        garbage = torch.full((1, self.channels), torch.nan, device=self.device)
        x = torch.cat([garbage if n < 0 else self.x[n] for n in order])
        lengths = [1 if n < 0 else self.lengths[n] for n in order]

        def int32(values: list[int]) -> Tensor:
            return torch.tensor(values, dtype=torch.int32, device=self.device)

        offsets = [sum(lengths[:n]) for n in range(len(lengths) + 1)]
        index = int32([sentinel if n < 0 else slots[n] for n in order])
        flags = torch.tensor([n < 0 or self.flags[n] for n in order], device=self.device)
        counts = int32([7 if n < 0 else self.counts[n] for n in order])
        options = {"bias": self.bias, "pad_slot_id": sentinel, "has_initial_state": flags}
        if self.kind in ("prefill", "prefill counts"):
            if self.kind == "prefill counts":
                options["num_accepted_tokens"] = counts
            out = causal_conv1d_fn(x, self.weight, pool, int32(offsets), index, **options)
        else:
            if self.kind == "speculative":
                options["num_accepted_tokens"] = counts
            if self.kind != "decode":
                options["cu_seqlens"] = int32(offsets)
            out = causal_conv1d_update(x, self.weight, pool, index, **options)
        pieces = {n: out[offsets[i] : offsets[i + 1]].cpu() for i, n in enumerate(order) if n >= 0}
        for i, n in enumerate(order):
            assert n >= 0 or not bool(out[offsets[i]].any())
        return pieces, pool.cpu()


CALLS = pytest.mark.parametrize("kind", ["prefill", "prefill counts", "decode", "rows", "speculative"])


def assert_same(a: dict[int, Tensor], b: dict[int, Tensor]) -> None:
    assert a.keys() == b.keys()
    assert all(same_bits(a[n], b[n]) for n in a)


@CALLS
@given(seed=SEEDS, data=st.data())
def test_batch_order_does_not_matter(kind: str, seed: int, data: st.DataObject, device: torch.device) -> None:
    call = Call(seed, kind, device)
    order = list(range(len(call.slots)))
    base = call.run(order, call.pool.clone(), call.slots)
    other = call.run(data.draw(st.permutations(order)), call.pool.clone(), call.slots)
    assert_same(base[0], other[0])
    assert same_bits(base[1], other[1])


@CALLS
@given(seed=SEEDS, data=st.data())
def test_slots_may_be_permuted(kind: str, seed: int, data: st.DataObject, device: torch.device) -> None:
    call = Call(seed, kind, device)
    order = list(range(len(call.slots)))
    moved = data.draw(st.permutations(range(9)))  # slot s moves to moved[s]
    pool = torch.empty_like(call.pool)
    pool[torch.tensor(moved, device=device)] = call.pool
    base = call.run(order, call.pool.clone(), call.slots)
    other = call.run(order, pool, [moved[s] for s in call.slots])
    assert_same(base[0], other[0])
    assert same_bits(base[1], other[1][torch.tensor(moved)])


@CALLS
@given(seed=SEEDS, data=st.data(), sentinel=st.sampled_from([-1, -77, 9, 1000]))
def test_padding_may_be_added(kind: str, seed: int, data: st.DataObject, sentinel: int, device: torch.device) -> None:
    call = Call(seed, kind, device)
    order = list(range(len(call.slots)))
    padded = data.draw(st.permutations([*order, *[-1] * data.draw(st.integers(1, 5))]))
    base = call.run(order, call.pool.clone(), call.slots)
    other = call.run(padded, call.pool.clone(), call.slots, sentinel)
    assert_same(base[0], other[0])
    assert same_bits(base[1], other[1])


@CALLS
@given(seed=SEEDS)
def test_each_sequence_alone_gives_the_same(kind: str, seed: int, device: torch.device) -> None:
    call = Call(seed, kind, device)
    order = list(range(len(call.slots)))
    base = call.run(order, call.pool.clone(), call.slots)
    pool = call.pool.clone()
    outputs: dict[int, Tensor] = {}
    for n in reversed(order):
        outputs |= call.run([n], pool, call.slots)[0]
    assert_same(base[0], outputs)
    assert same_bits(base[1], pool.cpu())


@CALLS
@given(seed=SEEDS)
def test_channels_are_independent(kind: str, seed: int, device: torch.device) -> None:
    # Half of the channels alone (another vector length, another alignment) give the same bits.
    call = Call(seed, kind, device)
    order = list(range(len(call.slots)))
    base = call.run(order, call.pool.clone(), call.slots)
    keep = slice(call.channels // 2, None)
    part = Call(seed, kind, device)
    part.x = [x[:, keep].contiguous() for x in call.x]
    part.weight, part.bias = call.weight[keep].contiguous(), call.bias[keep].contiguous()
    part.channels = part.weight.shape[0]
    got = part.run(order, call.pool[:, keep].contiguous(), call.slots)
    assert_same({n: v[:, keep] for n, v in base[0].items()}, got[0])
    assert same_bits(base[1][:, keep], got[1])
