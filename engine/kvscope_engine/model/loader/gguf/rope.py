"""Rotary embedding of a GGUF file as transformers' `rope_parameters`.

Interprets the keys `rope.*` and the tensors that scale frequencies; reads no other weights.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

from kvscope_engine.model.loader.gguf.gguf_header import GgufHeader, Scalar
from kvscope_engine.model.loader.gguf.split_files import read_gguf
from kvscope_telemetry.errors import BadInput

FACTORS: Final = "rope_freqs.weight"
LONG_FACTORS: Final = "rope_factors_long.weight"
SHORT_FACTORS: Final = "rope_factors_short.weight"
ROPE_TENSORS: Final = (FACTORS, LONG_FACTORS, SHORT_FACTORS)
_TYPE: Final = "rope.scaling.type"
_FACTOR: Final = "rope.scaling.factor"
_OLD_FACTOR: Final = "rope.scale_linear"
_ATTENTION: Final = "rope.scaling.attn_factor"
_ORIGINAL: Final = "rope.scaling.original_context_length"
_YARN: Final = {
    "rope.scaling.yarn_beta_fast": ("beta_fast", 32.0),
    "rope.scaling.yarn_beta_slow": ("beta_slow", 1.0),
}
ROPE_KEYS: Final = frozenset(
    {
        "rope.freq_base",
        "rope.freq_base_swa",
        "rope.dimension_count",
        "rope.scaling.finetuned",
        "rope.scaling.yarn_ext_factor",
        "rope.scaling.yarn_attn_factor",
        _TYPE,
        _FACTOR,
        _OLD_FACTOR,
        _ATTENTION,
        _ORIGINAL,
        *_YARN,
    }
)
_NEUTRAL: Final = {"rope.scaling.yarn_ext_factor": (-1.0, 1.0), "rope.scaling.yarn_attn_factor": (1.0,)}
_PARTLY_ROTATING_TYPES: Final = frozenset({"phi3", "stablelm", "nemotron", "minimax_m2"})
"""Model types that may apply the rotary embedding to only some dimensions of each head."""
_UNROTATED_TYPES: Final = frozenset({"gpt2", "bloom"})


def apply_rope(header: GgufHeader, metadata: dict[str, Scalar], gguf: Path, config: Any) -> None:
    """Apply keys and tensors of the rotary embedding to `config`. Raises BadInput, naming the key, if one is
    unsupported.
    """
    for key, accepted in _NEUTRAL.items():
        if metadata.get(key, accepted[0]) not in accepted:
            raise _refusal(header, key, metadata[key])
    parameters = getattr(config, "rope_parameters", None)
    if config.model_type in _UNROTATED_TYPES or not parameters:
        if any(key != "rope.scaling.finetuned" for key in metadata):
            raise _refusal(header, *next(iter(metadata.items())))
        return
    scaling = _scaling(header, metadata, gguf, config)
    if "rope_type" in parameters:
        config.rope_parameters = _parameters(header, metadata, config, parameters, scaling)
        return
    if any(tensor in header.shapes for tensor in ROPE_TENSORS):
        raise BadInput(
            "it is not accepted: it scales rotary frequencies, but its layers have different rotary embeddings"
        )
    full = _parameters(header, metadata, config, parameters["full_attention"], scaling)
    sliding = dict(parameters["sliding_attention"])
    sliding["rope_theta"] = metadata.get("rope.freq_base_swa", sliding["rope_theta"])
    config.rope_parameters = parameters | {"full_attention": full, "sliding_attention": sliding}


def _parameters(
    header: GgufHeader, metadata: dict[str, Scalar], config: Any, parameters: dict[str, Any], scaling: dict[str, Any]
) -> dict[str, Any]:
    """Return the `rope_parameters` for one kind of layer. If the file does not state the base of the
    frequencies, it is 10,000.
    """
    partial = {key: value for key, value in parameters.items() if key == "partial_rotary_factor"}
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    count = metadata.get("rope.dimension_count", head_dim)
    if config.model_type in _PARTLY_ROTATING_TYPES:
        partial["partial_rotary_factor"] = float(count) / head_dim
    elif count != head_dim:
        raise _refusal(header, "rope.dimension_count", count)
    return partial | {"rope_theta": float(metadata.get("rope.freq_base", 10000.0))} | scaling


def _scaling(header: GgufHeader, metadata: dict[str, Scalar], gguf: Path, config: Any) -> dict[str, Any]:
    """Return the type of rotary scaling and its parameters. A factor without a type means linear scaling."""
    kind, factor = _scaling_type(header, metadata), float(metadata.get(_FACTOR, metadata.get(_OLD_FACTOR, 1.0)) or 1.0)
    attention = metadata.get(_ATTENTION, 1.0)
    if kind != "longrope" and attention not in (0.0, 1.0):
        raise _refusal(header, _ATTENTION, attention)
    if kind == "longrope":
        return _longrope(header, metadata, gguf, config)
    if FACTORS in header.shapes and (kind == "none" or factor == 1.0):
        return _scaled_frequencies(tensor_values(gguf, FACTORS), config)
    if FACTORS in header.shapes:
        raise BadInput(f"it is not accepted: it scales rotation twice, by {FACTORS} and by {_TYPE}={kind!r:.40}")
    if kind == "none" or factor == 1.0:
        return {"rope_type": "default"}
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor}
    original = metadata.get(_ORIGINAL) or int(config.max_position_embeddings / factor)
    exact = {"truncate": False} if config.model_type == "gpt_oss" else {}
    betas = {name: float(metadata.get(key) or default) for key, (name, default) in _YARN.items()}
    return {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original} | betas | exact


def _scaling_type(header: GgufHeader, metadata: dict[str, Scalar]) -> str:
    kind = metadata.get(_TYPE, "longrope" if LONG_FACTORS in header.shapes else "linear")
    if kind not in ("none", "linear", "yarn", "longrope"):
        raise _refusal(header, _TYPE, kind)
    return str(kind)


def _longrope(header: GgufHeader, metadata: dict[str, Scalar], gguf: Path, config: Any) -> dict[str, Any]:
    if LONG_FACTORS not in header.shapes or SHORT_FACTORS not in header.shapes:
        raise BadInput(f"it is not accepted: its rotation is of type 'longrope', and it lacks {LONG_FACTORS}")
    original = metadata.get(_ORIGINAL) or config.max_position_embeddings
    if hasattr(config, "original_max_position_embeddings"):
        config.original_max_position_embeddings = original
    return {
        "rope_type": "longrope",
        "short_factor": tensor_values(gguf, SHORT_FACTORS),
        "long_factor": tensor_values(gguf, LONG_FACTORS),
        "attention_factor": float(metadata.get(_ATTENTION) or 1.0),
        "factor": config.max_position_embeddings / original,
        "original_max_position_embeddings": original,
    }


def _scaled_frequencies(factors: list[float], config: Any) -> dict[str, Any]:
    """Return rotary parameters that divide each frequency by its factor, whatever the sequence length.

    The parameters are of type `longrope`, with `factors` for both short and long sequences.
    """
    if all(factor == 1.0 for factor in factors):
        return {"rope_type": "default"}
    return {
        "rope_type": "longrope",
        "short_factor": factors,
        "long_factor": factors,
        "attention_factor": 1.0,
        "factor": 1.0,
        "original_max_position_embeddings": config.max_position_embeddings,
    }


def tensor_values(gguf: Path, name: str) -> list[float]:
    from gguf import dequantize

    tensor = next(tensor for tensor in read_gguf(gguf).tensors if tensor.name == name)
    return [float(value) for value in dequantize(tensor.data, tensor.tensor_type).reshape(-1)]


def _refusal(header: GgufHeader, key: str, value: Scalar) -> BadInput:
    return BadInput(
        f"it is not accepted: its rotary embedding, {header.architecture}.{key}={value!r:.40}, is not supported"
    )
