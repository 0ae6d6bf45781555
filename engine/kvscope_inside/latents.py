"""What a model of latents (MLA) would hold as keys and values, by the names that configurations have for its sizes."""

from __future__ import annotations

from typing import Any


def expanded_times(config: Any, num_ranks: int = 1) -> float:
    """How many times as many numbers a token and layer keys and values of a rank's heads are as its latent and rotary
    key, which each rank has whole; 0: it does not say.

    Keys and values have one width in a cache: the larger of the two.
    """
    names = ("kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim", "num_attention_heads")
    sizes = [getattr(config, name, None) for name in names]
    if not all(isinstance(size, int) and size > 0 for size in sizes):
        return 0.0
    latent, rotary, content, value, heads = (int(size or 0) for size in sizes)
    return 2 * heads / max(1, num_ranks) * max(content + rotary, value) / (latent + rotary)
