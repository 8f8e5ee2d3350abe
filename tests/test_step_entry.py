"""A whole step in one launch gives the bits of the separate entries: outputs, every byte of the pool, checkpoints."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import serving_conv
from serving_conv.backends import ReferenceBackend
from serving_conv.faults import DeviceFault

NAN = float("nan")


@dataclass(frozen=True)
class Member:
    """One sequence of a step.

    Attributes:
        tokens: in this step.
        history: the window is in the slot.
        accepted: tokens of the previous step that were kept.
        drafts: the tokens are drafts.
        padding: its slot is the sentinel.
        checkpoints: token counts after which the window is kept elsewhere.
    """

    tokens: int
    history: bool = True
    accepted: int = 1
    drafts: bool = False
    padding: bool = False
    checkpoints: tuple[int, ...] = ()


@dataclass(frozen=True)
class Step:
    """A step and its pool."""

    members: tuple[Member, ...]
    channels: int = 70
    width: int = 4
    drafts: int = 3
    dtype: torch.dtype = torch.float32
    state: torch.dtype = torch.float32
    layout: str = "channels"
    activation: str | None = "silu"
    pad_slot_id: int = -1
    tail: int = 2


MIXED = Step(
    (
        Member(5, history=False),
        Member(1),
        Member(4, accepted=2, drafts=True),
        Member(40, checkpoints=(1, 2, 3, 16, 33, 40)),
        Member(1, accepted=3, drafts=True, checkpoints=(1,)),
        Member(2, padding=True),
        Member(0),
        Member(3, accepted=4, drafts=True, checkpoints=(2, 3)),
        *[Member(1)] * 40,
        Member(2, history=False, drafts=True),
        Member(1, history=False),
        Member(17, accepted=2),
    )
)
ROWS = {
    "base": MIXED,
    "two taps": replace(MIXED, width=2),
    "eight taps": replace(MIXED, width=8),
    "positions": replace(MIXED, layout="positions"),
    "strided": replace(MIXED, layout="strided"),
    "vectors": replace(MIXED, channels=256),
    "half": replace(MIXED, dtype=torch.float16, state=torch.float16, channels=64),
    "brain": replace(MIXED, dtype=torch.bfloat16, state=torch.bfloat16, channels=64),
    "wide state": replace(MIXED, dtype=torch.bfloat16),
    "linear": replace(MIXED, activation=None),
    "null block": replace(MIXED, pad_slot_id=0),
    "all decode": replace(MIXED, members=(Member(1),) * 50),
    "all drafts": replace(MIXED, members=(Member(4, drafts=True, accepted=2),) * 12),
    "one chunk": replace(MIXED, members=(Member(100, checkpoints=(64, 99)),)),
}


def play(step: Step, device: torch.device) -> dict[str, Any]:
    """Tensors of a step: live slots are drawn without repetition, all that must not be read is NaN."""
    generator = torch.Generator().manual_seed(7)
    members = step.members
    checkpoints = [(i, t) for i, m in enumerate(members) for t in m.checkpoints]
    positions = step.width - 1 + step.drafts
    slots = len(members) + len(checkpoints) + 3
    base = torch.full((slots, positions, step.channels), NAN)
    numbers = (torch.randperm(slots - 1, generator=generator) + 1)[: len(members) + len(checkpoints)]
    where = torch.where(torch.tensor([m.padding for m in members]), step.pad_slot_id, numbers[: len(members)])
    for member, slot in zip(members, where.tolist(), strict=True):
        if member.history and not member.padding:
            window = torch.randn(step.width - 1, step.channels, generator=generator)
            base[slot, member.accepted - 1 : member.accepted - 1 + step.width - 1] = window
    base = base.to(step.state).to(device)
    if step.layout == "channels":
        pool = base.transpose(1, 2)
    elif step.layout == "positions":
        pool = base.transpose(1, 2).contiguous()
    else:
        pool = base.new_full((slots, step.channels, positions + 2), NAN)[:, :, :positions]
        pool.copy_(base.transpose(1, 2))
    rows = sum(m.tokens for m in members) + step.tail
    counts = [sum(i == j for j, _ in checkpoints) for i in range(len(members))]

    def int32(values: Any) -> Tensor:
        return torch.tensor(list(values), dtype=torch.int32, device=device)

    x = torch.randn(rows, step.channels, generator=generator).to(step.dtype).to(device)
    x[rows - step.tail :] = NAN
    return {
        "x": x,
        "weight": torch.randn(step.channels, step.width, generator=generator).to(step.dtype).to(device),
        "conv_state": pool,
        "cu_seqlens": int32([0, *accumulate(m.tokens for m in members)]),
        "cache_indices": where.to(torch.int32).to(device),
        "has_initial_state": torch.tensor([m.history for m in members], device=device),
        "num_accepted_tokens": int32(m.accepted for m in members),
        "speculative": torch.tensor([m.drafts for m in members], device=device),
        "checkpoint_offsets": int32([0, *accumulate(counts)]),
        "checkpoint_tokens": int32(t for _, t in checkpoints),
        "checkpoint_slots": numbers[len(members) :].to(torch.int32).to(device),
        "bias": torch.randn(step.channels, generator=generator).to(step.dtype).to(device),
        "activation": step.activation,
        "pad_slot_id": step.pad_slot_id,
    }


def copy_of(pool: Tensor) -> Tensor:
    """A copy of a pool's whole storage, seen with the same strides."""
    storage = torch.empty(0, dtype=pool.dtype, device=pool.device).set_(pool.untyped_storage()).clone()
    return storage.as_strided(pool.shape, pool.stride(), pool.storage_offset())


