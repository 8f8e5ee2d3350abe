"""Owns what is measured: the rows, their useful bytes, and the tensors of one row as a rotation of cold buffers.

All rows are bf16 with W = 4, SiLU and bias. The lengths are fixed, so that two runs measure the same work.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal

import torch
from torch import Tensor

__all__ = ["ROWS", "Row", "Work", "choose_rows", "make_work", "rotation"]

Kind = Literal["prefill", "decode", "speculative"]
Layout = Literal["channels", "positions"]

ELEMENT = 2  # bytes of bf16
WIDTH = 4
DRAFTS = 4  # tokens of a speculative step
MOST_CALLS = 4096  # nodes of one graph
PLENTY = 400_000_000  # bytes of a rotation, where calls are large enough for it to take few of them


@dataclass(frozen=True)
class Row:
    """One measured call.

    Attributes:
        name: as tables and `--rows` spell it.
        kind: which entry is called, and how.
        lengths: tokens of each sequence.
        channels: of a token.
        positions: of a slot.
        layout: which axis of a slot is contiguous.
        warm: also measured with everything in the L2 cache.
    """

    name: str
    kind: Kind
    lengths: tuple[int, ...]
    channels: int = 8192
    positions: int = WIDTH - 1
    layout: Layout = "channels"
    warm: bool = False

    @property
    def tokens(self) -> int:
        """Rows of x."""
        return sum(self.lengths)

    @property
    def sequences(self) -> int:
        """Sequences, each with a slot of its own."""
        return len(self.lengths)

    @property
    def stream_bytes(self) -> int:
        """Bytes of x and out, each once."""
        return 2 * self.tokens * self.channels * ELEMENT

    @property
    def useful_bytes(self) -> int:
        """Bytes a call cannot avoid: x and out once, and of each slot what must be read and written.

        Read: the window, W-1 positions. Written: W-1 positions, or in a speculative step W-2 and one a token.
        Weights, bias and metadata are left out: a few percent of the smallest rows, nothing in the others.
        """
        read = WIDTH - 1
        if self.kind == "speculative":
            slots = sum(read + WIDTH - 2 + length for length in self.lengths)
        else:
            slots = self.sequences * 2 * read
        return self.stream_bytes + slots * self.channels * ELEMENT


def _rows() -> tuple[Row, ...]:
    lengths = random.Random(1)
    ragged = tuple(lengths.randint(1, 511) for _ in range(32))
    short = tuple(lengths.randint(1, 12) for _ in range(256))
    rows = [
        Row("prefill 8192", "prefill", (8192,)),
        Row("prefill 32 ragged", "prefill", ragged),
        Row("prefill 2048", "prefill", (2048,)),
        Row("prefill 512", "prefill", (512,)),
        Row("prefill 256 short", "prefill", short),
        Row("prefill 4096 + 200x1", "prefill", (4096, *[1] * 200)),
        Row("prefill 200x1 + 4096", "prefill", (*[1] * 200, 4096)),
        Row("prefill 32768", "prefill", (32768,)),
        Row("prefill 8192 C12288", "prefill", (8192,), channels=12288),
        Row("prefill 8192 C2048", "prefill", (8192,), channels=2048),
    ]
    layouts: tuple[tuple[Layout, str], ...] = (("channels", ""), ("positions", " positions"))
    for layout, suffix in layouts:
        for count in (1, 8, 64, 256, 1024):
            warm = layout == "channels" and count <= 64
            rows.append(Row(f"decode {count}{suffix}", "decode", (1,) * count, layout=layout, warm=warm))
        for count in (1, 64, 256):
            positions = WIDTH - 1 + DRAFTS - 1
            rows.append(
                Row(
                    f"speculative {count}{suffix}",
                    "speculative",
                    (DRAFTS,) * count,
                    positions=positions,
                    layout=layout,
                )
            )
    return tuple(rows)


ROWS = _rows()


def choose_rows(names: str) -> tuple[Row, ...]:
    """Rows whose names start with one of the comma-separated `names`; empty means all.

    Raises:
        ValueError: a name that fits no row.
    """
    wanted = [name.strip() for name in names.split(",") if name.strip()]
    for name in wanted:
        if not any(row.name.startswith(name) for row in ROWS):
            raise ValueError(f"no row starts with {name!r}; there are: {', '.join(row.name for row in ROWS)}")
    return tuple(row for row in ROWS if not wanted or any(row.name.startswith(name) for name in wanted))


def rotation(row: Row, l2_bytes: int) -> int:
    """Calls on buffers of their own before the first buffer comes again, so that nothing is found in the cache."""
    least = 3 * l2_bytes + 1
    wanted = max(least, PLENTY) if row.useful_bytes >= 1 << 22 else least
    return min(MOST_CALLS, max(2, -(-wanted // row.useful_bytes)))


@dataclass(frozen=True)
class Work:
    """The tensors of a row; call `i` uses `x[i]`, `out[i]`, `weight[i]`, `bias[i]` and `slots[i]`.

    Attributes:
        row: what they are for.
        x: `[tokens, channels]` each.
        out: like x.
        weight: `[channels, W]` each, as every layer of a model has its own.
        bias: `[channels]` each.
        state: `[slots, channels, positions]`, one pool for all calls; slot 0 is nobody's (vLLM's null block).
        slots: int32 `[sequences]` each, disjoint.
        cu_seqlens: int32 `[sequences + 1]`.
        has_initial_state: bool `[sequences]`, all true.
        accepted: int32 `[sequences]` in a speculative step, else None.
    """

    row: Row
    x: tuple[Tensor, ...]
    out: tuple[Tensor, ...]
    weight: tuple[Tensor, ...]
    bias: tuple[Tensor, ...]
    state: Tensor
    slots: tuple[Tensor, ...]
    cu_seqlens: Tensor
    has_initial_state: Tensor
    accepted: Tensor | None

    @property
    def calls(self) -> int:
        """Length of the rotation."""
        return len(self.x)

    def is_cold(self, l2_bytes: int) -> bool:
        """Whether more than three times the L2 cache is touched before any byte comes again."""
        return self.calls * self.row.useful_bytes > 3 * l2_bytes


def make_work(row: Row, calls: int, device: torch.device | str) -> Work:
    """Random tensors for `calls` calls of a row, in one allocation per argument."""
    dtype = torch.bfloat16
    generator = torch.Generator(device=device).manual_seed(1)

    def normal(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=device).normal_(generator=generator)

    sequences, channels, positions = row.sequences, row.channels, row.positions
    x = normal(calls, row.tokens, channels)
    slots = calls * sequences + 1
    if row.layout == "channels":
        state = normal(slots, positions, channels).transpose(1, 2)
    else:
        state = normal(slots, channels, positions)
    # Rows of 16 bytes: Triton would compile one more kernel for addresses that are not so aligned.
    numbers = torch.zeros(calls, -(-sequences // 4) * 4, dtype=torch.int32)
    shuffle = torch.Generator().manual_seed(2)
    for call in range(calls):
        order = torch.randperm(sequences, generator=shuffle)
        numbers[call, :sequences] = (order + (1 + call * sequences)).to(torch.int32)
    numbers = numbers.to(device)
    accepted = None
    if row.kind == "speculative":
        counts = torch.randint(1, row.lengths[0] + 1, (sequences,), generator=shuffle)
        accepted = counts.to(device=device, dtype=torch.int32)
    return Work(
        row=row,
        x=x.unbind(0),
        out=torch.empty_like(x).unbind(0),
        weight=normal(calls, channels, WIDTH).unbind(0),
        bias=normal(calls, channels).unbind(0),
        state=state,
        slots=tuple(numbers[call, :sequences] for call in range(calls)),
        cu_seqlens=torch.tensor([0, *accumulate(row.lengths)], dtype=torch.int32, device=device),
        has_initial_state=torch.ones(sequences, dtype=torch.bool, device=device),
        accepted=accepted,
    )
