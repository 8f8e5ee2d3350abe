"""Owns the sticky fault code of each device: what a kernel leaves behind when a device value is out of range.

Offsets, slots and counts live on the device and are never read by the host, so a kernel that meets a bad one
skips that sequence (zero output, slot untouched) and ORs a code into one int32 of its device. Reading the code
synchronises with the device, so it happens only when the caller asks.
"""

from __future__ import annotations

from enum import IntFlag

import torch
from torch import Tensor

__all__ = ["DeviceFault", "clear_device_fault", "device_fault", "fault_flag"]


class DeviceFault(IntFlag):
    """Sticky codes; several may be set."""

    NONE = 0
    OFFSETS = 1
    """Offsets do not start at 0, go backwards or leave `[0, R]`."""
    SLOT = 2
    """A slot number is neither `pad_slot_id` nor in `[0, S)`."""
    ACCEPTED_COUNT = 4
    """An accepted count is outside `[1, L-W+2]`."""
    STATE_TRUNCATED = 8
    """A speculative step had more than L-W+2 tokens: outputs are right, only what fits was stored."""
    CHECKPOINT = 16
    """A checkpoint names a count of tokens outside `[1, T]`: it was not written."""


_FLAGS: dict[torch.device, Tensor] = {}


def fault_flag(device: torch.device) -> Tensor:
    """The device's flag: int32 `[1]` at an address that never changes, so captured graphs may hold it."""
    flag = _FLAGS.get(device)
    if flag is None:
        with torch.inference_mode(False):  # or no later call outside inference mode could write to it
            flag = _FLAGS.setdefault(device, torch.zeros(1, dtype=torch.int32, device=device))
    return flag


def device_fault(device: torch.device | str = "cpu") -> DeviceFault:
    """Read the sticky code of a device. Waits for the work queued on it."""
    return DeviceFault(int(fault_flag(_canonical(device)).item()))


def clear_device_fault(device: torch.device | str = "cpu") -> None:
    """Set the sticky code back to `NONE`, in stream order."""
    fault_flag(_canonical(device)).zero_()


def _canonical(device: torch.device | str) -> torch.device:
    """`cuda` means the current device, as everywhere in torch; a tensor's device always has its index."""
    device = torch.device(device)
    if device.type != "cpu" and device.index is None:
        device = torch.empty(0, device=device).device
    return device
