"""Owns the tests of prefix checkpoints: exact counts, recency, pins, and the window after a speculative step."""

from __future__ import annotations

import pytest
import torch

from serving_conv import ContractError, causal_conv1d_update
from serving_conv.pool import LayerState, PoolLayout, PrefixStatistics, Slot, StatePool


def _pool(slots: int = 6) -> StatePool:
    return StatePool(slots, [LayerState(2, 4)], draft_tokens=3)


def _at(pool: StatePool, tokens: int) -> Slot:
    """A live slot with so many tokens and a window that spells them."""
    slot = pool.take()
    assert slot is not None
    pool.states[0][slot] = float(tokens)
    pool.commit(slot, tokens)
    return slot


def _publish(pool: StatePool, *keys: tuple[str, int]) -> None:
    for key, tokens in keys:
        slot = _at(pool, tokens)
        assert pool.publish(slot, key, tokens)
        pool.free(slot)


def _published(pool: StatePool) -> set[object]:
    return {key for key in "abcdefgh" if pool._prefixes._entries.get(key)}


@pytest.mark.parametrize("tokens", [0, 15, 17, 32, -16])
def test_publish_refuses_a_count_that_is_not_the_history(tokens: int) -> None:
    pool = _pool()
    slot = _at(pool, 16)
    with pytest.raises(ContractError, match="16, where the slot's last step ended") as raised:
        pool.publish(slot, "key", tokens)
    assert raised.value.argument == "tokens"
    assert pool.longest_prefix([("key", 16)]) is None
    assert pool.counts().cached == 0


def test_publish_refuses_a_slot_without_history() -> None:
    pool = _pool()
    slot = pool.take()
    assert slot is not None
    with pytest.raises(ContractError, match="a history"):
        pool.publish(slot, "key", 0)


def test_a_key_stands_for_one_number_of_tokens() -> None:
    pool = _pool()
    _publish(pool, ("a", 16))
    with pytest.raises(ContractError, match="16, with which the key is published"):
        pool.publish(_at(pool, 32), "a", 32)
    for look in (pool.longest_prefix, pool.take_prefix):
        with pytest.raises(ContractError, match="count tokens, not blocks"):
            look([("a", 1)])


def test_publishing_again_changes_nothing_but_recency() -> None:
    pool = _pool(5)
    _publish(pool, ("a", 1), ("b", 2), ("c", 3))
    slot = _at(pool, 1)
    assert pool.publish(slot, "a", 1)
    assert pool.counts() == (0, 1, 3, 1)
    assert pool.take() is not None
    assert _published(pool) == {"a", "c"}


def test_look_up_finds_the_longest_published_prefix_in_any_order() -> None:
    pool = _pool()
    _publish(pool, ("a", 16), ("b", 32))
    chain = [("a", 16), ("b", 32), ("c", 48), ("d", 64)]
    assert pool.longest_prefix(chain) == ("b", 32)
    assert pool.longest_prefix(chain[::-1]) == ("b", 32)
    assert pool.longest_prefix(chain[2:]) is None
    assert pool.longest_prefix([]) is None


def test_take_prefix_copies_the_window_and_the_count() -> None:
    pool = _pool()
    _publish(pool, ("a", 16), ("b", 32))
    found = pool.take_prefix([("a", 16), ("b", 32), ("c", 48)])
    assert found is not None
    slot, tokens = found
    assert (tokens, pool.tokens(slot), pool.accepted(slot), pool.has_history(slot)) == (32, 32, 1, True)
    assert torch.equal(pool.states[0][slot], torch.full((2, 6), 32.0))
    pool.states[0][slot] = -1.0  # the slot is a copy: the checkpoint must not see this
    again = pool.take_prefix([("b", 32)])
    assert again is not None
    assert torch.equal(pool.states[0][again[0]], torch.full((2, 6), 32.0))
    assert pool.take_prefix([("c", 48)]) is None
    assert pool.prefix_statistics == PrefixStatistics(hits=2, misses=1, evictions=0)


def test_least_recently_used_goes_first() -> None:
    pool = _pool(5)
    _publish(pool, ("a", 1), ("b", 2), ("c", 3))
    pool.take()
    assert pool.longest_prefix([("a", 1)]) == ("a", 1)
    pool.take()
    assert _published(pool) == {"a", "c"}
    pool.take()
    assert _published(pool) == {"a"}
    assert pool.prefix_statistics.evictions == 2
    assert pool.counts() == (0, 3, 1, 1)


