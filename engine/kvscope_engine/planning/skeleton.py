"""Structure of a model without its weights: the configuration, modules whose tensors have shapes but no data, and the
number of parameters by layer.

For a model name, only the configuration is downloaded.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch

from kvscope_engine.model.hf_config import read_config
from kvscope_engine.model.loader.download.hub import hub_file
from kvscope_engine.model.loader.download.model_names import parse_model_name
from kvscope_engine.model.loader.supported_models import blueprint
from kvscope_engine.model.loader.text_part import make_model, text_config
from kvscope_engine.model.quantization.quantization_recipe import pop_recipe
from kvscope_telemetry.errors import BadInput

if TYPE_CHECKING:
    from transformers import PretrainedConfig

_LAYER: Final = re.compile(r"(?:^|\.)(?:layers|h|blocks)\.(\d+)\.")


@dataclass(frozen=True, slots=True)
class Parameters:
    """Number of parameters in matrices, which can be divided among devices and quantized, and in vectors
    (norms, biases), which cannot.
    """

    matrices: int = 0
    vectors: int = 0

    def __add__(self, other: Parameters) -> Parameters:
        return Parameters(self.matrices + other.matrices, self.vectors + other.vectors)

    @property
    def total(self) -> int:
        return self.matrices + self.vectors


@dataclass(frozen=True, slots=True, eq=False)
class Skeleton:
    """Properties of a model that a plan needs, without its weights. Instances are compared by identity."""

    name: str
    architecture: str
    config: PretrainedConfig
    """Configuration of the text part of the model."""
    whole: PretrainedConfig
    """Configuration of the whole model, the argument of `build_model`."""
    layers: tuple[Parameters, ...]
    embedding: Parameters
    """Parameters of the input embedding. If weights are tied, the LM head uses them as well."""
    head: Parameters
    """Parameters of the LM head (0 if weights are tied) and of the norm before it."""
    by_module: tuple[tuple[str, int], ...]
    """Number of parameters by kind of module, such as "self_attn" and "mlp", summed over all layers; largest first."""

    @property
    def num_parameters(self) -> int:
        return self.embedding.total + self.head.total + sum(layer.total for layer in self.layers)

    @property
    def num_layers(self) -> int:
        return len(self.layers)


def read_skeleton(model: str) -> Skeleton:
    """Return the skeleton of `model`: `default`, a Hugging Face id, a folder, a `.gguf` file, a `config.json`, or
    dummy:FILE.

    Raises BadInput for a model that this engine does not serve, KvscopeError if the hub cannot be reached.
    """
    config = _config(model)
    pop_recipe(config, model)  # --dtype, not the checkpoint, determines the type of planned quantized layers
    plan = blueprint(config, model)
    module = build_model(config, torch.bfloat16, torch.device("meta"))
    layers: dict[int, Parameters] = {}
    embedding, head = Parameters(), Parameters()
    modules: dict[str, int] = {}
    inputs: Any = module.get_input_embeddings()
    for name, parameter in module.named_parameters():
        count = Parameters(parameter.numel(), 0) if parameter.dim() > 1 else Parameters(0, parameter.numel())
        match = _LAYER.search(name)
        if match:
            layers[int(match[1])] = layers.get(int(match[1]), Parameters()) + count
        elif parameter is inputs.weight:
            embedding += count
        else:
            head += count
        kind = _module_kind(name, match)
        modules[kind] = modules.get(kind, 0) + parameter.numel()
    return Skeleton(
        name=model,
        architecture=plan.architecture,
        config=text_config(config),
        whole=config,
        layers=tuple(layers[number] for number in sorted(layers)),
        embedding=embedding,
        head=head,
        by_module=tuple(sorted(modules.items(), key=lambda item: -item[1])),
    )


def build_model(config: PretrainedConfig, dtype: torch.dtype, device: torch.device, attention: str = "eager") -> Any:
    """Return the causal language model of `config`. Its tensors have no data on the device "meta" or in a fake tensor
    mode.
    """
    with device:
        return make_model(config, dtype, attention)


def _module_kind(name: str, match: re.Match[str] | None) -> str:
    """Return the first component of a parameter's name within its layer, or the top-level module of other
    parameters.
    """
    parts = (name[match.end() :] if match else name.removeprefix("model.")).split(".")
    return parts[0]


def _config(model: str) -> PretrainedConfig:
    if model.endswith(".json") and Path(model).expanduser().is_file():
        return read_config(Path(model).expanduser())
    name = parse_model_name(model)
    if name.kind == "dummy":
        return read_config(name.path)
    if name.kind == "folder":
        return read_config(_existing_file(name.path / "config.json", model))
    if name.kind == "hub":
        return read_config(hub_file(name.text, "config.json"))
    return _gguf_config(name.path if name.kind == "gguf" else None)


def _existing_file(path: Path, model: str) -> Path:
    if not path.is_file():
        raise BadInput(f"model {model!r} is not accepted: the folder has no config.json")
    return path


def _gguf_config(path: Path | None) -> PretrainedConfig:
    """Return the configuration of a GGUF file, read from its header; of the default model if `path` is None."""
    from kvscope_engine.model.loader.download.default_model import default_gguf
    from kvscope_engine.model.loader.download.progress import TerminalProgress
    from kvscope_engine.model.loader.gguf.gguf_cache import entry_folder
    from kvscope_engine.model.loader.gguf.gguf_config import config_of
    from kvscope_engine.model.loader.gguf.gguf_entries import content_sha256, is_intact
    from kvscope_engine.model.loader.gguf.gguf_header import check_gguf

    file = path or default_gguf(TerminalProgress())
    for dtype in (torch.bfloat16, torch.float32, torch.float16):
        entry = entry_folder(content_sha256(file), dtype)
        if is_intact(entry):  # the file was converted before: reading its header again takes seconds
            return read_config(entry / "config.json")
    config: PretrainedConfig = config_of(file, check_gguf(file))
    return config
