"""Reads the configuration of Gemma 4 from the header of a GGUF file, in which lists give the sizes that differ between
layers.

transformers' loader would use the values of the largest layers for all layers.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

from kvscope_engine.model.loader.gguf.gguf_header import GgufHeader, Scalar
from kvscope_engine.model.loader.gguf.rope import FACTORS, tensor_values
from kvscope_telemetry.errors import BadInput

GEMMA4: Final = "gemma4"
FULL: Final = "full_attention"
SLIDING: Final = "sliding_attention"
_ENDS: Final = (1, 50, 106)
"""Ids of the tokens that end an answer, a turn, and a tool call. A file names only one of them."""
_UNROTATED: Final = 1e29
"""Minimum divisor with which a rotary frequency counts as not rotated. A tensor of the file contains a divisor
for each frequency.
"""
_CONFIG_NAMES: Final = {
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "attention.head_count": "num_attention_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attention.key_length": "global_head_dim",
    "attention.key_length_swa": "head_dim",
    "attention.sliding_window": "sliding_window",
}
"""Configuration attribute by GGUF key, for the keys that every file has."""
_OPTIONAL_CONFIG_NAMES: Final = {
    "attention.shared_kv_layers": "num_kv_shared_layers",
    "embedding_length_per_layer_input": "hidden_size_per_layer_input",
    "final_logit_softcapping": "final_logit_softcapping",
    "expert_count": "num_experts",
    "expert_used_count": "top_k_experts",
    "expert_feed_forward_length": "moe_intermediate_size",
}
_DUPLICATE_KEYS: Final = {
    "attention.value_length": "attention.key_length",
    "attention.value_length_swa": "attention.key_length_swa",
    "rope.dimension_count": "attention.key_length",
    "rope.dimension_count_swa": "attention.key_length_swa",
}
"""GGUF keys that repeat the value of another key, with that other key."""


def gemma4_config(
    gguf: Path, header: GgufHeader, metadata: dict[str, Scalar], lists: dict[str, tuple[Scalar, ...]]
) -> Any:
    """Return a transformers configuration. Keys that are read are removed from `metadata`, so that the caller can check
    the remaining ones.

    Raises BadInput, naming the key, if one is missing or not supported for this architecture.
    """
    from transformers import AutoConfig

    for key, other in _DUPLICATE_KEYS.items():
        if metadata.pop(key, None) not in (None, metadata.get(other)):
            raise _refusal(key)
    num_layers = int(_pop(metadata, "block_count"))
    layer_types = _layer_types(metadata, lists, num_layers)
    options = {name: _pop(metadata, key) for key, name in _CONFIG_NAMES.items()}
    options |= {name: metadata.pop(key) for key, name in _OPTIONAL_CONFIG_NAMES.items() if key in metadata}
    options |= _heads(header, metadata, lists, layer_types, num_layers - int(options.get("num_kv_shared_layers", 0)))
    options |= _widths(metadata, lists, num_layers, num_layers - int(options.get("num_kv_shared_layers", 0)))
    metadata.pop("vocab_size", None)
    if lists:
        raise _refusal(next(iter(lists)))
    per_layer = header.shapes.get("per_layer_token_embd.weight")
    ends = {*_ENDS, int(header.fields.get("tokenizer.ggml.eos_token_id", _ENDS[0]))}
    return AutoConfig.for_model(
        "gemma4_text",
        **options,
        num_hidden_layers=num_layers,
        layer_types=layer_types,
        rope_parameters=_rotation(gguf, header, metadata),
        vocab_size=header.shapes["token_embd.weight"][1],
        vocab_size_per_layer_input=per_layer[1] if per_layer else header.shapes["token_embd.weight"][1],
        enable_moe_block=bool(options.get("num_experts")),
        tie_word_embeddings="output.weight" not in header.shapes,
        eos_token_id=sorted(ends),
        bos_token_id=header.fields.get("tokenizer.ggml.bos_token_id"),
        pad_token_id=header.fields.get("tokenizer.ggml.padding_token_id"),
    )


def _layer_types(metadata: dict[str, Scalar], lists: dict[str, tuple[Scalar, ...]], count: int) -> list[str]:
    pattern = lists.pop("attention.sliding_window_pattern", ())
    if len(pattern) != count or pattern[-1]:
        raise _refusal("attention.sliding_window_pattern")
    return [SLIDING if slides else FULL for slides in pattern]


def _heads(
    header: GgufHeader,
    metadata: dict[str, Scalar],
    lists: dict[str, tuple[Scalar, ...]],
    layer_types: list[str],
    num_own: int,
) -> dict[str, Any]:
    """Return the configuration's numbers of KV heads. In some models, full-attention layers use keys as values and have
    fewer heads.
    """
    key = "attention.head_count_kv"
    heads = lists.pop(key, None) or (_pop(metadata, key),) * len(layer_types)
    by_kind = {
        kind: {number for number, other in zip(heads, layer_types, strict=True) if other == kind}
        for kind in layer_types
    }
    own_full = [layer for layer in range(num_own) if layer_types[layer] == FULL]
    num_with_values = sum(f"blk.{layer}.attn_v.weight" in header.shapes for layer in own_full)
    has_keys_as_values = num_with_values == 0
    if any(len(numbers) != 1 for numbers in by_kind.values()) or num_with_values not in (0, len(own_full)):
        raise _refusal(key)
    (sliding,), (full,) = by_kind.get(SLIDING, by_kind[FULL]), by_kind[FULL]
    if sliding != full and not has_keys_as_values:
        raise _refusal(key)
    return {"num_key_value_heads": sliding, "num_global_key_value_heads": full, "attention_k_eq_v": has_keys_as_values}


def _widths(
    metadata: dict[str, Scalar], lists: dict[str, tuple[Scalar, ...]], count: int, num_own: int
) -> dict[str, Any]:
    """Return the configuration's MLP widths. Layers that share keys and values of other layers may be twice as wide."""
    key = "feed_forward_length"
    widths = lists.pop(key, None)
    if widths is None:
        return {"intermediate_size": _pop(metadata, key)}
    base_width = int(widths[0])
    if list(widths) != [base_width if layer < num_own else 2 * base_width for layer in range(count)]:
        raise _refusal(key)
    return {"intermediate_size": base_width, "use_double_wide_mlp": True}


