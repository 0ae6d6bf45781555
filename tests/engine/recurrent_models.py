"""Configurations of tiny models with recurrent layers, one for each family in transformers."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

import pytest
import torch
from torch import nn

SIZES: Final[dict[str, Any]] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.3,
    "max_position_embeddings": 4096,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}
_TURNS = ["linear_attention", "full_attention"] * 2
_DELTA: Final[dict[str, Any]] = {
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 4,
    "layer_types": _TURNS,
}
_EXPERTS: Final[dict[str, Any]] = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
}
_MAMBA2: Final[dict[str, Any]] = {
    "mamba_n_heads": 8,
    "mamba_d_head": 8,
    "mamba_d_state": 8,
    "mamba_n_groups": 1,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_chunk_size": 8,
}
_LATENT: Final[dict[str, Any]] = {
    "head_dim": 8,
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
}
_CONV: Final[dict[str, Any]] = {"layer_types": ["conv", "full_attention"] * 2, "conv_L_cache": 3}

EACH_KIND: Final = (
    "qwen3_next",
    "granitemoehybrid",
    "lfm2",
    "jamba",
    "mamba2",
    "rwkv",
    "kimi_linear",
    "recurrent_gemma",
)
"""Families that together have each kind of layer."""
FAMILIES: Final[dict[str, dict[str, Any]]] = {
    "qwen3_next": {"head_dim": 8, **_DELTA, **_EXPERTS},
    "qwen3_5_text": {"head_dim": 8, **_DELTA},
    "qwen3_5_moe_text": {"head_dim": 8, **_DELTA, **_EXPERTS},
    "olmo_hybrid": _DELTA,
    "kimi_linear": {
        **_LATENT,
        "linear_attn_config": {
            "full_attn_layers": [2, 4],
            "kda_layers": [1, 3],
            "head_dim": 8,
            "num_heads": 4,
            "short_conv_kernel_size": 4,
        },
        "num_experts": 4,
        "moe_intermediate_size": 16,
        "num_experts_per_token": 2,
    },
    "bailing_hybrid": {
        **_LATENT,
        "layer_group_size": 2,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "n_group": 2,
        "topk_group": 1,
        "moe_intermediate_size": 16,
    },
    "lfm2": _CONV,
    "lfm2_moe": {
        **_CONV,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "num_dense_layers": 1,
    },
    "lfm3": _CONV,
    "granitemoehybrid": {
        **_MAMBA2,
        "layer_types": ["mamba", "attention"] * 2,
        "num_local_experts": 0,
        "shared_intermediate_size": 48,
    },
    "bamba": {**_MAMBA2, "attn_layer_indices": [1, 3]},
    "nemotron_h": {
        "layers_block_type": ["mamba", "attention", "mlp", "mamba"],
        "mamba_num_heads": 8,
        "mamba_head_dim": 8,
        "ssm_state_size": 8,
        "n_groups": 1,
        "conv_kernel": 4,
        "chunk_size": 8,
        "head_dim": 8,
        "expand": 2,
    },
    "falcon_h1": {**_MAMBA2, "head_dim": 8, "mamba_d_ssm": 64},
    "zamba2": {
        "mamba_d_state": 8,
        "mamba_d_conv": 4,
        "mamba_expand": 2,
        "mamba_ngroups": 1,
        "n_mamba_heads": 8,
        "chunk_size": 8,
        "attention_hidden_size": 64,
        "attention_head_dim": 16,
        "num_mem_blocks": 1,
        "layers_block_type": ["mamba", "hybrid"] * 2,
        "num_key_value_heads": 4,
        "adapter_rank": 4,
        "use_mem_rope": True,
    },
    "zamba": {
        "mamba_d_state": 8,
        "mamba_d_conv": 4,
        "mamba_expand": 2,
        "n_mamba_heads": 2,
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "num_key_value_heads": 4,
        "attention_hidden_size": 64,
        "attention_head_dim": 16,
        "num_hidden_layers": 6,
    },
    "jamba": {
        "mamba_d_state": 8,
        "mamba_d_conv": 4,
        "mamba_expand": 2,
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "num_experts": 1,
    },
    "mamba": {"state_size": 8},
    "falcon_mamba": {"state_size": 8},
    "mamba2": {"state_size": 8, "num_heads": 8, "head_dim": 8, "n_groups": 1, "chunk_size": 8, "expand": 2},
    "recurrent_gemma": {"lru_width": 32, "attention_window_size": 16, "sliding_window": 16, "head_dim": 8},
    "rwkv": {"attention_hidden_size": 32, "context_length": 4096},
    "minimax": {
        "head_dim": 8,
        "layer_types": _TURNS,
        "num_local_experts": 2,
        "num_experts_per_tok": 1,
        "block_size": 8,
    },
    "zaya": {"head_dim": 8},
}
ONE_BY_ONE: Final = frozenset({"recurrent_gemma"})
"""Families whose recurrent layers lose their state in chunks of several tokens."""
WITHOUT_ATTENTION: Final = frozenset({"mamba", "falcon_mamba", "mamba2", "rwkv"})


def sampled(families: Iterable[str] = FAMILIES) -> list[Any]:
    """Return parameters for one family per kind of layer; the others run only with `storm`."""
    return [family if family in EACH_KIND else pytest.param(family, marks=pytest.mark.storm) for family in families]


def recurrent_config(family: str, **changes: Any) -> Any:
    """Return the configuration of a tiny model."""
    from transformers import AutoConfig

    return AutoConfig.for_model(family, **(SIZES | FAMILIES[family] | changes))


def recurrent_model(family: str, dtype: torch.dtype = torch.float32, **changes: Any) -> nn.Module:
    """Return a tiny transformers model with random weights."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    auto: Any = AutoModelForCausalLM
    model: nn.Module = auto.from_config(recurrent_config(family, **changes), dtype=dtype, attn_implementation="eager")
    return model.requires_grad_(False).eval()
