"""Owns the question whether something above the kernels must see a call: a compiler, a fake mode, a subclass."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["needs_dispatch"]


def needs_dispatch(x: object) -> bool:
    """Whether something above the kernels (compiler, fake mode, subclass, profiler mode) must see the call."""
    if torch.compiler.is_compiling():
        return True
    # Anything that is not a tensor goes to the checks, whose message is better than the dispatcher's.
    return isinstance(x, Tensor) and (
        type(x) not in (Tensor, torch.nn.Parameter) or x.is_meta or torch._C._len_torch_dispatch_stack() > 0
    )
