"""Copies a pinned block to a fixed address on the device, on the current stream, without torch's dispatch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

__all__ = ["copier"]


def copier(source: Tensor, target: Tensor) -> Callable[[], object]:
    """What copies host bytes to as many on a device; on a GPU asynchronously, so that the source must be pinned.

    torch's `copy_` takes 6.1 us of an H200's host, the driver's own call 3.4.
    """
    if not target.is_cuda or torch.version.cuda is None:
        return lambda: target.copy_(source, non_blocking=True)
    from cuda.bindings import driver

    device, host = driver.CUdeviceptr(target.data_ptr()), source.data_ptr()
    nbytes, index, copy = target.nbytes, target.device.index, driver.cuMemcpyHtoDAsync
    streams: dict[int, Any] = {}

    def upload() -> None:
        # Else another device is current, or none yet on this thread: torch's copy sees to that.
        if torch._C._cuda_getDevice() == index:
            handle = torch._C._cuda_getCurrentRawStream(index)
            stream = streams.get(handle)
            if stream is None:
                stream = streams[handle] = driver.CUstream(handle)
            if not copy(device, host, nbytes, stream)[0]:
                return
        target.copy_(source, non_blocking=True)

    return upload
