"""The adapters over functions with the signatures of several vLLMs: same meaning, views only, counted fallbacks."""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from serving_conv.engine_integration.vllm_adapter import (
    UnsupportedSignature,
    deferred_metadata,
    prefill_adapter,
    update_adapter,
)

import serving_conv
from serving_conv.engine_report import COUNTERS

C, W, L, SLOTS = 6, 4, 6, 9


class Reached(Exception):
    """The original ran."""


# vLLM's signatures, by the version that has them.
def fn_026(
    x, weight, bias, conv_states, query_start_loc, cache_indices=None, has_initial_state=None, activation="silu",
    pad_slot_id=-1, null_block_id=0, block_idx_first_scheduled_token=None, block_idx_last_scheduled_token=None,
    initial_state_idx=None, num_computed_tokens=None, block_size_to_align=0, metadata=None, validate_data=False,
):  # fmt: skip
    raise Reached(metadata)


def fn_033(
    x, weight, bias, conv_states, query_start_loc, cache_indices=None, has_initial_state=None, activation="silu",
    pad_slot_id=-1, null_block_id=0, metadata=None, validate_data=False,
):  # fmt: skip
    raise Reached(metadata)


def fn_cpu(
    x, weight, bias, conv_states, query_start_loc, cache_indices=None, has_initial_state=None, activation="silu",
    pad_slot_id=-1, **kwargs,
):  # fmt: skip
    raise Reached(kwargs.get("metadata"))


def update_026(
    x, conv_state, weight, bias=None, activation=None, conv_state_indices=None, num_accepted_tokens=None,
    query_start_loc=None, max_query_len=-1, null_block_id=0, block_idx_last_scheduled_token=None,
    initial_state_idx=None, validate_data=False,
):  # fmt: skip
    raise Reached


def update_033(
    x, conv_state, weight, bias=None, activation=None, conv_state_indices=None, num_accepted_tokens=None,
    query_start_loc=None, max_query_len=-1, null_block_id=0, validate_data=False, out=None,
):  # fmt: skip
    raise Reached


@pytest.fixture(autouse=True)
def _fresh_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(COUNTERS, "functions", {})


def pool() -> torch.Tensor:
    return torch.randn(SLOTS, L, C).transpose(1, 2)  # channels contiguous, as vLLM's layout SD


def weights() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(C, W), torch.randn(C)


def slots(*numbers: int) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.int32)


@pytest.mark.parametrize("original", [fn_026, fn_033, fn_cpu])
def test_prefill_means_what_vllms_does(original: Any) -> None:
    conv = prefill_adapter(original, "fn")
    weight, bias = weights()
    rows, state = torch.randn(9, 2 * C)[:, :C], pool()  # a column slice: rows are padded apart
    expected_state = state.clone(memory_format=torch.preserve_format)
    offsets, indices, flags = slots(0, 4, 5, 9), slots(3, 0, 7), torch.tensor([True, True, False])
    expected = serving_conv.causal_conv1d_fn(
        rows, weight, expected_state, offsets, indices, flags, bias=bias, pad_slot_id=0
    )
    metadata = SimpleNamespace(nums_dict=None)
    got = conv(
        rows.transpose(0, 1),
        weight,
        bias,
        activation="silu",
        conv_states=state,
        has_initial_state=flags,
        cache_indices=indices,
        metadata=metadata,
        query_start_loc=offsets,
    )
    assert got.shape == (C, 9) and got.stride(0) == 1
    assert torch.equal(got.transpose(0, 1), expected)
    assert torch.equal(state, expected_state)
    assert not got[:, 4].any(), "the null block's sequence is padding"
    assert serving_conv.engine_report().calls == 1


def test_prefill_takes_positions_booleans_and_longer_tables() -> None:
    conv = prefill_adapter(fn_033, "fn")
    weight, bias = weights()
    rows, state = torch.randn(5, C), pool()
    again = state.clone(memory_format=torch.preserve_format)
    offsets = slots(0, 5)
    got = conv(rows.t(), weight, bias, state, offsets, slots(2, 5, 6), torch.tensor([False, True]), True)
    expected = serving_conv.causal_conv1d_fn(rows, weight, again, offsets, slots(2), bias=bias)
    assert torch.equal(got.t(), expected) and torch.equal(state, again)
    plain = conv(rows.t(), weight, bias, state, offsets, slots(2)[:, None], None, False)
    assert torch.equal(
        plain.t(), serving_conv.causal_conv1d_fn(rows, weight, again, offsets, slots(2), bias=bias, activation=None)
    )


