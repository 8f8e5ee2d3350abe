"""A sequence cut over 2, 3 and 4 gloo processes: hand-checked digits, and parity with the run on one device."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.gradients import Case, exact_and_bounds, worst
from support.rank_calls import (
    agree_after_another_start,
    agree_in_turn,
    agree_with_tensors_elsewhere,
    differentiate_twice,
    in_parts,
    shapes_on_one_rank,
    under_any_order_of_blocks,
)
from support.ranks import RankError, Ranks
from support.shards import (
    Problem,
    checkpointed,
    compiled,
    digits,
    joined,
    leave,
    leave_without_a_word,
    on_one_device,
    on_rank,
    problem,
    sleep,
    under_autocast,
    wrong_call,
)

import serving_conv
from serving_conv.training import agreement
from serving_conv.training.halo import Neighbours

Groups = Callable[[int], Ranks]


def shards(group: Ranks, given: Problem) -> dict[str, torch.Tensor]:
    return joined([answers[0] for answers in group.call(on_rank, given)])


# --- hand-checked ---------------------------------------------------------------------------------------------


def test_kit_8_one_token_a_rank(ranks: Groups) -> None:
    answers = ranks(4).call(digits, [1.0, 2, 3, 4], [1, 1, 1, 1], None)
    assert [out for out, _ in answers] == [[1000], [2100], [3210], [4321]]
    assert [dx for _, dx in answers] == [[1111], [1110], [1100], [1000]]


KIT_8 = {
    (37, 51, 40): [8765, 9876, 1987, 2198, 3219, 4321, 5432],
    (64, 64): [8765, 9876, 1987, 2000, 3200, 4320, 5432],
    (63, 65): [8765, 9876, 1000, 2100, 3210, 4321, 5432],
    (62, 1, 1, 64): [8765, 9000, 1000, 2000, 3200, 4320, 5432],
}


@pytest.mark.parametrize("documents", KIT_8, ids=str)
def test_kit_8_documents(documents: tuple[int, ...], ranks: Groups) -> None:
    tokens = [1.0 + i % 9 for i in range(128)]
    answers = ranks(2).call(digits, tokens, [64, 64], list(documents))
    assert [value for out, _ in answers for value in out][61:68] == KIT_8[documents]


# --- parity ---------------------------------------------------------------------------------------------------

CUTS: dict[str, dict[str, Any]] = {
    "long": {"rows": [9, 9, 9, 9]},
    "unequal": {"rows": [5, 8, 3, 7], "batches": 2},
    "one row": {"rows": [1, 1, 1, 1], "batches": 2},
    "two rows": {"rows": [2, 2, 2, 2]},
    "none": {"rows": [0, 0, 0, 0]},
    "short between long": {"rows": [6, 1, 0, 5]},
    "none before long": {"rows": [0, 0, 2, 9]},
    "eight taps over short shards": {"rows": [2, 2, 2, 2], "width": 8},
    "two taps": {"rows": [1, 4, 0, 3], "width": 2},
    "no bias": {"rows": [4, 4, 4, 4], "bias": False},
    "no activation": {"rows": [4, 4, 4, 4], "activation": None},
    "cut at the edges": {"rows": [9] * 4, "documents": [9, 9, 18]},
    "cut one before": {"rows": [9] * 4, "documents": [8, 9, 9, 10]},
    "cut one after": {"rows": [9] * 4, "documents": [10, 9, 9, 8]},
    "tiny documents at the edge": {"rows": [9] * 4, "documents": [7, 1, 1, 1, 1, 7, 2, 16]},
    "one document": {"rows": [4] * 4, "documents": [16]},
    "documents over short shards": {"rows": [2] * 4, "documents": [3, 4, 1]},
    "documents over single rows": {"rows": [1] * 4, "documents": [3, 1]},
    "shards as long as the halo": {"rows": [3] * 4, "documents": [2, 5, 5]},
    "eight taps, documents": {"rows": [8] * 4, "width": 8, "documents": [7, 2, 6, 12, 5]},
    "eight taps, documents over short shards": {"rows": [3] * 4, "width": 8, "documents": [1, 8, 3]},
}


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("size", [2, 3, 4])
def test_float64_parity(size: int, cut: str, ranks: Groups) -> None:
    changes = dict(CUTS[cut])
    # Fewer ranks take the last shards together, so that edges stay where they are.
    rows = changes.pop("rows")
    if "documents" in changes:
        total = sum(rows)
        if total % size:
            changes["documents"] = [*changes["documents"], size - total % size]
            total += size - total % size
        rows = [total // size] * size
    else:
        rows = [*rows[: size - 1], sum(rows[size - 1 :])]
    given = problem(rows, **changes)
    got, want = shards(ranks(size), given), on_one_device(given)
    assert got.keys() == want.keys()
    for name in want:
        torch.testing.assert_close(
            got[name], want[name], rtol=1e-10, atol=1e-10, msg=lambda text, n=name: f"{n}: {text}"
        )


@pytest.mark.parametrize("cut", ["unequal", "one row", "cut one before", "documents over short shards"])
def test_float32_parity(cut: str, ranks: Groups) -> None:
    given = problem(**CUTS[cut], dtype=torch.float32)
    got, want = shards(ranks(4), given), on_one_device(given)
    assert torch.equal(got["out"], want["out"]), "outputs are the same bits however the sequence is cut"
    for name in want:
        torch.testing.assert_close(got[name].float(), want[name], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("cut", ["unequal", "two rows", "tiny documents at the edge"])
def test_bfloat16_within_the_derived_bound(cut: str, ranks: Groups) -> None:
    given = problem(**CUTS[cut], dtype=torch.bfloat16)
    answers = [each[0] for each in ranks(4).call(on_rank, given)]
    got, want = joined(answers), on_one_device(given)
    assert torch.equal(got["out"], want["out"])
    offsets = None
    if given["seq_idx"] is not None:
        numbers = given["seq_idx"][0]
        offsets = torch.tensor([0, *(numbers.diff().nonzero()[:, 0] + 1).tolist(), numbers.shape[0]]).int()
    case = Case(given["dout"], given["x"], given["weight"], given["bias"], None, offsets, None, given["activation"])
    exact, bounds = exact_and_bounds(case)
    assert worst(got["dx"], exact.dx, bounds.dx) <= 1
    # Each rank rounds its part of the sum once, so the total may be off by half a step of every part.
    for name in ("dweight", "dbias"):
        parts = torch.stack([answer[name].double() for answer in answers])
        rounding = (parts.abs() * 2.0**-8).sum(0)
        error = (got[name] - getattr(exact, name)).abs()
        assert bool((error <= getattr(bounds, name) + rounding).all()), name


@pytest.mark.parametrize("rows", [9, 2], ids=["long", "short"])
def test_documents_are_isolated(rows: int, ranks: Groups) -> None:
    documents = [10, 7, 12, 7] if rows == 9 else [3, 4, 1]
    given = problem([rows] * 4, documents=documents, dtype=torch.float32)
    before = shards(ranks(4), given)
    begin = 0
    for length in documents:
        inside = slice(begin, begin + length)
        moved = dict(given, x=given["x"].clone(), dout=given["dout"].clone())
        moved["x"][:, inside] += 1
        moved["dout"][:, inside] += 1
        after = shards(ranks(4), moved)
        outside = torch.ones(rows * 4, dtype=torch.bool)
        outside[inside] = False
        for name in ("out", "dx"):
            assert float((after[name] - before[name])[:, outside].abs().max()) == 0
            assert bool((after[name] - before[name])[:, inside].any())
        begin += length


# --- reproducibility, memory, compilers -------------------------------------------------------------------------


@pytest.fixture(scope="module")
def kernel_ranks() -> Iterator[Ranks]:
    """Two processes that run the kernels' source, compiled for the CPU."""
    group = Ranks(2, SERVING_CONV_BACKEND="host")
    yield group
    group.close()


