"""The `cuda` backend: compiles a variant with NVRTC through cuda.core, keeps it on disk, launches it.

Compiling needs no toolkit: NVRTC comes in its wheel. The disk cache is cuda.core's: entries are published by
rename, a corrupt one is a miss, and several processes may share it. Kernels are launched with programmatic
dependent launch where the device has it (sm_90 and up), unless `SERVING_CONV_DEPENDENT_LAUNCH=0` says otherwise.
"""

from __future__ import annotations

import ctypes
import struct
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from serving_conv.errors import BackendError, CaptureError
from serving_conv.faults import fault_flag
from serving_conv.native.abi import PACKER, TENSORS
from serving_conv.native.backward import prepare_backward
from serving_conv.native.call import ForwardLaunch, Launch, prepare_prefill, prepare_update
from serving_conv.native.variant import AnyVariant, source
from serving_conv.settings import SETTINGS

__all__ = [
    "PARAMETER_BYTES",
    "CudaBackend",
    "Kernel",
    "StepLaunch",
    "check_status",
    "compile_variant",
    "load_variant",
    "prefill_launch",
    "run_backward",
    "run_forward",
]

PARAMETER_BYTES = 4096  # the most that every device takes as a kernel's parameters


class CudaBackend:
    """Runs the kernels on NVIDIA GPUs from sm_80."""

    name = "cuda"

    def supports(self, device: torch.device) -> bool:
        """CUDA tensors of an NVIDIA GPU, with cuda-python installed and NVRTC there."""
        return (
            device.type == "cuda"
            and torch.version.cuda is not None
            and _bindings_available()
            and torch.cuda.get_device_capability(device) >= (8, 0)
        )

    def prefill(self, *, x: Tensor, workspace: Tensor | None, **arguments: Any) -> None:
        """`causal_conv1d_fn`; the kernel needs no scratch."""
        _run(prefill_launch(x, arguments), x.device)

    def step(self, *, x: Tensor, **arguments: Any) -> None:
        """`causal_conv1d_step`."""
        _run(prefill_launch(x, arguments), x.device)

    def update(self, *, x: Tensor, **arguments: Any) -> None:
        """`causal_conv1d_update`."""
        _run(prepare_update(x, **arguments, fault_flag=fault_flag(x.device)), x.device)


def prefill_launch(x: Tensor, arguments: dict[str, Any]) -> ForwardLaunch | None:
    """The launch of a checked `causal_conv1d_fn` or `causal_conv1d_step`; `arguments`: all others but a workspace."""
    device = x.device
    multiprocessors, capability = _traits_of_device(device.index)
    return prepare_prefill(
        x, **arguments, fault_flag=fault_flag(device), multiprocessors=multiprocessors, capability=capability
    )


@cache
def _bindings_available() -> bool:
    try:
        import cuda.bindings.driver
        import cuda.core  # noqa: F401
        from cuda.bindings import nvrtc

        status = nvrtc.nvrtcVersion()[0]  # loads the library
    except (ImportError, RuntimeError):
        return False
    return int(status) == 0


@cache
def _traits_of_device(device_index: int) -> tuple[int, int]:
    """Multiprocessors, and the compute capability as 90."""
    properties = torch.cuda.get_device_properties(device_index)
    return int(properties.multi_processor_count), 10 * int(properties.major) + int(properties.minor)


def compile_variant(variant: AnyVariant, architecture: str) -> Any:
    """Compile, or find in the disk cache, one variant as a cubin.

    Args:
        variant: the kernel.
        architecture: as `sm_90`.

    Returns:
        cuda.core's ObjectCode.

    Raises:
        BackendError: NVRTC refuses the source; its log is in the text.
    """
    from cuda.core import Program, ProgramOptions
    from cuda.core.utils import FileStreamProgramCache

    options = ProgramOptions(arch=architecture, std="c++17")
    program = Program(source(variant, "cuda"), "c++", options)
    try:
        with FileStreamProgramCache(SETTINGS.cache_directory / "cuda") as on_disk:
            return program.compile("cubin", cache=on_disk)
    except Exception as error:
        raise BackendError(
            variant.kernel, got=str(error)[-2000:], wanted=f"a clean compilation for {architecture}"
        ) from error


