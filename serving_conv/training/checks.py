"""Owns the argument checks of the training path. Host facts only: shapes, types, strides, devices."""

from __future__ import annotations

import torch
from torch import Tensor

from serving_conv.contract import ACTIVATIONS, FLOAT_TYPES, INT32_LIMIT, MAX_WIDTH, MIN_WIDTH
from serving_conv.errors import ContractError

__all__ = ["check_convolution", "check_global_seq_idx", "check_sequences"]

_TYPES = tuple(getattr(torch, name) for name in (*FLOAT_TYPES, "float64"))
_ROOM = 64  # rows short of int32 that the kernels may count beyond the last


def _tensor(name: str, value: object, axes: tuple[str, ...]) -> Tensor:
    if not isinstance(value, Tensor):
        raise ContractError(name, got=type(value).__name__, wanted="a torch.Tensor")
    if value.ndim != len(axes):
        raise ContractError(name, got=f"shape {list(value.shape)}", wanted=f"{len(axes)} axes [{', '.join(axes)}]")
    return value


def _same_device(name: str, tensor: Tensor, x: Tensor) -> None:
    if tensor.device != x.device:
        raise ContractError(name, got=f"device {tensor.device}", wanted=f"{x.device}, the device of x")


def check_convolution(x: object, weight: object, bias: object, activation: object) -> None:
    """What every call gives.

    Args:
        x: must be `[B, T, D]` bf16, fp16, fp32 or float64.
        weight: must be `[D, W]` contiguous, on the device of x, float64 if and only if x is.
        bias: must be `[D]` contiguous, as weight, or None.
        activation: must be "silu", "swish" or None.

    Raises:
        ContractError: the first rule that is broken.
    """
    x = _tensor("x", x, ("B", "T", "D"))
    weight = _tensor("weight", weight, ("D", "W"))
    if not MIN_WIDTH <= weight.shape[1] <= MAX_WIDTH:
        raise ContractError("weight", got=f"{weight.shape[1]} taps", wanted=f"{MIN_WIDTH} to {MAX_WIDTH}")
    given = [("x", x), ("weight", weight)]
    if bias is not None:
        given.append(("bias", _tensor("bias", bias, ("D",))))
    for name, tensor in given:
        channels = tensor.shape[2 if name == "x" else 0]
        if channels != x.shape[2]:
            raise ContractError(name, got=f"{channels} channels", wanted=f"{x.shape[2]}, the last axis of x")
        if tensor.dtype not in _TYPES or (tensor.dtype == torch.float64) != (x.dtype == torch.float64):
            wanted = "torch.float64 as x" if x.dtype == torch.float64 else f"one of {', '.join(FLOAT_TYPES)}"
            raise ContractError(name, got=str(tensor.dtype), wanted=wanted, remedy="convert it before the call")
        _same_device(name, tensor, x)
        if name != "x" and not tensor.is_contiguous():
            strides = list(tensor.stride())
            raise ContractError(name, got=f"strides {strides}", wanted="contiguous", remedy="call .contiguous()")
    if not (activation is None or isinstance(activation, str)) or activation not in ACTIVATIONS:
        wanted = ", ".join(repr(choice) for choice in ACTIVATIONS)
        raise ContractError("activation", got=repr(activation), wanted=wanted)
    if x.shape[0] * x.shape[1] > INT32_LIMIT - _ROOM or x.shape[2] > INT32_LIMIT:
        raise ContractError("x", got=f"shape {list(x.shape)}", wanted="B*T and D below 2^31")