def test_prefill_warm_up_call_with_only_the_null_block() -> None:
    # Qwen's warm-up: one token, no metadata, the null block, both sentinels given.
    conv = prefill_adapter(fn_033, "fn")
    weight, bias = weights()
    state = pool()
    before = state.clone()
    conv(
        torch.randn(1, C).t(), weight, bias, state, slots(0, 1), cache_indices=slots(0), pad_slot_id=-1,
        null_block_id=0, metadata=None, validate_data=False,
    )  # fmt: skip
    assert torch.equal(state, before)


@pytest.mark.parametrize("original", [update_026, update_033])
def test_update_overwrites_x(original: Any) -> None:
    conv = update_adapter(original, "update")
    weight, bias = weights()
    wide, state = torch.randn(3, 3 * C), pool()
    x = wide[:, C : 2 * C]
    left, right = wide[:, :C].clone(), wide[:, 2 * C :].clone()
    again, indices = state.clone(memory_format=torch.preserve_format), slots(4, 0, 2)
    expected = serving_conv.causal_conv1d_update(x.clone(), weight, again, indices, bias=bias, pad_slot_id=0)
    got = conv(x, state, weight, bias, "silu", conv_state_indices=indices, max_query_len=1)
    assert got.data_ptr() == x.data_ptr() and got.stride() == x.stride()
    assert torch.equal(x, expected) and torch.equal(state, again)
    assert torch.equal(wide[:, :C], left) and torch.equal(wide[:, 2 * C :], right)


def test_update_writes_out_and_leaves_x() -> None:
    conv = update_adapter(update_033, "update")
    weight, _ = weights()
    x, state, out = torch.randn(2, C), pool(), torch.empty(2, C)
    before, again = x.clone(), state.clone()
    got = conv(x, state, weight, conv_state_indices=slots(1, 2), out=out)
    assert got is out and torch.equal(x, before)
    assert torch.equal(
        out, serving_conv.causal_conv1d_update(before, weight, again.contiguous(), slots(1, 2), activation=None)
    )


def test_update_speculative_with_padded_tables() -> None:
    conv = update_adapter(update_026, "update")
    weight, bias = weights()
    x, state = torch.randn(7, C), pool()
    again = state.clone(memory_format=torch.preserve_format)
    offsets, counts, table = slots(0, 3, 6, 6, 6), slots(2, 3, 0, 0), slots(5, 8, 1, 4).view(2, 2)
    expected = serving_conv.causal_conv1d_update(
        x.clone(), weight, again, slots(5, 1), cu_seqlens=offsets[:3], num_accepted_tokens=counts[:2], bias=bias,
        pad_slot_id=0,
    )  # fmt: skip
    got = conv(
        x, state, weight, bias, "swish", conv_state_indices=table, num_accepted_tokens=counts,
        query_start_loc=offsets, max_query_len=3,
    )  # fmt: skip
    assert torch.equal(got[:6], expected[:6]) and torch.equal(state, again)


@pytest.mark.parametrize("tokens", [1, 3])
@pytest.mark.parametrize("in_place", [True, False])
def test_update_with_three_axes(tokens: int, in_place: bool) -> None:
    conv = update_adapter(update_033, "update", in_place=in_place)
    weight, bias = weights()
    rows, state = torch.randn(2, tokens, C), pool()
    again = state.clone(memory_format=torch.preserve_format)
    expected = serving_conv.causal_conv1d_update(
        rows.reshape(-1, C).clone(), weight, again, slots(3, 6), cu_seqlens=slots(0, tokens, 2 * tokens), bias=bias
    ).view(2, tokens, C)
    before = rows.clone()
    got = conv(rows.transpose(1, 2), state, weight, bias, True, conv_state_indices=slots(3, 6))
    assert torch.equal(got.transpose(1, 2), expected) and torch.equal(state, again)
    assert torch.equal(rows, expected if in_place else before)


