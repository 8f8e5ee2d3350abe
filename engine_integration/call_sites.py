"""Owns the table of vLLM's causal conv1d call sites, and the search that finds them in an installed vLLM.

The table is what the README shows and what the coverage test holds against real wheels. No torch, no vLLM.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

__all__ = ["CALL_SITES", "SEARCHED", "CallSite", "find_call_sites", "markdown_table"]

# Folders of the package where layers and models that convolve live.
SEARCHED = ("model_executor", "models")


@dataclass(frozen=True, slots=True)
class CallSite:
    """One function called in one module of vLLM.

    Attributes:
        family: layers that run it, as an operator of models knows them.
        module: below `vllm`.
        function: its name where it is defined.
        versions: of the examined wheels (0.23, 0.26, 0.29, 0.32 CPU, 0.33), those that have it.
        kept: why vLLM's own runs; empty where ours does.
    """

    family: str
    module: str
    function: str
    versions: str
    kept: str = ""


def find_call_sites(vllm: Path) -> Iterator[tuple[str, str]]:
    """Every call of a causal conv1d function outside the modules that define them.

    Args:
        vllm: the package's folder.

    Yields:
        Module below `vllm`, and the function's name where it is defined.
    """
    found: dict[tuple[str, str], None] = {}
    for folder in SEARCHED:
        for path in sorted((vllm / folder).rglob("*.py")):
            text = path.read_text(encoding="utf-8")
            if "conv1d" not in text or path.name == "causal_conv1d.py":
                continue
            module = ".".join(path.relative_to(vllm).with_suffix("").parts)
            tree = ast.parse(text)
            names = _imported(tree)
            for node in ast.walk(tree):
                if isinstance(node, ast.Call):
                    name = _called(node, names)
                    if name is not None:
                        found[module, name] = None
    yield from found


def _imported(tree: ast.AST) -> dict[str, str]:
    """Local name to original name, for every `from ... import ... as ...` at any depth."""
    return {
        alias.asname or alias.name: alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }


def _called(node: ast.Call, imported: dict[str, str]) -> str | None:
    function = node.func
    if isinstance(function, ast.Name):
        name = imported.get(function.id, function.id)
        return name if _convolves(name) else None
    if isinstance(function, ast.Attribute):
        if isinstance(function.value, ast.Name) and function.value.id == "F" and function.attr == "conv1d":
            return "F.conv1d"
        return f"ops.{function.attr}" if _convolves(function.attr) else None
    return None


def _convolves(name: str) -> bool:
    """Whether the name is a convolution's, and not its block map's, its weights' or its warm-up's."""
    return "causal_conv1d" in name and not any(part in name for part in ("metadata", "weight_pack", "_warm_"))


def markdown_table() -> str:
    """The table for the README."""
    lines = ["| layers | module | function | vLLM | runs |", "|---|---|---|---|---|"]
    for site in CALL_SITES:
        runs = f"vLLM's own: {site.kept}" if site.kept else "ours"
        lines.append(f"| {site.family} | `{site.module}` | `{site.function}` | {site.versions} | {runs} |")
    return "\n".join(lines)


_ALL = "0.23 to 0.33"
_GPU_PAIR = ("causal_conv1d_fn", "causal_conv1d_update")
_LAYERS = "model_executor.layers.mamba"
_CPU_GDN = f"{_LAYERS}.ops.cpu.gdn_attention"

# Families that use the public pair by name, as (family, module, versions).
_PUBLIC = (
    ("Mamba1 (Mamba, Jamba, FalconMamba)", f"{_LAYERS}.mamba_mixer", _ALL),
    ("Mamba2 (Mamba2, GraniteMoeHybrid, FalconH1, NemotronH, Zamba2)", f"{_LAYERS}.mamba_mixer2", _ALL),
    ("GatedDeltaNet (Qwen3-Next, Qwen3.5)", f"{_LAYERS}.gdn.qwen_gdn_linear_attn", _ALL),
    ("GatedDeltaNet (Olmo hybrid)", f"{_LAYERS}.gdn.olmo_gdn_linear_attn", _ALL),
    ("KDA (Kimi Linear)", f"{_LAYERS}.gdn.kimi_gdn_linear_attn", _ALL),
    ("KDA (Kimi K3)", "models.kimi_k3.nvidia.kda", "0.29 to 0.33"),
    ("KDA (Kimi K3, AMD)", "models.kimi_k3.amd.kda", "0.29 to 0.33"),
    ("KDA (GLM-5 next)", "models.glm5next.common.kda", "0.32, 0.33"),
    ("short conv (LFM2)", f"{_LAYERS}.short_conv", _ALL),
    ("linear attention (Bailing MoE v3)", "model_executor.models.bailing_moe_v3", "0.29 to 0.33"),
    ("Mamba (PLaMo 2)", "model_executor.models.plamo2", "0.23, 0.26"),
)

_OTHERS = (
    CallSite("short conv on a CPU", f"{_LAYERS}.short_conv", "causal_conv1d_fn_cpu", "0.29 to 0.33"),
    CallSite("short conv on a CPU", f"{_LAYERS}.short_conv", "causal_conv1d_torch", "0.26"),
    CallSite("short conv on a CPU", f"{_LAYERS}.short_conv", "causal_conv1d_update_cpu", "0.29 to 0.33"),
    CallSite(
        "short conv on an Arm CPU",
        f"{_LAYERS}.short_conv",
        "causal_conv1d_update_torch",
        "0.26 to 0.33",
        "works on a gathered copy of the states",
    ),
    CallSite("GatedDeltaNet on a CPU", _CPU_GDN, "causal_conv1d_fn_cpu", "0.29 to 0.33"),
    CallSite("GatedDeltaNet on a CPU", _CPU_GDN, "causal_conv1d_torch", "0.23, 0.26"),
    CallSite("GatedDeltaNet on a CPU", _CPU_GDN, "causal_conv1d_update_cpu", "0.29 to 0.33"),
    CallSite("GatedDeltaNet on a CPU with AMX", _CPU_GDN, "_causal_conv1d_fwd_cpu", "0.32, 0.33"),
    CallSite("GatedDeltaNet on a CPU with AMX", _CPU_GDN, "_causal_conv1d_update_cpu", "0.32, 0.33"),
    CallSite(
        "GatedDeltaNet on a CPU",
        _CPU_GDN,
        "causal_conv1d_update_torch",
        "0.23 to 0.29",
        "works on a gathered copy of the states",
    ),
    CallSite(
        "GatedDeltaNet on a CPU with AMX",
        _CPU_GDN,
        "ops.causal_conv1d_fwd_cpu",
        _ALL,
        "takes packed weights; replaced one level up from 0.32 on",
    ),
    CallSite(
        "GatedDeltaNet on a CPU with AMX",
        _CPU_GDN,
        "ops.causal_conv1d_update_cpu",
        _ALL,
        "takes packed weights; replaced one level up from 0.32 on",
    ),
    CallSite(
        "GatedDeltaNet on a CPU, speculation",
        _CPU_GDN,
        "F.conv1d",
        "0.26 to 0.33",
        "written out inside a longer function",
    ),
    CallSite(
        "GatedDeltaNet on AMD",
        f"{_LAYERS}.gdn.qwen_gdn_linear_attn",
        "fused_reshape_causal_conv1d_update_single_token",
        _ALL,
        "one kernel with the reshape around it, from AITER",
    ),
    CallSite(
        "per-layer embeddings (Qwen4 experimental)",
        "models.qwen4_exp.nvidia.ple_layer",
        "F.conv1d",
        "0.29",
        "no state pool",
    ),
    CallSite(
        "per-layer embeddings (Qwen4 experimental, AMD)",
        "models.qwen4_exp.amd.ple_layer",
        "F.conv1d",
        "0.29",
        "no state pool",
    ),
    CallSite(
        "warm-up of GatedDeltaNet", "model_executor.warmup.qwen_triton_warmup", "causal_conv1d_fn", "0.26 to 0.33"
    ),
)

CALL_SITES: tuple[CallSite, ...] = (
    *(CallSite(family, module, name, versions) for family, module, versions in _PUBLIC for name in _GPU_PAIR),
    *_OTHERS,
)
