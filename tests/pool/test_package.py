"""Owns the tests of slots in transit: round trips between pools, and cutting and joining by channel parts."""

from __future__ import annotations

import pickle
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from serving_conv import ContractError
from serving_conv.pool import ChannelPart, LayerState, SlotPackage, StatePool, cut_package, join_packages

pytestmark = pytest.mark.usefixtures("copies_by")

MAMBA = (ChannelPart("x", 16), ChannelPart("B", 8, groups=2), ChannelPart("C", 8, groups=2))
ATTENTION = (ChannelPart("q", 16, groups=8), ChannelPart("k", 8, groups=4), ChannelPart("v", 24, groups=4))
LAYERS = (LayerState(32, 4, torch.bfloat16), LayerState(32, 2, torch.float32), LayerState(32, 3, torch.float16))


def _package(parts: tuple[ChannelPart, ...] = MAMBA, slots: int = 3) -> SlotPackage:
    """Every value is its channel number (and so exact in every type), plus a sign for the slot."""
    channels = sum(part.channels for part in parts)
    package = SlotPackage.zeros(range(5, 5 + slots), [replace(layer, channels=channels) for layer in LAYERS])
    for window in package.windows():
        window.copy_(torch.arange(float(channels))[:, None] * torch.tensor([1.0, -1.0, 2.0])[:slots, None, None])
    return package


def _same(a: SlotPackage, b: SlotPackage) -> bool:
    return (a.tokens, a.layers) == (b.tokens, b.layers) and torch.equal(a.buffer, b.buffer)


def test_export_and_import_between_pools_of_other_layout_and_drafts() -> None:
    source = StatePool(5, LAYERS, draft_tokens=3)
    target = StatePool(4, LAYERS, layout="positions")
    for state in (*source.states, *target.states):
        state.fill_(float("nan"))
    plain, speculative, fresh = (source.take() for _ in range(3))
    assert plain is not None
    assert speculative is not None
    assert fresh is not None
    source.commit(plain, 7)
    source.commit(speculative, 4, accepted=3)
    for state in source.states:
        state[plain : speculative + 1] = torch.randn(2, *state.shape[1:])
    package = source.export([plain, speculative, fresh])
    assert package.tokens == (7, 3, 0)
    assert package.buffer.is_contiguous()
    slots = target.import_(package)
    assert slots is not None
    assert [(target.tokens(slot), target.accepted(slot)) for slot in slots] == [(7, 1), (3, 1), (0, 1)]
    for layer, old, new in zip(LAYERS, source.states, target.states, strict=True):
        taps = layer.width - 1
        assert torch.equal(new[slots[0], :, :taps], old[plain, :, :taps])
        assert torch.equal(new[slots[1], :, :taps], old[speculative, :, 2 : 2 + taps])
    assert _same(target.export(slots), package)
    # A slot without history is not read: its bytes in the buffer are zero, not what a former owner left.
    assert all(not window[2].any() for window in package.windows())


def test_import_is_all_or_nothing() -> None:
    source, target = StatePool(5, LAYERS), StatePool(4, LAYERS)
    slots = [source.take() for _ in range(3)]
    package = source.export([slot for slot in slots if slot is not None])
    taken = target.take()
    assert taken is not None
    target.commit(taken, 1)
    assert target.publish(taken, "key", 1)
    assert target.import_(package) is None
    assert target.counts() == (1, 1, 1, 1)
    target.free(taken)
    imported = target.import_(package)  # the checkpoint had to go
    assert imported is not None
    assert sorted(imported) == [1, 2, 3]
    assert target.counts() == (0, 3, 0, 1)
    assert target.import_(SlotPackage.zeros([], LAYERS)) == []


def test_import_refuses_other_layers() -> None:
    pool = StatePool(4, LAYERS)
    with pytest.raises(ContractError, match="cut or join it by parts"):
        pool.import_(cut_package(_package(), MAMBA, 0, 2))
    assert pool.counts() == (3, 0, 0, 1)


def test_a_package_survives_pickling_and_a_move_to_another_device() -> None:
    package = _package()
    assert _same(pickle.loads(pickle.dumps(package)), package)
    assert _same(package.to("cpu"), package)
    assert package.to("meta").buffer.device.type == "meta"


def test_every_layer_of_the_buffer_begins_aligned_for_its_type() -> None:
    layers = (LayerState(3, 2, torch.bfloat16), LayerState(1, 2), LayerState(1, 3, torch.float16))
    package = SlotPackage.zeros([1], layers)
    for value, window in enumerate(package.windows(), start=1):
        window.fill_(value)
    assert package.buffer.shape == (48,)
    assert [set(window.flatten().tolist()) for window in package.windows()] == [{1}, {2}, {3}]
    assert not package.buffer[6:16].any()


@pytest.mark.parametrize(
    "change",
    [
        {"tokens": (5, 6)},
        {"tokens": (5, 6, -7)},
        {"buffer": torch.zeros(1504)},
        {"buffer": torch.zeros(1503, dtype=torch.uint8)},
        {"buffer": torch.zeros(3008, dtype=torch.uint8)[::2]},
        {"buffer": torch.zeros(1600, dtype=torch.uint8)[8:1512]},
    ],
)
def test_a_package_that_does_not_fit_together_is_refused(change: dict[str, Any]) -> None:
    package = _package()
    assert package.buffer.shape == (1344,)
    with pytest.raises(ContractError):
        replace(package, **change)