class Kernel:
    """One loaded kernel, ready to go; shared by threads."""

    def __init__(self, variant: AnyVariant, device_index: int) -> None:
        from cuda.bindings import driver

        major, minor = torch.cuda.get_device_capability(device_index)
        # The object must outlive the handle taken from it.
        self._object = compile_variant(variant, f"sm_{major}{minor}")
        self._kernel = self._object.get_kernel(variant.kernel)
        self._function = check_status(driver.cuKernelGetFunction(driver.CUkernel(int(self._kernel.handle))))
        self._call = driver.cuLaunchKernelEx
        self._driver, self._threads = driver, variant.threads
        self._overlaps = major >= 9 and SETTINGS.dependent_launch
        # Frames that nobody uses. Taking one is atomic, and cheaper than a lock around a shared one.
        self._free: list[_Frame] = []
        self._free_alone: list[_Frame] = []

    def launch(
        self,
        parameters: bytes | ctypes.Array[ctypes.c_char],
        grid: tuple[int, int, int],
        stream: int,
        *,
        dependent: bool = True,
    ) -> None:
        """Launch on a raw stream handle of the current device.

        Args:
            parameters: of the kernel.
            grid: blocks.
            stream: raw handle.
            dependent: the kernel may start before the one before it has ended. It reads taps and bias at once, so
                only where no kernel that is still running can be writing them.
        """
        free = self._free if dependent else self._free_alone
        try:
            frame = free.pop()
        except IndexError:
            frame = _Frame(self._config(dependent), free)
        frame.step = None
        frame.block[: len(parameters)] = parameters
        frame.config.gridDimX, frame.config.gridDimY, frame.config.gridDimZ = grid
        self._launch(frame, stream)

    def launch_step(self, step: StepLaunch, tensors: struct.Struct, addresses: list[int], stream: int) -> None:
        """Launch with these tensors, which stand first in the block; all else is as in the step.

        Args:
            step: of this kernel.
            tensors: packs the addresses, and skips the absent ones.
            addresses: of the tensors that are given.
            stream: raw handle, of the current device.
        """
        try:
            frame = self._free.pop()
        except IndexError:
            frame = _Frame(self._config(dependent=True), self._free)
        tensors.pack_into(frame.block, 0, *addresses)
        if step is not frame.step:  # the one that is kept cannot be freed, so none other has its identity
            frame.step = step
            frame.block[TENSORS.size : PACKER.size] = step.rest
            frame.config.gridDimX, frame.config.gridDimY, frame.config.gridDimZ = step.grid
        self._launch(frame, stream)

    def _launch(self, frame: _Frame, stream: int) -> None:
        config = frame.config
        if stream != frame.stream:
            config.hStream = frame.stream = stream
        status = self._call(config, self._function, frame.arguments, 0)
        frame.home.append(frame)  # one whose launch raised is dropped
        if status[0]:
            check_status(status)

    def _config(self, dependent: bool) -> Any:
        driver = self._driver
        config = driver.CUlaunchConfig()
        config.blockDimX, config.blockDimY, config.blockDimZ = self._threads, 1, 1
        if dependent and self._overlaps:
            attribute = driver.CUlaunchAttribute()
            attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
            value = driver.CUlaunchAttributeValue()
            value.programmaticStreamSerializationAllowed = 1
            attribute.value = value
            config.attrs = [attribute]
            config.numAttrs = 1
        return config


class _Frame:
    """What one launch needs for itself: a block of parameters at a fixed address, and a configuration.

    Attributes:
        home: the list it returns to.
        block: the parameters.
        arguments: address of the array of pointers to parameters, of one element.
        config: the driver's.
        step: whose sizes stand in both, if any does.
        stream: that stands in the configuration.
    """

    __slots__ = ("_kept", "arguments", "block", "config", "home", "step", "stream")

    def __init__(self, config: Any, home: list[_Frame]) -> None:
        self.home = home
        self.block = bytearray(PARAMETER_BYTES)
        pinned = (ctypes.c_char * PARAMETER_BYTES).from_buffer(self.block)
        pointers = (ctypes.c_void_p * 1)(ctypes.addressof(pinned))
        self._kept = pinned, pointers
        self.arguments = ctypes.addressof(pointers)
        self.config = config
        self.step: StepLaunch | None = None
        self.stream: int | None = None


class StepLaunch(NamedTuple):
    """What a step's calls with the same sizes have in common.

    Attributes:
        kernel: that they run.
        grid: blocks.
        rest: the block of parameters behind the tensors' addresses.
        extents: bytes from the first element to the end of the last, of each tensor that is given.
    """

    kernel: Kernel
    grid: tuple[int, int, int]
    rest: bytes
    extents: tuple[int, ...]


def check_status(result: tuple[Any, ...]) -> Any:
    """What a driver call returned behind its status.

    Raises:
        BackendError: the status is an error.
    """
    status, *values = result
    if int(status) != 0:
        raise BackendError("cuda", got=str(status), wanted="CUDA_SUCCESS")
    return values[0] if values else None


_kernels: dict[tuple[AnyVariant, int], Kernel] = {}


def load_variant(variant: AnyVariant, device_index: int) -> Kernel:
    """The loaded kernel of a variant on a device.

    Raises:
        CaptureError: it is not loaded and the current stream is capturing.
    """
    kernel = _kernels.get((variant, device_index))
    if kernel is None:
        if torch.cuda.is_current_stream_capturing():
            raise CaptureError(
                variant.kernel,
                got="a kernel that is not loaded yet, under graph capture",
                wanted="every kernel of a graph loaded before capture",
                remedy="run the step once eagerly, or serving_conv.warmup(...), before capturing",
            )
        kernel = _kernels.setdefault((variant, device_index), Kernel(variant, device_index))
    return kernel


def run_forward(*, x: Tensor, workspace: Tensor | None, **arguments: Any) -> None:
    """`causal_conv1d_fn` where the kernel before may be writing the weights, as an optimiser's does."""
    _run(prefill_launch(x, arguments), x.device, dependent=False)


def run_backward(*arguments: Any, **options: Any) -> None:
    """Launch one backward on the current stream; arguments as of `prepare_backward`."""
    device: torch.device = arguments[0].device
    multiprocessors, _ = _traits_of_device(device.index)
    launches, scratch = prepare_backward(*arguments, **options, multiprocessors=multiprocessors)
    for place, launch in enumerate(launches):
        _run(launch, device, dependent=place > 0)  # those behind the first read what it wrote, and wait for it
    del scratch  # freed in stream order


def _run(launch: Launch | None, device: torch.device, *, dependent: bool = True) -> None:
    if launch is None:
        return
    if device.index == torch.cuda.current_device():
        _launch_here(launch, device.index, dependent)
    else:
        with torch.cuda.device(device):
            _launch_here(launch, device.index, dependent)


def _launch_here(launch: Launch, device_index: int, dependent: bool) -> None:
    stream = torch._C._cuda_getCurrentRawStream(device_index)
    kernel = load_variant(launch.variant, device_index)
    kernel.launch(launch.parameters, launch.grid, stream, dependent=dependent)
