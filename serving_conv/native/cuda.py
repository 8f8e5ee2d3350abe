"""The `cuda` backend: compiles a variant with NVRTC through cuda.core, keeps it on disk, launches it.

Compiling needs no toolkit: NVRTC comes in its wheel. The disk cache is cuda.core's: entries are published by
rename, a corrupt one is a miss, and several processes may share it. Kernels are launched with programmatic
dependent launch where the device has it (sm_90 and up).
"""

from __future__ import annotations

import ctypes
import threading
from functools import cache
from typing import Any

import torch
from torch import Tensor

from serving_conv.contract import PREFILL, Entry
from serving_conv.errors import BackendError, CaptureError
from serving_conv.faults import fault_flag
from serving_conv.native.abi import PACKER, POINTERS
from serving_conv.native.call import Launch, prepare_prefill, prepare_update
from serving_conv.native.variant import Variant, source
from serving_conv.settings import SETTINGS

__all__ = ["CudaBackend", "Plan", "compile_variant", "load_variant"]


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
        _run(_prefill_launch(x, arguments), x.device)

    def update(self, *, x: Tensor, **arguments: Any) -> None:
        """`causal_conv1d_update`."""
        _run(prepare_update(x, **arguments, fault_flag=fault_flag(x.device)), x.device)


def _prefill_launch(x: Tensor, arguments: dict[str, Any]) -> Launch | None:
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


def compile_variant(variant: Variant, architecture: str) -> Any:
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


class _Kernel:
    """One loaded kernel with its launch configuration, ready to go; shared by threads, hence the lock."""

    def __init__(self, variant: Variant, device_index: int) -> None:
        from cuda.bindings import driver

        major, minor = torch.cuda.get_device_capability(device_index)
        # The object must outlive the handle taken from it.
        self._object = compile_variant(variant, f"sm_{major}{minor}")
        self._kernel = self._object.get_kernel(variant.kernel)
        self._handle = driver.CUkernel(int(self._kernel.handle))
        self._launch = driver.cuLaunchKernelEx
        self._function = _checked(driver.cuKernelGetFunction(self._handle))
        config = driver.CUlaunchConfig()
        config.blockDimX, config.blockDimY, config.blockDimZ = variant.threads, 1, 1
        if major >= 9:
            attribute = driver.CUlaunchAttribute()
            attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
            value = driver.CUlaunchAttributeValue()
            value.programmaticStreamSerializationAllowed = 1
            attribute.value = value
            config.attrs = [attribute]
            config.numAttrs = 1
        self._config = config
        self._buffer = ctypes.create_string_buffer(PACKER.size)
        self._arguments = (ctypes.c_void_p * 1)(ctypes.addressof(self._buffer))
        self._arguments_address = ctypes.addressof(self._arguments)
        self._lock = threading.Lock()

    def launch(self, parameters: bytes, grid: tuple[int, int, int], stream: int) -> None:
        """Launch on a raw stream handle of the current device."""
        with self._lock:
            ctypes.memmove(self._buffer, parameters, PACKER.size)
            config = self._config
            config.gridDimX, config.gridDimY, config.gridDimZ = grid
            config.hStream = stream
            status = self._launch(config, self._function, self._arguments_address, 0)[0]
        if status:
            _checked((status,))


def _checked(result: tuple[Any, ...]) -> Any:
    status, *values = result
    if int(status) != 0:
        raise BackendError("cuda", got=str(status), wanted="CUDA_SUCCESS")
    return values[0] if values else None


_kernels: dict[tuple[Variant, int], _Kernel] = {}


def load_variant(variant: Variant, device_index: int) -> _Kernel:
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
        kernel = _kernels.setdefault((variant, device_index), _Kernel(variant, device_index))
    return kernel


def _run(launch: Launch | None, device: torch.device) -> None:
    if launch is None:
        return
    if device.index == torch.cuda.current_device():
        _launch_here(launch, device.index)
    else:
        with torch.cuda.device(device):
            _launch_here(launch, device.index)


def _launch_here(launch: Launch, device_index: int) -> None:
    stream = torch._C._cuda_getCurrentRawStream(device_index)
    load_variant(launch.variant, device_index).launch(launch.parameters, launch.grid, stream)


