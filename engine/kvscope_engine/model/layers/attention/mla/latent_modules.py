"""Which attention modules may hold latents, and how they come to: their keys and values are not expanded any more.

Found by structure and by what transformers' own modules have in common: `expand_kv` is where latents and rotary keys,
as a cache may keep them, become keys and values. All before it (projections, norms, rotation, scaling) stays the
module's own. Whether it gives the same is proven as of any other model (`hook_check`); where not, or where an MLA is
not of this structure, keys and values are kept, and a note says what that takes (`served`).
"""

from __future__ import annotations

from functools import partial
from typing import Any, Final

import torch
from torch import nn

from kvscope_engine.model.layers.attention.mla.latents import Latents, held_latents
from kvscope_engine.model.layers.attention_interface import uses_interface

_SIZES: Final = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "layer_idx")


def hold_latents(module: nn.Module, attention_name: str) -> None:
    """Let each MLA attention in `module` hand latents to the attention of that name, and expand for all others."""
    for part in module.modules():
        if held_latents(part) is None and _is_latent(part):
            part.kvscope_latents = Latents(part)  # type: ignore[assignment]
            part.expand_kv = partial(_latents_of, part, attention_name)  # type: ignore[assignment]


def expand_latents(module: nn.Module) -> bool:
    """Take it back; whether there was one."""
    parts = [part for part in module.modules() if held_latents(part) is not None]
    for part in parts:
        del part.kvscope_latents, part.expand_kv
    return bool(parts)


def _is_latent(part: nn.Module) -> bool:
    sizes = [getattr(part, name, None) for name in _SIZES]
    projection = getattr(part, "kv_b_proj", None)
    if not all(isinstance(size, int) for size in sizes) or type(projection) is not nn.Linear:
        return False
    if not hasattr(type(part), "expand_kv") or not uses_interface(type(part)) or projection.bias is not None:
        return False
    latent, content, _, value, _ = sizes
    outputs, inputs = projection.weight.shape
    return inputs == latent and outputs % (content + value) == 0


def _latents_of(
    part: Any, attention_name: str, latents: torch.Tensor, rotary: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """(1, 1, T, latent_dim) and (1, 1, T, rotary_dim) as they are; keys and values where another attention runs."""
    if part.config._attn_implementation == attention_name:
        return latents, rotary
    expanded: tuple[torch.Tensor, torch.Tensor] = type(part).expand_kv(part, latents, rotary)
    return expanded
