"""Owns the peers of the training path: causal-conv1d's and fla's backward, or the reason why one is absent."""

from __future__ import annotations

import ctypes
import importlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

if __package__ in (None, ""):  # run as a file
    sys.path.append(str(Path(__file__).resolve().parents[1]))

from benchmarks.peers import Fla, PeerAbsent
from benchmarks.timing import Call

if TYPE_CHECKING:
    from benchmarks.backward import Work

__all__ = ["BackwardPeer", "choose_backward_peers"]


class BackwardPeer(Protocol):
    """One implementation.

    Attributes:
        name: as tables and `--peers` spell it.
        modes: what is timed.
    """

    name: str
    modes: tuple[str, ...]

    def load(self, folder: Path) -> None:
        """Make the peer ready, or raise PeerAbsent."""

    def calls(self, work: Work, mode: str) -> list[Call]:
        """One call for each buffer of the rotation; it returns dx (forward: the output).

        Raises:
            PeerAbsent: it has no such call.
        """


class DaoBackward:
    """causal-conv1d's channel-last backward, with everything its C++ entry does: zeroed sums, workspace, its sum."""

    name = "causal-conv1d"
    modes: tuple[str, ...] = ("atomics", "ordered")

    def __init__(self) -> None:
        self._backward: Any = None

    def load(self, folder: Path) -> None:
        """See `BackwardPeer`."""
        library = folder / "causal_conv1d" / "libcausal_conv1d_backward.so"
        if not library.exists():
            raise PeerAbsent(f"{library.name} is not in the peers' folder: run benchmarks/fetch_peers.py")
        self._backward = ctypes.CDLL(str(library)).backward
        self._backward.argtypes = [*[ctypes.c_void_p] * 10, *[ctypes.c_int] * 3, ctypes.c_void_p]

    def calls(self, work: Work, mode: str) -> list[Call]:
        """See `BackwardPeer`; packed sequences go by its `seq_idx`."""
        row, ordered = work.row, mode == "ordered"
        chunks = -(-row.rows // (64 if row.rows <= 128 else 128))

        def zeros(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.float32, device="cuda")

        def make(i: int) -> Call:
            x, dout = work.x[i], work.dout[i]

            def call() -> Tensor:
                dx = torch.empty_like(x)
                dweight, dbias = zeros(row.channels, 4), zeros(row.channels)
                taps = zeros(row.batches, chunks, row.channels, 4) if ordered else None
                biases = zeros(row.batches, chunks, row.channels) if ordered else None
                tensors = (x, work.weight, work.bias, work.seq_idx, dout, dx, dweight, dbias, taps, biases)
                status = self._backward(
                    *[0 if tensor is None else tensor.data_ptr() for tensor in tensors],
                    *(row.batches, row.channels, row.rows),
                    torch.cuda.current_stream().cuda_stream,
                )
                if status:
                    raise RuntimeError(f"CUDA error {status}")
                if taps is not None and biases is not None:
                    dweight.add_(taps.sum((0, 1)))
                    dbias.add_(biases.sum((0, 1)))
                # As its autograd function hands them on.
                dweight.to(work.weight.dtype), dbias.to(work.bias.dtype)
                return dx

            return call

        return [make(i) for i in range(len(work.x))]


class FlaBackward:
    """flash-linear-attention's Triton backward; its sums are of a workspace, so it has one mode."""

    name = "fla"
    modes: tuple[str, ...] = ("backward",)

    def __init__(self) -> None:
        self._ops: Any = None

    def load(self, folder: Path) -> None:
        """See `BackwardPeer`."""
        Fla().load(folder)
        self._ops = importlib.import_module("fla.modules.causal_conv1d.ops")

    def calls(self, work: Work, mode: str) -> list[Call]:
        """See `BackwardPeer`."""
        offsets = None if work.cu_seqlens is None else work.cu_seqlens.long()
        host = None if offsets is None else offsets.cpu()

        def make(i: int) -> Call:
            def call() -> Tensor:
                dx: Tensor = self._ops.causal_conv1d_bwd(
                    work.x[i],
                    work.dout[i],
                    None,
                    weight=work.weight,
                    bias=work.bias,
                    activation="silu",
                    cu_seqlens=offsets,
                    cu_seqlens_cpu=host,
                )[0]
                return dx

            return call

        return [make(i) for i in range(len(work.x))]


PEERS: tuple[BackwardPeer, ...] = (DaoBackward(), FlaBackward())


def choose_backward_peers(names: str) -> tuple[BackwardPeer, ...]:
    """Peers whose names start with one of the comma-separated `names`; empty means all, `none` means none.

    Raises:
        ValueError: a name that fits no peer.
    """
    wanted = [name.strip().lower() for name in names.split(",") if name.strip()]
    if wanted == ["none"]:
        return ()
    for name in wanted:
        if not any(peer.name.lower().startswith(name) for peer in PEERS):
            raise ValueError(f"no peer starts with {name!r}; there are: {', '.join(peer.name for peer in PEERS)}")
    return tuple(p for p in PEERS if not wanted or any(p.name.lower().startswith(name) for name in wanted))
