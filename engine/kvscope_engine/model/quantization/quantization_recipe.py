"""Interprets a checkpoint's quantization configuration, and decides which variants are supported. Reads no weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from kvscope_kernels.quantized_linear.grouped_weight import CHUNK
from kvscope_telemetry.errors import BadInput

WORD_METHODS: Final = ("gptq", "awq")
_BITS: Final = {"gptq": (4, 8), "awq": (4,)}
_VERSIONS: Final = {"gptq": ("gptq", "gptq_v2"), "awq": ("gemm",)}
_VERSION_KEYS: Final = {"gptq": "checkpoint_format", "awq": "version"}
_NAMES: Final = {
    "bitsandbytes": "bitsandbytes",
    "compressed-tensors": "compressed-tensors",
    "fbgemm_fp8": "FP8",
    "fp8": "FP8",
    "modelopt": "ModelOpt",
    "mxfp4": "MXFP4",
}
"""Display names of quantization methods whose tensors reveal the format (`scaled_weights`)."""
_COMPRESSED_FORMATS: Final = (
    "float-quantized",
    "int-quantized",
    "mixed-precision",
    "mxfp4-pack-quantized",
    "mxfp8-quantized",
    "naive-quantized",
    "nvfp4-pack-quantized",
    "pack-quantized",
)
_AUTO_ROUND: Final = {
    "auto_round:auto_gptq": {"quant_method": "gptq", "checkpoint_format": "gptq"},
    "auto_round:auto_awq": {"quant_method": "awq", "version": "gemm"},
}
"""Settings of GPTQ, AWQ or another method, by the name of an AutoRound packing format that is identical to that
method's.
"""
METHODS: Final = "GPTQ, AWQ, FP8, MXFP4, compressed-tensors, ModelOpt, bitsandbytes"


@dataclass(frozen=True, slots=True)
class Recipe:
    """Quantization of a checkpoint's weights, according to its configuration."""

    method: str
    bits: int
    """Bit width of integer weights that the kernels support, 4 or 8; 0 for all other weights, which are dequantized."""
    group: int = 0
    """Number of inputs of an output that share a scale; 0 if all of them do."""
    zero_offset: int = 0
    """Number added to a stored zero point."""
    tile: tuple[int, int] | None = None
    """Size of the weight's tiles that share a scale, (outputs, inputs); None if the configuration does not state it."""
    variant: str = ""
    """Variant of the quantization method, for display and to detect FP8."""

    @property
    def is_in_words(self) -> bool:
        """Whether weights are stored in 32-bit words, as by GPTQ and AWQ."""
        return self.method in WORD_METHODS

    @property
    def is_fp8(self) -> bool:
        return self.method in ("fp8", "fbgemm_fp8") or self.variant in ("float-quantized", "FP8")

    @property
    def format(self) -> str:
        if self.is_in_words:
            return f"{self.method.upper()}, groups of {self.group or 'a row'}"
        name = _NAMES.get(self.method, self.method)
        return f"{name}, {self.variant}" if self.variant else name

    def __str__(self) -> str:
        if self.is_in_words:
            return f"{self.method.upper()} of {self.bits} bits, groups of {self.group or 'a row'}"
        return self.format


UNNAMED: Final = Recipe("FP8", 0)
"""Recipe for files with quantized weights whose configuration does not mention quantization."""


def pop_recipe(hf_config: Any, name: str) -> Recipe | None:
    """Remove the quantization settings from a model's configuration and return them; None without a supported method.

    Raises BadInput, naming the model, for an unsupported variant of the method.
    """
    raw = _settings(hf_config)
    method = raw.get("quant_method") if raw is not None else None
    if raw is None or method not in (*WORD_METHODS, *_NAMES):
        return None
    recipe = _word_recipe(raw, name) if method in WORD_METHODS else _scaled_recipe(raw, name)
    for part_config in _configs(hf_config):
        for key in _KEYS:
            if getattr(part_config, key, None) is not None:
                delattr(part_config, key)
    return recipe


_KEYS: Final = ("quantization_config", "compression_config")


