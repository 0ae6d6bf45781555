"""Tiny configurations of every causal and multimodal model type of the installed transformers, made by one recipe.

Each part of a type's default configuration is made again with small sizes, as far as it has them; what depends on
sizes (layer types, rotary tables) is computed by its own class. CHANGES is for types whose sizes have other names.
"""

from __future__ import annotations

from typing import Any, Final

from tests.engine.recurrent_models import FAMILIES
from tests.engine.recurrent_models import SIZES as RECURRENT_SIZES

VOCABULARY: Final = 320
SIZES: Final[dict[str, Any]] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "initializer_range": 0.3,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "sliding_window": 13,
    "sliding_window_size": 13,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "moe_num_experts": 4,
    "num_experts_per_tok": 2,
    "num_experts_per_token": 2,
    "moe_k": 2,
    "moe_topk": 2,
    "zero_expert_num": 2,
    "n_group": 1,
    "num_expert_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "shared_experts_intermediate_size": 32,
    "moe_shared_expert_intermediate_size": 32,
    "shared_intermediate_size": 48,
    "expert_ffn_hidden_size": 32,
    "share_expert_dim": 32,
    "dense_intermediate_size": 96,
    "intermediate_size_mlp": 96,
    "moe_hidden_size": 32,
    "moe_layer_end_index": 3,
    "q_lora_rank": 16,
    "kv_lora_rank": 32,
    "o_lora_rank": 16,
    "o_groups": 2,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "query_pre_attn_scalar": 16,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": VOCABULARY,
    "num_kv_shared_layers": 0,
    "laurel_rank": 8,
    "global_head_dim": 32,
    "swa_head_dim": 16,
    "swa_num_attention_heads": 4,
    "swa_num_key_value_heads": 2,
    "num_sliding_attention_heads": 4,
    "num_kv_heads": 2,
    "kv_channels": 16,
    "rotary_dim": 8,
    "n_ctx": 512,
    "n_positions": 512,
    "max_seq_len": 512,
    "unpadded_vocab_size": VOCABULARY,
    "embedding_size": 64,
    "word_embed_proj_dim": 64,
    "input_embedding_size": 64,
    "output_embedding_size": 64,
    "d_model": 64,
    "d_kv": 16,
    "d_ff": 96,
    "d_inner": 96,
    "dff": 96,
    "dim_ff": 96,
    "ffn_dim": 96,
    "ffn_hidden_size": 96,
    "ffn_intermediate_size": 96,
    "decoder_layers": 2,
    "encoder_layers": 2,
    "decoder_ffn_dim": 96,
    "encoder_ffn_dim": 96,
    "decoder_attention_heads": 4,
    "encoder_attention_heads": 4,
    "num_layers": 2,
    "n_embd": 64,
    "n_inner": 96,
    "n_head": 4,
    "n_heads": 4,
    "n_layer": 2,
    "n_layers": 2,
    "num_heads": 4,
    "depth": 2,
    "layers": 2,
    "attention_heads": 4,
    "embed_dim": 64,
    "emb_dim": 64,
    "mlp_dim": 96,
    "dim_head": 16,
    "out_hidden_size": 64,
    "projection_dim": 64,
    "image_size": 28,
    "patch_size": 14,
    "num_position_embeddings": 16,
    "fullatt_block_indexes": (0,),
    "deepstack_visual_indexes": (0,),
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_head_dim": 16,
    "linear_num_heads": 4,
    "index_head_dim": 16,
    "index_n_heads": 16,
    "index_topk": 16,
    "d_rel": 8,
    "hc_lowrank": 8,
    "ngram_vocab_size_base": 100,
    "ple_embed_dim": 32,
    "split_ngram_parts": 4,
    "mm_tokens_per_image": 4,
    "decoder_vocab_size": VOCABULARY,
}
"""Small sizes by their name in a configuration."""
IS_DECODER: Final = frozenset(
    {
        "bert",
        "bert-generation",
        "big_bird",
        "camembert",
        "data2vec-text",
        "electra",
        "ernie",
        "megatron-bert",
        "rembert",
    }
    | {"roberta", "roberta-prelayernorm", "roc_bert", "roformer", "xlm-roberta", "xlm-roberta-xl", "xmod"}
)
"""Encoders that transformers can also build as decoders; tried as decoders."""
MAY_BE_NONE: Final = frozenset(
    {"head_dim", "num_key_value_heads", "n_group", "topk_group", "num_experts_per_tok", "n_routed_experts"}
    | {"moe_intermediate_size", "num_experts", "num_local_experts", "q_lora_rank", "n_head_kv"}
)
"""Required sizes without a default in some types."""