def test_update_with_three_axes_that_no_view_packs_falls_back() -> None:
    conv = update_adapter(update_033, "update")
    weight, _ = weights()
    before = pool()
    state = before.clone(memory_format=torch.preserve_format)
    with pytest.raises(Reached):
        conv(torch.randn(2, C, 3), state, weight, conv_state_indices=slots(3, 6))
    assert torch.equal(state, before)
    assert serving_conv.engine_report().fallbacks == 1


def test_prefix_caching_of_old_versions_goes_to_vllm(caplog: pytest.LogCaptureFixture) -> None:
    conv = prefill_adapter(fn_026, "fn")
    weight, bias = weights()
    call: dict[str, Any] = {
        "x": torch.randn(C, 4), "weight": weight, "bias": bias, "conv_states": pool(), "query_start_loc": slots(0, 4),
        "cache_indices": slots(1, 2).view(1, 2), "block_size_to_align": 8,
    }  # fmt: skip
    for _ in range(3):
        with pytest.raises(Reached):
            conv(**call, block_idx_last_scheduled_token=slots(1))
    report = serving_conv.engine_report()
    assert report.functions["fn"].fallbacks == {"prefix caching passes block indices": 3}
    assert sum("falls back" in record.message for record in caplog.records) == 1
    with pytest.raises(Reached):
        update_adapter(update_026, "update")(
            torch.randn(1, C), pool(), weight, conv_state_indices=slots(1, 2), initial_state_idx=slots(0)
        )


def test_a_refused_layout_goes_to_vllm_untouched() -> None:
    conv = prefill_adapter(fn_033, "fn")
    weight, _ = weights()
    state = pool()
    before = state.clone()
    with pytest.raises(Reached):
        conv(torch.randn(C, 4), weight, None, state, slots(0, 4), slots(1))  # tokens contiguous: no view
    assert torch.equal(state, before)
    (reason,) = serving_conv.engine_report().functions["fn"].fallbacks
    assert reason.startswith("x: wanted")


def test_a_new_argument_is_fine_until_it_is_used() -> None:
    def later(x, weight, bias, conv_states, query_start_loc, cache_indices=None, fused_gate=None):
        raise Reached

    conv = prefill_adapter(later, "fn")
    weight, _ = weights()
    x = torch.randn(4, C).t()
    conv(x, weight, None, pool(), slots(0, 4), slots(1))
    with pytest.raises(Reached):
        conv(x, weight, None, pool(), slots(0, 4), slots(1), fused_gate=torch.ones(1))
    assert serving_conv.engine_report().functions["fn"].fallbacks == {"argument 'fused_gate' is unknown": 1}


def test_a_function_without_our_arguments_is_left_alone() -> None:
    with pytest.raises(UnsupportedSignature, match="query_start_loc"):
        prefill_adapter(lambda x, weight: None, "fn")
    with pytest.raises(UnsupportedSignature, match="gate"):
        update_adapter(lambda x, weight, gate: None, "update")


def test_the_block_map_is_built_for_a_fallback_only_and_once() -> None:
    built = []

    def compute(offsets, *, device):
        built.append(device)
        return {8: {"tot": 1}}, "batch", "offsets"

    nums, batch, _ = deferred_metadata(compute)(slots(0, 4), device="cpu")
    metadata = SimpleNamespace(nums_dict=nums, batch_ptr=batch, token_chunk_offset_ptr=None)
    conv = prefill_adapter(fn_033, "fn")
    weight, _ = weights()
    conv(torch.randn(4, C).t(), weight, None, pool(), slots(0, 4), slots(1), metadata=metadata)
    assert not built
    for positional in (False, True, False):
        bad = (torch.randn(C, 4), weight, None, pool(), slots(0, 4), slots(1), None, "silu", -1, 0)
        call = (
            functools.partial(conv, *bad, metadata) if positional else functools.partial(conv, *bad, metadata=metadata)
        )
        with pytest.raises(Reached) as reached:
            call()
        (given,) = reached.value.args
        assert (given.nums_dict[8]["tot"], given.batch_ptr, given.token_chunk_offset_ptr) == (1, "batch", "offsets")
    assert built == ["cpu"]


