"""Owns what the conv layers are fed: inputs and chances as pure functions of request and position.

A row's *key* is a 64-bit hash of what its position holds: within a hashed block of the prompt that is the chained
digest of the block hashes, so that requests which share a prefix share its inputs, elsewhere it is the request.
An input is a hash of key, layer and channel, a multiple of 1/32 between -4 and 4, exact in every type of the
operator.
"""

from __future__ import annotations

from hashlib import blake2b

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from serving_conv.replay.trace import BLOCK_TOKENS, Request

__all__ = ["Content", "block_digests"]

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_WRONG = np.uint64(0x5DEECE66D1CE4E5B)


def block_digests(request: Request) -> tuple[int, ...]:
    """One 64-bit digest a block, of its hash and all before it."""
    digests = []
    digest = b""
    for block in request.blocks:
        digest = blake2b(digest + b"/%d" % block, digest_size=8).digest()
        digests.append(int.from_bytes(digest))
    return tuple(digests)


class Content:
    """Inputs of a stack of conv layers.

    Args:
        layers: layers of the stack.
        channels: channels of each.
        dtype: type of the inputs.
        seed: another seed gives other inputs and chances.
    """

    def __init__(self, layers: int, channels: int, dtype: torch.dtype, seed: int) -> None:
        self._shape = (layers, channels)
        self._dtype = dtype
        self._seed = _mix(np.array([seed], dtype=np.uint64))
        columns = _mix(np.arange(layers * channels, dtype=np.uint64) ^ self._seed)
        self._multipliers = (columns >> np.uint64(32)).astype(np.uint32) | np.uint32(1)

    def row_keys(self, request: Request, digests: tuple[int, ...]) -> NDArray[np.uint64]:
        """Key of every position of a request, `[prompt + generated]`."""
        position = np.arange(request.tokens, dtype=np.uint64)
        # Blocks first, the request itself last: it owns what no block does.
        owners = np.array([*digests, 0], dtype=np.uint64)
        owners[-1:] = _mix(self._seed + np.uint64(request.index))
        hashed = request.prompt if digests else 0
        owner = np.where(position < hashed, position // np.uint64(BLOCK_TOKENS), np.uint64(len(digests)))
        return _mix(owners[owner] ^ (position * _GOLDEN))

    def chances(self, request: Request) -> NDArray[np.uint64]:
        """64 random bits for every position of a request; they decide what befalls it there."""
        position = np.arange(request.tokens, dtype=np.uint64)
        return _mix(_mix(~self._seed + np.uint64(request.index)) + position * _GOLDEN)

    @staticmethod
    def wrong(keys: NDArray[np.uint64]) -> NDArray[np.uint64]:
        """Keys of rows that hold wrong drafts of these tokens."""
        return keys ^ _WRONG

    def inputs(self, keys: NDArray[np.uint64]) -> Tensor:
        """Inputs `[rows, layers, channels]` of rows given by key."""
        bits = (keys >> np.uint64(32)).astype(np.uint32)[:, None] * self._multipliers
        values = (bits >> np.uint32(24)).astype(np.uint8).view(np.int8)
        return torch.from_numpy(values).to(self._dtype).mul_(1 / 32).view(len(keys), *self._shape)


def _mix(value: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """One step of splitmix64; on arrays, since only their arithmetic wraps without a warning."""
    value = value + _GOLDEN
    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return value ^ (value >> np.uint64(31))