def _rope(*sections: int, **more: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [*sections]} | more}


_GEMMA4: Final[dict[str, Any]] = {"num_hidden_layers": 6, "num_experts": None, "moe_intermediate_size": None}
_BOTH: Final = ("full_attention", "sliding_attention")
_SPARSE: Final[dict[str, Any]] = {"mlp_layer_types": ["dense", "sparse", "sparse", "sparse"]}
_INKLING: Final[dict[str, Any]] = {
    "layer_types": ["hybrid_sliding", "hybrid"] * 2,
    "rel_extent": 20,
    "log_scaling_n_floor": 9,
}
CHANGES: Final[dict[str, dict[str, Any]]] = {
    "chameleon": {"vocabulary_map": {"<image>": 5} | {f"IMGIMG{letter}Z": 6 + i for i, letter in enumerate("ABC")}},
    "cohere_compass_text": {
        "layer_types": list(_BOTH) * 2,
        "rope_parameters": {kind: _rope(2, 3, 3)["rope_parameters"] for kind in _BOTH},
    },
    "dbrx": {"attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 1e4}},
    "deepseek_ocr2_text": _SPARSE,
    "dots1": {"n_shared_experts": 1},
    "dots3_note_text": {
        "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 4,
        "swa_q_lora_rank": 16,
        "swa_kv_lora_rank": 48,  # sizes that differ from full-attention layers, as in transformers' defaults
        "swa_head_dim": 28,
        "swa_qk_nope_head_dim": 20,
        "swa_v_head_dim": 10,
    },
    "dots3_note_audio_encoder": {"adapter_input_size": 64, "adapter_out_dim": 64},
    "dots3_note_vision_encoder": {
        "num_hidden_layers": 42,  # each has its own number of experts
        "adapter_in_dim": 64,
        "adapter_out_dim": 64,
    },
    "emu3": {"vocabulary_map": {"<image>": 5, "<|extra_200|>": 6} | {f"<|visual token {i:06}|>": 7 for i in range(3)}},
    "ernie4_5_vl_moe_text": _rope(3, 3, 2),
    "gemma3_text": {"num_hidden_layers": 6},
    "gemma3n_text": {"num_hidden_layers": 5},
    "gemma4_assistant": {
        "text_config": {
            "model_type": "gemma4_text",
            "hidden_size": 64,
            "num_hidden_layers": 6,
            "hidden_size_per_layer_input": 0,
            "vocab_size_per_layer_input": 0,
        }
    },
    "gemma4_text": _GEMMA4,
    "gemma4_unified_text": _GEMMA4,
    "git": {"initializer_range": 0.1},
    "glm4v_text": _rope(2, 3, 3, partial_rotary_factor=1.0),
    "glm4v_moe_text": _rope(2, 3, 3, partial_rotary_factor=1.0),
    "glm_ocr_text": _rope(2, 3, 3),
    "glm5_next_text": {"qk_rope_head_dim": 0, "index_kpool": 4},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "window_size": 13},
    "granitemoe": {"initializer_range": 0.1},
    "granite4_vision": {"deepstack_layer_map": [[0, 0]], "downsample_rate": "1/2"},
    "granite_docling_vision": {"deepstack_visual_indexes": [0]},
    "fun_asr_nano": {"adaptor_config": {"hidden_size": 64, "intermediate_size": 16, "num_attention_heads": 4}},
    "hrm_text": {"initializer_range": 0.1},
    "hunyuan_vl_text": _rope(2, 2, 2, 2),
    "inkling_text": _INKLING | {"mlp_layer_types": ["dense", "sparse", "sparse", "sparse"]},
    "inkling2_text": _INKLING,
    "inkling2_vision": {"text_hidden_size": 64},
    "mllama_text_model": {"cross_attention_layers": [1]},
    "moshi": {"sliding_window": 512},  # as long as the context, like in the released model
    "molmo2_adapter": {"vision_feature_layer": [3, 1]},
    "paddleocr_vl_text": _rope(2, 3, 3),
    "qwen2_5_omni_text": _rope(2, 3, 3),
    "qwen2_5_vl_text": _rope(2, 3, 3),
    "qwen2_vl_text": _rope(2, 3, 3),
    "qwen4_exp_text": {
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 16,
        "indexer_budget": 16,
        "indexer_compress_ratio": 4,
    },
    "nemotron_h": {"initializer_range": 0.1},
    "radio": {"video_temporal_patch_size": 2},
    "reformer": {"is_decoder": True, "axial_pos_embds_dim": (32, 32)},
    "step3p5": {"sliding_window": 13, "layer_types": list(_BOTH) * 2},
    "recurrent_gemma": {"initializer_range": 0.1},
    "zamba2": {"initializer_range": 0.1},
    "xmod": {"default_language": "en_XX"},
}
"""Changes by the type of a part."""
AS_THEY_ARE: Final = frozenset({"nemotron3_5_transcribe_audio", "nemotron3_5_transcribe_word_timestamp"})
"""Types whose parts need sizes that fit each other."""


