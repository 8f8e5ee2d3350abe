"""Owns what the pool's tests share: pools in engine memory with guard bytes, and counting or failing at a line."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import Tensor

import serving_conv.pool
from serving_conv.native.copy_slots import HostLauncher
from serving_conv.pool import LayerState, PoolLayout, StatePool, pool_positions, state_pool
from serving_conv.pool.copies import KernelCopies, SlotCopies, TorchCopies

GUARD = 777.0
_FOLDER = str(Path(serving_conv.pool.__file__).parent)


class InjectedFault(BaseException):
    """Not an Exception, so that no handler meant for errors can swallow it."""


class Lines:
    """Runs an operation and counts the lines of the pool package it executes, or fails before the k-th."""

    Fault = InjectedFault

    def __init__(self) -> None:
        self.seen = 0

    def run(self, operation: Callable[[], Any], fail_at: int = 0) -> Any:
        """Run the operation; raises InjectedFault before line `fail_at` (from 1; 0: never)."""
        self.seen = 0

        def trace(frame: FrameType, event: str, argument: object) -> Any:
            if not frame.f_code.co_filename.startswith(_FOLDER):
                return None
            if event == "line":
                self.seen += 1
                if self.seen == fail_at:
                    raise InjectedFault
            return trace

        previous = sys.gettrace()
        sys.settrace(trace)
        try:
            return operation()
        finally:
            sys.settrace(previous)


@pytest.fixture
def lines() -> Lines:
    """A line counter and fault injector."""
    return Lines()


@pytest.fixture(params=["torch", "kernel"])
def copies_by(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Pools made under it copy by torch, or by the kernel's source on the CPU, whatever the environment says."""

    def copies(states: Sequence[Tensor], layers: Sequence[LayerState]) -> SlotCopies:
        return TorchCopies(states) if request.param == "torch" else KernelCopies(states, layers, HostLauncher())

    monkeypatch.setattr(state_pool, "copies_of", copies)
    return str(request.param)


class EnginePage:
    """Engine-owned memory: one flat tensor a layer, slots padded apart, guards everywhere else."""

    def __init__(self, slots: int, layers: list[LayerState], positions: int, layout: PoolLayout, stride: int):
        self.pages: list[Tensor] = []
        self.tensors: list[Tensor] = []
        self._owned: list[Tensor] = []
        for layer in layers:
            inner = (1, layer.channels + 3) if layout == "channels" else (positions + 2, 1)
            shape, strides = (slots, layer.channels, positions), (stride, *inner)
            page = torch.full((slots * stride + 11,), GUARD, dtype=layer.dtype)
            owned = torch.zeros(page.shape, dtype=torch.bool)
            owned.as_strided(shape, strides, 5).fill_(True)
            self.pages.append(page)
            self._owned.append(owned)
            self.tensors.append(page.as_strided(shape, strides, 5))

    def check_guards(self) -> None:
        """Every byte that is not a slot's is as it was."""
        for page, owned in zip(self.pages, self._owned, strict=True):
            assert torch.equal(page[~owned], torch.full_like(page[~owned], GUARD))


MakePool = Callable[..., tuple[StatePool, EnginePage]]


@pytest.fixture
def make_pool() -> Iterator[MakePool]:
    """Builds pools in padded engine memory, every value distinct; guards are checked when the test ends."""
    pages: list[EnginePage] = []

    def make(
        slots: int = 6,
        layers: tuple[LayerState, ...] = (LayerState(3, 4), LayerState(2, 2)),
        layout: PoolLayout = "channels",
        stride: int = 97,
        draft_tokens: int = 2,
    ) -> tuple[StatePool, EnginePage]:
        page = EnginePage(slots, list(layers), pool_positions(layers, draft_tokens), layout, stride)
        for index, tensor in enumerate(page.tensors):
            values = torch.arange(tensor.numel()).view(tensor.shape) + 1000 * index
            tensor.copy_(values)
        pool = StatePool(slots, layers, draft_tokens=draft_tokens, layout=layout, tensors=page.tensors)
        pages.append(page)
        return pool, page

    yield make
    for page in pages:
        page.check_guards()
