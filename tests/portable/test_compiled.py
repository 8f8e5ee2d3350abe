"""The Triton kernels compile for GPUs that are not here, and nothing about a size is compiled in."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.ahead import compile_ahead

pytest.importorskip("triton")

KINDS: dict[str, dict[str, Any]] = {
    "prefill": {"kernel": "conv_prefill"},
    "prefill-positions": {"kernel": "conv_prefill", "layout": 1},
    "prefill-strided": {"kernel": "conv_prefill", "layout": 2, "dtype": "fp32", "width": 8, "vec": 1, "counts": True},
    "decode": {"kernel": "conv_update", "packed": False, "warps": 4},
    "several-rows": {"kernel": "conv_update", "warps": 4},
    "speculative": {"kernel": "conv_update", "counts": True, "warps": 4},
    "speculative-wide": {"kernel": "conv_update", "counts": True, "width": 8, "layout": 1, "warps": 4},
}
HOPPER = ("cuda", 90, 32)
OTHERS = (("cuda", 80, 32), ("cuda", 100, 32), ("hip", "gfx942", 64))


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))


@pytest.mark.parametrize("kind", KINDS)
def test_compiles_with_fused_steps(kind: str) -> None:
    traits = dict(KINDS[kind])
    text = compile_ahead(traits.pop("kernel"), HOPPER, **traits).asm["ptx"]
    assert text.count("fma.rn.f32") >= traits.get("width", 4)


@pytest.mark.parametrize("target", OTHERS, ids=lambda target: str(target[1]))
@pytest.mark.parametrize("kind", ["prefill", "decode", "speculative"])
def test_compiles_elsewhere(kind: str, target: tuple[str, int | str, int]) -> None:
    traits = dict(KINDS[kind])
    made = compile_ahead(traits.pop("kernel"), target, **traits).asm
    assert "cubin" in made or "hsaco" in made


@pytest.mark.parametrize("kernel", ["conv_prefill", "conv_update"])
def test_no_size_is_specialised(kernel: str) -> None:
    from serving_conv.portable import kernels

    for parameter in getattr(kernels, kernel).params:
        if not parameter.is_constexpr and parameter.annotation_type:
            # The annotation keeps the type from following the value.
            assert parameter.do_not_specialize, parameter.name
        elif not parameter.is_constexpr and parameter.name not in ("x", "conv_state", "out"):
            assert parameter.do_not_specialize_on_alignment, parameter.name


@pytest.mark.gpu
def test_changed_sizes_compile_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    import triton

    from serving_conv.portable.backend import TritonBackend

    compiled = []
    device = torch.device("cuda", torch.cuda.current_device())

    def step(rows: int, slots: int) -> None:
        TritonBackend().prefill(
            x=torch.randn(rows, 512, device=device),
            weight=torch.randn(512, 4, device=device),
            conv_state=torch.zeros(slots, 3, 512, device=device).transpose(1, 2),
            cu_seqlens=torch.tensor([0, rows], dtype=torch.int32, device=device),
            cache_indices=torch.tensor([1], dtype=torch.int32, device=device),
            has_initial_state=None,
            bias=None,
            activation="silu",
            num_accepted_tokens=None,
            out=torch.empty(rows, 512, device=device),
            workspace=None,
            pad_slot_id=-1,
        )

    step(16, 4)
    monkeypatch.setattr(triton.knobs.runtime, "jit_post_compile_hook", lambda **_: compiled.append(1))
    for rows, slots in ((1, 2), (17, 16), (4096, 1000)):
        step(rows, slots)
    assert not compiled
