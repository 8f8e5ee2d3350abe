"""The backward's kernels, as the host build: within the derived bounds, whatever the cut, and nothing else touched."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.gradients import Case, exact_and_bounds, make_case, worst
from support.memory import POISONS, Guarded
from torch import Tensor

from serving_conv.native import host, variant
from serving_conv.native.backward import BackwardBuffers, prepare_backward
from serving_conv.native.config import LaunchConfig, choose_backward

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
DOCUMENTS = [0, 1, 3, 3, 10, 14, 15, 60, 80]  # shorter than the window, empty, and rows past the last


def fixed(rows: int, **changes: Any) -> Callable[..., LaunchConfig]:
    """A launch choice with runs of so many rows."""

    def choose(**sizes: Any) -> LaunchConfig:
        return choose_backward(**sizes)._replace(rows=rows, **changes)

    return choose


def run(case: Case, *, ordered: bool = True, **options: Any) -> dict[str, Tensor]:
    """All gradients of a case, from buffers full of NaN."""
    batches, rows, channels = case.x.shape
    nan = partial(torch.full, fill_value=float("nan"))
    lengths = torch.full((batches,), rows) if case.cu_seqlens is None else case.cu_seqlens[1:] - case.cu_seqlens[:-1]
    dinitial = None
    if case.initial is not None:
        dinitial = nan((case.sequences, case.weight.shape[1] - 1, channels))
        dinitial[lengths == 0] = 0 if case.dfinal is None else case.dfinal[lengths == 0]
    buffers = BackwardBuffers(
        dx=nan(case.x.shape, dtype=case.x.dtype),
        dweight=nan(case.weight.shape, dtype=case.weight.dtype),
        dbias=None if case.bias is None else nan(case.bias.shape, dtype=case.bias.dtype),
        dinitial=dinitial,
    )
    host.run_backward(
        case.dout,
        case.x,
        case.weight,
        case.bias,
        case.initial,
        case.cu_seqlens,
        case.dfinal,
        buffers,
        activation=case.activation,
        ordered=ordered,
        **options,
    )
    found = {"dx": buffers.dx, "dweight": buffers.dweight, "dbias": buffers.dbias}
    found["dinitial"] = None if dinitial is None else dinitial.transpose(1, 2)
    return {name: tensor for name, tensor in found.items() if tensor is not None}


def assert_right(case: Case, found: dict[str, Tensor]) -> None:
    exact, bounds = exact_and_bounds(case)
    for name, got in found.items():
        ratio = worst(got, getattr(exact, name), getattr(bounds, name))
        assert ratio <= 1, f"{name}: error / bound {ratio:.3g}"


ROWS: dict[str, dict[str, Any]] = {
    "base": {},
    "packed": {"offsets": DOCUMENTS},
    "batches": {"batches": 3, "rows": 37},
    "fp16": {"x": FP16, "weight": FP16, "bias": FP16},
    "fp32": {"x": FP32, "weight": FP32, "bias": FP32},
    "fp32 packed": {"x": FP32, "weight": FP32, "bias": FP32, "offsets": DOCUMENTS},
    "fp32 weights": {"weight": FP32, "bias": FP16},
    "no bias": {"bias": None},
    "no activation": {"activation": None},
    "no initial windows": {"initial": False},
    "no final gradient": {"final": False, "offsets": DOCUMENTS},
    "odd channels": {"channels": 13, "offsets": DOCUMENTS},
    "two tiles": {"channels": 520, "rows": 21},
    "one row": {"rows": 1},
    "two rows": {"rows": 2, "batches": 2},
    **{f"{width} taps": {"width": width, "offsets": DOCUMENTS} for width in (2, 3, 5, 6, 7, 8)},
}


@pytest.mark.parametrize("ordered", [True, False], ids=["ordered", "fast"])
@pytest.mark.parametrize("row", ROWS)
def test_within_the_derived_bound(row: str, ordered: bool) -> None:
    case = make_case(**ROWS[row])
    assert_right(case, run(case, ordered=ordered))


@pytest.mark.parametrize("kind", ["expanded", "sliced", "channels first", "reversed batch stride", "odd pitch"])
@pytest.mark.parametrize("which", ["dout", "x"])
def test_any_strides_are_read_as_they_are(which: str, kind: str) -> None:
    case = make_case(batches=2, rows=21)
    shape, tensor = case.x.shape, getattr(case, which)
    views = {
        "expanded": lambda: torch.randn(()).to(BF16).expand(shape),
        "sliced": lambda: torch.randn(2, 42, 3 * shape[2]).to(BF16)[:, ::2, shape[2] : 2 * shape[2]],
        "channels first": lambda: torch.randn(2, shape[2], 21).to(BF16).transpose(1, 2),
        "reversed batch stride": lambda: torch.randn(21, 2, shape[2]).to(BF16).transpose(0, 1),
        "odd pitch": lambda: torch.randn(2, 21, shape[2] + 1).to(BF16)[..., 1:],
    }
    strided = views[kind]()
    assert strided.stride() != tensor.stride()
    case = dataclasses.replace(case, **{which: strided})
    found = run(case)
    assert_right(case, found)
    plain = run(dataclasses.replace(case, **{which: strided.contiguous()}))
    for name in found:
        if name in ("dx", "dinitial"):
            assert torch.equal(found[name], plain[name]), name


@pytest.mark.parametrize("offsets", [None, DOCUMENTS], ids=["one", "packed"])
def test_rows_and_windows_do_not_depend_on_the_cut(offsets: list[int] | None) -> None:
    case = make_case(offsets=offsets, channels=16)
    want = run(case, choose=fixed(1024))
    for rows in (4, 8, 12, 16, 20, 64):
        for changes in ({}, {"vec": 1}, {"vec": 2, "ahead": 8}):
            found = run(case, choose=fixed(rows, **changes), reverse=rows % 8 == 0)
            assert torch.equal(found["dx"], want["dx"]), (rows, changes)
            assert torch.equal(found["dinitial"], want["dinitial"]), (rows, changes)


def test_the_ordered_sum_does_not_depend_on_the_order_of_blocks() -> None:
    # Magnitudes far apart, so that another order shows; the fast sum must then differ, or this test proves nothing.
    case = make_case(rows=257, x=FP32, weight=FP32, bias=FP32, activation=None)
    case.dout *= torch.logspace(-6, 6, 257)[torch.randperm(257)][None, :, None]
    found = [
        {reverse: run(case, ordered=ordered, reverse=reverse, choose=fixed(16)) for reverse in (False, True)}
        for ordered in (True, False)
    ]
    for name in ("dweight", "dbias"):
        assert torch.equal(found[0][False][name], found[0][True][name])
        assert not torch.equal(found[1][False][name], found[1][True][name])


def test_a_batch_of_sequences_is_the_packed_one() -> None:
    case = make_case(batches=3, rows=20)
    flat = {
        name: getattr(case, name).reshape(1, 60, -1) for name in ("x", "dout")
    } | {"cu_seqlens": torch.tensor([0, 20, 40, 60], dtype=torch.int32)}  # fmt: skip
    found, packed = run(case), run(dataclasses.replace(case, **flat))
    assert torch.equal(found["dx"].reshape(1, 60, -1), packed["dx"])
    assert torch.equal(found["dinitial"], packed["dinitial"])


@pytest.mark.parametrize("offsets", [None, DOCUMENTS], ids=["one", "packed"])
@pytest.mark.parametrize("channels", [16, 13])
def test_no_foreign_byte_is_read_or_written(channels: int, offsets: list[int] | None) -> None:
    results = []
    case = make_case(channels=channels, offsets=offsets)
    pitch = channels + 3 + (-channels - 3) % 4
    for poison in POISONS:
        given = {
            name: Guarded.of(
                getattr(case, name), device=torch.device("cpu"), poison=poison, strides=(pitch * 83, pitch, 1), shift=1
            )
            for name in ("x", "dout")
        }
        results.append(run(dataclasses.replace(case, **{name: g.view for name, g in given.items()})))
    for found in results[1:]:
        assert all(torch.equal(found[name], results[0][name]) for name in found)
    assert all(bool(tensor.isfinite().all()) for tensor in results[0].values())


@pytest.mark.parametrize("channels", [16, 13])
def test_only_what_is_asked_for_is_written(channels: int) -> None:
    case = make_case(channels=channels, offsets=DOCUMENTS)
    whole = run(case)
    shapes = {"dx": (case.x.shape, BF16), "dweight": (case.weight.shape, BF16), "dbias": ((channels,), BF16)}
    shapes["dinitial"] = ((case.sequences, 3, channels), FP32)
    for wanted in shapes:
        shape, dtype = shapes[wanted]
        guarded = Guarded(shape, dtype=dtype, device=torch.device("cpu"), shift=13)
        guarded.view.zero_()
        guarded.arm()
        buffers = BackwardBuffers(**{name: guarded.view if name == wanted else None for name in shapes})
        host.run_backward(
            *(case.dout, case.x, case.weight, case.bias, case.initial, case.cu_seqlens, case.dfinal, buffers),
            activation="silu",
            ordered=True,
        )
        guarded.assert_untouched(except_for=torch.ones(shape, dtype=torch.bool), name=wanted)
        got = guarded.view.transpose(1, 2) if wanted == "dinitial" else guarded.view
        lengths = torch.tensor(DOCUMENTS).diff() if wanted == "dinitial" else torch.ones(got.shape[0])
        assert torch.equal(got[lengths > 0], whole[wanted][lengths > 0]), wanted


@pytest.mark.parametrize(
    "offsets",
    [[0, 50, 20, 83], [5, 10, 83], [0, 200, 83], [-7, 10, 83], [0, 83, 90], [83, 0], [0, 0, 0], [2**31 - 1, -(2**31)]],
    ids=str,
)
def test_hostile_offsets_stay_inside(offsets: list[int]) -> None:
    case = make_case(offsets=offsets)
    guarded = Guarded(case.x.shape, dtype=BF16, device=torch.device("cpu"))
    windows = Guarded((case.sequences, 3, 24), dtype=FP32, device=torch.device("cpu"))
    for memory in (guarded, windows):
        memory.arm()
    host.run_backward(
        *(case.dout, case.x, case.weight, case.bias, case.initial, case.cu_seqlens, case.dfinal),
        BackwardBuffers(guarded.view, torch.empty_like(case.weight), torch.empty_like(case.bias), windows.view),
        activation="silu",
        ordered=True,
    )
    guarded.assert_untouched(except_for=torch.ones(case.x.shape, dtype=torch.bool))
    windows.assert_untouched(except_for=torch.ones(windows.view.shape, dtype=torch.bool))


@settings(max_examples=60)
@given(
    lengths=st.lists(st.sampled_from([0, 1, 2, 3, 4, 5, 7, 8, 15, 16, 17, 31, 40]), min_size=1, max_size=8),
    behind=st.integers(0, 5),
    rows=st.sampled_from([4, 8, 16, 32]),
    seed=st.integers(0, 2**20),
)
def test_any_lengths(lengths: list[int], behind: int, rows: int, seed: int) -> None:
    torch.manual_seed(seed)
    offsets = [0, *torch.tensor(lengths).cumsum(0).tolist()]
    case = make_case(rows=offsets[-1] + behind, offsets=offsets, channels=8)
    if offsets[-1] + behind:
        assert_right(case, run(case, choose=fixed(rows)))


# What a slip would look like in the source; each must leave the bound of some gradient.
MUTANTS = {
    "the slope without its second term": ("fused_multiply_add(sum[i] * s, 1.0f - s, s)", "s"),
    "the output instead of its slope": ("g[i] *= fused_multiply_add(sum[i] * s, 1.0f - s, s)", "g[i] *= sum[i] * s"),
    "taps the wrong way round": ("taps.weight[place + 1][i], pending", "taps.weight[HALO - 1 - place][i], pending"),
    "rows of the next run in the sums": ("if (row < run.row1) accumulate", "accumulate"),
    "no rows behind the run": ("run.row1 + HALO;", "run.row1;"),
    "zeros for the initial window": ("const bool known = p.conv_state &&", "const bool known = false &&"),
    "the final gradient one row early": ("row >= s.end - HALO &&", "row >= s.end - HALO && row + 1 < s.end &&"),
    "no flush at a sequence's end": ("if (row == s.end - 1)", "if (row == -9)"),
    "a window that is not renewed": ("window_before(b, run, s, row, window);", ""),
    "a bias that is not summed": ("if constexpr (HAS_BIAS) sums.bias[i] += g[i];", ""),
    "products rounded to bf16": ("g[i] = element(dout, i);", "g[i] = element(dout, i) * 1.004f;"),
    "a run left out": ("int run = 0; run < b.runs", "int run = 1; run < b.runs"),
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_planted_bugs_leave_the_bound(mutant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    old, new = MUTANTS[mutant]
    read, hits = variant.read_kernel_file, []

    def planted(name: str) -> str:
        text = read(name)
        if old in text:
            hits.append(name)
        return text.replace(old, new)

    monkeypatch.setattr(variant, "read_kernel_file", planted)
    host._load.cache_clear()
    try:
        ratios = []
        for row in ("packed", "fp32 packed"):
            case = make_case(**ROWS[row])
            exact, bounds = exact_and_bounds(case)
            found = run(case, choose=fixed(16))
            ratios += [worst(got, getattr(exact, name), getattr(bounds, name)) for name, got in found.items()]
    finally:
        host._load.cache_clear()
    assert hits, "the source has changed: plant it anew"
    assert max(ratios) > 1, ratios


def test_gradients_of_final_windows_may_lie_anywhere() -> None:
    x, taps, dout = torch.randn(2, 9, 64), torch.randn(64, 4), torch.randn(2, 9, 64)
    dfinal = torch.randn(2 * 3 * 64 + 1)[1:].view(2, 3, 64)
    buffers = BackwardBuffers(torch.empty_like(x), None, None, None)
    launches, _ = prepare_backward(
        dout, x, taps, None, None, None, dfinal, buffers, activation=None, ordered=True, multiprocessors=4
    )
    chosen: Any = launches[0].variant
    assert chosen.vec == 1
