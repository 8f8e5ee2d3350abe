"""Step metadata: fixed addresses, refilled in place, padded to buckets, refused when wrong."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import serving_conv
from serving_conv import ContractError
from serving_conv.step import Checkpoint, StepArguments, StepMetadata


def contents(step: StepArguments) -> dict[str, list[Any]]:
    return {
        "cu_seqlens": step.cu_seqlens.tolist(),
        "slots": step.slots.tolist(),
        "has_initial_state": step.has_initial_state.tolist(),
        "num_accepted_tokens": step.num_accepted_tokens.tolist(),
    }


def test_fill(device: torch.device) -> None:
    step = StepMetadata(8, device).fill([3, 1, 0], [5, 2, 7], [True, False, True], [1, 4, 2])
    assert contents(step) == {
        "cu_seqlens": [0, 3, 4, 4],
        "slots": [5, 2, 7],
        "has_initial_state": [True, False, True],
        "num_accepted_tokens": [1, 4, 2],
    }
    assert step.rows == 4
    for tensor in (step.cu_seqlens, step.slots, step.num_accepted_tokens):
        assert tensor.dtype == torch.int32
        assert tensor.device == device
        assert tensor.is_contiguous()
    assert step.has_initial_state.dtype == torch.bool


def test_counts_default_to_one(device: torch.device) -> None:
    assert StepMetadata(4, device).fill([1, 1], [0, 1], [True, True]).num_accepted_tokens.tolist() == [1, 1]


@pytest.mark.parametrize("pad", [-1, 0, 12])
def test_bucket_is_padded_with_empty_sequences(pad: int, device: torch.device) -> None:
    step = StepMetadata(6, device, pad_slot_id=pad).fill([2, 1], [3, 4], [True, True], [2, 3], bucket=5)
    assert contents(step) == {
        "cu_seqlens": [0, 2, 3, 3, 3, 3],
        "slots": [3, 4, pad, pad, pad],
        "has_initial_state": [True, True, False, False, False],
        "num_accepted_tokens": [2, 3, 1, 1, 1],
    }
    assert step.rows == 3


def test_nothing_is_stale_after_a_larger_step(device: torch.device) -> None:
    metadata = StepMetadata(6, device)
    metadata.fill([7] * 6, [9] * 6, [True] * 6, [4] * 6)
    step = metadata.fill([1], [2], [False], bucket=6)
    assert contents(step) == {
        "cu_seqlens": [0, 1, 1, 1, 1, 1, 1],
        "slots": [2, -1, -1, -1, -1, -1],
        "has_initial_state": [False] * 6,
        "num_accepted_tokens": [1] * 6,
    }


def test_no_sequences(device: torch.device) -> None:
    metadata = StepMetadata(4, device)
    assert contents(metadata.fill([], [], []))["cu_seqlens"] == [0]
    step = metadata.fill([], [], [], bucket=3)
    assert step.cu_seqlens.tolist() == [0, 0, 0, 0]
    assert step.slots.tolist() == [-1, -1, -1]
    assert step.rows == 0


@given(steps=st.lists(st.lists(st.integers(0, 9), max_size=12), min_size=1, max_size=6), data=st.data())
def test_addresses_never_change(steps: list[list[int]], data: st.DataObject, device: torch.device) -> None:
    metadata = StepMetadata(12, device)
    names = ("cu_seqlens", "slots", "has_initial_state", "num_accepted_tokens")
    first = metadata.fill([1] * 12, list(range(12)), [True] * 12)
    addresses = {name: getattr(first, name).data_ptr() for name in names}
    for lengths in steps:
        n = len(lengths)
        slots = data.draw(st.lists(st.integers(-1, 1000), min_size=n, max_size=n))
        flags = data.draw(st.lists(st.booleans(), min_size=n, max_size=n))
        counts = data.draw(st.lists(st.integers(1, 9), min_size=n, max_size=n))
        step = metadata.fill(lengths, slots, flags, counts)
        assert contents(step) == {
            "cu_seqlens": [sum(lengths[:i]) for i in range(n + 1)],
            "slots": slots,
            "has_initial_state": flags,
            "num_accepted_tokens": counts,
        }
        for name in names:
            assert n == 0 or getattr(step, name).data_ptr() == addresses[name]


def test_the_entries_take_it(device: torch.device) -> None:
    # A decode step padded to a bucket, as a captured graph runs it: padded rows are zero, no slot is touched.
    metadata = StepMetadata(8, device)
    pool = torch.zeros(5, 2, 3, device=device)
    step = metadata.fill([1, 1], [3, 1], [True, True], bucket=8)
    x = torch.ones(8, 2, device=device)
    out = serving_conv.causal_conv1d_update(
        x, torch.ones(2, 4, device=device), pool, step.slots, has_initial_state=step.has_initial_state, activation=None
    )
    assert out[:, 0].tolist() == [1.0, 1.0, 0, 0, 0, 0, 0, 0]
    assert pool.sum((1, 2)).tolist() == [0, 2, 0, 2, 0]
    step = metadata.fill([2, 3], [3, 0], [True, False], bucket=4)
    out = serving_conv.causal_conv1d_fn(
        x[: step.rows],
        torch.ones(2, 4, device=device),
        pool,
        step.cu_seqlens,
        step.slots,
        step.has_initial_state,
        num_accepted_tokens=step.num_accepted_tokens,
        activation=None,
    )
    assert out[:, 0].tolist() == [2.0, 3.0, 1.0, 2.0, 3.0]


@pytest.mark.parametrize(
    ("arguments", "options", "name"),
    [
        (([1, 1], [0], [True, True]), {}, "slots"),
        (([1, 1], [0, 1], [True]), {}, "has_initial_state"),
        (([1, 1], [0, 1], [True, True], [1]), {}, "num_accepted_tokens"),
        (([1, -1], [0, 1], [True, True]), {}, "lengths"),
        (([1] * 5, [0] * 5, [True] * 5), {}, "lengths"),
        (([1, 1], [0, 1], [True, True]), {"bucket": 5}, "bucket"),
        (([1, 1], [0, 1], [True, True]), {"bucket": 1}, "bucket"),
        (([1, 1], [0, 1], [True, True]), {"bucket": -1}, "bucket"),
        (([1, 1], [0, 2**31], [True, True]), {}, "slots"),
        (([1, 1], [0, -(2**31) - 1], [True, True]), {}, "slots"),
        (([1, 1], [0, 1], [True, True], [1, 2**31]), {}, "num_accepted_tokens"),
        (([2**31 - 1, 1], [0, 1], [True, True]), {}, "lengths"),
        (([2**31], [0], [True]), {}, "lengths"),
    ],
)
def test_refused(arguments: tuple[Any, ...], options: dict[str, int], name: str, device: torch.device) -> None:
    metadata = StepMetadata(4, device)
    before = metadata.fill([2, 1], [3, 2], [True, False], [2, 1])
    kept = contents(before)
    with pytest.raises(ContractError) as caught:
        metadata.fill(*arguments, **options)
    assert caught.value.argument == name
    assert contents(before) == kept, "the last step's arguments changed"


def test_groups_have_slots_of_their_own(device: torch.device) -> None:
    metadata = StepMetadata(4, device, groups=2, pad_slot_id=0)
    step = metadata.fill([2, 1], [[5, 6], [7, 8]], [True, False], bucket=3)
    assert [slots.tolist() for slots in step.group_slots] == [[5, 6, 0], [7, 8, 0]]
    assert step.slots is step.group_slots[0]
    assert step.keywords(1)["cache_indices"] is step.group_slots[1]
    assert step.keywords(1)["cu_seqlens"] is step.keywords(0)["cu_seqlens"]


def test_drafts(device: torch.device) -> None:
    metadata = StepMetadata(4, device, drafts=True)
    step = metadata.fill([2, 1], [5, 6], [True, True], speculative=[True, False], bucket=4)
    assert step.speculative is not None
    assert step.speculative.tolist() == [True, False, False, False]
    step = metadata.fill([1, 1, 1], [5, 6, 7], [True] * 3)
    assert step.speculative is not None
    assert step.speculative.tolist() == [False] * 3
    assert StepMetadata(4, device).fill([1], [5], [True]).keywords()["speculative"] is None


def test_checkpoints(device: torch.device) -> None:
    metadata = StepMetadata(4, device, groups=2, max_checkpoints=5)
    given = [
        Checkpoint(2, 6, (14, 24)),
        Checkpoint(0, 3, (11, 21)),
        Checkpoint(2, 4, (13, 23)),
        Checkpoint(0, 1, (10, 20)),
    ]
    step = metadata.fill([3, 2, 6], [[1, 2, 3], [4, 5, 6]], [True] * 3, checkpoints=given, bucket=4)
    assert step.checkpoint_offsets is not None
    assert step.checkpoint_tokens is not None
    assert step.checkpoint_offsets.tolist() == [0, 2, 2, 4, 4]
    assert step.checkpoint_tokens.tolist()[:4] == [1, 3, 4, 6]
    assert [slots.tolist()[:4] for slots in step.group_checkpoint_slots] == [[10, 11, 13, 14], [20, 21, 23, 24]]
    assert step.keywords(1)["checkpoint_slots"] is step.group_checkpoint_slots[1]
    step = metadata.fill([3, 2], [[1, 2], [4, 5]], [True] * 2, bucket=4)
    assert step.checkpoint_offsets is not None
    assert step.checkpoint_offsets.tolist() == [0] * 5, "the last step's are still named"
    assert StepMetadata(4, device).fill([1], [5], [True]).keywords()["checkpoint_tokens"] is None


@pytest.mark.parametrize(
    ("built", "options", "name"),
    [
        ({}, {"speculative": [True, False]}, "speculative"),
        ({"drafts": True}, {"speculative": [True]}, "speculative"),
        ({}, {"checkpoints": [Checkpoint(0, 1, 3)]}, "checkpoints"),
        ({"max_checkpoints": 1}, {"checkpoints": [Checkpoint(0, 1, 3), Checkpoint(1, 1, 4)]}, "checkpoints"),
        ({"max_checkpoints": 1}, {"checkpoints": [Checkpoint(2, 1, 3)]}, "checkpoints"),
        ({"max_checkpoints": 1}, {"checkpoints": [Checkpoint(-1, 1, 3)]}, "checkpoints"),
        ({"max_checkpoints": 1}, {"checkpoints": [Checkpoint(0, 1, (3, 4))]}, "checkpoints"),
        ({"max_checkpoints": 1}, {"checkpoints": [Checkpoint(0, 2**31, 3)]}, "checkpoints"),
        ({"max_checkpoints": 1}, {"checkpoints": [Checkpoint(0, 1, 2**31)]}, "checkpoints"),
        ({"groups": 2}, {}, "slots"),
        ({"groups": 3}, {}, "slots"),
    ],
)
def test_refused_beyond_the_plain(
    built: dict[str, Any], options: dict[str, Any], name: str, device: torch.device
) -> None:
    metadata = StepMetadata(4, device, **built)
    # Two numbers are two slots of one group, and no list for each of two groups.
    slots: Any = [[0, 1], [2]] if built.get("groups") == 2 else [0, 1]
    with pytest.raises(ContractError) as caught:
        metadata.fill([1, 1], slots, [True, True], **options)
    assert caught.value.argument == name


@pytest.mark.parametrize("bucket", [1, 4])
def test_a_view_is_what_steps_fill(bucket: int, device: torch.device) -> None:
    metadata = StepMetadata(4, device, drafts=True, max_checkpoints=2)
    before = metadata.view(bucket, 9)
    after = metadata.fill([1], [3], [True], bucket=bucket)
    assert before.rows == 9
    for name, value in before.keywords().items():
        assert value is after.keywords()[name], name


@pytest.mark.parametrize("bucket", [0, 5])
def test_a_view_beyond_the_capacity(bucket: int) -> None:
    with pytest.raises(ContractError, match="bucket"):
        StepMetadata(4).view(bucket, 1)


@pytest.mark.parametrize(("name", "size"), [("groups", 0), ("max_checkpoints", -1)])
def test_other_capacities(name: str, size: int) -> None:
    with pytest.raises(ContractError, match=name):
        StepMetadata(4, **{name: size})  # type: ignore[arg-type]


def test_arrays_are_taken_as_they_are(device: torch.device) -> None:
    metadata = StepMetadata(4, device)
    for kind in (np.int32, np.int64):
        step = metadata.fill(
            np.array([2, 1], kind), np.array([3, 2], kind), np.array([True, False]), np.array([1, 2], kind)
        )
        assert contents(step)["cu_seqlens"] == [0, 2, 3]
        assert contents(step)["num_accepted_tokens"] == [1, 2]
    with pytest.raises(ContractError, match="slots"):
        metadata.fill(np.array([1]), np.array([2**31]), np.array([True]))
    with pytest.raises(ContractError, match="slots"):
        metadata.fill(np.array([1]), np.array([1.0]), np.array([True]))


@pytest.mark.parametrize("capacity", [0, -1])
def test_capacity_below_one(capacity: int) -> None:
    with pytest.raises(ContractError, match="max_sequences"):
        StepMetadata(capacity)


@pytest.mark.parametrize("pad", [2**31, -(2**31) - 1])
def test_sentinel_outside_int32(pad: int) -> None:
    with pytest.raises(ContractError, match="pad_slot_id"):
        StepMetadata(4, pad_slot_id=pad)


@pytest.mark.gpu
def test_fill_does_not_synchronise() -> None:
    metadata = StepMetadata(8, "cuda")
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(5):
            step = metadata.fill([1, 2], [3, 4], [True, True])
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert step.slots.tolist() == [3, 4]
