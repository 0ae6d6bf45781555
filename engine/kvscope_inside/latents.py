"""Computes how much larger an MLA model's expanded keys and values are than its latents, from the transformers
configuration.
"""

from __future__ import annotations

from typing import Any


def expanded_times(config: Any, num_ranks: int = 1) -> float:
    """Return the number of elements of expanded keys and values divided by that of latents, per token and layer; 0 if
    unknown.

    Each tensor-parallel rank has the expanded keys and values of its own heads, but the whole latent and rotary key.
    Keys and values are counted with the same width, the larger of the two, as caches store them.
    """
    names = ("kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim", "num_attention_heads")
    sizes = [getattr(config, name, None) for name in names]
    if not all(isinstance(size, int) and size > 0 for size in sizes):
        return 0.0
    latent, rotary, content, value, heads = (int(size or 0) for size in sizes)
    return 2 * heads / max(1, num_ranks) * max(content + rotary, value) / (latent + rotary)