def test_twenty_repeats_are_the_same_bits(kernel_ranks: Ranks) -> None:
    given = problem([65, 65], documents=[60, 30, 40], dtype=torch.float32, activation=None)
    # Magnitudes far apart, so that another order shows; the fast sum must then differ, or this test proves nothing.
    given["dout"] *= torch.logspace(-6, 6, 130)[torch.randperm(130)][None, :, None]
    for answers in kernel_ranks.call(under_any_order_of_blocks, given, 20, True):
        for again in answers[1:]:
            assert all(torch.equal(again[name], answers[0][name]) for name in again)
    for first, turned in kernel_ranks.call(under_any_order_of_blocks, given, 2, False):
        assert torch.equal(first["out"], turned["out"]) and torch.equal(first["dx"], turned["dx"])
        assert not torch.equal(first["dweight"], turned["dweight"])
        assert not torch.equal(first["dbias"], turned["dbias"])


def test_activation_checkpointing_gives_the_same_bits(ranks: Groups) -> None:
    given = problem([5, 1, 4], dtype=torch.float32)
    for plain, again in ranks(3).call(checkpointed, given):
        assert all(torch.equal(plain[name], again[name]) for name in plain)


def test_autocast(ranks: Groups) -> None:
    given = problem([5, 4], dtype=torch.float32)
    for types in ranks(2).call(under_autocast, given):
        assert types == {"out": torch.bfloat16, "dx": torch.bfloat16, "dweight": torch.float32, "dbias": torch.float32}