def test_a_packed_weight_is_looked_up() -> None:
    def packed(*, x, weight, bias, conv_states, query_start_loc, cache_indices, has_initial_state, silu_activation,
               is_weight_packed):  # fmt: skip
        raise Reached

    plain, bias = weights()
    known = torch.zeros(1)
    conv = prefill_adapter(
        packed, "fn", renamed={"silu_activation": "activation"}, unpack=lambda w: plain if w is known else None
    )
    call: dict[str, Any] = {
        "x": torch.randn(4, C).t(),
        "bias": bias,
        "conv_states": pool(),
        "query_start_loc": slots(0, 4),
        "cache_indices": slots(1),
        "has_initial_state": None,
        "silu_activation": True,
        "is_weight_packed": True,
    }
    expected = serving_conv.causal_conv1d_fn(call["x"].t(), plain, pool(), slots(0, 4), slots(1), bias=bias)
    assert torch.equal(conv(weight=known, **call).t(), expected)
    with pytest.raises(Reached):
        conv(weight=torch.zeros(1), **call)


def test_the_report_says_what_happened() -> None:
    conv = prefill_adapter(fn_033, "fn")
    weight, _ = weights()
    conv(torch.randn(4, C).t(), weight, None, pool(), slots(0, 4), slots(1))
    with pytest.raises(Reached):
        conv(torch.randn(C, 4), weight, None, None, slots(0, 4))
    report = serving_conv.engine_report()
    assert (report.calls, report.fallbacks) == (1, 1)
    assert "1 calls ran here (fn 1), 1 fell back (fn: 1 x a call without a state pool)" in report.sentence()


def test_an_update_with_a_padding_slot_of_its_own_uses_it() -> None:
    def update_cpu(x, conv_state, weight, bias=None, activation=None, conv_state_indices=None, pad_slot_id=None, **kw):
        raise Reached

    conv = update_adapter(update_cpu, "update")
    weight, _ = weights()
    for given, padding in ((None, 0), (-1, -1)):
        x, state = torch.randn(2, C), pool()
        again = state.clone(memory_format=torch.preserve_format)
        expected = serving_conv.causal_conv1d_update(
            x.clone(), weight, again, slots(0, 3), activation=None, pad_slot_id=padding
        )
        got = conv(x, state, weight, conv_state_indices=slots(0, 3), pad_slot_id=given)
        assert torch.equal(got, expected) and torch.equal(state, again)


def test_prefill_with_a_padding_slot_of_its_own_uses_it() -> None:
    # The CPU build's has no null block; vLLM's tests of before 0.23 give -1 there, with slot 0 live.
    conv = prefill_adapter(fn_cpu, "fn")
    weight, _ = weights()
    rows, offsets, indices = torch.randn(7, C), slots(0, 4, 5, 7), slots(3, 0, -1)
    for options, padding in (({}, 0), ({"pad_slot_id": -1}, -1)):
        state = pool()
        again = state.clone(memory_format=torch.preserve_format)
        expected = serving_conv.causal_conv1d_fn(rows[:5], weight, again, offsets[:3], indices[:2], pad_slot_id=padding)
        got = conv(rows.t(), weight, None, state, offsets, indices, **options).t()
        assert torch.equal(got[:5], expected) and torch.equal(state, again)
        assert not got[5:].any()


def test_without_indices_sequences_have_the_slots_of_their_numbers() -> None:
    weight, bias = weights()
    rows, state, offsets = torch.randn(5, C), pool(), slots(0, 3, 5)
    again = state.clone(memory_format=torch.preserve_format)
    expected = serving_conv.causal_conv1d_fn(rows, weight, again, offsets, slots(0, 1), bias=bias)
    assert torch.equal(prefill_adapter(fn_033, "fn")(rows.t(), weight, bias, state, offsets).t(), expected)
    expected = serving_conv.causal_conv1d_update(rows[:2].clone(), weight, again, slots(0, 1), bias=bias)
    assert torch.equal(update_adapter(update_033, "update")(rows[:2].clone(), state, weight, bias, "silu"), expected)
    assert torch.equal(state, again)


