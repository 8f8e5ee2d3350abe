"""A loaded kernel's launches, with a driver that records: what stands in the parameters and the configuration."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from serving_conv.errors import BackendError
from serving_conv.native import cuda
from serving_conv.native.abi import PACKER, TENSORS
from serving_conv.native.cuda import Kernel, StepLaunch
from serving_conv.training import kernels as training


class Driver:
    """Stands for cuda.bindings.driver."""

    CUlaunchConfig = SimpleNamespace
    CUlaunchAttribute = SimpleNamespace
    CUlaunchAttributeValue = SimpleNamespace
    CUlaunchAttributeID = SimpleNamespace(CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION=6)

    def __init__(self) -> None:
        self.launches: list[tuple[bytes, tuple[int, ...], int, int]] = []
        self.status = 0
        self.during: Callable[[], None] = lambda: None

    def launch(self, config: Any, function: object, arguments: int, extra: int) -> tuple[int]:
        self.during()
        block = ctypes.c_void_p.from_address(arguments).value
        assert block is not None
        grid = (config.gridDimX, config.gridDimY, config.gridDimZ)
        attributes = getattr(config, "numAttrs", 0)
        self.launches.append((ctypes.string_at(block, PACKER.size), grid, config.hStream, attributes))
        return (self.status,)


@pytest.fixture
def driver() -> Driver:
    return Driver()


@pytest.fixture
def kernel(driver: Driver) -> Kernel:
    kernel = object.__new__(Kernel)
    kernel._call, kernel._function, kernel._driver = driver.launch, None, driver
    kernel._threads, kernel._overlaps = 128, True
    kernel._free, kernel._free_alone = [], []
    return kernel


ALL = struct.Struct("<" + "Q" * (TENSORS.size // 8))
REST = PACKER.size - TENSORS.size


def step_of(kernel: Kernel, mark: int) -> StepLaunch:
    return StepLaunch(kernel, (mark, 1, 1), bytes([mark]) * REST, ())


def addresses(first: int) -> list[int]:
    return list(range(first, first + TENSORS.size // 8))


def block(first: int, mark: int) -> bytes:
    return ALL.pack(*addresses(first)) + bytes([mark]) * REST


def test_a_step_writes_only_what_changes_and_all_of_it(kernel: Kernel, driver: Driver) -> None:
    one, two = step_of(kernel, 1), step_of(kernel, 2)
    for first, step, stream in ((100, one, 7), (200, one, 7), (300, two, 8), (400, one, 8)):
        kernel.launch_step(step, ALL, addresses(first), stream)
    kernel.launch(bytes([9]) * PACKER.size, (5, 6, 7), 8)
    kernel.launch_step(one, ALL, addresses(500), 8)
    assert driver.launches == [
        (block(100, 1), (1, 1, 1), 7, 1),
        (block(200, 1), (1, 1, 1), 7, 1),
        (block(300, 2), (2, 1, 1), 8, 1),
        (block(400, 1), (1, 1, 1), 8, 1),
        (bytes([9]) * PACKER.size, (5, 6, 7), 8, 1),
        (block(500, 1), (1, 1, 1), 8, 1),
    ]
    assert len(kernel._free) == 1


def test_absent_tensors_are_null(kernel: Kernel, driver: Driver) -> None:
    some = struct.Struct("<Q8x" + "Q" * (TENSORS.size // 8 - 2))
    kernel.launch_step(step_of(kernel, 1), ALL, addresses(100), 7)
    kernel.launch_step(step_of(kernel, 1), some, addresses(200)[:-1], 7)
    values = ALL.unpack(driver.launches[1][0][: TENSORS.size])
    assert values == (200, 0, *range(201, 200 + TENSORS.size // 8 - 1))


def test_launches_at_the_same_time_have_frames_of_their_own(kernel: Kernel, driver: Driver) -> None:
    inner = step_of(kernel, 2)

    def another_thread() -> None:
        driver.during = lambda: None
        kernel.launch_step(inner, ALL, addresses(900), 9)

    driver.during = another_thread
    kernel.launch_step(step_of(kernel, 1), ALL, addresses(100), 7)
    assert driver.launches == [(block(900, 2), (2, 1, 1), 9, 1), (block(100, 1), (1, 1, 1), 7, 1)]
    assert len(kernel._free) == 2


def test_a_refused_launch_raises_and_the_next_one_runs(kernel: Kernel, driver: Driver) -> None:
    driver.status = 1
    with pytest.raises(BackendError):
        kernel.launch(bytes(PACKER.size), (1, 1, 1), 7)
    driver.status = 0
    kernel.launch_step(step_of(kernel, 3), ALL, addresses(100), 7)
    assert driver.launches[-1] == (block(100, 3), (3, 1, 1), 7, 1)


@pytest.mark.parametrize(("overlaps", "dependent", "attributes"), [(True, True, 1), (True, False, 0), (False, True, 0)])
def test_who_starts_early(kernel: Kernel, driver: Driver, overlaps: bool, dependent: bool, attributes: int) -> None:
    kernel._overlaps = overlaps
    for _ in range(2):
        kernel.launch(bytes(PACKER.size), (1, 1, 1), 7, dependent=True)
        kernel.launch(bytes(PACKER.size), (1, 1, 1), 7, dependent=dependent)
    assert driver.launches[-1][3] == attributes
    assert driver.launches[-2][3] == int(overlaps)


def test_training_waits_for_who_may_write_the_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    early: list[tuple[str, bool]] = []

    class Loaded:
        def __init__(self, variant: Any) -> None:
            self.name = variant.kernel

        def launch(self, parameters: bytes, grid: object, stream: int, *, dependent: bool) -> None:
            early.append((self.name, dependent))

    monkeypatch.setattr(cuda, "load_variant", lambda variant, index: Loaded(variant))
    monkeypatch.setattr(cuda, "fault_flag", lambda device: torch.zeros(1, dtype=torch.int32))
    monkeypatch.setattr(cuda, "_traits_of_device", lambda index: (132, 90))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: None)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 7, raising=False)
    monkeypatch.setattr(training, "choose_backend", lambda device: cuda.CudaBackend())
    x, weight = torch.zeros(1, 300, 64), torch.zeros(64, 4)
    training.convolve(x, weight, None, None, None, activation="silu", want_final=False)
    wanted = (True, True, False, False)
    training.gradients(
        torch.zeros_like(x), x, weight, None, None, None, None, activation="silu", deterministic=True, wanted=wanted
    )
    assert early[0] == ("conv_prefill", False)
    assert early[1] == ("conv_backward", False)
    assert early[2:] and all(dependent for _, dependent in early[2:])
