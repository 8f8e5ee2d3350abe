"""Plans of slot copies: every byte has one lane, orders keep every value, records are the compiler's."""

from __future__ import annotations

import re
import struct
import subprocess
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serving_conv.native.copy_plan import (
    KEPT,
    LAYER,
    MOVE,
    NOTHING,
    PARAMETERS,
    Lanes,
    Move,
    Side,
    move_order,
    pack_layer,
    plan_lanes,
)
from serving_conv.native.variant import CopyVariant, kernel_directory

# --- lanes ---------------------------------------------------------------------------------------------------


def side(layout: str, channels: int, positions: int, element: int, *, gap: int = 0, base: int = 1 << 20) -> Side:
    """A pool's slots with `gap` elements between runs of the contiguous axis."""
    if layout == "channels":
        pitch = (channels + gap) * element
        return Side(base, positions * pitch, element, pitch, positions)
    pitch = (positions + gap) * element
    return Side(base, channels * pitch, pitch, element, positions)


@pytest.mark.parametrize(
    ("layout", "channels", "positions", "element", "options", "word", "lanes", "steps"),
    [
        ("channels", 64, 3, 2, {}, 16, 8, 3),
        ("channels", 60, 3, 2, {}, 8, 15, 3),
        ("channels", 63, 3, 2, {}, 2, 63, 3),
        ("channels", 63, 3, 4, {}, 4, 63, 3),
        ("channels", 64, 3, 2, {"gap": 4}, 8, 16, 3),
        ("channels", 64, 3, 2, {"base": 4}, 4, 32, 3),
        ("channels", 64, 1, 2, {"gap": 8}, 16, 8, 1),
        ("positions", 64, 3, 2, {}, 16, 24, 1),
        ("positions", 63, 3, 2, {}, 2, 189, 1),
        ("positions", 64, 8, 2, {"gap": 8}, 16, 64, 1),
        ("positions", 64, 4, 2, {"gap": 1}, 2, 256, 1),
        ("positions", 64, 4, 2, {"base": 2}, 2, 256, 1),
    ],
)
def test_words_are_as_wide_as_the_memory_allows(
    layout: str, channels: int, positions: int, element: int, options: dict[str, int], word: int, lanes: int, steps: int
) -> None:
    slots = side(layout, channels, positions, element, **options)
    plan = plan_lanes(slots, slots, channels, element, shifted=False)
    assert (plan.word, plan.lanes, plan.steps) == (word, lanes, (steps, steps))


def test_shifted_runs_and_changes_of_layout_go_by_channels() -> None:
    runs, rows, window = side("positions", 64, 4, 2), side("channels", 64, 4, 2), side("positions", 64, 3, 2)
    by_channel = (64, 64, 2)
    for source, destination, shifted in ((runs, runs, True), (rows, window, False), (runs, window, False)):
        plan = plan_lanes(source, destination, 64, 2, shifted=shifted)
        assert (plan.lanes, plan.lanes_of_row, plan.word) == by_channel
    assert plan_lanes(rows, rows, 64, 2, shifted=True) == plan_lanes(rows, rows, 64, 2, shifted=False)


def places(plan: Lanes, which: int, first: int, steps: int) -> list[list[int]]:
    """Bytes of each lane and step, as offsets in a slot, in the kernel's order."""
    found = []
    for lane in range(plan.lanes):
        row, in_row = divmod(lane, plan.lanes_of_row)
        for step in range(first, first + steps):
            start = row * plan.row[which] + in_row * plan.lane[which] + step * plan.step[which]
            found.append([start + byte for byte in range(plan.word)])
    return found


