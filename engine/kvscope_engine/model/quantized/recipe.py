"""How a checkpoint says that its weights are quantized, and which forms of that are read here. Reads no weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from kvscope_kernels.grouped.weight import CHUNK
from kvscope_telemetry.errors import BadInput

METHODS: Final = ("gptq", "awq")
_BITS: Final = {"gptq": (4, 8), "awq": (4,)}
_VERSIONS: Final = {"gptq": ("gptq", "gptq_v2"), "awq": ("gemm",)}
_VERSION_KEYS: Final = {"gptq": "checkpoint_format", "awq": "version"}


@dataclass(frozen=True, slots=True)
class Recipe:
    """What the words of a checkpoint mean."""

    method: str
    bits: int
    group: int
    """Inputs that share a scale; 0: all of a row."""
    zero_offset: int
    """What is added to a zero point as it is stored."""

    def __str__(self) -> str:
        return f"{self.method.upper()} of {self.bits} bits, groups of {self.group or 'a row'}"


def take_recipe(hf_config: Any, name: str) -> Recipe | None:
    """That of a model's configuration, which is then one of plain weights; None where it names no method read here.

    Raises BadInput, naming the model, for a form of it that is not read.
    """
    raw = getattr(hf_config, "quantization_config", None)
    if not isinstance(raw, dict) or raw.get("quant_method") not in METHODS:
        return None
    recipe = _recipe(raw, name)
    del hf_config.quantization_config
    return recipe


def _recipe(raw: dict[str, Any], name: str) -> Recipe:
    method = str(raw["quant_method"])
    version_key = _VERSION_KEYS[method]
    bits = _one_of(raw, "bits", _BITS[method], name)
    version = str(_one_of(raw, version_key, _VERSIONS[method], name))
    group = raw.get("group_size", 128)
    if not isinstance(group, int) or isinstance(group, bool) or (group != -1 and (group < 1 or group % CHUNK)):
        raise _refusal(name, method, "group_size", group, f"a multiple of {CHUNK}, or -1")
    return Recipe(method, int(bits), max(group, 0), int(version == "gptq"))


def _one_of(raw: dict[str, Any], key: str, accepted: tuple[Any, ...], name: str) -> Any:
    value = raw.get(key) or accepted[0]
    value = value.lower() if isinstance(value, str) else value
    if isinstance(value, bool) or value not in accepted:
        raise _refusal(name, str(raw["quant_method"]), key, value, " or ".join(map(str, accepted)))
    return value


def _refusal(name: str, method: str, key: str, value: Any, accepted: str) -> BadInput:
    return BadInput(f"model {name!r} is not supported: its {method} {key} is {value!r:.40}, {accepted} is accepted")
