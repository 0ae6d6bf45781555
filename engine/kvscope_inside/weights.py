"""Measures the bytes of a model's weights by part: embeddings, attention, MLP, ..."""

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
"""Pairs of a substring of a parameter's name and the part of the model to which it belongs. The first match counts."""


def bytes_by_part(model: Any) -> dict[str, int]:
    """Return the bytes of a torch module's parameters and buffers by part of the model. Tied tensors, which
    share memory, count once.
    """
    parts: dict[str, int] = {}
    seen: set[int] = set()
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.data_ptr() in seen:
            continue
        seen.add(tensor.data_ptr())
        part = next((part for substring, part in _PARTS if substring in name), "other")
        parts[part] = parts.get(part, 0) + int(tensor.nbytes)
    return parts
