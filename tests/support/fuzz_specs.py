"""Owns which kernels the fuzz runs: the specs, the planted bugs, and their compiled functions."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any
from unittest import mock

from serving_conv.native import call, host
from serving_conv.native.config import LaunchConfig
from serving_conv.native.variant import Variant, source

__all__ = ["MUTANTS", "ORDER_MUTANT", "SILENT_MUTANTS", "SPECS", "Mutant", "Spec", "function_of", "launch_choice"]


@dataclass(frozen=True, slots=True)
class Spec:
    """One compiled kernel.

    Attributes:
        entry: prefill, step, decode (one row a sequence), rows or speculative (both with offsets).
        types: of x, weight, state and bias; bias may be "-", absent.
        width: taps.
        layout: channels, positions or strided.
        extra: positions of a slot beyond W-1.
        config: the launch choice; `vec` is what the wide path takes.
        aligned: whether sizes and addresses let `vec` stand; else it falls to 1.
        silu: the activation.
        drafts: of a step: sequences may be marked as drafts.
        checkpoints: of a step: windows go to further slots.
    """

    entry: str
    types: tuple[str, str, str, str]
    width: int
    layout: str
    extra: int
    config: LaunchConfig
    aligned: bool = True
    silu: bool = False
    drafts: bool = False
    checkpoints: bool = False

    @property
    def prefills(self) -> bool:
        """Whether the kernel is conv_prefill."""
        return self.entry in ("prefill", "step")

    @property
    def positions(self) -> int:
        """Positions of a slot."""
        return self.width - 1 + self.extra

    def __str__(self) -> str:
        of_step = " drafts" * self.drafts + " checkpoints" * self.checkpoints
        return (
            f"{self.entry}{of_step} {'/'.join(self.types)} width={self.width} {self.layout} extra={self.extra} "
            f"vec={self.config.vec} threads={self.config.threads} {'aligned' if self.aligned else 'odd'} "
            f"{'silu' if self.silu else 'plain'}"
        )


def _prefill(vec: int, threads: int = 2) -> LaunchConfig:
    return LaunchConfig(vec=vec, threads=threads, min_blocks=1, rows=16)


def _update(vec: int, threads: int = 2, sequences: int = 1) -> LaunchConfig:
    return LaunchConfig(vec=vec, threads=threads, min_blocks=1, sequences=sequences)


_BF16, _FP16, _FP32 = (("bf16",) * 4, ("fp16",) * 4, ("fp32",) * 4)
# Few threads a block: tiny rows then have several channel tiles, and no time goes to idle threads. The last ones of
# each entry have the sizes that engines get.
SPECS: tuple[Spec, ...] = (
    Spec("prefill", _BF16, 4, "channels", 0, _prefill(4), silu=True),
    Spec("prefill", _BF16, 4, "channels", 2, _prefill(4)),
    Spec("prefill", ("bf16", "fp32", "bf16", "-"), 4, "positions", 0, _prefill(4)),
    Spec("prefill", _FP16, 4, "positions", 3, _prefill(2)),
    Spec("prefill", ("bf16", "bf16", "fp32", "fp32"), 3, "strided", 1, _prefill(4)),
    Spec("prefill", _BF16, 4, "channels", 1, _prefill(4), aligned=False),
    Spec("prefill", _BF16, 4, "positions", 0, _prefill(4), aligned=False),
    Spec("prefill", _FP32, 4, "channels", 0, _prefill(2)),
    Spec("prefill", ("fp32", "bf16", "bf16", "-"), 2, "channels", 2, _prefill(2)),
    Spec("prefill", _FP32, 2, "positions", 1, _prefill(1), silu=True),
    Spec("prefill", ("fp16", "fp32", "fp32", "bf16"), 8, "channels", 0, _prefill(2)),
    Spec("prefill", _BF16, 8, "positions", 4, _prefill(2)),
    Spec("prefill", _BF16, 5, "strided", 0, _prefill(2), aligned=False),
    Spec("prefill", _BF16, 3, "positions", 5, _prefill(4, threads=128)),
    Spec("decode", _BF16, 4, "channels", 0, _update(4, sequences=2), silu=True),
    Spec("decode", _BF16, 4, "channels", 3, _update(2)),
    Spec("decode", ("fp16", "fp32", "fp16", "-"), 4, "positions", 0, _update(4, sequences=2)),
    Spec("decode", _BF16, 4, "positions", 2, _update(2), aligned=False),
    Spec("decode", ("fp32", "fp32", "bf16", "fp16"), 3, "strided", 2, _update(2, sequences=2)),
    Spec("decode", _FP32, 8, "channels", 1, _update(2), aligned=False),
    Spec("decode", _FP32, 2, "positions", 1, _update(1, threads=64)),
    Spec("rows", _BF16, 4, "channels", 0, _update(4)),
    Spec("rows", _BF16, 4, "positions", 0, _update(4)),
    Spec("rows", ("fp32", "bf16", "fp16", "-"), 3, "strided", 2, _update(2)),
    Spec("rows", _FP16, 8, "positions", 1, _update(2), aligned=False, silu=True),
    Spec("rows", _FP32, 2, "channels", 3, _update(2, threads=128)),
    Spec("speculative", _BF16, 4, "channels", 3, _update(4)),
    Spec("speculative", _BF16, 4, "positions", 3, _update(4), silu=True),
    Spec("speculative", ("bf16", "fp32", "bf16", "-"), 4, "positions", 1, _update(4)),
    Spec("speculative", _BF16, 4, "channels", 7, _update(2), aligned=False),
    Spec("speculative", ("fp16", "fp16", "fp32", "fp32"), 3, "strided", 4, _update(2)),
    Spec("speculative", _FP32, 2, "positions", 2, _update(2)),
    Spec("speculative", ("fp32", "fp32", "bf16", "-"), 8, "positions", 7, _update(1)),
    Spec("speculative", _FP32, 2, "channels", 0, _update(2)),
    Spec("speculative", _BF16, 5, "positions", 9, _update(2, threads=64), aligned=False),
    Spec("step", _BF16, 4, "channels", 3, _prefill(4), drafts=True, checkpoints=True),
    Spec("step", _BF16, 4, "positions", 3, _prefill(4), silu=True, drafts=True),
    Spec("step", ("bf16", "fp32", "bf16", "-"), 4, "positions", 0, _prefill(4), checkpoints=True),
    Spec("step", _FP32, 2, "channels", 2, _prefill(2), drafts=True, checkpoints=True),
    Spec("step", ("fp16", "fp16", "fp32", "fp32"), 3, "strided", 4, _prefill(2), drafts=True, checkpoints=True),
    Spec("step", _BF16, 8, "positions", 7, _prefill(2), drafts=True, checkpoints=True),
    Spec("step", _BF16, 4, "channels", 3, _prefill(4), aligned=False, drafts=True, checkpoints=True),
    Spec("step", _FP32, 5, "channels", 1, _prefill(2, threads=128), silu=True, drafts=True, checkpoints=True),
)


@dataclass(frozen=True, slots=True)
class Mutant:
    """A planted bug: places of the source, replaced.

    Attributes:
        spec: number of the spec that shows it.
        edits: text that occurs once, and what stands there instead.
        silent: reads without consequence, which AddressSanitizer alone sees.
    """

    spec: int
    edits: tuple[tuple[str, str], ...]
    silent: bool = False


# Strays stay inside the guards as long as the metadata do, so a run without AddressSanitizer survives them.
MUTANTS: dict[str, Mutant] = {
    "slot bound dropped": Mutant(0, (("s.slot < 0 || s.slot >= p.slot_count", "s.slot < 0"),)),
    "offsets may pass the rows by one": Mutant(21, (("s.end > p.rows)", "s.end > p.rows + 1)"),)),
    "count bound off by one": Mutant(
        27, (("accepted > p.positions - WIDTH + 2", "accepted > p.positions - WIDTH + 3"),)
    ),
    "padding is not told apart": Mutant(0, (("s.live = !(padding | ", "s.live = !("),)),
    "the slot is read without history": Mutant(
        14, (("if (s[i].live && s[i].has_history) unpack_window", "if (s[i].live) unpack_window"),)
    ),
    # Right while blocks run in order: the first one has read the slot before the last one writes it.
    "the slot is written by the sequence's last block": Mutant(
        0,
        (
            ("end >= tile.row1 && end <= p.rows", "end > tile.row1 && end <= p.rows"),
            ("begins && g.end > tile.row1 && g.end > g.begin + WIDTH - 1", "false"),
            ("if (plain && begins && row == g.end)", "if (row == g.end && (begins || g.end - g.begin >= WIDTH - 1))"),
        ),
    ),
    "rows are copied past the last one": Mutant(0, (("if (r < tile.row1 - tile.row0)", "if (true)"),), silent=True),
    # Of the step.
    "early checkpoints see the windows behind the rows": Mutant(
        35,
        (
            (
                "if constexpr (CHECKPOINTS) store_early_checkpoints_of_rows",
                "if constexpr (false) store_early_checkpoints_of_rows",
            ),
            (
                "else compute_segments(p, taps, tile, window, sequence);",
                "else compute_segments(p, taps, tile, window, sequence);"
                "store_early_checkpoints_of_rows(p, sequence, tile.row0, tile.row1, tile.channel);",
            ),
        ),
    ),
    "a later block writes early checkpoints too": Mutant(35, (("if (p.cu_seqlens[i] >= row0) store", "store"),)),
    "an early checkpoint lacks its last token": Mutant(
        37, (("t < tokens; ++t) {\n      const", "t < tokens - 1; ++t) {\n      const"),)
    ),
    "an early checkpoint starts from zeros": Mutant(
        35, (("if (s.has_history) {\n      SlotWindow", "if (false) {\n      SlotWindow"),)
    ),
    "a late checkpoint is a row late": Mutant(
        37, (("s.begin + tokens - (WIDTH - 1) + tap", "s.begin + tokens - (WIDTH - 2) + tap"),)
    ),
    "no block writes the checkpoint after W-1 tokens": Mutant(
        38, (("if (!sound || tokens < WIDTH - 1) return;", "if (!sound || tokens <= WIDTH - 1) return;"),)
    ),
    "a late checkpoint belongs to the sequence before": Mutant(
        40, (("p.sequences + 1, checkpoint) - 1;", "p.sequences + 1, checkpoint - 1) - 1;"),)
    ),
    "checkpoints of padding are written": Mutant(
        39, (("if (!s.live) return;\n  int tokens", "if (s.fault) return;\n  int tokens"),)
    ),
    "the sentinel of checkpoints is -1 always": Mutant(
        35, (("const bool padding = slot == p.pad_slot_id;", "const bool padding = slot == -1;"),)
    ),
    "a checkpoint slot outside the pool is flagged, and written": Mutant(
        37, (("return !padding && !fault;", "return !padding && !bad_tokens;"),)
    ),
    "the bound of checkpoint slots is off by one": Mutant(
        41, (("bad_slot = slot < 0 || slot >= p.slot_count", "bad_slot = slot < 0 || slot > p.slot_count"),)
    ),
    "a checkpoint of too many tokens is flagged, and written": Mutant(
        37, (("return !padding && !fault;", "return !padding && !bad_slot;"),)
    ),
    "the bound of checkpoint tokens is off by one": Mutant(
        35, (("tokens > sequence_tokens,", "tokens > sequence_tokens + 1,"),)
    ),
    "checkpoint offsets may pass the last one": Mutant(
        35, (("i < last && i < p.checkpoints; ++i", "i < last; ++i"),), silent=True
    ),
    "checkpoint offsets may be -1": Mutant(35, (("first < 0 ? 0 : first", "first < -1 ? 0 : first"),), silent=True),
    "the last draft is dropped": Mutant(
        36, (("tokens = g.end - g.begin < room ?", "tokens = -1 + g.end - g.begin < room ? -1 +"),)
    ),
    "drafts are stored past the slot": Mutant(
        39, (("room = p.positions - (WIDTH - 2)", "room = p.positions - (WIDTH - 3)"),)
    ),
    "drafts leave the last W-1 inputs": Mutant(
        36, (("const bool plain = !SPECULATIVE || !g.drafts;", "const bool plain = true;"),)
    ),
    "drafts that spill over their block leave the last W-1 inputs": Mutant(
        40, (("if (spilled == g.end && !(SPECULATIVE && g.drafts))", "if (spilled == g.end)"),)
    ),
    "drafts keep the window from its oldest": Mutant(
        35,
        (
            (
                "store_position(p, offset, tap - 1, window.past[tap])",
                "store_position(p, offset, tap - 1, window.past[tap - 1])",
            ),
        ),
    ),
    "only the lowest bit of a flag counts": Mutant(
        36, (("p.speculative[sequence] != 0", "(p.speculative[sequence] & 1) != 0"),)
    ),
    "drafts that do not fit are not flagged": Mutant(
        35, (("s.end - s.begin > p.positions - WIDTH + 2)", "s.end - s.begin > p.positions - WIDTH + 3)"),)
    ),
    "more rows than fit are flagged without drafts": Mutant(35, (("s.live && has_drafts(p, i) && ", "s.live && "),)),
}
SILENT_MUTANTS = tuple(name for name, mutant in MUTANTS.items() if mutant.silent)
ORDER_MUTANT = "the slot is written by the sequence's last block"


@cache
def function_of(variant: Variant, edits: tuple[tuple[str, str], ...]) -> Any:
    text = source(variant, "host")
    for old, new in edits:
        if text.count(old) != 1:
            raise ValueError(f"the planted bug fits {text.count(old)} places: {old!r}")
        text = text.replace(old, new)
    function = ctypes.CDLL(str(host._compiled(text))).launch
    function.argtypes = [ctypes.c_char_p, ctypes.c_uint, ctypes.c_uint, ctypes.c_uint, ctypes.c_int]
    function.restype = None
    return function


@contextmanager
def launch_choice(config: LaunchConfig) -> Iterator[None]:
    """Let `prepare_*` take the spec's choice instead of the one for a GPU-sized call."""

    def choose(**sizes: int) -> LaunchConfig:
        return config

    with mock.patch.object(call, "choose_prefill", choose), mock.patch.object(call, "choose_update", choose):
        yield
