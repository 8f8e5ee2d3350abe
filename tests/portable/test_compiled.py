"""The Triton kernels compile for GPUs that are not here, as the backend would launch them; no size is compiled in."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from serving_conv.portable.backend import Launch, choose, prepare

pytest.importorskip("triton")

HOPPER = ("cuda", 90, 32)
OTHERS = (("cuda", 80, 32), ("cuda", 100, 32), ("hip", "gfx942", 64))
BF16, FP32 = torch.bfloat16, torch.float32

KINDS: dict[str, dict[str, Any]] = {
    "prefill": {},
    "prefill-positions": {"layout": "positions"},
    "prefill-strided": {"layout": "strided", "dtype": FP32, "width": 8, "channels": 999, "counts": True},
    "step": {"counts": True, "drafts": 3, "checkpoints": 2},
    "decode": {"kernel": "conv_update", "packed": False},
    "several-rows": {"kernel": "conv_update"},
    "speculative": {"kernel": "conv_update", "counts": True, "drafts": 3},
    "speculative-wide": {"kernel": "conv_update", "counts": True, "drafts": 3, "width": 8, "layout": "positions"},
}


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))


def launch_of(
    target: tuple[str, int | str, int] = HOPPER,
    *,
    kernel: str = "conv_prefill",
    dtype: torch.dtype = BF16,
    width: int = 4,
    channels: int = 8192,
    layout: str = "channels",
    packed: bool = True,
    counts: bool = False,
    drafts: int = 0,
    checkpoints: int = 0,
    rows: int = 100,
    sequences: int = 5,
) -> Launch:
    """The launch of a call on tensors without memory."""

    def empty(*shape: int, kind: torch.dtype = dtype) -> Tensor:
        return torch.empty(shape, dtype=kind, device="meta")

    slots, positions = 7, width - 1 + drafts
    if layout == "channels":
        state = empty(slots, positions, channels).transpose(1, 2)
    elif layout == "positions":
        state = empty(slots, channels, positions)
    else:
        state = empty(slots, channels, 2 * positions)[:, :, ::2]
    step: dict[str, Any] = {}
    if kernel == "conv_prefill":
        int32 = {"checkpoint_offsets": sequences + 1, "checkpoint_tokens": checkpoints, "checkpoint_slots": checkpoints}
        step = {name: empty(size, kind=torch.int32) if checkpoints else None for name, size in int32.items()}
        step["speculative"] = empty(sequences, kind=torch.bool) if drafts else None
    made = prepare(
        kernel,
        x=empty(rows, channels),
        weight=empty(channels, width),
        conv_state=state,
        cu_seqlens=empty(sequences + 1, kind=torch.int32) if packed else None,
        slots=empty(sequences, kind=torch.int32),
        has_initial_state=empty(sequences, kind=torch.bool),
        bias=empty(channels),
        activation="silu",
        num_accepted_tokens=empty(sequences, kind=torch.int32) if counts else None,
        out=empty(rows, channels),
        pad_slot_id=-1,
        **step,
        fault_flag=empty(1, kind=torch.int32),
        nvidia=target[0] == "cuda",
        dependent=target[0] == "cuda" and int(target[1]) >= 90,
    )
    assert made is not None
    return made


def compiled(launch: Launch, target: tuple[str, int | str, int] = HOPPER) -> Any:
    """What Triton makes of a launch for a target that need not be here."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from serving_conv.portable import kernels

    function = getattr(kernels, launch.kernel)
    types = {torch.bfloat16: "*bf16", torch.float32: "*fp32", torch.int32: "*i32", torch.uint8: "*u8"}
    tensors = iter(launch.tensors)
    signature: dict[str, str] = {}
    fixed: dict[tuple[int, ...], Any] = {}
    attributes: dict[tuple[int, ...], Any] = {}
    for i, parameter in enumerate(function.params):
        if parameter.is_constexpr:
            signature[parameter.name], fixed[(i,)] = "constexpr", launch.constants[parameter.name]
        elif parameter.annotation_type:
            signature[parameter.name] = parameter.annotation_type
        elif (tensor := next(tensors)) is None:
            signature[parameter.name], fixed[(i,)] = "constexpr", None
        else:
            signature[parameter.name] = types[tensor.dtype]
            if not parameter.do_not_specialize_on_alignment:
                attributes[(i,)] = [["tt.divisibility", 16]]
    source = ASTSource(fn=function, signature=signature, constexprs=fixed, attrs=attributes)
    return triton.compile(source, target=GPUTarget(*target), options=launch.options)


