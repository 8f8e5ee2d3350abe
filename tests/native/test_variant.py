"""The variant record, and the source text that is its whole identity."""

from __future__ import annotations

import dataclasses
import re

import pytest

from serving_conv.errors import BackendError
from serving_conv.native import variant as module
from serving_conv.native.variant import Variant, kernel_directory, source

PREFILL = Variant(
    kernel="conv_prefill",
    x="bfloat16",
    weight="bfloat16",
    state="bfloat16",
    bias="bfloat16",
    width=4,
    vec=4,
    threads=128,
    min_blocks=5,
    state_layout=0,
    positions=3,
    has_bias=True,
    silu=True,
    rows=16,
)
UPDATE = dataclasses.replace(PREFILL, kernel="conv_update", rows=0, sequences=2)
BACKWARD = dataclasses.replace(PREFILL, kernel="conv_backward", rows=0, ahead=12, ordered=True)
SUM = dataclasses.replace(BACKWARD, kernel="sum_partials", vec=1, silu=False, ahead=0)
KERNELS = {"prefill": PREFILL, "update": UPDATE, "backward": BACKWARD, "sum": SUM}
OTHER = {
    "kernel": "conv_update",
    "x": "float16",
    "weight": "float32",
    "state": "float32",
    "bias": "float16",
    "width": 3,
    "vec": 2,
    "threads": 64,
    "min_blocks": 8,
    "state_layout": 2,
    "positions": 5,
    "has_bias": False,
    "silu": False,
    "rows": 8,
    "packed": True,
    "speculative": True,
    "checkpoints": True,
    "ahead": 4,
    "sequences": 1,
    "ordered": True,
}
FIELDS = [field.name for field in dataclasses.fields(Variant)]


@pytest.fixture
def fresh_files() -> None:
    """Let no test see another one's kernel files."""
    module.read_kernel_file.cache_clear()


def test_equal_variants_are_one_key() -> None:
    assert {PREFILL: 1}[dataclasses.replace(PREFILL)] == 1
    assert len({PREFILL, UPDATE, dataclasses.replace(UPDATE)}) == 2
    with pytest.raises(dataclasses.FrozenInstanceError):
        PREFILL.vec = 1  # type: ignore[misc]


@pytest.mark.parametrize("platform", ["cuda", "host"])
@pytest.mark.parametrize("field", FIELDS)
def test_every_field_changes_the_source(field: str, platform: str) -> None:
    changed = dataclasses.replace(PREFILL, **{field: OTHER[field]})
    assert changed != PREFILL
    assert hash(changed) != hash(PREFILL)
    assert source(changed, platform) != source(PREFILL, platform)


@pytest.mark.parametrize("variant", KERNELS.values(), ids=KERNELS)
def test_numbers_become_macros_of_their_names(variant: Variant) -> None:
    text = source(variant, "cuda")
    for field in FIELDS:
        value = getattr(variant, field)
        if not isinstance(value, str):
            assert f"#define {field.upper()} {int(value)}\n" in text
    assert "typedef BFloat16 X;" in text


def _parts(variant: Variant, platform: str) -> set[str]:
    """Kernel files that are in a source text."""
    text = source(variant, platform)
    return {path.name for path in kernel_directory().iterdir() if path.suffix in (".cu", ".cuh", ".h", ".cc")
            and path.read_text(encoding="utf-8") in text}  # fmt: skip


@pytest.mark.parametrize("variant", KERNELS.values(), ids=KERNELS)
@pytest.mark.parametrize("platform", ["cuda", "host"])
def test_an_edit_of_any_file_changes_the_source(
    platform: str, variant: Variant, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = _parts(variant, platform)
    before, read = source(variant, platform), module.read_kernel_file
    for edited in files:
        monkeypatch.setattr(
            module, "read_kernel_file", lambda name, edited=edited: read(name) + "\n" * (name == edited)
        )
        assert source(variant, platform) != before, edited
    common = {
        "parameters.cuh",
        "channels.cuh",
        "window.cuh",
        "sequence.cuh",
        "checkpoints.cuh",
        "singles.cuh",
        f"{variant.kernel}.cu",
    }
    if variant in (BACKWARD, SUM):
        common.add("backward_parameters.cuh")
    own = {"platform_cuda.cuh"} if platform == "cuda" else {"platform_host.h", "host_entry.cc"}
    assert files == common | own


def test_no_file_is_without_use() -> None:
    used = {name for v in KERNELS.values() for platform in ("cuda", "host") for name in _parts(v, platform)}
    assert {p.name for p in kernel_directory().iterdir() if p.suffix in (".cu", ".cuh", ".h", ".cc")} == used


@pytest.mark.parametrize("variant", KERNELS.values(), ids=KERNELS)
def test_the_cuda_side_needs_no_header(variant: Variant) -> None:
    assert "#include" not in source(variant, "cuda")
    # The host's own, in angle brackets: nothing of ours is found by a path.
    assert set(re.findall(r"#include (\S+)", source(variant, "host"))) <= {"<math.h>", "<stdint.h>", "<string.h>"}


def test_the_kernel_is_the_texts_only_entry() -> None:
    for variant in KERNELS.values():
        assert re.findall(r"^KERNEL\(.*\) (\w+)\(", source(variant, "cuda"), re.MULTILINE) == [variant.kernel]


def test_the_platforms_share_every_line_of_a_kernel() -> None:
    shared = source(PREFILL, "cuda").removeprefix(module.read_kernel_file("platform_cuda.cuh"))
    assert shared in source(PREFILL, "host")


def test_missing_kernels_say_so(monkeypatch: pytest.MonkeyPatch, tmp_path: object) -> None:
    monkeypatch.setattr(module, "__file__", f"{tmp_path}/a/b/variant.py")
    with pytest.raises(BackendError, match="kernel"):
        kernel_directory()