def bits(tensor: Tensor) -> Tensor:
    """The whole storage as bytes: NaN equals itself."""
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())


def one(arguments: dict[str, Any], index: int, tokens: int | None = None) -> dict[str, Any]:
    """The call of one sequence alone, or of its first tokens."""
    begin, end = arguments["cu_seqlens"][index : index + 2].tolist()
    end = end if tokens is None else begin + tokens
    shared = ("weight", "conv_state", "bias", "activation", "pad_slot_id")
    return {
        **{name: arguments[name] for name in shared},
        "x": arguments["x"][begin:end],
        "cu_seqlens": torch.tensor([0, end - begin], dtype=torch.int32, device=arguments["x"].device),
        "has_initial_state": arguments["has_initial_state"][index : index + 1].clone(),
        "num_accepted_tokens": arguments["num_accepted_tokens"][index : index + 1].clone(),
    }


def apart(step: Step, arguments: dict[str, Any], pool: Tensor) -> Tensor:
    """The step by the separate entries, one call a sequence; checkpoints by calls that end on their token."""
    arguments = {**arguments, "conv_state": pool}
    out = torch.full_like(arguments["x"], 77.0)
    checkpoint = 0
    for index, member in enumerate(step.members):
        begin, end = arguments["cu_seqlens"][index : index + 2].tolist()
        slot = arguments["cache_indices"][index : index + 1].clone()
        for tokens in member.checkpoints:
            scratch = copy_of(pool)
            call = {**one(arguments, index, tokens), "conv_state": scratch}
            serving_conv.causal_conv1d_fn(**call, cache_indices=slot)
            to = int(arguments["checkpoint_slots"][checkpoint])
            pool[to, :, : step.width - 1] = scratch[int(slot), :, : step.width - 1]
            checkpoint += 1
        call = one(arguments, index)
        if member.drafts:
            result = serving_conv.causal_conv1d_update(**call, state_indices=slot)
        else:
            result = serving_conv.causal_conv1d_fn(**call, cache_indices=slot)
        out[begin:end] = result
    return out


def check(step: Step, device: torch.device) -> None:
    arguments = play(step, device)
    pools = [copy_of(arguments["conv_state"]) for _ in range(2)]
    serving_conv.clear_device_fault(device)
    wanted = apart(step, arguments, pools[0])
    out = torch.full_like(arguments["x"], 77.0)
    got = serving_conv.causal_conv1d_step(**{**arguments, "conv_state": pools[1]}, out=out)
    assert got is out
    assert torch.equal(bits(got), bits(wanted))
    assert torch.equal(bits(pools[1]), bits(pools[0]))
    assert serving_conv.device_fault(device) is DeviceFault.NONE
    # And the reference, whatever the backend: slots bit for bit; without SiLU outputs too.
    pool, out = copy_of(arguments["conv_state"]), torch.full_like(arguments["x"], 77.0)
    ReferenceBackend().step(**{**arguments, "conv_state": pool, "out": out})
    assert torch.equal(bits(pool), bits(pools[0]))
    torch.testing.assert_close(got, out, atol=2e-2 if step.dtype is torch.bfloat16 else 5e-3, rtol=1e-2)
    if step.activation is None:
        assert torch.equal(bits(got), bits(out))


@pytest.mark.parametrize("name", ROWS)
def test_a_mixed_step_is_the_separate_calls(name: str, device: torch.device) -> None:
    check(ROWS[name], device)


def test_plain_arguments_are_prefill(device: torch.device) -> None:
    step = replace(MIXED, members=tuple(replace(m, drafts=False, checkpoints=()) for m in MIXED.members))
    arguments = play(step, device)
    for name in ("speculative", "checkpoint_offsets", "checkpoint_tokens", "checkpoint_slots"):
        del arguments[name]
    pools = [copy_of(arguments["conv_state"]) for _ in range(2)]
    rows = int(arguments["cu_seqlens"][-1])
    got = serving_conv.causal_conv1d_step(**{**arguments, "conv_state": pools[0]})[:rows]
    want = serving_conv.causal_conv1d_fn(**{**arguments, "conv_state": pools[1]})[:rows]
    assert torch.equal(got, want)
    assert torch.equal(bits(pools[0]), bits(pools[1]))


