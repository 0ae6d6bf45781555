"""Computes the bytes of a model's weights, in total and by part of the model. Parts are recognized by module names."""

from __future__ import annotations

from typing import Final

from torch import nn

from kvscope_engine.model.layers.fused.packed_linear import PackedLinear, packed_bytes
from kvscope_telemetry.messages.telemetry import ModuleBytes

LORA: Final = "LoRA adapters"
_PART_SUBSTRINGS: Final = (
    (LORA, ("lora_stack",)),
    ("Norms", ("norm", "layernorm", "ln_")),
    ("Attention", ("attn", "attention")),
    ("MLP", ("shared_expert", "shared_mlp")),
    ("Experts", ("expert", "moe")),
    ("MLP", ("mlp", "feed_forward", "ffn")),
    ("Embeddings", ("embed", "wte", "wpe")),
    ("Head", ("lm_head", "output_projection")),
)
"""Names of parts, and the substrings of module names that identify them; the first match wins."""
OTHERS: Final = "Others"


def weights_bytes(module: nn.Module) -> int:
    """Return the bytes of parameters, buffers and packed weights, each counted once."""
    tensors = {tensor.data_ptr(): tensor.nbytes for tensor in (*module.parameters(), *module.buffers())}
    return sum(tensors.values()) + packed_bytes(module)


def weights_by_part(module: nn.Module) -> tuple[ModuleBytes, ...]:
    """Return the bytes of parameters, buffers and packed weights by part, largest first.

    A shared tensor counts for the first part that contains it, so the parts add up to all weights.
    """
    sizes: dict[str, int] = {}
    counted: set[int] = set()
    for name, submodule in module.named_modules():
        part_name = part_of(name)
        tensors = (*submodule.parameters(recurse=False), *submodule.buffers(recurse=False))
        for tensor in tensors:
            if tensor.data_ptr() not in counted:
                counted.add(tensor.data_ptr())
                sizes[part_name] = sizes.get(part_name, 0) + tensor.nbytes
        if isinstance(submodule, PackedLinear):
            sizes[part_name] = sizes.get(part_name, 0) + submodule.num_bytes
    return tuple(
        ModuleBytes(name=part_name, num_bytes=size) for part_name, size in sorted(sizes.items(), key=lambda s: -s[1])
    )


def part_of(name: str) -> str:
    lower = name.lower()
    return next((part for part, substrings in _PART_SUBSTRINGS if any(word in lower for word in substrings)), OTHERS)
