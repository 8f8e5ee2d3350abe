"""Models for the engine benchmark: real widths, few layers, weights drawn from a seed by name."""

from __future__ import annotations

import json
import math
import zlib
from pathlib import Path
from typing import Any

__all__ = ["MODELS", "draw_weights", "write_config"]

_COMMON: dict[str, Any] = {
    "vocab_size": 32768,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "torch_dtype": "bfloat16",
    "tie_word_embeddings": False,
}
MODELS: dict[str, dict[str, Any]] = {
    # The Mamba-2 block at hidden size 4096: 8192 + 2 * 128 = 8448 channels in the convolution.
    "mamba2": {
        "architectures": ["Mamba2ForCausalLM"],
        "model_type": "mamba2",
        "hidden_size": 4096,
        "num_hidden_layers": 8,
        "num_heads": 128,
        "head_dim": 64,
        "n_groups": 1,
        "state_size": 128,
        "conv_kernel": 4,
        "expand": 2,
        "chunk_size": 256,
        "use_conv_bias": True,
        "use_bias": False,
        "hidden_act": "silu",
        "layer_norm_epsilon": 1e-5,
        "rms_norm": True,
        "residual_in_fp32": True,
        **_COMMON,
    },
    # Qwen3-Next-80B-A3B: 2 * 16 * 128 + 32 * 128 = 8192 channels; 16 experts instead of 512.
    "qwen3next": {
        "architectures": ["Qwen3NextForCausalLM"],
        "model_type": "qwen3_next",
        "hidden_size": 2048,
        "intermediate_size": 5120,
        "num_hidden_layers": 8,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000000,
        "partial_rotary_factor": 0.25,
        "max_position_embeddings": 32768,
        "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 2,
        "full_attention_interval": 4,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "num_experts": 16,
        "num_experts_per_tok": 4,
        "decoder_sparse_step": 1,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
        "norm_topk_prob": True,
        "mlp_only_layers": [],
        "num_nextn_predict_layers": 1,
        **_COMMON,
    },
}
_LAST_OF_BLOCK = ("out_proj.weight", "o_proj.weight", "down_proj.weight", "w2_weight")

# For speculation: so few words that drafts are accepted now and then.
for _name, _kinds in (("mamba2", {}), ("qwen3next", {"layer_types": ["linear_attention"] * 3 + ["full_attention"]})):
    MODELS[f"{_name}-words64"] = {**MODELS[_name], "vocab_size": 64, "num_hidden_layers": 4, **_kinds}


def write_config(name: str, folder: Path) -> Path:
    """Write a model's `config.json` into a folder of its own, and return that."""
    model = folder / name
    model.mkdir(parents=True, exist_ok=True)
    (model / "config.json").write_text(json.dumps(MODELS[name], indent=1), encoding="utf-8")
    return model


def draw_weights(model: Any, block_scale: float = 1.0) -> None:
    """Weights of a sensible size, the same for equal names, so that tokens depend on every layer.

    vLLM's own dummy weights are so small that no token would depend on the convolution.

    Args:
        model: a loaded vLLM model.
        block_scale: of what each block adds; below 1 the next token is mostly a map of the last one, so that
            sequences fall into cycles and drafts are accepted.
    """
    import torch

    with torch.no_grad():
        for name, weight in model.named_parameters():
            if not weight.is_floating_point():
                continue
            source = torch.Generator(device=weight.device)
            source.manual_seed(zlib.crc32(name.encode()))
            last = name.rsplit(".", 1)[-1]
            if last == "A":
                weight.data.uniform_(-16, -1, generator=source)
            elif last == "A_log":
                weight.data.uniform_(0, math.log(16), generator=source)
            elif last == "D":
                weight.data.fill_(1)
            elif last == "dt_bias":
                weight.data.uniform_(0.001, 0.1, generator=source)
                weight.data.copy_(torch.log(torch.expm1(weight.data.float())))
            elif "norm" in name:
                weight.data.normal_(1, 0.1, generator=source)
            elif "conv1d" in name:
                weight.data.normal_(0, 0.2 if last == "bias" else 0.5, generator=source)
            elif last == "bias":
                weight.data.normal_(0, 0.1, generator=source)
            elif name.endswith("fc.weight") and block_scale < 1:  # a draft model's: pass the token's embedding on
                weight.data.zero_()
                weight.data[:, : weight.shape[0]].fill_diagonal_(1)
            else:
                scale = block_scale if name.endswith(_LAST_OF_BLOCK) else 1.0
                scale *= 1.0 if "embed" in name else weight.shape[-1] ** -0.5
                weight.data.normal_(0, scale, generator=source)
