"""The parameter block: one record, the C text made of it, and what a C++ compiler makes of that text."""

from __future__ import annotations

import re
import struct
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from serving_conv.contract import ENTRIES
from serving_conv.native.abi import (
    BACKWARD_FIELDS,
    BACKWARD_PACKER,
    FIELDS,
    PACKER,
    STEP_SIZES,
    TENSORS,
    backward_parameters_header,
    parameters_header,
)
from serving_conv.native.plan import tensor_names
from serving_conv.native.variant import kernel_directory


@pytest.mark.parametrize("make", [parameters_header, backward_parameters_header])
def test_kernels_have_the_generated_header(make: Callable[[], str]) -> None:
    name = f"{make.__name__.removesuffix('_header')}.cuh"
    text = (kernel_directory() / name).read_text(encoding="utf-8")
    assert text == make(), f"write it anew: {make.__name__}() > kernels/{name}"


def test_every_field_is_declared_once() -> None:
    declared = re.findall(r"^  .*?(\w+);", parameters_header(), re.MULTILINE)
    assert declared == [name for _, name, _ in FIELDS]
    assert len(set(declared)) == len(declared)
    declared = re.findall(r"^  .*?(\w+);", backward_parameters_header(), re.MULTILINE)
    assert declared == ["forward", *[name for _, name, _ in BACKWARD_FIELDS]]


@pytest.mark.parametrize("fields", [FIELDS, BACKWARD_FIELDS], ids=["forward", "backward"])
def test_pointers_come_first_and_longer_fields_before_shorter_ones(fields: tuple[tuple[str, str, str], ...]) -> None:
    sizes = [4 if kind == "int" else 8 for kind, _, _ in fields]
    assert sizes == sorted(sizes, reverse=True)
    assert sum(sizes) % 8 == 0
    pointers = [kind.endswith("*") for kind, _, _ in fields]
    assert pointers == sorted(pointers, reverse=True)


def test_tensors_come_first_and_sizes_of_the_step_last() -> None:
    pointers = [name for kind, name, _ in FIELDS if kind.endswith("*")]
    assert TENSORS.size == 8 * (len(pointers) - 1)
    assert pointers[-1] == "fault_flag"
    for entry in ENTRIES:
        names = ["slots" if name.endswith("_indices") else name for name in tensor_names(entry) if name != "workspace"]
        assert pointers[: len(names)] == names
    assert [name for _, name, _ in FIELDS][-4:] == ["rows", "sequences", "checkpoints", "unused"]
    assert STEP_SIZES.size == struct.calcsize("".join("i" for _ in range(4)))


def test_packing_is_the_compilers_layout(tmp_path: Path) -> None:
    lines = ["#include <cstddef>", "#include <cstdio>", "typedef long long i64;", parameters_header(), "int main() {"]
    lines.append('  printf("size %zu\\n", sizeof(Parameters));')
    lines += [f'  printf("{name} %zu %zu\\n", offsetof(Parameters, {name}), sizeof(Parameters::{name}));'
              for _, name, _ in FIELDS]  # fmt: skip
    code, program = tmp_path / "layout.cc", tmp_path / "layout"
    code.write_text("\n".join([*lines, "}"]), encoding="utf-8")
    subprocess.run(["g++", "-std=c++17", "-o", str(program), str(code)], check=True)
    first, *rest = subprocess.run([str(program)], capture_output=True, text=True, check=True).stdout.splitlines()
    assert first == f"size {PACKER.size}"
    codes, offset = PACKER.format.lstrip("<"), 0
    for line, (_, name, _), code_letter in zip(rest, FIELDS, codes, strict=True):
        size = struct.calcsize("<" + code_letter)
        assert line == f"{name} {offset} {size}"
        offset += size


def test_each_value_lands_in_its_field(tmp_path: Path) -> None:
    """A compiled reader of the block sees, by name, what was packed by position."""
    values = [1000 + number for number in range(len(FIELDS))]
    reads = [f'  printf("%lld\\n", (long long)p.{name});' for _, name, _ in FIELDS]
    lines = ["#include <cstdio>", "typedef long long i64;", parameters_header(), "int main() {", "  Parameters p;"]
    lines += ["  if (fread(&p, sizeof p, 1, stdin) != 1) return 1;", *reads, "}"]
    code, program = tmp_path / "read.cc", tmp_path / "read"
    code.write_text("\n".join(lines), encoding="utf-8")
    subprocess.run(["g++", "-std=c++17", "-o", str(program), str(code)], check=True)
    printed = subprocess.run([str(program)], input=PACKER.pack(*values), capture_output=True, check=True).stdout
    assert [int(line) for line in printed.split()] == values


def test_each_value_of_the_backward_lands_in_its_field(tmp_path: Path) -> None:
    forward = [1000 + number for number in range(len(FIELDS))]
    own = [2000 + number for number in range(len(BACKWARD_FIELDS))]
    reads = [f'  printf("%lld\\n", (long long)p.forward.{name});' for _, name, _ in FIELDS]
    reads += [f'  printf("%lld\\n", (long long)p.{name});' for _, name, _ in BACKWARD_FIELDS]
    lines = ["#include <cstdio>", "typedef long long i64;", parameters_header(), backward_parameters_header()]
    lines += ["int main() {", "  BackwardParameters p;", "  if (fread(&p, sizeof p, 1, stdin) != 1) return 1;"]
    code, program = tmp_path / "read.cc", tmp_path / "read"
    code.write_text("\n".join([*lines, *reads, "}"]), encoding="utf-8")
    subprocess.run(["g++", "-std=c++17", "-o", str(program), str(code)], check=True)
    block = BACKWARD_PACKER.pack(*forward, *own)
    printed = subprocess.run([str(program)], input=block, capture_output=True, check=True).stdout
    assert [int(line) for line in printed.split()] == [*forward, *own]


def test_negative_sentinels_and_large_strides_fit() -> None:
    fields = [0] * len(FIELDS)
    names = [name for _, name, _ in FIELDS]
    fields[names.index("pad_slot_id")] = -(2**31)
    fields[names.index("slot_stride")] = 2**40
    unpacked = PACKER.unpack(PACKER.pack(*fields))
    assert unpacked[names.index("pad_slot_id")] == -(2**31)
    assert unpacked[names.index("slot_stride")] == 2**40
