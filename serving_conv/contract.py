"""Owns the operator contract as data: every entry, argument, axis, type, layout and limit, once.

Argument checks (`checks`), torch schemas and docstring tables (`signatures`), the README table and the test
grids all derive from these records. Standard library only: nothing here imports torch.

Letters used for axes: R `rows` (packed tokens), C `channels`, W `width` (taps), S `slots`, L `positions` in a
slot, N `sequences`.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from serving_conv.errors import ContractError

__all__ = [
    "ACTIVATIONS",
    "ENTRIES",
    "FLOAT_TYPES",
    "INT32_LIMIT",
    "MAX_WIDTH",
    "MIN_WIDTH",
    "PREFILL",
    "STEP",
    "UPDATE",
    "Entry",
    "Layout",
    "Option",
    "TensorArgument",
    "accepted_limit",
    "prefill_workspace_size",
    "state_positions",
]

FLOAT_TYPES = ("bfloat16", "float16", "float32")
ACTIVATIONS = ("silu", "swish", None)  # swish is another name of SiLU, which vLLM and causal-conv1d take too
MIN_WIDTH, MAX_WIDTH = 2, 8
INT32_LIMIT = 2**31 - 1


class Layout(Enum):
    """How a tensor may lie in memory; the value is the sentence that errors and tables show."""

    CONTIGUOUS = "contiguous"
    ROWS = "channels contiguous, row stride at least the channels"
    POOL = "channels or positions contiguous, slots disjoint"
    ANY = "any stride"


@dataclass(frozen=True, slots=True)
class TensorArgument:
    """One tensor argument of an entry.

    Attributes:
        name: public name.
        axes: axis names; equal names must have equal sizes within a call, `+1` adds one to the axis before it.
        dtypes: torch dtype names that are accepted.
        layout: memory layouts that are accepted.
        meaning: one line for docstrings and tables.
        optional: None is accepted and is the default.
        mutated: written in place.
        same_dtype_as: name of the argument whose dtype this one must have.
        may_be: name of the one argument this one may share memory with, if it is exactly the same view.
        private_storage: may not even share storage with another argument.
        keyword: keyword-only.
    """

    name: str
    axes: tuple[str, ...]
    dtypes: tuple[str, ...]
    layout: Layout
    meaning: str
    optional: bool = False
    mutated: bool = False
    same_dtype_as: str | None = None
    may_be: str | None = None
    private_storage: bool = False
    keyword: bool = False


@dataclass(frozen=True, slots=True)
class Option:
    """One argument that is not a tensor: always keyword-only, always with a default."""

    name: str
    schema_type: str
    default: str | int | None
    meaning: str
    choices: tuple[str | None, ...] = ()
    keyword: bool = True


@dataclass(frozen=True, slots=True)
class Entry:
    """One public entry of the operator; `arguments` are in call order."""

    name: str
    summary: str
    arguments: tuple[TensorArgument | Option, ...]
    returns: str

    @property
    def tensors(self) -> tuple[TensorArgument, ...]:
        """The tensor arguments, in call order."""
        return tuple(a for a in self.arguments if isinstance(a, TensorArgument))

    def __getitem__(self, name: str) -> TensorArgument | Option:
        for argument in self.arguments:
            if argument.name == name:
                return argument
        raise KeyError(name)


_X = TensorArgument("x", ("rows", "channels"), FLOAT_TYPES, Layout.ROWS, "the packed tokens")
_WEIGHT = TensorArgument(
    "weight",
    ("channels", "width"),
    FLOAT_TYPES,
    Layout.CONTIGUOUS,
    "taps; the last one meets the current token",
)
_STATE = TensorArgument(
    "conv_state",
    ("slots", "channels", "positions"),
    FLOAT_TYPES,
    Layout.POOL,
    "the pool of raw inputs, oldest first, updated in place; its type may differ from x",
    mutated=True,
)
_ACTIVATION = Option("activation", "str?", "silu", "applied to the sum, or None", choices=ACTIVATIONS)
_PAD = Option("pad_slot_id", "int", -1, "slot number that marks padding: zero output, no slot touched")


def _slots(name: str) -> TensorArgument:
    return TensorArgument(name, ("sequences",), ("int32",), Layout.ANY, "slot of each sequence, or pad_slot_id")


def _flags(*, keyword: bool, absent: str) -> TensorArgument:
    return TensorArgument(
        "has_initial_state",
        ("sequences",),
        ("bool",),
        Layout.CONTIGUOUS,
        f"false: the window is zeros and the slot is never read; absent: {absent}",
        optional=True,
        keyword=keyword,
    )


def _offsets(*, optional: bool) -> TensorArgument:
    return TensorArgument(
        "cu_seqlens",
        ("sequences+1",),
        ("int32",),
        Layout.CONTIGUOUS,
        "offsets of the sequences in the rows" + (" (absent: one row each)" if optional else ""),
        optional=optional,
        keyword=optional,
    )


def _accepted(meaning: str) -> TensorArgument:
    return TensorArgument(
        "num_accepted_tokens",
        ("sequences",),
        ("int32",),
        Layout.CONTIGUOUS,
        meaning,
        optional=True,
        keyword=True,
    )


_BIAS = TensorArgument(
    "bias",
    ("channels",),
    FLOAT_TYPES,
    Layout.CONTIGUOUS,
    "added first; own type",
    optional=True,
    keyword=True,
)


def _out(*, may_be: str | None) -> TensorArgument:
    return TensorArgument(
        "out",
        ("rows", "channels"),
        FLOAT_TYPES,
        Layout.ROWS,
        "result, own row stride; allocated if absent" + (f"; may be {may_be} itself" if may_be else ""),
        optional=True,
        mutated=True,
        same_dtype_as="x",
        may_be=may_be,
        private_storage=may_be is None,
        keyword=True,
    )


PREFILL = Entry(
    "causal_conv1d_fn",
    "Causal depthwise convolution of packed prompt chunks; leaves each sequence's last W-1 inputs in its slot.",
    (
        _X,
        _WEIGHT,
        _STATE,
        _offsets(optional=False),
        _slots("cache_indices"),
        _flags(keyword=False, absent="all false"),
        _BIAS,
        _ACTIVATION,
        _accepted("where the window starts in the slot (count - 1), after a speculative step"),
        _out(may_be=None),
        TensorArgument(
            "workspace",
            ("scratch",),
            ("int32",),
            Layout.CONTIGUOUS,
            "scratch of at least prefill_workspace_size(R, N) elements; allocated if absent",
            optional=True,
            mutated=True,
            private_storage=True,
            keyword=True,
        ),
        _PAD,
    ),
    "out [R, C]; rows at and past the last offset are not written",
)

UPDATE = Entry(
    "causal_conv1d_update",
    "Decode and linear speculative steps: one row, or a few, per sequence.",
    (
        _X,
        _WEIGHT,
        _STATE,
        _slots("state_indices"),
        _offsets(optional=True),
        _accepted("speculative step: tokens of the previous step that were kept, bonus included, 1 <= a <= L-W+2"),
        _flags(keyword=True, absent="all true"),
        _BIAS,
        _ACTIVATION,
        _out(may_be="x"),
        _PAD,
    ),
    "out [R, C]; rows at and past the last offset are not written",
)


def _checkpoints(name: str, meaning: str, *, axis: str = "checkpoints") -> TensorArgument:
    return TensorArgument(name, (axis,), ("int32",), Layout.CONTIGUOUS, meaning, optional=True, keyword=True)


STEP = Entry(
    "causal_conv1d_step",
    "A whole step in one launch: first and later prompt chunks, decode rows and speculative rows in any mix.",
    (
        _X,
        _WEIGHT,
        _STATE,
        _offsets(optional=False),
        _slots("cache_indices"),
        _flags(keyword=False, absent="all false"),
        _accepted("where the window starts in the slot (count - 1): tokens of the previous step that were kept"),
        TensorArgument(
            "speculative",
            ("sequences",),
            ("bool",),
            Layout.CONTIGUOUS,
            "true: the tokens are drafts, all kept behind the last W-2 of the window; absent: all false",
            optional=True,
            keyword=True,
        ),
        _checkpoints("checkpoint_offsets", "which checkpoints each sequence names; absent: none", axis="sequences+1"),
        _checkpoints("checkpoint_tokens", "after how many of its sequence's tokens in this call, 1 to T"),
        _checkpoints("checkpoint_slots", "slot that the window there is written to, or pad_slot_id"),
        _BIAS,
        _ACTIVATION,
        _out(may_be=None),
        _PAD,
    ),
    "out [R, C]; rows at and past the last offset are not written",
)

ENTRIES = (PREFILL, UPDATE, STEP)


def state_positions(width: int, draft_tokens: int = 0) -> int:
    """Positions `L` a slot needs: W-1 of window plus one per draft token.

    A speculative step stores (the last W-2 of the window, then all T tokens) with T = drafts + 1, so
    `T <= L-W+2` gives `L >= W-1+drafts`. vLLM sizes its slots the same way.

    Raises:
        ContractError: width outside 2..8, or a negative number of drafts.
    """
    if not MIN_WIDTH <= width <= MAX_WIDTH:
        raise ContractError("width", got=width, wanted=f"{MIN_WIDTH} to {MAX_WIDTH} taps")
    if draft_tokens < 0:
        raise ContractError("draft_tokens", got=draft_tokens, wanted="0 or more")
    return width - 1 + draft_tokens


def accepted_limit(width: int, positions: int) -> int:
    """Largest legal accepted count, and most tokens a speculative step stores whole: L-W+2."""
    return positions - width + 2


def prefill_workspace_size(rows: int, num_sequences: int) -> int:
    """Elements of int32 scratch that `causal_conv1d_fn` may ask for.

    The amount is the one flashinfer.mamba asks for, so a buffer sized by either library serves both: nothing up
    to 32 sequences, else `1 + 2*min(R, ceil(R/B) + N)` with blocks of B = 8 rows (R < 64 N) or 16.

    Raises:
        ContractError: a negative number.
    """
    for name, value in (("rows", rows), ("num_sequences", num_sequences)):
        if value < 0:
            raise ContractError(name, got=value, wanted="0 or more")
    if num_sequences <= 32 or rows == 0:
        return 0
    block = 8 if rows < 64 * num_sequences else 16
    return 1 + 2 * min(rows, -(-rows // block) + num_sequences)