def test_compiled_without_a_break(ranks: Groups) -> None:
    given = problem([5, 4], documents=None, dtype=torch.float32)
    for plain, fast in ranks(2).call(compiled, given):
        assert all(torch.equal(plain[name], fast[name]) for name in plain)


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("parts", [[[1, 3], [0, 2]], [[1, 2, 3], [0]]], ids=str)
def test_parts_of_the_processes(parts: list[list[int]], compiled: bool, ranks: Groups) -> None:
    # Ranks of a part count from 0, and lie apart; each part has its own problem, and all run at once.
    problems = []
    for number, members in enumerate(parts):
        documents = [7, 2, 5 * len(members) - 9] if number == 0 else None
        problems.append(problem([5] * len(members), documents=documents, seed=number))
    answers = ranks(4).call(in_parts, parts, problems, compiled)
    for members, given in zip(parts, problems, strict=True):
        got, want = joined([answers[rank] for rank in members]), on_one_device(given)
        for name in want:
            torch.testing.assert_close(got[name], want[name], rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("how", ["fake", "compiled"])
def test_a_second_derivative_is_refused_by_the_operator(how: str, ranks: Groups) -> None:
    for answer in ranks(2).try_call(differentiate_twice, how):
        assert isinstance(answer, RankError)
        assert "BackendError" in answer.kind and "first derivatives" in answer.text


def test_a_fake_call_waits_for_nobody(ranks: Groups) -> None:
    assert ranks(2).call(shapes_on_one_rank)[1] == [1, 5, 3]


# --- errors -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "what",
    [
        "global_seq_idx shape",
        "global_seq_idx type",
        "global_seq_idx device",
        "two batches packed",
        "activation",
        "taps",
        "float64 taps",
    ],
)
@pytest.mark.parametrize("where", ["everywhere", "on one rank"])
def test_an_error_is_a_value_error_on_every_rank(what: str, where: str, ranks: Groups) -> None:
    group = ranks(3)
    begun = time.monotonic()
    answers = group.try_call(wrong_call, what, None if where == "everywhere" else 1)
    assert time.monotonic() - begun < 20
    for answer in answers:
        assert isinstance(answer, RankError)
        assert "ValueError" in answer.kind and "ContractError" in answer.kind
    # The group is in step afterwards.
    given = problem([3, 3, 3])
    torch.testing.assert_close(shards(group, given)["out"], on_one_device(given)["out"])