def check_sequences(
    x: Tensor, weight: Tensor, seq_idx: object, cu_seqlens: object, initial_states: object, *, want_final: bool
) -> None:
    """What says where sequences begin, and their initial windows.

    Args:
        x: `[B, T, D]`, checked.
        weight: `[D, W]`, checked.
        seq_idx: must be int32 `[B, T]`, or None.
        cu_seqlens: must be int32 `[N+1]` contiguous with B = 1, or None, as it must with `seq_idx`.
        initial_states: must be `[N, D, W-1]` in the type of x, or None; with `seq_idx` N is free and B = 1.
        want_final: final windows are asked for, which `seq_idx` cannot say the number of.

    Raises:
        ContractError: the first rule that is broken.
    """
    batches, rows, channels = x.shape
    if seq_idx is not None and cu_seqlens is not None:
        raise ContractError("seq_idx", got="both seq_idx and cu_seqlens", wanted="one of them")
    sequences = batches
    if seq_idx is not None:
        seq_idx = _tensor("seq_idx", seq_idx, ("B", "T"))
        if seq_idx.shape != (batches, rows) or seq_idx.dtype != torch.int32:
            raise ContractError(
                "seq_idx",
                got=f"{seq_idx.dtype} {list(seq_idx.shape)}",
                wanted=f"torch.int32 {[batches, rows]}, one number a token",
            )
        _same_device("seq_idx", seq_idx, x)
        if want_final:
            raise ContractError(
                "return_final_states",
                got="True with seq_idx",
                wanted="cu_seqlens, which says how many sequences there are",
                remedy="give cu_seqlens",
            )
        if initial_states is not None and batches != 1:
            raise ContractError(
                "initial_states",
                got=f"initial windows with seq_idx of {batches} batches",
                wanted="B = 1, so that sequences have one order",
                remedy="flatten x to B = 1 and give cu_seqlens",
            )
    if cu_seqlens is not None:
        cu_seqlens = _tensor("cu_seqlens", cu_seqlens, ("N+1",))
        if batches != 1:
            raise ContractError("x", got=f"{batches} batches", wanted="B = 1 with cu_seqlens", remedy="flatten x")
        if cu_seqlens.dtype != torch.int32 or not cu_seqlens.is_contiguous():
            got = f"{cu_seqlens.dtype} with strides {list(cu_seqlens.stride())}"
            raise ContractError("cu_seqlens", got=got, wanted="torch.int32, contiguous")
        _same_device("cu_seqlens", cu_seqlens, x)
        sequences = cu_seqlens.shape[0] - 1
        if sequences < (1 if rows else 0):
            raise ContractError("cu_seqlens", got=f"{sequences + 1} offsets", wanted="N+1, at least one sequence")
    if initial_states is not None:
        initial_states = _tensor("initial_states", initial_states, ("N", "D", "W-1"))
        count = initial_states.shape[0] if seq_idx is not None else sequences
        wanted = (count, channels, weight.shape[1] - 1)
        if initial_states.shape != wanted or initial_states.dtype != x.dtype:
            raise ContractError(
                "initial_states",
                got=f"{initial_states.dtype} {list(initial_states.shape)}",
                wanted=f"{x.dtype} {list(wanted)}: sequences, channels, W-1 inputs oldest first",
            )
        _same_device("initial_states", initial_states, x)


def check_global_seq_idx(x: Tensor, global_seq_idx: object, ranks: int) -> None:
    """One number for each token of all ranks.

    Args:
        x: `[B, T, D]`, checked; B must be 1.
        global_seq_idx: must be int32 `[1, ranks*T]`.
        ranks: of the group.

    Raises:
        ContractError: a wrong shape, type or device, or x of more than one batch.
    """
    global_seq_idx = _tensor("global_seq_idx", global_seq_idx, ("1", "ranks*T"))
    wanted = (1, ranks * x.shape[1])
    if x.shape[0] != 1:
        raise ContractError("x", got=f"{x.shape[0]} batches", wanted="B = 1 with global_seq_idx", remedy="flatten x")
    if global_seq_idx.shape != wanted:
        raise ContractError(
            "global_seq_idx",
            got=f"shape {list(global_seq_idx.shape)}",
            wanted=f"{list(wanted)}: the numbers of all {ranks} shards of {x.shape[1]} tokens, the same on every rank",
        )
    if global_seq_idx.dtype != torch.int32:
        raise ContractError("global_seq_idx", got=str(global_seq_idx.dtype), wanted="torch.int32")
    _same_device("global_seq_idx", global_seq_idx, x)
