"""Owns the kernels' resource usage: which variants engines run, what NVRTC says they use, and the file that states it.

`python -m support.resources` compiles the variants and rewrites `kernels/resources.json`; run it from `tests/` after
a change to the kernels or to a launch choice. It needs the NVRTC wheel and no GPU.
"""

from __future__ import annotations

import io
import itertools
import json
import re
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from serving_conv.native.backward import BackwardBuffers, prepare_backward
from serving_conv.native.call import Launch, prepare_prefill, prepare_update
from serving_conv.native.variant import AnyVariant, CopyVariant, Variant, kernel_directory, source

__all__ = ["ARCHITECTURES", "Usage", "main_variants", "measure", "round_up", "stated", "variant_name"]

ARCHITECTURES = ("sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_103", "sm_120", "sm_121")
FULL = "sm_90"  # compiled whole; the others compile every variant that differs in kind

_SHORT = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
_WIDTHS = (2, 3, 4, 8)
_MULTIPROCESSORS = 132
_UNIT = 8  # registers are given to a thread in these steps: fewer or more inside one change nothing


@dataclass(frozen=True, slots=True)
class Usage:
    """What the assembler says of one kernel.

    Attributes:
        registers: of a thread.
        local_bytes: stack frame and spills, which live in local memory.
        shared_bytes: of a block.
    """

    registers: int
    local_bytes: int
    shared_bytes: int


def measure(variant: AnyVariant, architecture: str) -> Usage:
    """Compile a variant as the `cuda` backend does and read the assembler's report."""
    from cuda.core import Program, ProgramOptions

    log = io.StringIO()
    options = ProgramOptions(arch=architecture, std="c++17", ptxas_options="-v")
    Program(source(variant, "cuda"), "c++", options).compile("cubin", logs=log)
    return read_report(log.getvalue())


