"""Owns the fuzz of the kernels' source under g++: hostile metadata, guarded memory, every result compared.

A *spec* fixes one compiled kernel. A *batch* fixes the sizes, strides and alignments of one spec and holds many
*cases*, each with its own values, metadata and memory, so that filling and checking are vectorised and a case costs
little more than its launch. Each buffer of each case lies in its own guarded piece of memory or, for
AddressSanitizer, in its own allocation that ends with its last element.

Whatever a call does not own holds NaN or 777: guards, padding of rows, gaps between slots, unowned slots, slots
without history, positions outside the window, rows of padding. So no foreign byte may change, and none may be read
either: owned results are compared with `serving_conv.reference`, whose inputs are clean.

`python -m support.fuzz --cases 20000 --exact` runs it alone; see `main`.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence

import numpy as np
import torch
from support.fuzz_draw import claims, draw_metadata, draw_sizes, interpret
from support.fuzz_memory import RAW, RAW_TORCH, TORCH, Array, Memory, bits_of, floats_of, ordered, typed
from support.fuzz_specs import MUTANTS, SPECS, Spec, function_of, launch_choice
from torch import Tensor

from serving_conv import reference
from serving_conv.faults import clear_device_fault, device_fault, fault_flag
from serving_conv.native import call

__all__ = ["Batch", "FuzzFailure", "run"]

LIMIT = 12.0  # no output and no state of clean inputs is larger: |x|, |w|, |b| <= 1 and at most 8 taps


class FuzzFailure(AssertionError):
    """A case went wrong; the text says which and how to run it again."""


# --- one batch -----------------------------------------------------------------------------------------------


class Batch:
    """Cases of one spec and one set of sizes, run and checked together."""

    def __init__(self, spec: Spec, dice: np.random.Generator, cases: int, *, exact: bool, near: bool) -> None:
        self.spec, self._dice = spec, dice
        self.sizes = sizes = draw_sizes(spec, dice, cases)
        x, weight, state, bias = spec.types
        n, c = sizes.sequences, sizes.channels

        def floats(name: str, kind: str, shape: Sequence[int], strides: Sequence[int], guard: int) -> Memory:
            return Memory(
                cases,
                shape,
                strides,
                raw=RAW[kind],
                kind=TORCH[kind],
                shift=sizes.shifts[name],
                guard=guard,
                exact=exact,
            )

        def words(shape: Sequence[int], stride: int = 1) -> Memory:
            return Memory(cases, shape, (stride,), raw=np.int32, kind=torch.int32, exact=exact)

        self.memory = {
            "x": floats("x", x, (sizes.rows, c), (sizes.x_pitch, 1), 12 * sizes.x_pitch),
            "weight": floats("weight", weight, (c, spec.width), (spec.width, 1), 0),
            "state": floats(
                "state", state, (sizes.slots, c, spec.positions), sizes.pool_strides, 3 * sizes.pool_strides[0]
            ),
            "offsets": words((n + 1,)),
            "slots": words((n,), sizes.slots_stride),
            "flags": Memory(cases, (n,), (1,), raw=np.bool_, kind=torch.bool, exact=exact),
            "counts": words((n,)),
            "fault": words((1,)),
        }
        if spec.drafts:
            self.memory["drafts"] = Memory(cases, (n,), (1,), raw=np.uint8, kind=torch.bool, exact=exact)
        if spec.checkpoints:
            self.memory["checkpoint_offsets"] = words((n + 1,))
            self.memory["checkpoint_tokens"] = words((sizes.checkpoints,))
            self.memory["checkpoint_slots"] = words((sizes.checkpoints,))
        if bias != "-":
            self.memory["bias"] = floats("bias", bias, (c,), (1,), 0)
        if not sizes.in_place:
            self.memory["out"] = floats("out", x, (sizes.rows, c), (sizes.out_pitch, 1), 12 * sizes.out_pitch)
        self.near = near

    def run(self, edits: tuple[tuple[str, str], ...] = (), *, reverse: bool | None = None) -> None:
        """Fill, launch every case, check everything.

        Args:
            edits: of the source, for planted bugs.
            reverse: order of the blocks; both in turn if None.

        Raises:
            FuzzFailure: a foreign byte changed, or a result is wrong.
        """
        self.metadata = draw_metadata(self.spec, self.sizes, self._dice, self.near)
        self.meaning = interpret(self.spec, self.sizes, self.metadata)
        self._before = before = self._fill()
        for name, memory in self.memory.items():
            memory.write(before[name])
        self._launch(edits, reverse)
        self._after = {name: memory.read() for name, memory in self.memory.items()}
        self._check()

    # -- contents

    def _fill(self) -> dict[str, Array]:
        spec, sizes, dice, m = self.spec, self.sizes, self._dice, self.metadata
        x, weight, state, bias = spec.types

        def poisoned(name: str, kind: str) -> Array:
            return np.full((sizes.cases, self.memory[name].width), bits_of([sizes.poison], kind)[0])

        def values(kind: str, shape: tuple[int, ...]) -> Array:
            made = dice.uniform(-1, 1, (sizes.cases, *shape)).astype(np.float32)
            # Some tiny ones: subnormals of 16-bit floats, zeros of both signs.
            tiny = dice.random(made.shape) < 0.02
            return bits_of(np.where(tiny, made * np.float32(2.0**-20), made), kind)

        content: dict[str, Array] = {}
        for name, kind in (("x", x), ("weight", weight), ("bias", bias), ("out", x)):
            if name in self.memory:
                content[name] = poisoned(name, kind)
                if name != "out":
                    index = self.memory[name].index
                    made = values(kind, index.shape)
                    # One set of weights a batch, so that one call of the reference serves all its cases.
                    content[name][:, index] = made if name == "x" else made[:1]
        # Rows of padding, of faulty sequences and of nobody may hold anything.
        index = self.memory["x"].index
        owned = claims(sizes, self.meaning.begin, self.meaning.end, self.meaning.live) > 0
        content["x"][:, index] = np.where(owned[:, :, None], content["x"][:, index], bits_of([sizes.poison], x)[0])
        # Only windows that a live sequence with history reads hold numbers.
        content["state"] = poisoned("state", state)
        index = self.memory["state"].index
        clean = values(state, index.shape)
        readable = np.zeros((sizes.cases, sizes.slots, spec.positions), dtype=bool)
        case, sequence = np.nonzero(self.meaning.history)
        for tap in range(spec.width - 1):
            readable[case, m.slots[case, sequence], self.meaning.start[case, sequence] + tap] = True
        content["state"][:, index] = np.where(readable[:, :, None, :], clean, content["state"][:, index])
        for name, numbers in (
            ("offsets", m.offsets),
            ("slots", m.slots),
            ("counts", m.counts),
            ("checkpoint_offsets", m.checkpoint_offsets),
            ("checkpoint_tokens", m.checkpoint_tokens),
            ("checkpoint_slots", m.checkpoint_slots),
        ):
            if name in self.memory:
                content[name] = np.full((sizes.cases, self.memory[name].width), 777, dtype=np.int32)
                content[name][:, self.memory[name].index] = numbers
        if spec.drafts:
            content["drafts"] = np.full((sizes.cases, self.memory["drafts"].width), 77, dtype=np.uint8)
            content["drafts"][:, self.memory["drafts"].index] = m.drafts
        content["flags"] = np.full((sizes.cases, self.memory["flags"].width), True)
        content["flags"][:, self.memory["flags"].index] = m.flags
        content["fault"] = np.full((sizes.cases, self.memory["fault"].width), 777, dtype=np.int32)
        content["fault"][:, self.memory["fault"].index] = dice.choice([0, 0, 0, 16, 8], (sizes.cases, 1))
        return content

    # -- launches

    def _launch(self, edits: tuple[tuple[str, str], ...], reverse: bool | None) -> None:
        sizes = self.sizes
        for case in range(sizes.cases):
            launch = self._prepare(case)
            assert launch is not None
            if case == 0:
                expected = self.spec.config.vec if self.spec.aligned else 1
                assert launch.variant.vec == expected, (launch.variant, sizes)
                assert launch.variant.state_layout == ("channels", "positions", "strided").index(self._kind())
            function = function_of(launch.variant, edits)
            function(launch.parameters, *launch.grid, case % 2 if reverse is None else int(reverse))

    def _kind(self) -> str:
        # With one channel every pool is channels contiguous.
        return "channels" if self.sizes.channels == 1 else self.spec.layout

    def _prepare(self, case: int) -> call.Launch | None:
        memory, sizes, spec = self.memory, self.sizes, self.spec
        x, weight, state = memory["x"][case], memory["weight"][case], memory["state"][case]
        out = x if sizes.in_place else memory["out"][case]
        slots, fault = memory["slots"][case], memory["fault"][case]
        bias = memory["bias"][case] if "bias" in memory else None
        flags = memory["flags"][case] if sizes.flags else None
        counts = memory["counts"][case] if sizes.counts else None
        activation = "silu" if spec.silu else None
        offsets = None if spec.entry == "decode" else memory["offsets"][case]
        if spec.prefills:
            assert offsets is not None
            of_step = {
                argument: memory[name][case]
                for argument, name in (
                    ("speculative", "drafts"),
                    ("checkpoint_offsets", "checkpoint_offsets"),
                    ("checkpoint_tokens", "checkpoint_tokens"),
                    ("checkpoint_slots", "checkpoint_slots"),
                )
                if name in memory
            }
            return call.prepare_prefill(
                x,
                weight,
                state,
                offsets,
                slots,
                flags,
                bias,
                activation,
                counts,
                out,
                sizes.pad_slot_id,
                **of_step,
                fault_flag=fault,
                multiprocessors=1,
            )
        return call.prepare_update(
            x,
            weight,
            state,
            slots,
            offsets,
            counts,
            flags,
            bias,
            activation,
            out,
            sizes.pad_slot_id,
            fault_flag=fault,
        )

    # -- checks

    def _check(self) -> None:
        before, after, sizes, meaning = self._before, self._after, self.sizes, self.meaning
        written = "x" if sizes.in_place else "out"
        for name in self.memory:
            if name not in (written, "state", "fault"):
                self._same(name, before[name], after[name])
        wanted_fault = before["fault"].copy()
        place = self.memory["fault"].index[0]
        wanted_fault[:, place] |= meaning.fault.astype(np.int32)
        wanted_fault[:, place] |= after["fault"][:, place] & meaning.open_fault.astype(np.int32)
        self._same("fault", wanted_fault, after["fault"])
        rows, values = self._reference()
        self._check_out(written, rows, values)
        self._check_state()

    def _same(self, name: str, wanted: Array, got: Array, allowed: Array | None = None) -> None:
        different = wanted != got
        if allowed is not None:
            different &= ~allowed
        if different.any():
            case = int(np.nonzero(different.any(1))[0][0])
            self._fail(case, f"{name}: elements {np.nonzero(different[case])[0][:8].tolist()} are wrong")

    def _fail(self, case: int, what: str) -> None:
        m, memory = self.metadata, self.memory
        raise FuzzFailure(
            f"{self.spec}: case {case} of a batch: {what}; view starts "
            f"{ {name: buffer.start for name, buffer in memory.items()} }, {self.sizes}, "
            f"offsets {m.offsets[case].tolist()}, slots {m.slots[case].tolist()}, flags {m.flags[case].tolist()}, "
            f"counts {m.counts[case].tolist()}, live {self.meaning.live[case].tolist()}, "
            f"drafts {m.drafts[case].tolist()}, checkpoint offsets {m.checkpoint_offsets[case].tolist()}, "
            f"tokens {m.checkpoint_tokens[case].tolist()}, slots {m.checkpoint_slots[case].tolist()}"
        )

    def _reference(self) -> tuple[Array, Array]:
        """All live sequences of the strict cases, as one call of the reference.

        Returns:
            Rows, numbered through all cases, and the raw bits of their outputs. The expected pool is left in
            `self._wanted_pool`: raw bits `[cases, slots, channels, positions]`.
        """
        spec, sizes, m, meaning = self.spec, self.sizes, self.metadata, self.meaning
        kind, state = spec.types[0], spec.types[2]
        case, sequence = np.nonzero(meaning.live & meaning.strict[:, None])
        # Every second sequence is padding, so that neighbours need not touch.
        offsets = np.empty(2 * len(case), dtype=np.int64)
        offsets[0::2] = meaning.begin[case, sequence] + case * sizes.rows
        offsets[1::2] = meaning.end[case, sequence] + case * sizes.rows
        slots = np.full(max(0, 2 * len(case) - 1), -1, dtype=np.int64)
        slots[0::2] = m.slots[case, sequence] + case * sizes.slots
        history = np.zeros(len(slots), dtype=bool)
        history[0::2] = meaning.history[case, sequence]
        counts = np.ones(len(slots), dtype=np.int64)
        counts[0::2] = meaning.start[case, sequence] + 1
        drafts = np.zeros(len(slots), dtype=bool)
        drafts[0::2] = meaning.drafts[case, sequence]
        x = self._before["x"][:, self.memory["x"].index].reshape(-1, sizes.channels)
        pool = self._before["state"][:, self.memory["state"].index]
        self._wanted_pool = pool
        if not len(case):
            return np.empty(0, dtype=np.int64), x[:0]
        result = reference.causal_conv1d(
            typed(x, kind),
            typed(self._before["weight"][0][self.memory["weight"].index], spec.types[1]),
            pooled := typed(pool.reshape(-1, *pool.shape[2:]), state),
            torch.from_numpy(offsets.astype(np.int32)),
            torch.from_numpy(slots.astype(np.int32)),
            bias=(
                typed(self._before["bias"][0][self.memory["bias"].index], spec.types[3])
                if "bias" in self.memory
                else None
            ),
            activation="silu" if spec.silu else None,
            has_initial_state=torch.from_numpy(history),
            num_accepted_tokens=torch.from_numpy(counts.astype(np.int32)),
            speculative=torch.from_numpy(drafts),
            pad_slot_id=-1,
            checkpoints=self._strict_checkpoints(case, sequence) if spec.checkpoints else None,
        )
        self._wanted_pool = pooled.view(RAW_TORCH[state]).numpy().reshape(pool.shape)
        bits = result.values.to(TORCH[kind]).view(RAW_TORCH[kind]).numpy()
        return result.rows.numpy(), bits

    def _strict_checkpoints(self, case: Array, sequence: Array) -> tuple[Tensor, Tensor, Tensor]:
        """The checkpoints of these sequences, for a call in which every second one is padding."""
        m, meaning = self.metadata, self.meaning
        at_case, number = np.nonzero(meaning.checkpoint_written & meaning.strict[:, None])
        # By case and number is by sequence too, since offsets of strict cases never go backwards.
        place = np.full(meaning.live.shape, -1)
        place[case, sequence] = np.arange(len(case))
        owner = place[at_case, meaning.checkpoint_owner[at_case, number]]
        of_sequence = np.bincount(owner, minlength=len(case))
        offsets = np.zeros(2 * len(case), dtype=np.int32)
        offsets[1::2] = np.cumsum(of_sequence)
        offsets[2::2] = offsets[1:-1:2]
        slots = m.checkpoint_slots[at_case, number] + at_case * self.sizes.slots
        tokens = m.checkpoint_tokens[at_case, number]
        return torch.from_numpy(offsets), *(torch.from_numpy(t.astype(np.int32)) for t in (tokens, slots))

    def _check_out(self, name: str, rows: Array, bits: Array) -> None:
        sizes, meaning, kind = self.sizes, self.meaning, self.spec.types[0]
        index, got = self.memory[name].index, self._after[name]
        wanted = self._before[name].copy()
        strict = meaning.strict[:, None]
        case, row = np.nonzero((claims(sizes, meaning.begin, meaning.end, ~meaning.live) > 0) & strict)
        wanted[case[:, None], index[row]] = 0
        case, row = rows // sizes.rows, rows % sizes.rows
        where = (case[:, None], index[row])
        steps = np.abs(ordered(got[where]) - ordered(bits))
        wrong = steps > self._steps_allowed()
        if wrong.any():
            first = int(np.nonzero(wrong.any(1))[0][0])
            self._fail(
                int(case[first]),
                f"{name}: row {int(row[first])} is {floats_of(got[where][first], kind).tolist()}, "
                f"wanted {floats_of(bits[first], kind).tolist()}",
            )
        wanted[where] = got[where]
        # Where overlapping offsets leave the result open, any number may stand in the rows, but only a number.
        loose = np.zeros(got.shape, dtype=bool)
        loose[:, index] = ~strict[:, :, None]
        self._clean(name, kind, loose)
        self._same(name, wanted, got, loose)

    def _steps_allowed(self) -> int:
        """Steps of the output type: none without SiLU, whose `exp` the contract leaves open to a rounding or two."""
        if not self.spec.silu:
            return 0
        # In fp32 the argument's rounding counts: |v| log2(e) half-units at |v| <= 9, and a few more.
        return 24 if self.spec.types[0] == "fp32" else 2

    def _check_state(self) -> None:
        spec, sizes, meaning = self.spec, self.sizes, self.meaning
        index, got = self.memory["state"].index, self._after["state"]
        wanted = self._before["state"].copy()
        wanted[:, index] = self._wanted_pool
        tokens = meaning.end - meaning.begin
        kept = np.full_like(tokens, spec.width - 1)
        kept = np.where(meaning.drafts, np.minimum(tokens + spec.width - 2, spec.positions), kept)
        storable = np.zeros((sizes.cases, sizes.slots, spec.positions), dtype=bool)
        for case, sequence in zip(*np.nonzero(meaning.live & ~meaning.strict[:, None]), strict=True):
            storable[case, self.metadata.slots[case, sequence], : kept[case, sequence]] = True
        case, number = np.nonzero(meaning.checkpoint_written & ~meaning.strict[:, None])
        storable[case, self.metadata.checkpoint_slots[case, number], : spec.width - 1] = True
        loose = np.zeros(got.shape, dtype=bool)
        loose[:, index] = storable[:, :, None, :]
        self._clean("state", spec.types[2], loose)
        self._same("state", wanted, got, loose)

    def _clean(self, name: str, kind: str, where: Array) -> None:
        """Elements that changed there hold numbers that clean inputs can give."""
        got = self._after[name]
        changed = where & (self._before[name] != got)
        case, element = np.nonzero(changed)
        values = floats_of(got[case, element], kind)
        foreign = np.nonzero(~(np.abs(values) <= LIMIT))[0]
        if len(foreign):
            first = case[foreign[0]]
            there = foreign[case[foreign] == first]
            self._fail(int(first), f"{name}: elements {element[there][:8].tolist()} hold {values[there][:8].tolist()}")

    def check_meaning(self, case: int) -> None:
        """Compare one strict case with the reference on the raw metadata: are they read here as they are there?"""
        spec, sizes, meaning, memory = self.spec, self.sizes, self.meaning, self.memory
        if not meaning.strict[case]:
            return
        x_kind, weight_kind, state_kind, bias_kind = spec.types
        device = torch.device("cpu")

        def int32(values: Array) -> Tensor:
            return torch.from_numpy(values.astype(np.int32))

        m = self.metadata
        state = typed(self._before["state"][case][memory["state"].index], state_kind).clone()
        kept = int(device_fault(device))
        clear_device_fault(device)
        result = reference.causal_conv1d(
            typed(self._before["x"][case][memory["x"].index], x_kind),
            typed(self._before["weight"][case][memory["weight"].index], weight_kind),
            state,
            None if spec.entry == "decode" else int32(m.offsets[case]),
            int32(m.slots[case]),
            bias=typed(self._before["bias"][case][memory["bias"].index], bias_kind) if "bias" in memory else None,
            activation="silu" if spec.silu else None,
            has_initial_state=torch.from_numpy(m.flags[case]) if sizes.flags else not spec.prefills,
            num_accepted_tokens=int32(m.counts[case]) if sizes.counts else None,
            speculative=torch.from_numpy(m.drafts[case] != 0) if spec.drafts else spec.entry == "speculative",
            pad_slot_id=sizes.pad_slot_id,
            checkpoints=(
                (int32(m.checkpoint_offsets[case]), int32(m.checkpoint_tokens[case]), int32(m.checkpoint_slots[case]))
                if spec.checkpoints
                else None
            ),
        )
        fault = int(device_fault(device))
        fault_flag(device).fill_(kept)
        if fault != meaning.fault[case]:
            self._fail(case, f"the reference leaves code {fault}, not {meaning.fault[case]}")
        pool = state.view(RAW_TORCH[state_kind]).numpy()
        if not np.array_equal(pool, self._after["state"][case][memory["state"].index]):
            self._fail(case, "the reference leaves another pool")
        name = "x" if sizes.in_place else "out"
        got = self._after[name][case][memory[name].index]
        wanted = self._before[name][case][memory[name].index].copy()
        wanted[result.zero_rows.numpy()] = 0
        wanted[result.rows.numpy()] = result.values.to(TORCH[x_kind]).view(RAW_TORCH[x_kind]).numpy()
        # Rows that nobody owns hold poison on both sides; NaN patterns are bits here.
        if (np.abs(ordered(got) - ordered(wanted)) > self._steps_allowed()).any():
            self._fail(case, "the reference gives another output")


# --- runs ----------------------------------------------------------------------------------------------------

_BATCH = 48


def run(
    spec: Spec,
    cases: int,
    *,
    seed: int = 0,
    exact: bool = False,
    near: bool = False,
    edits: tuple[tuple[str, str], ...] = (),
    reverse: bool | None = None,
) -> int:
    """Run at least `cases` cases of a spec.

    Args:
        spec: which kernel.
        cases: how many.
        seed: of all choices.
        exact: each buffer in an allocation of its own that ends with its last element, for AddressSanitizer.
        near: hostile values stay so small that a stray access would hit the guards.
        edits: of the source, for planted bugs.
        reverse: order of the blocks; both in turn if None.

    Returns:
        The number of cases that ran.

    Raises:
        FuzzFailure: see `Batch.run`.
    """
    dice = np.random.default_rng([seed, SPECS.index(spec)])
    done = 0
    with launch_choice(spec.config):
        while done < cases:
            batch = Batch(spec, dice, _BATCH, exact=exact, near=near)
            # The same memory twice: allocating costs as much as running.
            for _ in range(2):
                batch.run(edits, reverse=reverse)
                batch.check_meaning(int(dice.integers(_BATCH)))
                done += _BATCH
                if done >= cases:
                    break
    return done


def main(arguments: Sequence[str] | None = None) -> None:
    """Run every spec, and say how many cases ran and how fast."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=200_000, help="of all specs together")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--exact", action="store_true", help="allocations without guards, for AddressSanitizer")
    parser.add_argument("--spec", type=int, action="append", help="number of a spec; all if absent")
    parser.add_argument("--mutant", choices=sorted(MUTANTS), help="plant this bug")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    edits: tuple[tuple[str, str], ...] = ()
    chosen = options.spec or range(len(SPECS))
    if options.mutant:
        edits, chosen = MUTANTS[options.mutant].edits, [MUTANTS[options.mutant].spec]
    total, started = 0, time.perf_counter()
    for number in chosen:
        begin = time.perf_counter()
        done = run(SPECS[number], -(-options.cases // len(chosen)), seed=options.seed, exact=options.exact, edits=edits)
        total += done
        print(f"{number:2} {done / (time.perf_counter() - begin):8.0f}/s  {SPECS[number]}", flush=True)
    print(f"{total} cases in {time.perf_counter() - started:.1f} s")


if __name__ == "__main__":
    main()