@pytest.mark.parametrize("what", ["other batches", "other channels", "other type", "packed on one"])
def test_calls_that_differ_are_an_error_on_every_rank(what: str, ranks: Groups) -> None:
    for answer in ranks(3).try_call(wrong_call, what, 1):
        assert isinstance(answer, RankError)
        assert "ValueError" in answer.kind and "every rank" in answer.text


def test_a_failed_agreement_is_none(ranks: Groups) -> None:
    answers = ranks(3).call(agree_in_turn)
    for rank, (differ, second, good, later) in enumerate(answers):
        assert "batches that differ" in differ and "[1, 2, 1]" in differ
        assert ("mine" if rank == 1 else "on rank 1") in second
        assert good == "agreed"
        # Once all have agreed, only the rank itself sees its error.
        assert ("mine" in later) if rank == 1 else (later == "agreed")


def test_a_rank_whose_tensors_lie_elsewhere_is_an_error_and_no_deadlock() -> None:
    group = Ranks(3, timeout=10.0)
    try:
        for good, elsewhere in group.call(agree_with_tensors_elsewhere):
            assert good == "agreed" and "device of x" in elsewhere
    finally:
        group.close()


def test_a_new_group_of_an_old_name_has_not_agreed(tmp_path: Path) -> None:
    group = Ranks(2, timeout=60.0)
    try:
        answers = group.call(agree_after_another_start, str(tmp_path / "again"))
        assert [good for good, _ in answers] == ["agreed"] * 2
        assert "on rank 1" in answers[0][1] and "mine" in answers[1][1]
    finally:
        group.close()


class OfGpus:
    """A process group that carries tensors of GPUs alone, as NCCL's do."""

    group_name = "gpus"
    bound_device_id = torch.device("cuda", 2)

    def rank(self) -> int:
        return 0

    def size(self) -> int:
        return 2

    def name(self) -> str:
        return "nccl"

    def _get_backend(self, device: torch.device) -> OfGpus:
        if device.type != "cuda":
            raise RuntimeError(f"No backend type associated with device type {device.type}")
        return self


def test_a_group_that_cannot_carry_x() -> None:
    group: Any = OfGpus()
    neighbours = Neighbours(group)
    assert not neighbours.host_takes_part
    assert neighbours.any_device(torch.device("cuda", 1)) == torch.device("cuda", 1), "where x is"
    assert neighbours.any_device(torch.device("cpu")) == torch.device("cuda", 2), "the group's own"
    agreement._agreed.add(group)  # so that nothing is exchanged
    with pytest.raises(serving_conv.ContractError) as caught:
        serving_conv.causal_conv1d_cp(torch.randn(1, 4, 6), torch.randn(6, 4), None, "silu", group)
    assert caught.value.argument == "x"
    for said in ("device cpu", "nccl", "cuda tensor", "move x"):
        assert said in str(caught.value)


@pytest.mark.parametrize("how", [leave, leave_without_a_word, sleep], ids=lambda how: how.__name__)
def test_a_rank_that_is_gone_is_an_error_and_no_deadlock(how: Callable[..., Any]) -> None:
    group = Ranks(3, timeout=5.0)
    try:
        given = problem([4, 4, 4])
        group.call(on_rank, given)
        begun = time.monotonic()
        for rank in (0, 2):
            group._pipes[rank].send((on_rank, (given,)))
        group._pipes[1].send((how, ()))
        for rank in (0, 2):
            assert group._pipes[rank].poll(60), "a deadlock"
            good, value = group._pipes[rank].recv()
            assert not good
            kinds, text, _ = value
            assert "CommunicationError" in kinds
            assert "timeout of 0:00:05" in text
        assert time.monotonic() - begun < 40
    finally:
        for process in group.processes:
            process.kill()
        group.close()
