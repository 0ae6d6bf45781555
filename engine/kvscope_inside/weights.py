"""Bytes of a model's weights by what they are of: embeddings, attention, MLP, …"""

from __future__ import annotations

from typing import Any, Final

_PARTS: Final = (
    ("embed", "embeddings"),
    ("lm_head", "output head"),
    ("attn", "attention"),
    ("attention", "attention"),
    ("mixer", "state layers"),
    ("mamba", "state layers"),
    ("expert", "experts"),
    ("mlp", "MLP"),
    ("feed_forward", "MLP"),
    ("norm", "norms"),
)
"""What the name of a parameter has in it, and which part of the weights that is."""


def bytes_by_part(model: Any) -> dict[str, int]:
    """Of a torch module's parameters and buffers, each once: those that share their memory are tied."""
    parts: dict[str, int] = {}
    seen: set[int] = set()
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.data_ptr() in seen:
            continue
        seen.add(tensor.data_ptr())
        part = next((part for word, part in _PARTS if word in name), "other")
        parts[part] = parts.get(part, 0) + int(tensor.nbytes)
    return parts