def read_report(log: str) -> Usage:
    """Parse the assembler's report of one kernel; every number must be there."""
    # The second line is missing where a kernel calls no function of its own; none of these kernels does.
    (frame,) = re.findall(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", log)
    (registers,) = re.findall(r"Used (\d+) registers", log)
    shared = re.findall(r"(\d+) bytes smem", log)
    return Usage(int(registers), sum(map(int, frame)), int(shared[0]) if shared else 0)


def variant_name(variant: AnyVariant) -> str:
    """One line that names a variant in the resource file."""
    if isinstance(variant, CopyVariant):
        return f"{variant.kernel} threads={variant.threads}/{variant.min_blocks}"
    kind = variant.kernel.removeprefix("conv_")
    if variant.kernel == "sum_partials":
        return (
            f"sum weight={_SHORT[variant.weight]} width={variant.width} threads={variant.threads}/{variant.min_blocks}"
        )
    if variant.kernel == "conv_backward":
        kind += f" {'ordered' if variant.ordered else 'fast'} ahead={variant.ahead}"
    if variant.packed:
        kind += f" {'speculative' if variant.speculative else 'rows'} ahead={variant.ahead}"
    elif variant.sequences:
        kind += f" sequences={variant.sequences}"
    else:
        kind += " drafts" * variant.speculative + " checkpoints" * variant.checkpoints
    layout = ("channels", f"positions={variant.positions}", "strided")[variant.state_layout]
    return (
        f"{kind} {layout} x={_SHORT[variant.x]} weight={_SHORT[variant.weight]} width={variant.width} "
        f"vec={variant.vec} threads={variant.threads}/{variant.min_blocks}"
    )


# --- which variants ------------------------------------------------------------------------------------------


def _meta(shape: Sequence[int], dtype: torch.dtype, strides: Sequence[int] | None = None) -> Tensor:
    # Meta tensors have an address of 0, which is aligned to everything, and cost nothing.
    tensor = torch.empty(1, dtype=dtype, device="meta")
    return tensor.new_empty(shape) if strides is None else tensor.new_empty_strided(shape, strides)


def _pool(layout: str, channels: int, positions: int, dtype: torch.dtype) -> Tensor:
    strides = {
        "channels": (channels * positions, 1, channels),
        "positions": (channels * positions, positions, 1),
        "strided": (channels * (positions + 1), positions + 1, 1),
    }[layout]
    return _meta((64, channels, positions), dtype, strides)


def _calls(
    x_type: torch.dtype,
    weight_type: torch.dtype,
    width: int,
    layout: str,
    channels: int,
    drafts: Sequence[int],
    capability: int,
) -> Iterator[Launch | None]:
    """The calls of engines: long and short prefill, mixed steps, decode of few and many, rows, speculative steps."""

    def int32(size: int) -> Tensor:
        return _meta((size,), torch.int32)

    weight, bias = _meta((channels, width), weight_type), _meta((channels,), weight_type)
    flag, none = int32(1), None
    for draft_tokens in (0, *drafts):
        pool = _pool(layout, channels, width - 1 + draft_tokens, x_type)
        counted = draft_tokens > 0
        # Longer slots change a kernel without counts only where it holds a slot whole.
        longer_slot_only = counted and layout != "positions"
        drafts_of_step = {"speculative": _meta((8,), torch.bool)} if counted else {}
        checkpoints = {
            "checkpoint_offsets": int32(9),
            "checkpoint_tokens": int32(8),
            "checkpoint_slots": int32(8),
        }
        of_step: list[dict[str, Tensor]] = []
        # Mixed steps of the usual types, where a thread owns several channels; drafts alone hold less.
        if x_type == weight_type == _BF16 and channels == 8192:
            of_step.append({**drafts_of_step, **checkpoints})
        if not longer_slot_only:
            of_step.append({})
        for rows, arguments in itertools.product((64, 65536), of_step):
            x = _meta((rows, channels), x_type)
            yield prepare_prefill(
                x,
                weight,
                pool,
                int32(9),
                int32(8),
                _meta((8,), torch.bool),
                bias,
                "silu",
                none,
                x,
                -1,
                **arguments,
                fault_flag=flag,
                multiprocessors=_MULTIPROCESSORS,
                capability=capability,
            )
        for sequences in (1, 32, 1024):
            shapes: tuple[tuple[int, bool], ...]
            if not counted:
                shapes = ((1, False), (1, True))
            elif longer_slot_only:
                shapes = ((draft_tokens + 1, True),)
            else:
                shapes = ((1, False), (draft_tokens + 1, True))
            for tokens, packed in shapes:
                x = _meta((sequences * tokens, channels), x_type)
                yield prepare_update(
                    x,
                    weight,
                    pool,
                    int32(sequences),
                    int32(sequences + 1) if packed else none,
                    int32(sequences) if counted else none,
                    none,
                    bias,
                    "silu",
                    x,
                    -1,
                    fault_flag=flag,
                )


def _backward_calls(x_type: torch.dtype, weight_type: torch.dtype, width: int, channels: int) -> Iterator[Launch]:
    """A training step's backward, both reductions; sizes change the length of runs alone."""
    x, weight = _meta((1, 8192, channels), x_type), _meta((channels, width), weight_type)
    bias, windows = _meta((channels,), weight_type), _meta((8, width - 1, channels), torch.float32)
    for ordered in (True, False):
        yield from prepare_backward(
            x,
            x,
            weight,
            bias,
            _pool("channels", channels, width - 1, x_type),
            _meta((9,), torch.int32),
            windows,
            BackwardBuffers(x, weight, bias, windows),
            activation="silu",
            ordered=ordered,
            multiprocessors=_MULTIPROCESSORS,
        )[0]


_BF16, _FP16, _FP32 = torch.bfloat16, torch.float16, torch.float32
_LAYOUTS = ("channels", "positions", "strided")


@cache
def main_variants(architecture: str) -> tuple[Variant, ...]:
    """What engines run: everything on `FULL`; elsewhere what differs in kind, at the widths that press registers."""
    found: dict[Variant, None] = {}
    capability = int(architecture.removeprefix("sm_"))

    def add(types: Sequence[tuple[torch.dtype, torch.dtype]], widths: Sequence[int], drafts: int) -> None:
        # 8192 channels take the vector paths; of 8191 a thread owns one.
        for (x, weight), width, layout, channels in itertools.product(types, widths, _LAYOUTS, (8192, 8191)):
            for launch in _calls(x, weight, width, layout, channels, (drafts,), capability):
                assert launch is not None
                found[launch.variant] = None
            for launch in _backward_calls(x, weight, width, channels):
                found[launch.variant] = None

    if architecture == FULL:
        add(((_BF16, _BF16),), (2, 3, 4), 3)
        add(((_BF16, _FP32), (_FP16, _FP16), (_FP32, _FP32)), (4,), 3)
        add(((_BF16, _BF16), (_FP32, _FP32)), (8,), 7)
    else:
        add(((_BF16, _BF16),), (4,), 3)
        add(((_FP32, _FP32),), (8,), 7)
        return tuple(v for v in found if v.vec > 1 or v.kernel != "conv_update")
    return tuple(found)


# --- the file ------------------------------------------------------------------------------------------------


def _path() -> Path:
    return kernel_directory() / "resources.json"


@cache
def stated() -> dict[str, dict[str, int]]:
    """Most registers of a thread, by variant name and architecture."""
    kernels: dict[str, dict[str, int]] = json.loads(_path().read_text(encoding="utf-8"))["registers"]
    return kernels


def round_up(registers: int) -> int:
    """Registers that the hardware gives for so many."""
    return -(-registers // _UNIT) * _UNIT


def _measure_named(task: tuple[str, AnyVariant]) -> tuple[str, str, Usage]:
    architecture, variant = task
    return architecture, variant_name(variant), measure(variant, architecture)


def _nvrtc_version() -> str:
    from cuda.bindings import nvrtc

    _, major, minor = nvrtc.nvrtcVersion()
    return f"{major}.{minor}"


def main() -> None:
    """Compile everything and rewrite the file; report what uses local memory."""
    tasks: list[tuple[str, AnyVariant]] = [
        (architecture, variant)
        for architecture in ARCHITECTURES
        for variant in (*main_variants(architecture), CopyVariant())
    ]
    registers: dict[str, dict[str, int]] = {}
    spilled = 0
    with ProcessPoolExecutor(2) as workers:  # NVRTC compiles one program at a time in a process
        for architecture, name, usage in workers.map(_measure_named, tasks, chunksize=8):
            registers.setdefault(name, {})[architecture] = round_up(usage.registers)
            if usage.local_bytes:
                spilled += 1
                print(f"{architecture}: {name} uses {usage.local_bytes} bytes of local memory")
    lines = ",\n".join(f"    {json.dumps(name)}: {json.dumps(registers[name])}" for name in sorted(registers))
    _path().write_text(
        "{\n"
        '  "about": "Most registers of a thread, in steps of 8; no kernel uses local memory. '
        'Made by python -m support.resources in tests/.",\n'
        f'  "nvrtc": "{_nvrtc_version()}",\n'
        f'  "registers": {{\n{lines}\n  }}\n}}\n',
        encoding="utf-8",
    )
    print(f"{len(tasks)} compilations, {len(registers)} kernels, {spilled} with local memory")


if __name__ == "__main__":
    main()
