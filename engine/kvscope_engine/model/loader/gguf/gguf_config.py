"""Transformers configuration of a GGUF file, from the file's header.

transformers' loader reads some of the file's keys and silently ignores the others; here each key of the architecture is
applied, or the file is refused, naming the key. Reads tensors only for rotary embeddings.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Final

from kvscope_engine.model.loader.gguf.gemma4 import GEMMA4, gemma4_config
from kvscope_engine.model.loader.gguf.gguf_header import GgufHeader, Scalar
from kvscope_engine.model.loader.gguf.rope import ROPE_KEYS, apply_rope
from kvscope_engine.model.loader.gguf.split_files import reading_all_parts
from kvscope_telemetry.errors import BadInput

CONFIG_NAMES: Final = {
    "context_length": ("max_position_embeddings",),
    "vocab_size": ("vocab_size",),
    "block_count": ("num_hidden_layers",),
    "embedding_length": ("hidden_size",),
    "feed_forward_length": ("intermediate_size", "n_inner", "ffn_hidden_size"),
    "expert_feed_forward_length": ("moe_intermediate_size", "intermediate_size"),
    "expert_shared_feed_forward_length": ("shared_expert_intermediate_size",),
    "expert_count": ("num_experts", "num_local_experts"),
    "expert_used_count": ("num_experts_per_tok",),
    "use_parallel_residual": ("use_parallel_residual",),
    "attention.head_count": ("num_attention_heads",),
    "attention.head_count_kv": ("num_kv_heads", "num_key_value_heads"),
    "attention.layer_norm_rms_epsilon": ("rms_norm_eps", "norm_eps"),
    "attention.layer_norm_epsilon": ("layer_norm_eps", "layer_norm_epsilon", "norm_epsilon", "norm_eps"),
    "attn_logit_softcapping": ("attn_logit_softcapping",),
    "final_logit_softcapping": ("final_logit_softcapping",),
}
"""Candidate transformers configuration attributes for each GGUF key; the first one that the configuration has
is set.
"""
EXPECTED: Final[dict[str, tuple[Scalar, ...]]] = {
    "attention.causal": (True,),
    "attention.clamp_kqv": (0.0,),
    "attention.max_alibi_bias": (0.0,),
    "expert_weights_scale": (0.0, 1.0),
    "logit_scale": (0.0, 1.0),
    "nextn_predict_layers": (0,),
    "pooling_type": (0,),
}
"""GGUF keys that are accepted only with one of the values listed here, because transformers' code computes as
if the key had such a value.
"""
IGNORED_KEYS: Final = frozenset({"tensor_data_layout", "attention.group_norm_groups"})
"""GGUF keys that are accepted with any value, because they do not change what the supported models compute."""
_HEAD_KEYS: Final = ("attention.key_length", "attention.value_length")
_WINDOW: Final = "attention.sliding_window"
_WINDOW_PATTERN: Final = "attention.sliding_window_pattern"
_TYPES_WITH_WINDOW: Final = frozenset({"mistral", "gemma2", "gemma3_text", "gpt_oss", "phi3", "starcoder2"})
_EXPERT_NORM_KEY: Final = "expert_weights_norm"
_GATING_KEY: Final = "expert_gating_func"
_GATING: Final = {"qwen2_moe": 1, "qwen3_moe": 1, "minimax_m2": 2}
"""Supported gating functions by model type: 1 is softmax, 2 sigmoid."""
_LARGEST_GEMMA: Final = {"gemma2": 46, "gemma3_text": 62}
"""Number of layers of the model size whose `query_pre_attn_scalar` is hidden_size / num_heads, by model type.

