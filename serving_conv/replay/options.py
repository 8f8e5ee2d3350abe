"""Owns the settings of a replay and their limits."""

from __future__ import annotations

from dataclasses import asdict, dataclass

import torch

from serving_conv.contract import FLOAT_TYPES, state_positions
from serving_conv.errors import ContractError
from serving_conv.replay.trace import BLOCK_TOKENS

__all__ = ["RESUME_MODES", "ReplayOptions"]

LAYOUTS = ("channels", "positions")
LAUNCHES = ("entries", "step", "graphs")
RESUME_MODES = ("recompute", "import", "alternate")


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayOptions:
    """Settings of a replay; the command line has a flag for each.

    Attributes:
        layers: conv layers, all alike.
        channels: channels of a layer.
        width: taps, 2 to 8.
        dtype: type of the inputs and outputs: bfloat16, float16 or float32.
        state_dtype: type of the pool; None is that of the inputs. Inputs are exact in all three types.
        layout: contiguous axis of the pool: channels or positions.
        slots: slots of the pool; one of them is reserved.
        max_sequences: most requests that run at once.
        max_step_tokens: most rows of a step.
        draft_tokens: drafts of a speculative step; 0 switches speculation off.
        acceptance: probability that a draft is right.
        step_ms: trace time of a step, in milliseconds, before its rows.
        token_us: trace time of each row, in microseconds.
        patience: trace seconds that the head of the queue waits while there is neither a slot nor a place among the
            running; then it gets those of the request that was served most.
        resume: after a preemption compute again, import the exported slot, or alternate.
        checkpoint_every: granularity of prefix checkpoints in tokens; divides 512.
        device: where the pool lies and the operator runs.
        launch: what a layer launches in a step. entries: one call for each entry that its sequences need; step: one
            `causal_conv1d_step` for all; graphs: the same, as captured graphs (CUDA devices).
        check: compare every output with the solo run.
        seed: of weights, inputs and acceptance.

    Raises:
        ContractError: a value out of range.
    """

    layers: int = 2
    channels: int = 8
    width: int = 4
    dtype: str = "bfloat16"
    state_dtype: str | None = None
    layout: str = "channels"
    slots: int = 512
    max_sequences: int = 32
    max_step_tokens: int = 2048
    draft_tokens: int = 3
    acceptance: float = 0.6
    step_ms: float = 30.0
    token_us: float = 10.0
    patience: float = 0.25
    resume: str = "alternate"
    checkpoint_every: int = 64
    device: str = "cpu"
    launch: str = "entries"
    check: bool = True
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("layers", "channels", "max_sequences", "max_step_tokens"):
            if getattr(self, name) < 1:
                raise ContractError(name, got=getattr(self, name), wanted="1 or more")
        if self.slots < 2:
            raise ContractError("slots", got=self.slots, wanted="2 or more", remedy="one of them is reserved")
        if self.seed < 0:
            raise ContractError("seed", got=self.seed, wanted="0 or more")
        state_positions(self.width, self.draft_tokens)  # raises if either is out of range
        for name, choices in (
            ("dtype", FLOAT_TYPES),
            ("state_dtype", (*FLOAT_TYPES, None)),
            ("layout", LAYOUTS),
            ("launch", LAUNCHES),
            ("resume", RESUME_MODES),
        ):
            if getattr(self, name) not in choices:
                wanted = " or ".join(choice for choice in choices if choice)
                raise ContractError(name, got=repr(getattr(self, name)), wanted=wanted)
        if self.launch == "graphs" and torch.device(self.device).type != "cuda":
            raise ContractError("launch", got="'graphs'", wanted="'entries' or 'step'", remedy="or a CUDA device")
        if not 0 <= self.acceptance <= 1:
            raise ContractError("acceptance", got=self.acceptance, wanted="a probability, 0 to 1")
        for name in ("step_ms", "token_us", "patience"):
            if not 0 <= getattr(self, name) < float("inf"):
                raise ContractError(name, got=getattr(self, name), wanted="0 or more, finite")
        if self.step_ms + self.token_us == 0:
            raise ContractError("step_ms", got="no time for steps and none for tokens", wanted="one above 0")
        if self.checkpoint_every < 1 or BLOCK_TOKENS % self.checkpoint_every:
            raise ContractError("checkpoint_every", got=self.checkpoint_every, wanted=f"a divisor of {BLOCK_TOKENS}")

    @property
    def torch_dtype(self) -> torch.dtype:
        """Type of inputs and outputs."""
        return _torch_type(self.dtype)

    @property
    def torch_state_dtype(self) -> torch.dtype:
        """Type of the pool."""
        return _torch_type(self.state_dtype or self.dtype)

    def to_json(self) -> dict[str, object]:
        """Every setting by name."""
        return {**asdict(self), "state_dtype": self.state_dtype or self.dtype}


def _torch_type(name: str) -> torch.dtype:
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype)
    return dtype