@pytest.mark.parametrize(
    ("parts", "ranks"), [(MAMBA, 1), (MAMBA, 2), (MAMBA, 4), (MAMBA, 8), (ATTENTION, 4), (ATTENTION, 8)]
)
def test_cutting_and_joining_by_parts_is_a_round_trip(parts: tuple[ChannelPart, ...], ranks: int) -> None:
    package = _package(parts)
    shares = [cut_package(package, parts, rank, ranks) for rank in range(ranks)]
    assert len({share.layers for share in shares}) == 1
    assert _same(join_packages(shares, parts), package)


def test_each_part_is_shared_on_its_own_and_groups_are_replicated() -> None:
    package = _package()
    channels = [[int(c) for c in cut_package(package, MAMBA, rank, 4).window(1)[0, :, 0].tolist()] for rank in range(4)]
    groups = [[*range(16, 20), *range(24, 28)], [*range(20, 24), *range(28, 32)]]
    assert channels == [[*range(4 * rank, 4 * rank + 4), *groups[rank // 2]] for rank in range(4)]


def test_a_flat_cut_is_wrong() -> None:
    package = _package()
    right = cut_package(package, MAMBA, 0, 2).window(0)
    flat = cut_package(package, (ChannelPart("all", 32),), 0, 2).window(0)
    assert right.shape == flat.shape
    assert not torch.equal(right, flat)
    assert right[0, :, 0].tolist() == [*range(8), *range(16, 20), *range(24, 28)]
    assert flat[0, :, 0].tolist() == [*range(16)]


def test_export_cut_join_import_between_unequal_ranks() -> None:
    """Two prefill ranks hand over to four decode ranks: every decode rank's window is its own share."""
    whole = _package()
    prefill = [StatePool(5, cut_package(whole, MAMBA, rank, 2).layers) for rank in range(2)]
    exported = []
    for rank, pool in enumerate(prefill):
        slots = pool.import_(cut_package(whole, MAMBA, rank, 2))
        assert slots is not None
        exported.append(pool.export(slots))
    joined = join_packages(exported, MAMBA)
    assert _same(joined, whole)
    for rank in range(4):
        share = cut_package(joined, MAMBA, rank, 4)
        pool = StatePool(5, share.layers, layout="positions")
        slots = pool.import_(share)
        assert slots is not None
        assert _same(pool.export(slots), cut_package(whole, MAMBA, rank, 4))


def test_replicas_must_be_equal_and_nan_equals_itself() -> None:
    package = _package()
    package.window(0)[1] = torch.nan
    shares = [cut_package(package, MAMBA, rank, 4) for rank in range(4)]
    assert _same(join_packages(shares, MAMBA), package)
    shares[3].window(2)[0, 5] += 1  # channels 4..7 of the share are B
    with pytest.raises(ContractError, match="channels 4 to 7 of B; wanted equal replicas") as raised:
        join_packages(shares, MAMBA)
    assert raised.value.argument == "packages[3]"


def test_packages_that_do_not_belong_together_are_refused() -> None:
    shares = [cut_package(_package(), MAMBA, rank, 2) for rank in range(2)]
    wrong: list[list[SlotPackage]] = [
        [],
        [shares[0]],
        [shares[0], replace(shares[1], tokens=(5, 6, 8))],
        [shares[0], cut_package(_package(), MAMBA, 1, 4)],
        [shares[0], cut_package(_package(slots=2), MAMBA, 1, 2)],
    ]
    for packages in wrong:
        with pytest.raises(ContractError):
            join_packages(packages, MAMBA)
    with pytest.raises(ContractError, match="as the layers have"):
        cut_package(_package(), MAMBA[:2], 0, 2)


@pytest.mark.parametrize(
    ("part", "rank", "ranks"),
    [
        (ChannelPart("x", 16), 0, 3),
        (ChannelPart("x", 16), 0, 32),
        (ChannelPart("B", 12, groups=6), 0, 4),
        (ChannelPart("B", 12, groups=2), 0, 3),
        (ChannelPart("x", 16), 2, 2),
        (ChannelPart("x", 16), -1, 2),
    ],
)
def test_shares_that_cannot_be_even_are_refused(part: ChannelPart, rank: int, ranks: int) -> None:
    with pytest.raises(ContractError):
        part.share(rank, ranks)


@pytest.mark.parametrize(("channels", "groups"), [(0, None), (8, 3), (8, 0), (8, -1)])
def test_a_part_that_its_groups_do_not_divide_is_refused(channels: int, groups: int | None) -> None:
    with pytest.raises(ContractError):
        ChannelPart("B", channels, groups)


@given(groups=st.integers(1, 8), size=st.integers(1, 5), factor=st.integers(1, 6), replicate=st.booleans())
def test_shares_cover_the_part_in_order(groups: int, size: int, factor: int, replicate: bool) -> None:
    if replicate:
        part, ranks = ChannelPart("B", groups * size, groups), groups * factor
        expected = [range(group * size, (group + 1) * size) for group in range(groups) for _ in range(factor)]
    else:
        part, ranks = ChannelPart("B", groups * factor * size, groups * factor), groups
        step = factor * size
        expected = [range(rank * step, (rank + 1) * step) for rank in range(ranks)]
    assert [part.share(rank, ranks) for rank in range(ranks)] == expected
