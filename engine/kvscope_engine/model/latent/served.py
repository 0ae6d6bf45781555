"""What is told of a model that has latents, held or not, and which options do not go with them."""

from __future__ import annotations

from typing import Any

from torch import nn

from kvscope_engine.model.checks.hook_check import check_hook
from kvscope_telemetry.engine_config import EngineConfig
from kvscope_telemetry.errors import BadInput


def check_options(config: EngineConfig, module: nn.Module) -> None:
    """Raise BadInput for what is not done with latents; `sparse_decode` is looked at with its layers."""
    if config.kv_cache_dtype != "auto" and any(call.shape.latent_dim for call in check_hook(module)):
        raise BadInput(
            f"kv_cache_dtype={config.kv_cache_dtype!r} is not accepted with {type(module).__name__}: its cache holds"
            " latents, which are not rounded to 8 bits; auto is"
        )


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
