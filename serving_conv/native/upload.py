"""Copies a pinned block to a fixed address on the device, on the current stream, without torch's dispatch."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

__all__ = ["upload_to"]


def upload_to(target: Tensor) -> Callable[[Tensor], object]:
    """What copies host bytes of the target's size into it: asynchronous on a GPU, where the source must be pinned.

    torch's `copy_` costs the host several microseconds, most of a step's metadata; the driver's own call about two.
    """
    if not target.is_cuda or torch.version.cuda is None:
        return lambda source: target.copy_(source, non_blocking=True)
    from cuda.bindings import driver

    address, nbytes, index = driver.CUdeviceptr(target.data_ptr()), target.nbytes, target.device.index
    copy, streams = driver.cuMemcpyHtoDAsync, dict[int, object]()

    def upload(source: Tensor) -> None:
        if torch._C._cuda_getDevice() == index:
            handle = torch._C._cuda_getCurrentRawStream(index)
            stream = streams.get(handle)
            if stream is None:
                stream = streams[handle] = driver.CUstream(handle)
            if not copy(address, source.data_ptr(), nbytes, stream)[0]:
                return
        target.copy_(source, non_blocking=True)  # another device is current, or none yet on this thread

    return upload
