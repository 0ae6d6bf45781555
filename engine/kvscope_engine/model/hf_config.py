"""Reads a model's unvalidated `config.json` into a configuration class of transformers."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from kvscope_engine.json_file import read_json
from kvscope_telemetry.errors import BadInput

if TYPE_CHECKING:
    from transformers import PretrainedConfig

SIZE_LIMITS: Final = {
    "num_hidden_layers": 1 << 10,
    "hidden_size": 1 << 17,
    "intermediate_size": 1 << 19,
    "num_attention_heads": 1 << 12,
    "num_key_value_heads": 1 << 12,
    "head_dim": 1 << 12,
    "vocab_size": 1 << 23,
}
"""Upper limits for sizes in a configuration, above those of any existing model. Building a larger model would take very
long before it fails for lack of memory.
"""
FLOAT_KEY: Final = "__float__"
NON_JSON_FLOATS: Final = ("Infinity", "-Infinity", "NaN")
FIRST_POSITION: Final = "kvscope_first_position"
"""Name of an attribute that is set on the configuration of a model whose positions start above 0. Its value is
the first position. It is not read from a file.
"""
EXPERT_COUNTS: Final = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
"""Names of the configuration fields that may have the number of experts per layer."""
_LENGTH_NAMES: Final = (
    "max_position_embeddings",
    "n_positions",
    "max_seq_len",
    "max_sequence_length",
    "n_ctx",
)


def read_config(path: Path) -> PretrainedConfig:
    """Read the configuration in the file `path`. Code that comes with a model is never run.

    Raises:
        BadInput: The file cannot be read, has a size above `SIZE_LIMITS`, or names an architecture unknown to
            transformers.
    """
    from transformers import __version__
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    raw = _with_floats(read_json(path))
    model_type = raw.get("model_type")
    if not isinstance(model_type, str) or not model_type:
        raise BadInput(f"{path} is not accepted: it names no model_type")
    _check_sizes(path, raw)
    if model_type not in CONFIG_MAPPING:
        raise BadInput(f"{path}: architecture {model_type!r} is unknown to transformers {__version__}")
    try:
        config: PretrainedConfig = CONFIG_MAPPING[model_type].from_dict(raw)
    except Exception as error:  # an external file: each architecture has checks of its own, which raise anything
        line = " ".join(str(error).split()) or type(error).__name__
        raise BadInput(f"{path} is not accepted by architecture {model_type!r}: {line:.200}") from error
    return config


def num_query_heads(config: Any) -> int:
    """Return the number of query heads per layer; if layers differ, the largest."""
    return max(int(getattr(layer, "num_attention_heads", 0) or 0) for layer in _layers(config))


def num_kv_heads(config: Any) -> int:
    """Return the number of key and value heads per layer; if layers differ, the largest."""
    return max(
        int(getattr(layer, "num_key_value_heads", None) or getattr(layer, "num_attention_heads", 0) or 0)
        for layer in _layers(config)
    )


def head_dim(config: Any) -> int:
    """Return the number of elements of a head's key; if layers differ, the largest."""
    return max(
        int(getattr(layer, "head_dim", None) or layer.hidden_size // (getattr(layer, "num_attention_heads", 0) or 1))
        for layer in _layers(config)
    )


def position_limit(config: Any) -> int | None:
    """Return the maximum number of tokens for which the model was trained; None if its configuration does not give
    it."""
    for name in _LENGTH_NAMES:
        value = getattr(config, name, None)
        if isinstance(value, int) and value > 0:
            return value - int(getattr(config, FIRST_POSITION, 0))
    return None


def eos_token_ids(folder: Path, config: Any) -> frozenset[int]:
    """Return the tokens that end an output, from `generation_config.json`, or from the configuration if that file names
    none. Raises BadInput for a value that is no token id, such as a text. A negative number is no token.
    """
    path = folder / "generation_config.json"
    generation = read_json(path) if path.is_file() else {}
    value = generation.get("eos_token_id")
    if value is None:
        value = getattr(config, "eos_token_id", None)
    ids = value if isinstance(value, list) else [value]
    for token_id in ids:
        if token_id is not None and (isinstance(token_id, bool) or not isinstance(token_id, int)):
            raise BadInput(f"eos_token_id={token_id!r:.60} of the model is not accepted: must be a token id")
    return frozenset(token_id for token_id in ids if token_id is not None and token_id >= 0)


def largest(config: Any, name: str) -> int:
    """Return the largest value that the size `name` has in any layer; 0 if no layer has it."""
    return max(int(getattr(layer, name, None) or 0) for layer in _layers(config))


def latent_ranks(config: Any) -> frozenset[int]:
    """Return the widths of latents (MLA's `kv_lora_rank`) over all layers; empty for a model without latents."""
    return frozenset(int(getattr(layer, "kv_lora_rank", None) or 0) for layer in _layers(config)) - {0}


def _layers(config: Any) -> list[Any]:
    """Return one configuration per layer if layers differ, else the model's configuration alone.

    If layers differ, reading a differing attribute from the model's configuration raises.
    """
    return list(config.per_layer_config) if getattr(config, "is_heterogeneous", False) else [config]


def _with_floats(value: Any) -> Any:
    """Replace the objects that stand for infinities and NaN by floats. transformers writes such objects,
    because JSON cannot represent these values.
    """
    if isinstance(value, list):
        return [_with_floats(item) for item in value]
    if not isinstance(value, dict):
        return value
    if value.keys() == {FLOAT_KEY} and value[FLOAT_KEY] in NON_JSON_FLOATS:
        return float(value[FLOAT_KEY])
    return {key: _with_floats(item) for key, item in value.items()}


def _check_sizes(path: Path, raw: dict[str, Any]) -> None:
    for name, limit in SIZE_LIMITS.items():
        value = raw.get(name)
        if value is None or isinstance(value, list):
            continue
        if not isinstance(value, int) or isinstance(value, bool) or not 0 < value <= limit:
            raise BadInput(f"{path}: {name}={value!r:.40} is not accepted: must be a whole number from 1 to {limit}")