def test_what_is_held_stays_and_holds_are_counted() -> None:
    pool = _pool(5)
    _publish(pool, ("a", 1), ("b", 2), ("c", 3))
    pool.hold("a")
    pool.hold("a")
    pool.hold("c")
    for _ in range(2):
        assert pool.take() is not None
    assert _published(pool) == {"a", "c"}
    assert pool.take() is None
    pool.release("a")
    assert pool.take() is None
    pool.release("a")
    with pytest.raises(ContractError, match="release once for each hold"):
        pool.release("a")
    assert pool.take() is not None
    assert _published(pool) == {"c"}


def test_a_release_is_a_use() -> None:
    pool = _pool(4)
    _publish(pool, ("a", 1), ("b", 2))
    pool.hold("a")
    pool.release("a")
    pool.take()
    pool.take()
    assert _published(pool) == {"a"}


def test_drop_frees_the_slot_unless_it_is_held() -> None:
    pool = _pool()
    _publish(pool, ("a", 1))
    pool.hold("a")
    with pytest.raises(ContractError, match="release it first"):
        pool.drop("a")
    pool.release("a")
    pool.drop("a")
    assert pool.counts() == (5, 0, 0, 1)
    for call in (pool.drop, pool.hold):
        with pytest.raises(ContractError, match="a published key"):
            call("a")


def test_the_source_is_not_evicted_to_make_room_for_its_own_copy() -> None:
    pool = _pool(4)
    _publish(pool, ("a", 1), ("b", 2))
    pool.take()
    assert pool.take_prefix([("a", 1)]) is not None  # b went, though a was the older one
    assert _published(pool) == {"a"}
    assert pool.take_prefix([("a", 1)]) is None
    assert _published(pool) == {"a"}
    assert pool.prefix_statistics == PrefixStatistics(hits=1, misses=0, evictions=1)


def test_publish_says_no_when_everything_is_in_use() -> None:
    pool = _pool(3)
    _publish(pool, ("a", 1))
    pool.hold("a")
    slot = _at(pool, 2)
    assert not pool.publish(slot, "b", 2)
    assert _published(pool) == {"a"}


@pytest.mark.parametrize("layout", ["channels", "positions"])
@pytest.mark.parametrize(
    ("accepted", "window", "outputs"),
    [
        (1, [8, 9, 1], [5198, 6519]),
        (2, [9, 1, 2], [5219, 6521]),
        (3, [1, 2, 3], [5321, 6532]),
        (4, [2, 3, 4], [5432, 6543]),
    ],
)
def test_a_checkpoint_after_a_speculative_step_starts_at_the_last_accepted_token(
    layout: PoolLayout, accepted: int, window: list[int], outputs: list[int]
) -> None:
    channels = 3
    pool = StatePool(5, [LayerState(channels, 4)], draft_tokens=3, layout=layout)
    scale = torch.arange(1.0, channels + 1)
    weight = torch.tensor([1.0, 10.0, 100.0, 1000.0]).repeat(channels, 1)
    (state,) = pool.states
    slot = pool.take()
    assert slot is not None
    state[slot] = torch.nan
    state[slot, :, :3] = torch.tensor([7.0, 8.0, 9.0]) * scale[:, None]
    pool.commit(slot, 9)

    def step(slot: int, tokens: list[int]) -> torch.Tensor:
        return causal_conv1d_update(
            torch.tensor(tokens, dtype=torch.float32)[:, None] * scale,
            weight,
            state,
            torch.tensor([slot], dtype=torch.int32),
            cu_seqlens=torch.tensor([0, len(tokens)], dtype=torch.int32),
            num_accepted_tokens=torch.tensor([pool.accepted(slot)], dtype=torch.int32),
            activation=None,
        )

    drafted = torch.tensor([1987.0, 2198.0, 3219.0, 4321.0])
    assert torch.equal(step(slot, [1, 2, 3, 4]), drafted[:, None] * scale)
    pool.commit(slot, 4, accepted=accepted)
    assert pool.publish(slot, "key", 9 + accepted)
    found = pool.take_prefix([("key", 9 + accepted)])
    assert found is not None
    assert torch.equal(state[found[0], :, :3], torch.tensor(window) * scale[:, None])
    # The copy and the original go on alike, though their windows begin at different positions.
    for live in (found[0], slot):
        assert torch.equal(step(live, [5, 6]), torch.tensor(outputs)[:, None] * scale)