def _settings(hf_config: Any) -> dict[str, Any] | None:
    """Return the quantization settings of the whole configuration, or of its text part; None if there are none."""
    candidates = [getattr(part, key, None) for part in _configs(hf_config) for key in _KEYS]
    raw = next((settings for settings in candidates if isinstance(settings, dict)), None)
    if raw is None:
        return None
    old = "bitsandbytes" if raw.get("load_in_4bit") or raw.get("load_in_8bit") else None
    return {"quant_method": old} | raw | _AUTO_ROUND.get(str(raw.get("packing_format")), {})


def _configs(hf_config: Any) -> list[Any]:
    text = hf_config.get_text_config(decoder=True)
    return [hf_config, *([text] if text is not hf_config else [])]


def _word_recipe(raw: dict[str, Any], name: str) -> Recipe:
    method = str(raw["quant_method"])
    version_key = _VERSION_KEYS[method]
    bits = _one_of(raw, "bits", _BITS[method], name)
    version = str(_one_of(raw, version_key, _VERSIONS[method], name))
    group = raw.get("group_size", 128)
    if not isinstance(group, int) or isinstance(group, bool) or (group != -1 and (group < 1 or group % CHUNK)):
        raise _refusal(name, method, "group_size", group, f"a multiple of {CHUNK}, or -1")
    return Recipe(method, int(bits), max(group, 0), int(version == "gptq"))


def _scaled_recipe(raw: dict[str, Any], name: str) -> Recipe:
    method = str(raw["quant_method"])
    if method == "compressed-tensors":
        return _compressed(raw, name)
    if method == "modelopt":
        return Recipe(method, 0, variant=str(raw.get("quant_algo", "")))
    if method == "bitsandbytes":
        is_int8 = bool(raw.get("load_in_8bit"))
        return Recipe(
            method, 8 if is_int8 else 0, variant="int8" if is_int8 else str(raw.get("bnb_4bit_quant_type", "4 bits"))
        )
    return Recipe(method, 0, tile=_tile(raw.get("weight_block_size"), method, "weight_block_size", name))


def _compressed(raw: dict[str, Any], name: str) -> Recipe:
    method, form = "compressed-tensors", str(raw.get("format", "dense"))
    if form not in _COMPRESSED_FORMATS:
        raise _refusal(name, method, "format", form, ", ".join(_COMPRESSED_FORMATS))
    sparsity = (raw.get("sparsity_config") or {}).get("format", "dense")
    if sparsity != "dense":
        raise _refusal(name, method, "sparsity_config", sparsity, "dense")
    if (raw.get("transform_config") or {}).get("config_groups"):
        raise _refusal(name, method, "transform_config", "...", "none")
    groups = raw.get("config_groups") or {}
    weights = [group.get("weights") or {} for group in groups.values() if isinstance(group, dict)]
    integer_bits = [
        bits
        for bits in (4, 8)
        if any((weight_args.get("type"), weight_args.get("num_bits")) == ("int", bits) for weight_args in weights)
    ]
    tiles = (weight_args.get("block_structure") for weight_args in weights)
    tile = next((structure for structure in tiles if structure), None)
    return Recipe(
        method, integer_bits[0] if integer_bits else 0, tile=_tile(tile, method, "block_structure", name), variant=form
    )


def _tile(value: Any, method: str, key: str, name: str) -> tuple[int, int] | None:
    if value is None:
        return None
    if not (isinstance(value, list) and len(value) == 2 and all(isinstance(n, int) and n > 0 for n in value)):
        raise _refusal(name, method, key, value, "two whole numbers")
    return value[0], value[1]


def _one_of(raw: dict[str, Any], key: str, accepted: tuple[Any, ...], name: str) -> Any:
    value = raw.get(key) or accepted[0]
    value = value.lower() if isinstance(value, str) else value
    if isinstance(value, bool) or value not in accepted:
        raise _refusal(name, str(raw["quant_method"]), key, value, " or ".join(map(str, accepted)))
    return value


def _refusal(name: str, method: str, key: str, value: Any, accepted: str) -> BadInput:
    return BadInput(f"model {name!r} is not supported: its {method} {key} is {value!r:.40}, {accepted} is accepted")
