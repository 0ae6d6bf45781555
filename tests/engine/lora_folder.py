"""Random LoRA adapters in folders in PEFT's format, and the same adapters merged into transformers' weights."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn

ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
PREFIX = "base_model.model."


def write_adapter(
    folder: Path, model: Any, *, seed: int = 0, rank: int = 4, targets: Sequence[str] = ALL, **config: Any
) -> Path:
    """Write an adapter large enough to change the model's tokens; `config` are more fields of its configuration."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and name.rpartition(".")[2] in targets:
            for part, shape in (("A", (rank, module.in_features)), ("B", (module.out_features, rank))):
                tensors[f"{PREFIX}{name}.lora_{part}.weight"] = 0.3 * torch.randn(shape, generator=generator)
    fields = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "target_modules": list(targets), "bias": "none"}
    write_files(folder, tensors, fields | config)
    return folder


def write_files(folder: Path, tensors: dict[str, torch.Tensor], config: dict[str, Any]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps(config))


def merged(model: Any, folder: Path) -> Any:
    """Return `model` with the adapter added to its weights: W + scale * B @ A."""
    from safetensors.torch import load_file

    config = json.loads((folder / "adapter_config.json").read_text())
    rank, alpha = config["r"], config["lora_alpha"]
    scale = alpha / math.sqrt(rank) if config.get("use_rslora") else alpha / rank
    tensors = load_file(folder / "adapter_model.safetensors")
    found = copy.deepcopy(model)
    with torch.no_grad():
        for name in [key.removesuffix(".lora_A.weight") for key in tensors if key.endswith(".lora_A.weight")]:
            delta = scale * tensors[f"{name}.lora_B.weight"] @ tensors[f"{name}.lora_A.weight"]
            found.get_submodule(name.removeprefix(PREFIX)).weight += delta
    return found


def greedy(model: Any, prompt: Sequence[int], num_tokens: int) -> tuple[int, ...]:
    """Return transformers' greedy tokens, computing the whole sequence again for each."""
    ids = list(prompt)
    with torch.inference_mode():
        for _ in range(num_tokens):
            ids.append(int(model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
    return tuple(ids[len(prompt) :])
