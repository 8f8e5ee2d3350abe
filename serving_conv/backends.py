"""Owns the choice of a backend: by device, or for every device by `SERVING_CONV_BACKEND`.

A backend is the arithmetic behind the entries. It gets arguments that are checked and complete (`out` and, where
needed, `workspace` are allocated) and writes to `out` and the pool.
"""

from __future__ import annotations

import logging
from typing import Protocol

import torch
from torch import Tensor

from serving_conv import reference
from serving_conv.errors import BackendError
from serving_conv.native.cuda import CudaBackend
from serving_conv.native.host import HostBackend
from serving_conv.portable.backend import TritonBackend
from serving_conv.settings import SETTINGS

__all__ = ["Backend", "backend_for", "choose_backend", "use_backend"]

logger = logging.getLogger("serving_conv")


class Backend(Protocol):
    """What every backend offers; arguments as in the entries of the contract."""

    name: str

    def supports(self, device: torch.device) -> bool:
        """Whether tensors of this device can be served here and now."""

    def prefill(
        self,
        *,
        x: Tensor,
        weight: Tensor,
        conv_state: Tensor,
        cu_seqlens: Tensor,
        cache_indices: Tensor,
        has_initial_state: Tensor | None,
        bias: Tensor | None,
        activation: str | None,
        num_accepted_tokens: Tensor | None,
        out: Tensor,
        workspace: Tensor | None,
        pad_slot_id: int,
    ) -> None:
        """`causal_conv1d_fn`."""

    def update(
        self,
        *,
        x: Tensor,
        weight: Tensor,
        conv_state: Tensor,
        state_indices: Tensor,
        cu_seqlens: Tensor | None,
        num_accepted_tokens: Tensor | None,
        has_initial_state: Tensor | None,
        bias: Tensor | None,
        activation: str | None,
        out: Tensor,
        pad_slot_id: int,
    ) -> None:
        """`causal_conv1d_update`."""

    def step(
        self,
        *,
        x: Tensor,
        weight: Tensor,
        conv_state: Tensor,
        cu_seqlens: Tensor,
        cache_indices: Tensor,
        has_initial_state: Tensor | None,
        num_accepted_tokens: Tensor | None,
        speculative: Tensor | None,
        checkpoint_offsets: Tensor | None,
        checkpoint_tokens: Tensor | None,
        checkpoint_slots: Tensor | None,
        bias: Tensor | None,
        activation: str | None,
        out: Tensor,
        pad_slot_id: int,
    ) -> None:
        """`causal_conv1d_step`."""


