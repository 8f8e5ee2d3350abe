"""Makes small hybrid models with random weights, for `serving-conv run` and the engine tests: a second and 1 MB each.

The weights are large enough that every token depends on the convolution. Needs transformers, which vLLM brings.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

__all__ = ["MODELS", "VOCABULARY", "make_model"]

VOCABULARY = 256
_SEED = 20
_MAMBA = {
    "mamba_n_heads": 8,
    "mamba_d_head": 32,
    "mamba_n_groups": 1,
    "mamba_d_state": 16,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_chunk_size": 16,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": False,
}


def _granite(transformers: Any, ids: dict[str, int]) -> Any:
    return transformers.GraniteMoeHybridConfig(
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=3,
        layer_types=["mamba", "attention", "mamba"],
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=0,
        num_experts_per_tok=0,
        shared_intermediate_size=256,
        **_MAMBA,
        **ids,
    )


def _falcon_h1(transformers: Any, ids: dict[str, int]) -> Any:
    return transformers.FalconH1Config(
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        mamba_d_ssm=256,
        **_MAMBA,
        **ids,
    )


def _mamba2(transformers: Any, ids: dict[str, int]) -> Any:
    return transformers.Mamba2Config(
        hidden_size=128,
        num_hidden_layers=3,
        num_heads=8,
        head_dim=32,
        n_groups=1,
        state_size=16,
        conv_kernel=4,
        expand=2,
        chunk_size=16,
        tie_word_embeddings=False,
        **ids,
    )


def _lfm2(transformers: Any, ids: dict[str, int]) -> Any:
    return transformers.Lfm2Config(
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=3,
        layer_types=["conv", "full_attention", "conv"],
        num_attention_heads=4,
        num_key_value_heads=2,
        conv_L_cache=3,
        conv_bias=False,
        # The next five are read by vLLM and not set by transformers.
        conv_dim=128,
        block_dim=128,
        block_ff_dim=256,
        block_multiple_of=64,
        block_ffn_dim_multiplier=1.0,
        block_auto_adjust_ff_dim=False,
        block_norm_eps=1e-5,
        max_position_embeddings=2048,
        tie_word_embeddings=True,  # vLLM ties them whatever the configuration says
        **ids,
    )


def _qwen3_next(transformers: Any, ids: dict[str, int]) -> Any:
    return transformers.Qwen3NextConfig(
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=4,
        layer_types=["linear_attention"] * 3 + ["full_attention"],
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=64,  # vLLM's CPU build refuses 32
        linear_value_head_dim=64,
        linear_conv_kernel_dim=4,
        num_experts=4,
        num_experts_per_tok=2,
        decoder_sparse_step=1,
        moe_intermediate_size=64,
        shared_expert_intermediate_size=64,
        mlp_only_layers=[],
        max_position_embeddings=2048,
        tie_word_embeddings=False,
        **ids,
    )


MODELS: dict[str, Callable[[Any, dict[str, int]], Any]] = {
    "granite": _granite,
    "falcon-h1": _falcon_h1,
    "mamba2": _mamba2,
    "lfm2": _lfm2,
    "qwen3-next": _qwen3_next,
}


def make_model(name: str, folder: Path, *, mixing: float = 1.0) -> Path:
    """Write a model's configuration, weights and tokenizer; a folder that holds them already is left alone.

    Args:
        name: one of `MODELS`.
        folder: where to write.
        mixing: scale of what each layer adds; small values make the next token depend on the last one most, so that
            sequences fall into cycles and n-gram drafts are accepted.

    Returns:
        The folder.
    """
    if (folder / "tokenizer.json").exists():  # written last
        return folder
    import transformers

    transformers.utils.logging.disable_progress_bar()
    ids = {"vocab_size": VOCABULARY, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    torch.manual_seed(_SEED)
    model = transformers.AutoModelForCausalLM.from_config(MODELS[name](transformers, ids), dtype=torch.float32)
    with torch.no_grad():
        for key, weight in model.named_parameters():
            if "conv" in key:
                weight.normal_(0, 0.5 if weight.dim() == 3 else 0.2)
            elif weight.dim() >= 2 and "A_log" not in key:
                # Large embeddings, so that the most likely token depends on all that came before.
                scale = mixing if "out_proj" in key or "o_proj" in key or "output_linear" in key else 1.0
                weight.normal_(0, 1.0 if "embed" in key else scale * 1.5 / weight.shape[-1] ** 0.5)
    model.to(torch.bfloat16).save_pretrained(folder)
    _write_tokenizer(folder)
    return folder


def _write_tokenizer(folder: Path) -> None:
    """A word for each token: `t3` to `t255`, separated by spaces."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = ["<pad>", "<s>", "</s>", *(f"t{number}" for number in range(3, VOCABULARY))]
    tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="<pad>", unk_token="<pad>"
    ).save_pretrained(folder)
