"""Creates a hybrid variant of the default model: its attention layers unchanged, with Mamba 2 layers between them.

    python scripts/hybrid_model.py FOLDER

The Mamba layers have random weights and zero output projections, so that they pass their input on. The output is that
of the default model, while recurrent states are stored, copied and evicted as in a real hybrid. Used for recordings and
experiments, because there is no small hybrid model with a free license.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from pathlib import Path
from typing import Any, Final

import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, GraniteMoeHybridConfig

from kvscope_engine.model.loader.download.default_model import default_gguf
from kvscope_engine.model.loader.gguf.gguf_cache import converted_gguf

ATTENTION_PER_MAMBA: Final = 3
"""Number of attention layers before each Mamba layer."""


def main() -> int:
    parser = argparse.ArgumentParser(description="Make a hybrid of the default model.")
    parser.add_argument("out", type=Path, metavar="FOLDER")
    make(parser.parse_args().out)
    return 0


def make(out: Path) -> None:
    source = converted_gguf(default_gguf(_quiet), torch.bfloat16, _quiet)
    config = json.loads((source / "config.json").read_text())
    types, layer_indices = _layers(config["num_hidden_layers"])
    torch.manual_seed(0)
    auto: Any = AutoModelForCausalLM
    model = auto.from_config(_config(config, types), dtype=torch.bfloat16)
    target = model.state_dict()
    for name, tensor in load_file(source / "model.safetensors").items():
        _copy(name, tensor, target, layer_indices)
    for number in (number for number, kind in enumerate(types) if kind == "mamba"):
        target[f"model.layers.{number}.mamba.out_proj.weight"].zero_()
        target[f"model.layers.{number}.shared_mlp.output_linear.weight"].zero_()
    model.save_pretrained(out)
    for file in source.iterdir():
        if "token" in file.name or "template" in file.name or file.name == "generation_config.json":
            shutil.copy(file, out / file.name)


def _quiet(_: object) -> None: ...


def _layers(count: int) -> tuple[list[str], list[int]]:
    """Return the types of all layers, and the index in this list of each layer of the default model."""
    types: list[str] = []
    layer_indices = []
    for number in range(count):
        layer_indices.append(len(types))
        types += ["attention", "mamba"] if number % ATTENTION_PER_MAMBA == ATTENTION_PER_MAMBA - 1 else ["attention"]
    return types, layer_indices


def _config(config: dict[str, Any], types: list[str]) -> GraniteMoeHybridConfig:
    hidden, head = config["hidden_size"], config["hidden_size"] // config["num_attention_heads"]
    size_names = ("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads")
    other_names = (
        "rope_parameters",
        "rms_norm_eps",
        "max_position_embeddings",
        "bos_token_id",
        "eos_token_id",
        "pad_token_id",
    )
    return GraniteMoeHybridConfig(
        **{name: config[name] for name in (*size_names, *other_names)},
        shared_intermediate_size=config["intermediate_size"],
        num_hidden_layers=len(types),
        layer_types=types,
        num_local_experts=0,
        num_experts_per_tok=0,
        embedding_multiplier=1.0,
        residual_multiplier=1.0,
        logits_scaling=1.0,
        attention_multiplier=head**-0.5,
        position_embedding_type="rope",
        tie_word_embeddings=True,
        mamba_n_heads=2 * hidden // 64,
        mamba_d_head=64,
        mamba_d_state=16,
        mamba_n_groups=1,
        mamba_d_conv=4,
        mamba_expand=2,
        mamba_chunk_size=32,
    )


def _copy(name: str, tensor: torch.Tensor, target: dict[str, torch.Tensor], layer_indices: list[int]) -> None:
    if not name.startswith("model.layers."):
        if name in target:
            target[name].copy_(tensor)
        return
    number, suffix = name.removeprefix("model.layers.").split(".", 1)
    layer = f"model.layers.{layer_indices[int(number)]}."
    half = tensor.shape[0]
    if suffix == "mlp.gate_proj.weight":
        target[f"{layer}shared_mlp.input_linear.weight"][:half].copy_(tensor)
    elif suffix == "mlp.up_proj.weight":
        target[f"{layer}shared_mlp.input_linear.weight"][half:].copy_(tensor)
    elif suffix == "mlp.down_proj.weight":
        target[f"{layer}shared_mlp.output_linear.weight"].copy_(tensor)
    else:
        target[layer + suffix].copy_(tensor)


if __name__ == "__main__":
    sys.exit(main())