class ReferenceBackend:
    """Vectorised torch in the contract's fixed order; runs wherever torch does, and synchronises off the CPU."""

    name = "reference"

    def supports(self, device: torch.device) -> bool:
        return True

    def prefill(
        self,
        *,
        x: Tensor,
        weight: Tensor,
        conv_state: Tensor,
        cu_seqlens: Tensor,
        cache_indices: Tensor,
        has_initial_state: Tensor | None,
        bias: Tensor | None,
        activation: str | None,
        num_accepted_tokens: Tensor | None,
        out: Tensor,
        workspace: Tensor | None,
        pad_slot_id: int,
    ) -> None:
        self.step(
            x=x,
            weight=weight,
            conv_state=conv_state,
            cu_seqlens=cu_seqlens,
            cache_indices=cache_indices,
            has_initial_state=has_initial_state,
            num_accepted_tokens=num_accepted_tokens,
            speculative=None,
            checkpoint_offsets=None,
            checkpoint_tokens=None,
            checkpoint_slots=None,
            bias=bias,
            activation=activation,
            out=out,
            pad_slot_id=pad_slot_id,
        )

    def update(
        self,
        *,
        x: Tensor,
        weight: Tensor,
        conv_state: Tensor,
        state_indices: Tensor,
        cu_seqlens: Tensor | None,
        num_accepted_tokens: Tensor | None,
        has_initial_state: Tensor | None,
        bias: Tensor | None,
        activation: str | None,
        out: Tensor,
        pad_slot_id: int,
    ) -> None:
        result = reference.causal_conv1d(
            x,
            weight,
            conv_state,
            cu_seqlens,
            state_indices,
            bias=bias,
            activation=activation,
            has_initial_state=True if has_initial_state is None else has_initial_state,
            num_accepted_tokens=num_accepted_tokens,
            speculative=num_accepted_tokens is not None,
            pad_slot_id=pad_slot_id,
        )
        _store(result, out)

    def step(
        self,
        *,
        x: Tensor,
        weight: Tensor,
        conv_state: Tensor,
        cu_seqlens: Tensor,
        cache_indices: Tensor,
        has_initial_state: Tensor | None,
        num_accepted_tokens: Tensor | None,
        speculative: Tensor | None,
        checkpoint_offsets: Tensor | None,
        checkpoint_tokens: Tensor | None,
        checkpoint_slots: Tensor | None,
        bias: Tensor | None,
        activation: str | None,
        out: Tensor,
        pad_slot_id: int,
    ) -> None:
        checkpoints = None
        if checkpoint_offsets is not None and checkpoint_tokens is not None and checkpoint_slots is not None:
            checkpoints = (checkpoint_offsets, checkpoint_tokens, checkpoint_slots)
        result = reference.causal_conv1d(
            x,
            weight,
            conv_state,
            cu_seqlens,
            cache_indices,
            bias=bias,
            activation=activation,
            has_initial_state=False if has_initial_state is None else has_initial_state,
            num_accepted_tokens=num_accepted_tokens,
            speculative=False if speculative is None else speculative,
            pad_slot_id=pad_slot_id,
            checkpoints=checkpoints,
        )
        _store(result, out)


def _store(result: reference.Result, out: Tensor) -> None:
    # Zeros first: hostile offsets may give one row to a faulty and to a sound sequence.
    out[result.zero_rows] = 0
    out[result.rows] = result.values.to(out.dtype)


# In order of preference; the first that supports the device serves it.
_BACKENDS: tuple[Backend, ...] = (CudaBackend(), TritonBackend(), HostBackend(), ReferenceBackend())
_chosen: dict[torch.device, Backend] = {}


def choose_backend(device: torch.device) -> Backend:
    """The backend that serves a device; decided once a device, and said in one log line.

    Raises:
        BackendError: the one that `SERVING_CONV_BACKEND` names does not exist or cannot serve the device.
    """
    backend = _chosen.get(device)
    if backend is None:
        backend = _select(device)
        _chosen[device] = backend
        why = "SERVING_CONV_BACKEND" if SETTINGS.backend else "by device"
        logger.info("serving_conv: backend %r for device %s (%s)", backend.name, device, why)
    return backend


def use_backend(device: torch.device, name: str) -> bool:
    """Serve a device with this backend from now on, unless `SERVING_CONV_BACKEND` names another.

    Returns:
        Whether the backend serves it: false where it cannot run, or the setting says otherwise.
    """
    for backend in _BACKENDS:
        if backend.name == name and SETTINGS.backend in (None, name) and backend.supports(device):
            _chosen[device] = backend
            return True
    return False


def _select(device: torch.device) -> Backend:
    names = " or ".join(backend.name for backend in _BACKENDS)
    for backend in _BACKENDS:
        if SETTINGS.backend is None and isinstance(backend, HostBackend):
            continue  # compiles for tens of seconds what the reference runs at once: only when asked for
        if SETTINGS.backend in (None, backend.name) and backend.supports(device):
            return backend
    raise BackendError(
        "SERVING_CONV_BACKEND",
        got=f"{SETTINGS.backend!r} for device {device}",
        wanted=names,
        remedy="unset it to choose by device",
    )


def backend_for(tensor: Tensor) -> str:
    """Name of the backend that serves calls on this tensor's device.

    Raises:
        BackendError: as the call itself would.
    """
    return choose_backend(tensor.device).name
