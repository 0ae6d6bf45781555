"""Bytes of a model's weights, in total and by part. Parts are recognized by module names."""

from __future__ import annotations

from typing import Final

from torch import nn

from kvscope_engine.model.layers.fused.packed_linear import PackedLinear, packed_bytes
from kvscope_telemetry.messages.telemetry import ModuleBytes

LORA: Final = "LoRA adapters"
_PARTS: Final = (
    (LORA, ("lora_stack",)),
    ("Norms", ("norm", "layernorm", "ln_")),
    ("Attention", ("attn", "attention")),
    ("MLP", ("shared_expert", "shared_mlp")),
    ("Experts", ("expert", "moe")),
    ("MLP", ("mlp", "feed_forward", "ffn")),
    ("Embeddings", ("embed", "wte", "wpe")),
    ("Head", ("lm_head", "output_projection")),
)
"""Part names and the substrings of module names that identify them; the first match wins."""
OTHERS: Final = "Others"


def weights_bytes(module: nn.Module) -> int:
    """Return the bytes of parameters, buffers and packed weights, each counted once."""
    tensors = {tensor.data_ptr(): tensor.nbytes for tensor in (*module.parameters(), *module.buffers())}
    return sum(tensors.values()) + packed_bytes(module)


def weights_by_part(module: nn.Module) -> tuple[ModuleBytes, ...]:
    """Return the bytes of parameters, buffers and packed weights by part, largest first.

    A shared tensor counts for the part in which it is met first, so the parts add up to all weights.
    """
    sizes: dict[str, int] = {}
    seen: set[int] = set()
    for name, part in module.named_modules():
        kind = part_of(name)
        tensors = (*part.parameters(recurse=False), *part.buffers(recurse=False))
        for tensor in tensors:
            if tensor.data_ptr() not in seen:
                seen.add(tensor.data_ptr())
                sizes[kind] = sizes.get(kind, 0) + tensor.nbytes
        if isinstance(part, PackedLinear):
            sizes[kind] = sizes.get(kind, 0) + part.num_bytes
    return tuple(ModuleBytes(name=kind, num_bytes=size) for kind, size in sorted(sizes.items(), key=lambda s: -s[1]))


def part_of(name: str) -> str:
    lower = name.lower()
    return next((part for part, words in _PARTS if any(word in lower for word in words)), OTHERS)
