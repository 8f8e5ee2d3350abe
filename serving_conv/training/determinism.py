"""Owns the switch between the two reductions of the parameters' gradients, and the guard that trainers call."""

from __future__ import annotations

import torch

from serving_conv.settings import deterministic_switch

__all__ = ["assert_causal_conv1d_deterministic", "deterministic_reduction"]


def deterministic_reduction() -> bool:
    """Whether gradients of weight and bias are summed in one fixed order.

    `CAUSAL_CONV1D_DETERMINISTIC` decides by a leading 1 or 0, as in causal-conv1d; anything else leaves it to
    `torch.use_deterministic_algorithms`.
    """
    switch = deterministic_switch()
    return torch.are_deterministic_algorithms_enabled() if switch is None else switch


def assert_causal_conv1d_deterministic(deterministic_mode: bool) -> None:
    """Refuse a deterministic run whose convolution need not be bit-reproducible. Call it once, at construction.

    The meaning is that of Megatron-Core's function of this name; there is no optional dependency to be too old.

    Args:
        deterministic_mode: whether the run wants bit-reproducible gradients.

    Raises:
        AssertionError: it does, and neither the environment nor torch asks for it.
    """
    if deterministic_mode and not deterministic_reduction():
        raise AssertionError(
            f"deterministic_mode: got CAUSAL_CONV1D_DETERMINISTIC {deterministic_switch()} and "
            f"torch.are_deterministic_algorithms_enabled() {torch.are_deterministic_algorithms_enabled()}; wanted the "
            "ordered sum of the convolution's parameter gradients. Remedy: torch.use_deterministic_algorithms(True), "
            "or CAUSAL_CONV1D_DETERMINISTIC=1"
        )
