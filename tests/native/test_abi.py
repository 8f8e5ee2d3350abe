"""The parameter block: one record, the C text made of it, and what a C++ compiler makes of that text."""

from __future__ import annotations

import re
import struct
import subprocess
from pathlib import Path

from serving_conv.native.abi import FIELDS, PACKER, POINTERS, parameters_header
from serving_conv.native.variant import kernel_directory


def test_kernels_have_the_generated_header() -> None:
    text = (kernel_directory() / "parameters.cuh").read_text(encoding="utf-8")
    assert text == parameters_header(), "write it anew: parameters_header() > kernels/parameters.cuh"


def test_every_field_is_declared_once() -> None:
    declared = re.findall(r"^  .*?(\w+);", parameters_header(), re.MULTILINE)
    assert declared == [name for _, name, _ in FIELDS]
    assert len(set(declared)) == len(declared)


def test_pointers_come_first_and_longer_fields_before_shorter_ones() -> None:
    sizes = [4 if kind == "int" else 8 for kind, _, _ in FIELDS]
    assert sizes == sorted(sizes, reverse=True)
    pointers = [kind.endswith("*") for kind, _, _ in FIELDS]
    assert pointers == sorted(pointers, reverse=True)
    assert POINTERS.size == 8 * sum(pointers)


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


def test_negative_sentinels_and_large_strides_fit() -> None:
    fields = [0] * len(FIELDS)
    names = [name for _, name, _ in FIELDS]
    fields[names.index("pad_slot_id")] = -(2**31)
    fields[names.index("slot_stride")] = 2**40
    unpacked = PACKER.unpack(PACKER.pack(*fields))
    assert unpacked[names.index("pad_slot_id")] == -(2**31)
    assert unpacked[names.index("slot_stride")] == 2**40
