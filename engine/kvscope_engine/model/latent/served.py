"""What is told of a model that has latents, held or not."""

from __future__ import annotations

from typing import Any

from torch import nn

from kvscope_engine.model.checks.hook_check import check_hook


def expanded_notes(module: nn.Module) -> list[str]:
    """What it takes that a model of latents keeps keys and values in their place; nothing for other models."""
    config: Any = module.config
    config = config.get_text_config(decoder=True)
    calls = check_hook(module)
    sizes: list[Any] = [getattr(config, name, None) for name in ("kv_lora_rank", "qk_rope_head_dim")]
    if any(call.shape.latent_dim for call in calls) or not all(isinstance(size, int) for size in sizes):
        return []
    why = getattr(module, "kvscope_why_expanded", None) or "its attention has another structure than is known"
    return [
        f"the cache holds keys and values in place of latents, {calls[0].shape.numbers:,} numbers a token and layer and"
        f" not {sum(sizes):,}: {why:.200}"
    ]