def test_arguments_of_prefix_caching_that_are_absent_or_say_nothing_alone_are_no_reason_to_fall_back() -> None:
    # vLLM 0.26 gives all of them, with None and the block size, where the cache mode is not `all`.
    weight, bias = weights()
    none = dict.fromkeys(("block_idx_first_scheduled_token", "block_idx_last_scheduled_token", "initial_state_idx"))
    conv = prefill_adapter(fn_026, "fn")
    conv(
        torch.randn(4, C).t(), weight, bias, activation="silu", conv_states=pool(), has_initial_state=None,
        cache_indices=slots(1), num_computed_tokens=None, block_size_to_align=1056, metadata=SimpleNamespace(),
        query_start_loc=slots(0, 4), **none,
    )  # fmt: skip
    update_adapter(update_026, "update")(
        torch.randn(1, C), pool(), weight, bias, "silu", conv_state_indices=slots(1, 2)[:, None][:1],
        block_idx_last_scheduled_token=None, initial_state_idx=None, num_accepted_tokens=None, query_start_loc=None,
        max_query_len=1,
    )  # fmt: skip
    report = serving_conv.engine_report()
    assert (report.calls, report.fallbacks) == (2, 0)


@pytest.mark.parametrize("accepted", [0, 4])
def test_an_impossible_accepted_count_gives_zeros_and_touches_nothing(accepted: int) -> None:
    # As a fork's tests of vLLM's own kernel demand it; three axes, drafts, `out` given.
    weight, _ = weights()
    rows, state = torch.randn(1, 3, C), torch.randn(3, W - 1 + 2, C).transpose(1, 2)
    before, out = state.clone(), torch.full_like(rows, torch.nan)
    got = update_adapter(update_033, "update")(
        rows.transpose(1, 2), state, weight, conv_state_indices=slots(1), num_accepted_tokens=slots(accepted),
        out=out.transpose(1, 2),
    )  # fmt: skip
    assert got.shape == (1, C, 3) and not got.any() and not out.any()
    assert torch.equal(state, before)


def test_torch_compile_traces_through_the_adapters() -> None:
    conv, update = prefill_adapter(fn_033, "fn"), update_adapter(update_033, "update")
    weight, bias = weights()

    def step(x: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
        y = conv(x.t(), weight, bias, state, slots(0, 2, 5), slots(1, 2), torch.tensor([True, False])).t()
        return 2 * update(y[:2].clone(), state, weight, bias, "silu", conv_state_indices=slots(2, 0))

    x, state = torch.randn(5, C), pool()
    again = state.clone(memory_format=torch.preserve_format)
    expected = step(x, again)
    assert torch.equal(torch.compile(step, fullgraph=True, backend="aot_eager")(x, state), expected)
    assert torch.equal(state, again)


def test_what_the_original_would_refuse_is_left_to_it() -> None:
    weight, bias = weights()

    def keyword_only(x, weight, bias, conv_states, query_start_loc, *, cache_indices=None, activation="silu"):
        raise Reached

    conv, update = prefill_adapter(keyword_only, "fn"), update_adapter(update_033, "update")
    x, state = torch.randn(4, C), pool()
    before = state.clone()
    with pytest.raises(TypeError, match="positional"):
        conv(x.t(), weight, bias, state, slots(0, 4), slots(3), cache_indices=slots(1))
    for options in ({"query_start_loc": None}, {"weight": None}, {"conv_states": None}):
        call = {"x": x.t(), "weight": weight, "bias": bias, "conv_states": state, "query_start_loc": slots(0, 4)}
        with pytest.raises(Reached):
            conv(**{**call, **options}, cache_indices=slots(1))
    for rows in (torch.tensor(1.0), torch.randn(C), torch.randn(1, 2, C, 2)):
        with pytest.raises(Reached):
            update(rows, state, weight, bias, conv_state_indices=slots(1))
    with pytest.raises(Reached):
        update(torch.randn(2, C, 3), state, weight, bias, conv_state_indices=slots(1), query_start_loc=slots(0, 2))
    assert torch.equal(state, before)
