"""Every architecture takes every kernel: no local memory, and no more registers than `kernels/resources.json` states.

NVRTC compiles for any architecture without a GPU. After a change to a kernel or a launch choice:
`cd tests && python -m support.resources` writes the file anew.
"""

from __future__ import annotations

import itertools
import re

import pytest
from support.resources import (
    ARCHITECTURES,
    Usage,
    main_variants,
    measure,
    read_report,
    round_up,
    stated,
    variant_name,
)

from serving_conv.native.variant import CopyVariant

PART = 64  # variants of one test, so that two workers share the time
PARTS = [
    (architecture, part)
    for architecture in ARCHITECTURES
    for part in range(-(-len(main_variants(architecture)) // PART))
]


@pytest.mark.parametrize(("architecture", "part"), PARTS, ids=[f"{a}-{part}" for a, part in PARTS])
def test_no_spills_and_no_more_registers_than_stated(architecture: str, part: int) -> None:
    wrong = []
    for variant in main_variants(architecture)[part * PART : (part + 1) * PART]:
        name, usage = variant_name(variant), measure(variant, architecture)
        most = stated().get(name, {}).get(architecture)
        if usage.local_bytes:
            wrong.append(f"{name}: {usage.local_bytes} bytes of local memory")
        if most is None:
            wrong.append(f"{name}: not in the file")
        elif round_up(usage.registers) > most:
            wrong.append(f"{name}: {usage.registers} registers, {most} stated")
        # What the launch choice asks for is what the multiprocessor can hold.
        assert round_up(usage.registers) * variant.threads * variant.min_blocks <= 65536, name
    assert not wrong, f"{architecture}:\n" + "\n".join(wrong)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_the_copy_of_slots_likewise(architecture: str) -> None:
    variant = CopyVariant()
    usage = measure(variant, architecture)
    registers = round_up(usage.registers)
    assert usage.local_bytes == 0
    assert registers <= stated()[variant_name(variant)][architecture]
    assert registers * variant.threads * variant.min_blocks <= 65536


def test_the_file_states_nothing_else() -> None:
    wanted = {(variant_name(v), a) for a in ARCHITECTURES for v in (*main_variants(a), CopyVariant())}
    found = {(name, a) for name, by_architecture in stated().items() for a in by_architecture}
    assert found == wanted


def test_names_are_the_variants() -> None:
    for architecture in ARCHITECTURES:
        variants = main_variants(architecture)
        assert len({variant_name(v) for v in variants}) == len(variants)


def test_main_variants_are_what_engines_run() -> None:
    full = main_variants("sm_90")
    kinds = [*itertools.product((0, 1, 2), ("conv_prefill", "conv_update")), (0, "conv_backward")]
    for width, (layout, kernel) in itertools.product((2, 3, 4, 8), kinds):
        of_kind = [v for v in full if (v.width, v.state_layout, v.kernel) == (width, layout, kernel)]
        assert {v.vec > 1 for v in of_kind} == {False, True}, (width, layout, kernel)
    for x, weight in (("bfloat16",) * 2, ("bfloat16", "float32"), ("float16",) * 2, ("float32",) * 2):
        of_types = [v for v in full if (v.x, v.weight, v.width) == (x, weight, 4)]
        updates = {(v.packed, v.speculative) for v in of_types if v.kernel == "conv_update"}
        assert updates == {(False, False), (True, False), (True, True)}
    for architecture, layout in itertools.product(ARCHITECTURES, (0, 1, 2)):
        steps = [v for v in main_variants(architecture) if v.kernel == "conv_prefill" and v.state_layout == layout]
        assert {(v.speculative, v.checkpoints) for v in steps} == {(False, False), (False, True), (True, True)}
    for architecture in ARCHITECTURES:
        assert {v.kernel for v in main_variants(architecture)} == {
            "conv_prefill",
            "conv_update",
            "conv_backward",
            "sum_partials",
        }


REPORT = """ptxas info    : Function properties for conv_prefill
ptxas         .     {} bytes stack frame, {} bytes spill stores, {} bytes spill loads
ptxas info    : Used {} registers, used 0 barriers, 16384 bytes smem
"""


def test_the_assemblers_report_is_read() -> None:
    assert read_report(REPORT.format(0, 0, 0, 93)) == Usage(registers=93, local_bytes=0, shared_bytes=16384)
    assert read_report(REPORT.format(16, 4, 8, 64)).local_bytes == 28
    with pytest.raises(ValueError, match="unpack"):
        read_report(re.sub("Used.*", "", REPORT.format(0, 0, 0, 1)))


def test_spills_are_seen() -> None:
    """Too few registers must show, or the tests above prove nothing."""
    from dataclasses import replace

    widest = max(main_variants("sm_90"), key=lambda v: (v.kernel == "conv_prefill", v.width * v.vec, v.positions))
    assert measure(replace(widest, min_blocks=16), "sm_90").local_bytes > 0
