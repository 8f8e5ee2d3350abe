"""Inputs: pure functions of request, position, layer and channel, exact in every type, shared where prefixes are."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from serving_conv.replay import Request
from serving_conv.replay.content import Content, block_digests


def content(seed: int = 0, dtype: torch.dtype = torch.float32) -> Content:
    return Content(2, 5, dtype, seed)


def keys(request: Request, seed: int = 0) -> np.ndarray:
    return content(seed).row_keys(request, block_digests(request))


def test_digests_are_chained() -> None:
    a, b = (block_digests(Request(0, 0, 1500, 0, blocks)) for blocks in ((1, 2, 3), (9, 2, 3)))
    assert len(set(a + b)) == 6
    assert block_digests(Request(7, 5, 1024, 9, (1, 2))) == a[:2]
    # Digits run together must not look like another chain.
    assert block_digests(Request(0, 0, 1024, 0, (1, 23)))[1] != block_digests(Request(0, 0, 1024, 0, (12, 3)))[1]


def test_requests_share_inputs_exactly_within_their_common_blocks() -> None:
    a, b = keys(Request(0, 0, 1500, 30, (1, 2, 3))), keys(Request(1, 0, 1300, 40, (1, 2, 4)))
    assert np.array_equal(a[:1024], b[:1024])
    assert not np.any(a[1024:1340] == b[1024:1340])


def test_generated_tokens_and_unhashed_prompts_belong_to_the_request() -> None:
    a, b = keys(Request(0, 0, 600, 100, (1, 2))), keys(Request(1, 0, 600, 100, (1, 2)))
    assert np.array_equal(a[:600], b[:600])
    assert not np.any(a[600:] == b[600:])
    assert not np.any(keys(Request(0, 0, 50, 9)) == keys(Request(1, 0, 50, 9)))


def test_every_key_and_input_differs_somewhere() -> None:
    rows = keys(Request(3, 0, 3000, 100, (1, 1, 1, 1, 1, 1)))
    assert len(np.unique(rows)) == len(rows)
    inputs = content().inputs(rows)
    assert len(torch.unique(inputs.flatten(1), dim=0)) == len(rows)
    columns = inputs.flatten(1).T
    assert len(torch.unique(columns, dim=0)) == len(columns)


def test_inputs_do_not_depend_on_the_cut() -> None:
    rows = keys(Request(0, 0, 200, 0))
    whole = content().inputs(rows)
    assert whole.shape == (200, 2, 5)
    assert torch.equal(whole, torch.cat([content().inputs(part) for part in np.split(rows, (1, 7, 150))]))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_inputs_are_exact_and_spread(dtype: torch.dtype) -> None:
    inputs = content(dtype=dtype).inputs(keys(Request(0, 0, 4000, 0)))
    assert inputs.dtype == dtype
    assert torch.equal(inputs.float(), content().inputs(keys(Request(0, 0, 4000, 0))))
    assert torch.unique(inputs).tolist() == [n / 32 for n in range(-128, 128)]
    assert abs(float(inputs.double().mean())) < 0.05


def test_seeds_and_wrong_drafts_give_other_inputs() -> None:
    request = Request(0, 0, 300, 0)
    rows = keys(request)
    right = content().inputs(rows)
    for other in (content().inputs(Content.wrong(rows)), content(1).inputs(rows), content().inputs(keys(request, 1))):
        assert bool((other != right).flatten(1).any(1).all())


def test_chances_are_uniform_and_not_the_keys() -> None:
    request = Request(4, 0, 20_000, 0)
    chances = content().chances(request)
    assert abs(float(np.mean(chances / 2**64)) - 0.5) < 0.01
    assert not np.any(chances == keys(request))
    assert not np.any(chances == content().chances(Request(5, 0, 20_000, 0)))