member = st.builds(
    Member,
    tokens=st.one_of(st.integers(0, 4), st.integers(5, 40)),
    history=st.booleans(),
    accepted=st.integers(1, 4),
    drafts=st.just(False),
    padding=st.sampled_from([False, False, False, True]),
)
draft = st.builds(
    Member, tokens=st.integers(1, 4), history=st.booleans(), accepted=st.integers(1, 4), drafts=st.just(True)
)


@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_any_mix(data: st.DataObject, device: torch.device) -> None:
    members = data.draw(st.lists(st.one_of(member, draft, st.just(Member(1))), min_size=1, max_size=24))
    drawn = []
    for m in members:
        counts: list[int] = []
        if m.tokens and not m.padding:
            counts = sorted(data.draw(st.sets(st.integers(1, m.tokens), max_size=2)))
        drawn.append(replace(m, checkpoints=tuple(counts)))
    check(replace(MIXED, members=tuple(drawn), channels=16, tail=data.draw(st.integers(0, 3))), device)


def test_more_drafts_than_fit(device: torch.device) -> None:
    step = replace(MIXED, members=(Member(9, drafts=True), Member(30, drafts=True), Member(2, drafts=True)))
    arguments = play(step, device)
    pools = [copy_of(arguments["conv_state"]) for _ in range(2)]
    wanted = apart(step, arguments, pools[0])
    serving_conv.clear_device_fault(device)
    got = serving_conv.causal_conv1d_step(**{**arguments, "conv_state": pools[1]})
    rows = int(arguments["cu_seqlens"][-1])
    assert torch.equal(got[:rows], wanted[:rows])
    assert torch.equal(bits(pools[0]), bits(pools[1]))
    assert serving_conv.device_fault(device) is DeviceFault.STATE_TRUNCATED
    serving_conv.clear_device_fault(device)


@pytest.mark.parametrize(
    ("tokens", "slot", "fault"),
    [
        (0, 3, DeviceFault.CHECKPOINT),
        (-(2**31), 3, DeviceFault.CHECKPOINT),
        (6, 3, DeviceFault.CHECKPOINT),
        (2**31 - 1, 3, DeviceFault.CHECKPOINT),
        (2, 4, DeviceFault.SLOT),
        (4, 2**31 - 1, DeviceFault.SLOT),
        (4, -2, DeviceFault.SLOT),
        (4, -1, DeviceFault.NONE),
        (99, -1, DeviceFault.NONE),
    ],
)
def test_bad_checkpoints_are_not_written(tokens: int, slot: int, fault: DeviceFault, device: torch.device) -> None:
    arguments = play(replace(MIXED, members=(Member(5, checkpoints=(1,)),)), device)
    slots = arguments["conv_state"][:4]
    own = int(arguments["cache_indices"][0]) % 3
    arguments |= {"conv_state": slots, "has_initial_state": None, "num_accepted_tokens": None}
    arguments["cache_indices"].fill_(own)
    arguments["checkpoint_tokens"].fill_(tokens)
    arguments["checkpoint_slots"].fill_(slot)
    before = copy_of(slots)
    serving_conv.clear_device_fault(device)
    serving_conv.causal_conv1d_step(**arguments)
    assert serving_conv.device_fault(device) is fault
    others = [i for i in range(4) if i != own]
    assert torch.equal(slots[others].isnan(), before[others].isnan()), "a checkpoint was written"
    assert not slots[own, :, :3].isnan().any()
    serving_conv.clear_device_fault(device)


@pytest.mark.parametrize("offsets", [(0, 5), (-3, 1), (0, 2**31 - 1), (-(2**31), 2**31 - 1), (1, 0), (5, 9)])
def test_hostile_checkpoint_offsets(offsets: tuple[int, int], device: torch.device) -> None:
    arguments = play(replace(MIXED, members=(Member(5, checkpoints=(1,)),)), device)
    arguments["checkpoint_offsets"].copy_(torch.tensor(offsets, dtype=torch.int32))
    pool = copy_of(arguments["conv_state"])
    want = serving_conv.causal_conv1d_step(
        **{**arguments, "conv_state": pool}
        | dict.fromkeys(("checkpoint_offsets", "checkpoint_tokens", "checkpoint_slots"))
    )
    got = serving_conv.causal_conv1d_step(**arguments)
    rows = int(arguments["cu_seqlens"][-1])
    assert torch.equal(got[:rows], want[:rows])
    spared = [i for i in range(pool.shape[0]) if i != int(arguments["checkpoint_slots"][0])]
    assert torch.equal(arguments["conv_state"][spared].nan_to_num(7.0), pool[spared].nan_to_num(7.0))