def model_types() -> list[str]:
    """Return transformers' causal language models, and multimodal models that write text."""
    from transformers.models.auto import modeling_auto

    kinds = ("CAUSAL_LM", "IMAGE_TEXT_TO_TEXT", "MULTIMODAL_LM")
    return sorted({name for kind in kinds for name in getattr(modeling_auto, f"MODEL_FOR_{kind}_MAPPING_NAMES")})


def tiny_config(model_type: str) -> Any:
    """Return the configuration of a model that is quick to make."""
    from transformers import AutoConfig

    config: Any = AutoConfig.for_model(model_type, **small_options(default_config(model_type)))
    return config


def default_config(model_type: str) -> Any:
    """Return transformers' default configuration."""
    from transformers import AutoConfig

    needed = CHANGES.get(model_type, {})
    try:
        return AutoConfig.for_model(model_type)
    except Exception:  # values that cannot be derived
        return AutoConfig.for_model(model_type, **needed)


def small_options(config: Any) -> dict[str, Any]:
    """Return keyword arguments for the class of `config`."""
    from transformers import PretrainedConfig

    kind = config.model_type
    if kind in FAMILIES:
        return RECURRENT_SIZES | FAMILIES[kind] | CHANGES.get(kind, {})
    told = {name for name in vars(config) if not name.startswith("_")}
    if kind in AS_THEY_ARE:
        return {}
    own = {name: _own(config, name) for name in told}
    other_names = {name: other for name, other in (config.attribute_map or {}).items() if name in SIZES}
    options: dict[str, Any] = {other: SIZES[name] for name, other in other_names.items() if other in told}
    options |= {name: SIZES[name] for name in told if name in SIZES and is_size(name, own[name])}
    for name, part in own.items():
        if isinstance(part, PretrainedConfig):
            options[name] = {"model_type": part.model_type} | small_options(part)
    rope = own.get("rope_parameters")
    if isinstance(rope, dict) and "mrope_section" in rope:
        options["rope_parameters"] = rope | {"mrope_section": [2, 3, 3]}
    if own.get("kv_lora_rank") is not None:
        options |= {"head_dim": 8, "num_key_value_heads": 4}
    if kind in IS_DECODER:
        options["is_decoder"] = True
    return {name: value for name, value in (options | CHANGES.get(kind, {})).items() if value is not None}


def is_size(name: str, value: Any) -> bool:
    """Return whether a configuration value may be replaced by a small one; missing values stay missing."""
    return name in MAY_BE_NONE if value is None else isinstance(value, list | tuple) == isinstance(SIZES[name], tuple)


def _own(config: Any, name: str) -> Any:
    """Return an attribute that is equal in all layers; configurations with different layers raise."""
    try:
        return getattr(config, name)
    except Exception:
        return getattr(config.per_layer_config[0], name, None)