All other sizes use the head dimension. The file does not state the value.
"""
_BIASES: Final = (
    (re.compile(r"blk\.\d+\.attn_(q|k|v|qkv|output)\.bias"), ("attention_bias", "use_qkv_bias")),
    (re.compile(r"blk\.\d+\.ffn_(gate|up|down)\.bias"), ("mlp_bias",)),
)
"""Patterns of bias tensors, and candidate configuration attributes that enable these biases."""


def config_of(gguf: Path, header: GgufHeader) -> Any:
    """Return a transformers configuration with everything in the header of `gguf`.

    Raises BadInput for a key or tensor that would change the model in an unsupported way.
    """
    from transformers import AutoConfig

    _check_file(header)
    metadata = _metadata_of(header)
    lists = _lists_of(header, metadata)
    config: Any
    if header.architecture == GEMMA4:
        config = gemma4_config(gguf, header, metadata, lists)
        _apply_expert_norm(config, metadata)
        _check_remaining(header, config, metadata)
        return config
    pattern = lists.pop(_WINDOW_PATTERN, None)
    _refuse_lists(header, lists)
    with reading_all_parts():
        config = AutoConfig.from_pretrained(gguf.parent, gguf_file=gguf.name, local_files_only=True)
    _apply_pattern(header, config, metadata.pop(_WINDOW_PATTERN, None) if pattern is None else pattern)
    rope_metadata = _apply(header, metadata, config)
    if isinstance(config.pad_token_id, int) and config.pad_token_id >= config.vocab_size:
        config.pad_token_id = None  # a default of the architecture that this file does not set
    apply_rope(header, rope_metadata, gguf, config)
    return config


def _apply(header: GgufHeader, metadata: dict[str, Scalar], config: Any) -> dict[str, Scalar]:
    """Apply all keys in `metadata`, and remove them. Returns the keys of rotary embeddings, which `apply_rope` applies.

    Each `_apply_...` function pops its keys, so that the remaining ones are those that nothing applies. Raises BadInput
    for these.
    """
    for key in [key for key in metadata if key in CONFIG_NAMES]:
        _set_key(header, config, key, metadata.pop(key))
    _apply_head_dim(header, config, metadata)
    _apply_window(header, config, metadata)
    _apply_biases(header, config)
    if config.model_type in _LARGEST_GEMMA:
        config.query_pre_attn_scalar = _gemma_scalar(config)
    rope_metadata = {key: metadata.pop(key) for key in list(metadata) if key in ROPE_KEYS}
    _apply_expert_norm(config, metadata)
    _check_remaining(header, config, metadata)
    return rope_metadata


def _check_file(header: GgufHeader) -> None:
    kind = header.fields.get("general.type", "model")
    if kind != "model" or any(key.startswith("adapter.") for key in header.fields):
        raise BadInput(f"it is not accepted: it has only a part of a model, {kind!r:.40}")


def _metadata_of(header: GgufHeader) -> dict[str, Scalar]:
    """Return the scalar keys of the architecture, without its name.

    A list with one value per layer, all equal, counts as a scalar.
    """
    prefix = f"{header.architecture}."
    scalars = {key.removeprefix(prefix): value for key, value in header.fields.items() if key.startswith(prefix)}
    count = header.fields.get(f"{prefix}block_count")
    uniform_lists = {
        key.removeprefix(prefix): values[0]
        for key, values in header.lists.items()
        if key.startswith(prefix) and len(values) == count and len(set(values)) == 1
    }
    return scalars | uniform_lists


def _lists_of(header: GgufHeader, metadata: dict[str, Scalar]) -> dict[str, tuple[Scalar, ...]]:
    prefix = f"{header.architecture}."
    lists = {key.removeprefix(prefix): values for key, values in header.lists.items() if key.startswith(prefix)}
    others = {key.removeprefix(prefix): () for key in header.arrays if key.startswith(prefix)}
    return {key: values for key, values in (lists | others).items() if key not in metadata}


def _refuse_lists(header: GgufHeader, lists: dict[str, tuple[Scalar, ...]]) -> None:
    key = next(iter(lists), None)
    if key is not None:
        name = f"{header.architecture}.{key}"
        raise BadInput(
            f"it is not accepted: its key {name} is a list with a value for each layer or part, which is not supported"
        )


def _set_key(header: GgufHeader, config: Any, key: str, value: Scalar) -> None:
    name = next((name for name in CONFIG_NAMES[key] if hasattr(config, name)), None)
    if name is None:
        raise _refusal(header, config, key, value)
    if getattr(config, name) != value:
        setattr(config, name, value)


def _apply_head_dim(header: GgufHeader, config: Any, metadata: dict[str, Scalar]) -> None:
    """Apply the head dimension; the default is hidden_size / num_heads."""
    default_dim = config.hidden_size // config.num_attention_heads
    sizes = {key: metadata.pop(key) for key in _HEAD_KEYS if key in metadata}
    head_dim = sizes.get(_HEAD_KEYS[0], default_dim)
    for key, value in sizes.items():
        if value != head_dim or (value != default_dim and not hasattr(config, "head_dim")):
            raise _refusal(header, config, key, value)
    if hasattr(config, "head_dim"):
        config.head_dim = head_dim


def _apply_window(header: GgufHeader, config: Any, metadata: dict[str, Scalar]) -> None:
    """Apply the sliding window. If the file does not have the key, no layer has a window, whatever the
    architecture's default.
    """
    window = metadata.pop(_WINDOW, 0)
    if config.model_type in _TYPES_WITH_WINDOW:
        config.sliding_window = window or None
    elif window:
        raise _refusal(header, config, _WINDOW, window)


def _apply_pattern(header: GgufHeader, config: Any, pattern: Scalar | tuple[Scalar, ...] | None) -> None:
    """Set which layers have a sliding window.

    `pattern` is the value of the GGUF key: a list with a value per layer, a boolean for all layers, or a number n,
    which means all layers except every n-th. If it is None, nothing is changed.
    """
    if pattern is None:
        return
    count = int(config.num_hidden_layers)
    if isinstance(pattern, bool):
        pattern = (pattern,) * count
    if isinstance(pattern, int) and pattern > 0:
        pattern = tuple((layer + 1) % pattern != 0 for layer in range(count))
    if not isinstance(pattern, tuple) or len(pattern) != count or not hasattr(config, "layer_types"):
        raise _refusal(header, config, _WINDOW_PATTERN, pattern if isinstance(pattern, int) else str(pattern))
    config.layer_types = ["sliding_attention" if slides else "full_attention" for slides in pattern]


def _apply_biases(header: GgufHeader, config: Any) -> None:
    """Enable biases for which the file has tensors. Tensors that end up unused are detected after loading."""
    for pattern, names in _BIASES:
        name = next((name for name in names if hasattr(config, name)), None)
        if name is not None and any(pattern.fullmatch(tensor) for tensor in header.shapes):
            setattr(config, name, True)


def _gemma_scalar(config: Any) -> int:
    is_largest = config.num_hidden_layers == _LARGEST_GEMMA[config.model_type]
    return int(config.hidden_size // config.num_attention_heads if is_largest else config.head_dim)


def _apply_expert_norm(config: Any, metadata: dict[str, Scalar]) -> None:
    if _EXPERT_NORM_KEY in metadata and getattr(config, "norm_topk_prob", None) is not None:
        config.norm_topk_prob = bool(metadata.pop(_EXPERT_NORM_KEY))


def _check_remaining(header: GgufHeader, config: Any, metadata: dict[str, Scalar]) -> None:
    """Raise BadInput for a key that was not applied, unless the model computes the same without it."""
    for key, value in metadata.items():
        if key in IGNORED_KEYS or value in EXPECTED.get(key, ()):
            continue
        if key == _GATING_KEY and _GATING.get(config.model_type) == value:
            continue
        raise _refusal(header, config, key, value)


def _refusal(header: GgufHeader, config: Any, key: str, value: Scalar) -> BadInput:
    return BadInput(
        f"it is not accepted: its key {header.architecture}.{key}={value!r:.40} needs a feature that is not supported "
        f"here for {config.model_type}"
    )