class Plan:
    """A call that passed all its checks, ready to be made again with other addresses.

    Everything that depends on shapes, strides and types is settled: what remains is to look at the addresses, put
    them in front of the packed sizes, and launch. A plan is found by the signature of its call (`ops`).
    """

    def __init__(self, entry: Entry, arguments: dict[str, Any]) -> None:
        x: Tensor = arguments["x"]
        rest = {name: value for name, value in arguments.items() if name not in ("x", "workspace")}
        if entry is PREFILL:
            launch = _prefill_launch(x, rest)
        else:
            launch = prepare_update(x, **rest, fault_flag=fault_flag(x.device))
        if launch is None:
            raise BackendError(entry.name, got="a call with nothing to compute", wanted="one that `possible` accepts")
        self._kernel = load_variant(launch.variant, x.device.index)
        self._grid = launch.grid
        self._sizes = launch.parameters[POINTERS.size :]
        self._device_index: int = x.device.index
        self._fault_flag = fault_flag(x.device).data_ptr()
        self._shape = x.shape
        self._private_storage = entry is PREFILL
        self._in_place = entry is not PREFILL and arguments["out"].stride() == x.stride()
        self._extents = tuple(
            _extent(arguments.get(name))
            for name in ("x", "weight", "bias", "cu_seqlens", "cache_indices", "state_indices", "has_initial_state")
        )
        self._counts_extent = _extent(arguments["num_accepted_tokens"])
        self._state_extent = _extent(arguments["conv_state"])
        self._out_extent = _extent(arguments["out"])

    @staticmethod
    def possible(arguments: dict[str, Any]) -> bool:
        """Whether a call may become a plan: something to compute, and addresses that allow the widest words."""
        x: Tensor = arguments["x"]
        return x.numel() > 0 and all(
            arguments[name] is None or arguments[name].data_ptr() % 16 == 0
            for name in ("x", "weight", "bias", "conv_state", "out")
        )

    def run(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        conv_state: Tensor,
        out: Tensor | None,
        cu_seqlens: Tensor | None,
        slots: Tensor,
        has_initial_state: Tensor | None,
        num_accepted_tokens: Tensor | None,
        workspace: Tensor | None,
    ) -> Tensor | None:
        """Make the call; None, and nothing done, if these addresses need the full checks."""
        device_index = self._device_index
        if device_index != torch._C._cuda_getDevice():
            return None
        fresh = out is None
        if out is None:
            out = x.new_empty(self._shape)
        at_x, at_weight, at_state, at_out = x.data_ptr(), weight.data_ptr(), conv_state.data_ptr(), out.data_ptr()
        at_bias = 0 if bias is None else bias.data_ptr()
        if (at_x | at_weight | at_state | at_out | at_bias) & 15:
            return None
        at_offsets = 0 if cu_seqlens is None else cu_seqlens.data_ptr()
        at_slots = slots.data_ptr()
        at_flags = 0 if has_initial_state is None else has_initial_state.data_ptr()
        at_counts = 0 if num_accepted_tokens is None else num_accepted_tokens.data_ptr()
        state_end, out_end = at_state + self._state_extent, at_out + self._out_extent
        reads = (at_x, at_weight, at_bias, at_offsets, at_slots, at_slots, at_flags)
        for at, extent in zip((*reads, at_counts), (*self._extents, self._counts_extent), strict=True):
            if at < state_end and at_state < at + extent:
                return None
        if not fresh:
            for at, extent in zip((*reads, at_counts), (*self._extents, self._counts_extent), strict=True):
                if at < out_end and at_out < at + extent and not (self._in_place and at == at_x == at_out):
                    return None
            if at_state < out_end and at_out < state_end:
                return None
        if self._private_storage and not (fresh and workspace is None):
            tensors = (x, weight, bias, conv_state, cu_seqlens, slots, has_initial_state, num_accepted_tokens)
            others = {t.untyped_storage().data_ptr() for t in tensors if t is not None}
            at_scratch = 0 if workspace is None else workspace.untyped_storage().data_ptr()
            if out.untyped_storage().data_ptr() in (*others, at_scratch) or at_scratch in others:
                return None
        pointers = POINTERS.pack(
            at_x,
            at_weight,
            at_bias,
            at_state,
            at_out,
            at_offsets,
            at_slots,
            at_flags,
            at_counts,
            self._fault_flag,
        )
        self._kernel.launch(pointers + self._sizes, self._grid, torch._C._cuda_getCurrentRawStream(device_index))
        return out


def _extent(tensor: Tensor | None) -> int:
    """Bytes from a tensor's first element to the end of its last."""
    if tensor is None or tensor.numel() == 0:
        return 0
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.element_size()
