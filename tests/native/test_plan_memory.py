"""Where tensors lie, and the short path of eager calls: it launches nothing that the full checks would refuse."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from support.plans import KINDS, Kind, Loaded, complete, full_path, in_order, make_call, pretend
from torch import Tensor

from serving_conv.errors import ContractError
from serving_conv.native import plan as plans_module
from serving_conv.native.plan import Plans

ROWS, SEQUENCES = 6, 40


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> type[Loaded]:
    return pretend(monkeypatch)


def learn(plans: Plans, kind: Kind, arguments: dict[str, Any]) -> None:
    """Keep a plan of a call, as the full path does behind it."""
    out = torch.zeros(arguments["x"].shape, dtype=kind.x) if arguments["out"] is None else arguments["out"]
    plans.add(in_order(kind, arguments), kind.activation, kind.pad_slot_id, complete(kind, arguments, out))


def run(plans: Plans, kind: Kind, arguments: dict[str, Any]) -> Tensor | None:
    return plans.run(in_order(kind, arguments), kind.activation, kind.pad_slot_id)


# Bytes at which the tensors of a prefill call lie; x and out have 768 of them, taps 512, the pool 5760, the offsets
# 164, slots and counts 160, flags 40, the workspace 64.
PLACES = {"x": 0, "weight": 1024, "bias": 2048, "conv_state": 4096, "out": 16384, "cu_seqlens": 20480}
PLACES |= {"slots": 21504, "has_initial_state": 22528, "num_accepted_tokens": 23552, "workspace": 24576}
POOL_END, OUT_END = 4096 + 5760, 16384 + 768


@pytest.mark.parametrize(
    ("changed", "sound"),
    [
        ({}, True),
        ({"x": 8}, False),  # not aligned for the widest words
        ({"bias": 2056}, False),
        ({"slots": 21508}, True),  # no words are read there
        ({"x": 4096 - 768}, True),  # right before the pool
        ({"x": 4096 - 752}, False),  # its last bytes are the pool's first
        ({"bias": POOL_END - 16}, False),
        ({"bias": POOL_END}, True),  # right behind it
        ({"slots": 4096 + 156}, False),
        ({"num_accepted_tokens": OUT_END - 4}, False),
        ({"num_accepted_tokens": OUT_END}, True),
        ({"cu_seqlens": POOL_END - 4}, False),
        ({"has_initial_state": 16384 - 1}, False),
        ({"has_initial_state": 16384 - SEQUENCES}, True),
        ({"out": 4096 + 128}, False),
        ({"out": 0}, False),  # x itself, but not in place
        ({"slots": 20480}, True),  # offsets and slots may share: both are read
        ({"workspace": OUT_END - 4}, False),
        ({"workspace": 4096 - 60}, False),
        ({"workspace": 4096 - 64}, True),
        ({"workspace": 22528 + SEQUENCES - 4}, False),
    ],
)
def test_overlap_by_address(changed: dict[str, int], sound: bool, device: type[Loaded]) -> None:
    kind, plans = KINDS["prefill with everything"], Plans(KINDS["prefill with everything"].entry)
    arguments = make_call(kind, ROWS, SEQUENCES)
    learn(plans, kind, arguments)
    sizes = {name: arguments[name].numel() * arguments[name].element_size() for name in PLACES}
    assert [sizes[name] for name in ("x", "conv_state", "cu_seqlens", "workspace")] == [768, 5760, 164, 64]
    memory = np.zeros((1 << 16) + 64, dtype=np.uint8)
    memory = memory[-memory.ctypes.data % 64 :]
    for name, place in (PLACES | changed).items():
        tensor = arguments[name]
        # A storage of its own each time, over the same memory.
        piece = torch.from_numpy(memory[place : place + sizes[name]])
        arguments[name] = piece.view(tensor.dtype).as_strided(tensor.shape, tensor.stride())
    assert (run(plans, kind, arguments) is not None) is sound


@pytest.mark.parametrize(
    ("name", "argument", "allowed"),
    [
        ("prefill with everything", "out", False),
        ("prefill with everything", "workspace", False),
        ("step with drafts", "out", False),
        ("decode with everything", "out", True),
    ],
)
def test_storage_shared_without_overlap(name: str, argument: str, allowed: bool, device: type[Loaded]) -> None:
    kind, plans = KINDS[name], Plans(KINDS[name].entry)
    arguments = make_call(kind, SEQUENCES, SEQUENCES)
    learn(plans, kind, arguments)
    mine, slots = arguments[argument], arguments["slots"]
    memory = torch.zeros(1 << 16, dtype=torch.uint8)
    arguments[argument] = memory.view(mine.dtype)[: mine.numel()].view(mine.shape)
    assert run(plans, kind, arguments) is not None
    arguments["slots"] = memory[-256:].view(torch.int32)[: len(slots)]
    assert (run(plans, kind, arguments) is not None) is allowed


def test_a_pool_without_slots_has_no_plan(device: type[Loaded]) -> None:
    # Every slot is out of range then, and an empty pool overlaps not even itself.
    kind, plans = KINDS["decode"], Plans(KINDS["decode"].entry)
    arguments = make_call(kind, 3, 3)
    arguments["conv_state"] = arguments["conv_state"][:0]
    learn(plans, kind, arguments)
    assert not plans._table
    assert run(plans, kind, arguments) is None


@pytest.mark.parametrize(("behind", "sound"), [(0, True), (-16, False)])
def test_the_last_row_of_a_slice_counts(behind: int, sound: bool, device: type[Loaded]) -> None:
    kind, plans = KINDS["prefill of a slice"], Plans(KINDS["prefill of a slice"].entry)
    arguments = make_call(kind, ROWS, 2)
    learn(plans, kind, arguments)
    x, pool = arguments["x"], arguments["conv_state"]
    memory = torch.zeros(1 << 15, dtype=torch.uint8).view(x.dtype)
    end = (ROWS - 1) * x.stride(0) + x.shape[1]
    arguments["x"] = memory.as_strided(x.shape, x.stride(), 0)
    arguments["conv_state"] = memory.as_strided(pool.shape, pool.stride(), end + behind // x.element_size())
    assert (run(plans, kind, arguments) is not None) is sound


class Draw:
    """Calls of one kind whose tensors lie anywhere, overlapping or not, and whose sizes are now and then wrong."""

    def __init__(self, kind: Kind, seed: int) -> None:
        self._kind = kind
        self._random = random.Random(seed)
        self._arenas = [torch.zeros(1 << 15, dtype=torch.uint8) for _ in range(2)]

    def call(self, share: float) -> dict[str, Any]:
        """A call; `share`: the part of the tensors that lie in one of two memories."""
        choose = self._random.choice
        sequences = choose([1, 1, 2, 3, 5, 33])
        rows = choose([1, 2, 8, 17, 40]) if "cu_seqlens" in self._kind.given else sequences
        arguments = make_call(self._kind, rows, sequences, choose([0, 1, 4]))
        in_place = arguments["out"] is arguments["x"]
        for name, tensor in arguments.items():
            if tensor is not None and not (name == "out" and in_place):
                arguments[name] = self._place(self._cut(tensor) if tensor.ndim == 1 else tensor, share)
        if in_place:
            arguments["out"] = arguments["x"] if self._random.random() < 0.8 else self._place(arguments["x"], share)
        return arguments

    def _cut(self, tensor: Tensor) -> Tensor:
        return tensor[:-1] if len(tensor) > 1 and self._random.random() < 0.02 else tensor

    def _place(self, tensor: Tensor, share: float) -> Tensor:
        if self._random.random() >= share:
            return tensor
        memory = self._random.choice(self._arenas).view(tensor.dtype)
        step = 16 if self._random.random() < 0.95 else tensor.element_size()
        at = self._random.randrange(0, 1024) * step // tensor.element_size()
        return memory.as_strided(tensor.shape, tensor.stride(), at)


@pytest.mark.parametrize("guards", [True, False], ids=["guards", "table"])
@pytest.mark.parametrize("name", KINDS)
def test_what_is_launched_passes_the_checks(
    name: str, guards: bool, device: type[Loaded], monkeypatch: pytest.MonkeyPatch
) -> None:
    kind = KINDS[name]
    if not guards:
        monkeypatch.setattr(plans_module, "TensorGuards", None)
    draw, launched, refused = Draw(kind, seed=7), 0, 0
    for share in (0.0, 0.15, 0.4, 1.0):
        plans = Plans(kind.entry)
        learn(plans, kind, make_call(kind, 4, 4))
        for _ in range(60):
            arguments = draw.call(share)
            device.launches.clear()
            result = run(plans, kind, arguments)
            if result is not None:
                assert device.launches == [full_path(kind, arguments, result)]
                launched += 1
                continue
            assert not device.launches
            out = torch.zeros(arguments["x"].shape, dtype=kind.x) if arguments["out"] is None else arguments["out"]
            try:
                full_path(kind, arguments, out)
            except ContractError:
                refused += 1
    assert launched > 60
    assert refused > 20