def _rotation(gguf: Path, header: GgufHeader, metadata: dict[str, Scalar]) -> dict[str, Any]:
    """Return the configuration's rotary parameters. Full-attention layers rotate a part of each head, given by a tensor
    of divisors.
    """
    full = {"rope_type": "proportional", "rope_theta": float(_pop(metadata, "rope.freq_base"))}
    sliding = {"rope_type": "default", "rope_theta": float(metadata.pop("rope.freq_base_swa", 10000.0))}
    divisors = tensor_values(gguf, FACTORS) if FACTORS in header.shapes else [1.0]
    num_rotated = divisors.count(1.0)
    if any(value != 1.0 for value in divisors[:num_rotated]) or any(
        value < _UNROTATED for value in divisors[num_rotated:]
    ):
        raise BadInput(f"it is not accepted: its {FACTORS} divides frequencies by numbers other than 1 and infinity")
    return {FULL: full | {"partial_rotary_factor": num_rotated / len(divisors)}, SLIDING: sliding}


def _pop(metadata: dict[str, Scalar], key: str) -> Any:
    if key not in metadata:
        raise BadInput(f"it is not accepted: it lacks the key {GEMMA4}.{key}")
    return metadata.pop(key)


def _refusal(key: str) -> BadInput:
    return BadInput(
        f"it is not accepted: its key {GEMMA4}.{key} needs a feature that is not supported here for {GEMMA4}"
    )