@given(
    channels=st.integers(1, 40),
    windows=st.tuples(st.integers(1, 6), st.integers(0, 3)),
    element=st.sampled_from([2, 4]),
    layouts=st.tuples(*[st.sampled_from(["channels", "positions"])] * 2),
    gaps=st.tuples(*[st.sampled_from([0, 1, 2, 8])] * 2),
    bases=st.tuples(*[st.sampled_from([0, 4, 8, 12, 16])] * 2),
    shifted=st.booleans(),
)
def test_every_value_has_one_lane_on_both_sides(
    channels: int,
    windows: tuple[int, int],
    element: int,
    layouts: tuple[str, str],
    gaps: tuple[int, int],
    bases: tuple[int, int],
    shifted: bool,
) -> None:
    positions, more = windows
    source = side(layouts[0], channels, positions + more, element, gap=gaps[0], base=bases[0])
    destination = side(layouts[1], channels, positions, element, gap=gaps[1], base=bases[1])
    plan = plan_lanes(source, destination, channels, element, shifted=shifted)
    shifts = range(more + 1) if shifted else (0,)
    for shift in shifts:
        read, written = places(plan, 0, shift, plan.steps[1]), places(plan, 1, 0, plan.steps[1])
        pairs = [pair for of, to in zip(read, written, strict=True) for pair in zip(of, to, strict=True)]
        wanted = [
            (
                channel * source.channel + (position + shift) * source.position + byte,
                channel * destination.channel + position * destination.position + byte,
            )
            for channel in range(channels)
            for position in range(positions)
            for byte in range(element)
        ]
        assert sorted(pairs) == sorted(wanted)
        for one, run in ((source, read), (destination, written)):
            assert all((one.base + slot * one.slot + word[0]) % plan.word == 0 for word in run for slot in range(3))


# --- order ---------------------------------------------------------------------------------------------------


def run_in_order(moves: list[Move], slots: list[list[int]]) -> list[list[int]]:
    """What one thread of the kernel does."""
    slots = [list(slot) for slot in slots]
    kept = None
    for step in range(len(slots[0])):
        for move in moves:
            if step + move.shift >= len(slots[0]):
                continue
            word = kept if move.source == KEPT else slots[move.source][step + move.shift]
            if move.destination == KEPT:
                kept = word
            else:
                slots[move.destination][step] = word  # type: ignore[assignment]
    return slots


_moves = st.lists(
    st.tuples(st.integers(0, 7), st.integers(0, 7), st.sampled_from([0, 0, 0, 1, 2])),
    unique_by=lambda move: move[1],
    max_size=8,
)


@given(moves=_moves)
def test_an_order_keeps_every_value(moves: list[tuple[int, int, int]]) -> None:
    before = [[10 * slot + position for position in range(4)] for slot in range(8)]
    after = [list(slot) for slot in before]
    for source, destination, shift in moves:
        for position in range(4 - shift):
            after[destination][position] = before[source][position + shift]
    plan, ordered = move_order(moves)
    assert run_in_order(plan, before) == after
    if not ordered:
        assert run_in_order(plan[::-1], before) == after
        assert {move.source for move in plan}.isdisjoint(move.destination for move in plan)
    assert sum(move.destination == KEPT for move in plan) == sum(move.source == KEPT for move in plan)


@pytest.mark.parametrize(
    ("moves", "plan", "ordered"),
    [
        ([], [], False),
        ([(1, 1, 0)], [], False),
        ([(1, 2, 0), (1, 3, 1)], [(1, 2, 0), (1, 3, 1)], False),
        ([(1, 2, 0), (2, 3, 0)], [(2, 3, 0), (1, 2, 0)], True),
        ([(1, 1, 2)], [(1, 1, 2)], True),
        ([(1, 2, 1), (2, 1, 0)], [(2, 1, 0), (1, 2, 1)], True),
        ([(1, 2, 0), (2, 1, 0)], [(1, KEPT, 0), (2, 1, 0), (KEPT, 2, 0)], True),
    ],
    ids=["none", "no effect", "fan out", "chain", "in place", "shifted swap", "swap"],
)
def test_orders_of_a_few_moves(moves: list[tuple[int, int, int]], plan: list[tuple[int, ...]], ordered: bool) -> None:
    assert move_order(moves) == (plan, ordered)