@pytest.mark.parametrize("kind", KINDS)
def test_compiles_with_fused_steps(kind: str) -> None:
    text = compiled(launch_of(**KINDS[kind])).asm["ptx"]
    assert text.count("fma.rn.f32") >= KINDS[kind].get("width", 4)


@pytest.mark.parametrize("target", OTHERS, ids=lambda target: str(target[1]))
@pytest.mark.parametrize("kind", ["prefill", "step", "decode", "speculative"])
def test_compiles_elsewhere(kind: str, target: tuple[str, int | str, int]) -> None:
    made = compiled(launch_of(target, **KINDS[kind]), target).asm
    assert "cubin" in made or "hsaco" in made


@pytest.mark.parametrize("kind", ["prefill", "step", "decode", "speculative"])
def test_rows_and_slots_move_in_whole_words(kind: str) -> None:
    text = compiled(launch_of(**KINDS[kind])).asm["ptx"]
    accesses = [line for line in text.splitlines() if " ld.global" in line or " st.global" in line]
    assert any(".v2.b32" in line for line in accesses)
    assert not [line for line in accesses if ".b16" in line]


def test_a_multiprocessor_holds_four_programs_of_prefill(tmp_path: Path) -> None:
    import triton

    cuobjdump = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    if not cuobjdump.exists():
        pytest.skip("Triton came without cuobjdump")
    launch = launch_of()
    (tmp_path / "prefill.cubin").write_bytes(compiled(launch).asm["cubin"])
    used = subprocess.run([cuobjdump, "-res-usage", tmp_path / "prefill.cubin"], capture_output=True, text=True).stdout
    fields = dict(field.split(":") for field in used.split() if field.count(":") == 1 and not field.endswith(":"))
    registers = -(-int(fields["REG"]) // 8) * 8
    assert registers * 32 * launch.options["num_warps"] * 4 <= 65536
    assert int(fields["STACK"]) == 0, "registers spill"


@pytest.mark.parametrize("kernel", ["conv_prefill", "conv_update"])
def test_no_size_is_specialised(kernel: str) -> None:
    from serving_conv.portable import kernels

    for parameter in getattr(kernels, kernel).params:
        if not parameter.is_constexpr and parameter.annotation_type:
            # The annotation keeps the type from following the value.
            assert parameter.do_not_specialize, parameter.name
        elif not parameter.is_constexpr and parameter.name not in ("x", "weight", "bias", "conv_state", "out"):
            assert parameter.do_not_specialize_on_alignment, parameter.name


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_compiled_follows_from_the_model(kind: str) -> None:
    few = launch_of(**KINDS[kind], rows=5, sequences=5)
    assert few.compiled_for() == launch_of(**KINDS[kind], rows=70000, sequences=60000).compiled_for()


@pytest.mark.parametrize("kernel", ["conv_prefill", "conv_update"])
@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("layout", [0, 1, 2])
@pytest.mark.parametrize("width", range(2, 9))
@pytest.mark.parametrize("element_bytes", [2, 4])
def test_choices_are_what_kernels_take(kernel: str, packed: bool, layout: int, width: int, element_bytes: int) -> None:
    for most_tokens in (1, 2, 4, 100):
        choice = choose(
            kernel,
            width=width,
            element_bytes=element_bytes,
            layout=layout,
            packed=packed,
            most_tokens=most_tokens,
        )
        for number in (choice.each, choice.warps):
            assert number > 0 and number & (number - 1) == 0
        if kernel == "conv_prefill":
            assert choice.rows % choice.group == 0
            assert choice.rows & (choice.rows - 1) == 0
            assert width - 1 <= choice.rows <= 32, "sets of rows are bits; only the first program lacks rows before"
        else:
            assert choice.ahead >= 1 if packed else choice.sequences >= 1


@pytest.mark.gpu
def test_changed_sizes_compile_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    import triton

    from serving_conv.portable.backend import TritonBackend

    made = []
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
    monkeypatch.setattr(triton.knobs.runtime, "jit_post_compile_hook", lambda **_: made.append(1))
    for rows, slots in ((1, 2), (17, 16), (4096, 1000)):
        step(rows, slots)
    assert not made
