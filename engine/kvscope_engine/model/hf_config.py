"""Reads a model's configuration as transformers understands it, from a `config.json` that nobody has checked."""

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
"""Larger than any model there is: beyond, building takes forever, only to be refused for memory."""
FLOAT_KEY: Final = "__float__"
ODD_FLOATS: Final = ("Infinity", "-Infinity", "NaN")
FIRST_POSITION: Final = "kvscope_first_position"
"""What a configuration says of positions that its model does not count from 0; not from a file."""
EXPERT_COUNTS: Final = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
"""Names that configurations give the number of a layer's experts."""
_LENGTH_NAMES: Final = (
    "max_position_embeddings",
    "n_positions",
    "max_seq_len",
    "max_sequence_length",
    "n_ctx",
)


def read_config(path: Path) -> PretrainedConfig:
    """The configuration in the file `path`.

    Raises BadInput, naming the file, when it cannot be read, has absurd sizes, or names an architecture that
    transformers does not know. Code that comes with a model is never run.
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
    except Exception as error:  # a external file: each architecture checks its own, and raises what it likes
        line = " ".join(str(error).split()) or type(error).__name__
        raise BadInput(f"{path} is not accepted by architecture {model_type!r}: {line:.200}") from error
    return config


def num_query_heads(config: Any) -> int:
    """Query heads of a layer; where layers differ, of the one that has most."""
    return max(int(getattr(layer, "num_attention_heads", 0) or 0) for layer in _layers(config))


def num_kv_heads(config: Any) -> int:
    """Key and value heads of a layer; where layers differ, of the one that has most."""
    return max(
        int(getattr(layer, "num_key_value_heads", None) or getattr(layer, "num_attention_heads", 0) or 0)
        for layer in _layers(config)
    )


def head_dim(config: Any) -> int:
    """Numbers in a head's key; where layers differ, of the widest."""
    return max(
        int(getattr(layer, "head_dim", None) or layer.hidden_size // (getattr(layer, "num_attention_heads", 0) or 1))
        for layer in _layers(config)
    )


def position_limit(config: Any) -> int | None:
    """Tokens the model was made for, None when its configuration does not say."""
    for name in _LENGTH_NAMES:
        value = getattr(config, name, None)
        if isinstance(value, int) and value > 0:
            return value - int(getattr(config, FIRST_POSITION, 0))
    return None


def eos_token_ids(folder: Path, config: Any) -> frozenset[int]:
    """Tokens that end an answer: those of `generation_config.json`, else those of the configuration."""
    path = folder / "generation_config.json"
    generation = read_json(path) if path.is_file() else {}
    value = generation.get("eos_token_id")
    if value is None:
        value = getattr(config, "eos_token_id", None)
    ids = value if isinstance(value, list) else [value]
    return frozenset(token_id for token_id in ids if isinstance(token_id, int))


def largest(config: Any, name: str) -> int:
    """Return the largest value that the size `name` has in any layer; 0 if no layer has it."""
    return max(int(getattr(layer, name, None) or 0) for layer in _layers(config))


def latent_ranks(config: Any) -> frozenset[int]:
    """Return the widths of latents (MLA's `kv_lora_rank`) over all layers; empty for a model without latents."""
    return frozenset(int(getattr(layer, "kv_lora_rank", None) or 0) for layer in _layers(config)) - {0}


def _layers(config: Any) -> list[Any]:
    """A configuration a layer where they differ, else the one of all. Asked of the whole, what differs raises."""
    return list(config.per_layer_config) if getattr(config, "is_heterogeneous", False) else [config]


def _with_floats(value: Any) -> Any:
    """What transformers writes for a float that JSON has no number for is that float again."""
    if isinstance(value, list):
        return [_with_floats(item) for item in value]
    if not isinstance(value, dict):
        return value
    if value.keys() == {FLOAT_KEY} and value[FLOAT_KEY] in ODD_FLOATS:
        return float(value[FLOAT_KEY])
    return {key: _with_floats(item) for key, item in value.items()}


def _check_sizes(path: Path, raw: dict[str, Any]) -> None:
    for name, limit in SIZE_LIMITS.items():
        value = raw.get(name)
        if value is None or isinstance(value, list):
            continue
        if not isinstance(value, int) or isinstance(value, bool) or not 0 < value <= limit:
            raise BadInput(f"{path}: {name}={value!r:.40} is not accepted: a whole number from 1 to {limit}")