def test_a_thousand_moves_take_no_recursion() -> None:
    assert move_order([(slot, slot + 1, 0) for slot in range(5000)])[0][0] == (4999, 5000, 0)
    assert len(move_order([(slot, (slot + 1) % 5000, 0) for slot in range(5000)])[0]) == 5001


# --- records -------------------------------------------------------------------------------------------------


def structures() -> str:
    """The structures of the kernel, without the kernel."""
    text = (kernel_directory() / "copy_slots.cu").read_text(encoding="utf-8")
    end = re.search(r"struct Parameters \{.*?\n\};", text, re.DOTALL)
    assert end
    return f"typedef long long i64;\n#define MOVES {CopyVariant().moves}\n{text[: end.end()]}\n"


def compiled(tmp_path: Path, body: str, data: bytes = b"") -> list[int]:
    """Numbers that a program over the structures prints."""
    code, program = tmp_path / "code.cc", tmp_path / "program"
    code.write_text(
        f"#include <cstddef>\n#include <cstdio>\n{structures()}int main() {{\n{body}\n}}\n", encoding="utf-8"
    )
    subprocess.run(["g++", "-std=c++17", "-o", str(program), str(code)], check=True)
    done = subprocess.run([str(program)], input=data, capture_output=True, check=True)
    return [int(number) for number in done.stdout.split()]


def show(*expressions: str) -> str:
    return "\n".join(f'  printf("%lld\\n", (long long)({expression}));' for expression in expressions)


def test_sizes_and_sentinels_are_the_compilers(tmp_path: Path) -> None:
    body = show("sizeof(Layer)", "sizeof(Move)", "offsetof(Parameters, moves)", "sizeof(Parameters)", "NOTHING", "KEPT")
    sizes = [LAYER.size, MOVE.size, PARAMETERS.size, PARAMETERS.size + CopyVariant().moves * MOVE.size]
    assert compiled(tmp_path, body) == [*sizes, NOTHING, KEPT]
    assert LAYER.size % 8 == 0
    assert sizes[-1] <= 4096  # what every CUDA version takes as parameters


def test_a_layers_record_lands_in_its_fields(tmp_path: Path) -> None:
    source, destination = Side(1, 2, 0, 0, 0), Side(11, 12, 0, 0, 0)
    lanes = Lanes(20, 21, (3, 13), (4, 14), (5, 15), (23, 22), 24)
    sides = [
        f"layer.{name}.{field}"
        for name in ("source", "destination")
        for field in ["base", "slot", "row", "lane", "step"]
    ]
    rest = [f"layer.{field}" for field in ("lanes", "lanes_of_row", "steps", "source_steps", "word_bytes")]
    body = "  Layer layer;\n  if (fread(&layer, sizeof layer, 1, stdin) != 1) return 1;\n" + show(*sides, *rest)
    wanted = [*range(1, 6), *range(11, 16), *range(20, 25)]
    assert compiled(tmp_path, body, pack_layer(source, destination, lanes)) == wanted


def test_parameters_land_in_their_fields(tmp_path: Path) -> None:
    fields = ("layers", "entry_bytes", "package", "staged", "tiles", "count", "entries", "ordered")
    moves = [f"p.moves[{index}].{field}" for index in (0, 63) for field in ("source", "destination", "shift")]
    body = "  Parameters p;\n  if (fread(&p, sizeof p, 1, stdin) != 1) return 1;\n"
    body += show(*(f"p.{field}" for field in fields), *moves)
    data = PARAMETERS.pack(*range(1, 9)) + b"".join(MOVE.pack(*range(100 + i, 103 + i)) for i in range(64))
    assert compiled(tmp_path, body, data) == [*range(1, 9), 100, 101, 102, 163, 164, 165]
    assert struct.calcsize("P") == 8
