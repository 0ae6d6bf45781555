"""Shapes of `bench families`: a model of each family of KV, of 40 to 115 million parameters, as its config says it.

Small enough that the whole table takes minutes, and so large that a step is products of weights and not Python alone.
Windows and chunks are 256 tokens, so that contexts of 512 go beyond them.
"""

from __future__ import annotations

from typing import Any, Final

_SIZES: Final[dict[str, Any]] = {
    "vocab_size": 16384,
    "hidden_size": 768,
    "intermediate_size": 2048,
    "num_hidden_layers": 8,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "max_position_embeddings": 8192,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": True,
}
_WINDOW: Final = 256
_FULL, _SLIDING, _CHUNKED, _LINEAR = "full_attention", "sliding_attention", "chunked_attention", "linear_attention"
_DELTA: Final[dict[str, Any]] = {
    "head_dim": 64,
    "linear_num_value_heads": 12,
    "linear_num_key_heads": 6,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "linear_conv_kernel_dim": 4,
    "layer_types": [_LINEAR, _LINEAR, _LINEAR, _FULL] * 2,
}
_MAMBA2: Final[dict[str, Any]] = {"mamba_n_heads": 24, "mamba_d_head": 64, "mamba_d_state": 64, "mamba_expand": 2}

FAMILIES: Final[dict[str, dict[str, Any]]] = {
    "llama": _SIZES | {"model_type": "llama", "head_dim": 64},
    "qwen3-moe": _SIZES
    | {
        "model_type": "qwen3_moe",
        "head_dim": 64,
        "num_experts": 16,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 256,
    },
    "gemma-3": _SIZES
    | {
        "model_type": "gemma3_text",
        "head_dim": 64,
        "query_pre_attn_scalar": 64,
        "sliding_window": _WINDOW,
        "layer_types": [_SLIDING] * 5 + [_FULL] + [_SLIDING] * 2,
    },
    "gpt-oss": _SIZES
    | {
        "model_type": "gpt_oss",
        "head_dim": 64,
        "intermediate_size": 512,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "sliding_window": _WINDOW,
        "layer_types": [_SLIDING, _FULL] * 4,
        "rope_parameters": {"rope_type": "default", "rope_theta": 150000.0},
        "tie_word_embeddings": False,
    },
    "llama-4": _SIZES
    | {
        "model_type": "llama4_text",
        "head_dim": 64,
        "intermediate_size": 768,
        "intermediate_size_mlp": 2048,
        "num_local_experts": 4,
        "num_experts_per_tok": 1,
        "interleave_moe_layer_step": 2,
        "attention_chunk_size": _WINDOW,
        "layer_types": [_CHUNKED, _CHUNKED, _CHUNKED, _FULL] * 2,
    },
    "deepseek-v3": _SIZES
    | {
        "model_type": "deepseek_v3",
        "num_key_value_heads": 12,
        "q_lora_rank": 384,
        "kv_lora_rank": 256,
        "qk_nope_head_dim": 64,
        "qk_rope_head_dim": 32,
        "v_head_dim": 64,
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 384,
        "n_group": 2,
        "topk_group": 1,
        "first_k_dense_replace": 1,
    },
    "gemma-3n": _SIZES
    | {
        "model_type": "gemma3n_text",
        "head_dim": 64,
        "num_hidden_layers": 10,
        "layer_types": ([_SLIDING] * 4 + [_FULL]) * 2,
        "num_kv_shared_layers": 4,
        "hidden_size_per_layer_input": 128,
        "vocab_size_per_layer_input": 16384,
        "laurel_rank": 32,
        "sliding_window": _WINDOW,
        "activation_sparsity_pattern": [0.95] * 2 + [0.0] * 8,
    },
    "qwen3.5": _SIZES | _DELTA | {"model_type": "qwen3_5_text"},
    "qwen3-next": _SIZES
    | _DELTA
    | {
        "model_type": "qwen3_next",
        "num_experts": 16,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 256,
        "shared_expert_intermediate_size": 256,
    },
    "granite-4": _SIZES
    | _MAMBA2
    | {
        "model_type": "granitemoehybrid",
        "mamba_n_groups": 1,
        "layer_types": ["mamba", "mamba", "mamba", "attention"] * 2,
        "num_local_experts": 0,
        "shared_intermediate_size": 2048,
    },
    "nemotron-h": _SIZES
    | {
        "model_type": "nemotron_h",
        "layers_block_type": ["mamba", "mlp", "mamba", "mlp", "attention", "mlp", "mamba", "mlp"],
        "mamba_num_heads": 24,
        "mamba_head_dim": 64,
        "ssm_state_size": 64,
        "n_groups": 2,
        "head_dim": 64,
        "expand": 2,
    },
    "mamba-2": _SIZES
    | {"model_type": "mamba2", "num_heads": 24, "head_dim": 64, "state_size": 64, "n_groups": 1, "expand": 2},
    "jamba": _SIZES | {"model_type": "jamba", "attn_layer_period": 4, "attn_layer_offset": 3, "num_experts": 1},
    "lfm2": _SIZES | {"model_type": "lfm2", "layer_types": ["conv", "conv", _FULL, "conv"] * 2},
    "rwkv": _SIZES | {"model_type": "rwkv", "attention_hidden_size": 768, "context_length": 8192},
}
"""By the name of a model that is shaped so."""
