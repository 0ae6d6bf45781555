"""MLA attention modules that store latents: found by structure, and changed so that keys and values are not expanded.

`expand_kv` of transformers' modules is where latents and rotary keys, as a cache may store them, become keys and
values. Everything before it (projections, norms, rotation, scaling) stays the module's own. `hook_check` verifies the
result. If it is wrong, or an MLA has another structure, keys and values are stored, and `components` reports the cost
in a note.
"""

from __future__ import annotations

from functools import partial
from typing import Any, Final

import torch
from torch import nn

from kvscope_engine.model.layers.attention.mla.latents import Latents, latents_of
from kvscope_engine.model.layers.attention_interface import uses_interface

_SIZES: Final = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "layer_idx")


def store_latents(module: nn.Module, attention_name: str) -> None:
    """Make each MLA attention in `module` pass latents to the attention implementation `attention_name`; others get
    keys and values.
    """
    for part in module.modules():
        if latents_of(part) is None and _is_latent(part):
            part.kvscope_latents = Latents(part)  # type: ignore[assignment]
            part.expand_kv = partial(_latents_of, part, attention_name)  # type: ignore[assignment]


def store_expanded(module: nn.Module) -> bool:
    """Undo `store_latents`. Returns whether any module held latents."""
    parts = [part for part in module.modules() if latents_of(part) is not None]
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
    """Return (1, 1, T, latent_dim) and (1, 1, T, rotary_dim) unchanged, or keys and values for another attention."""
    if part.config._attn_implementation == attention_name:
        return latents, rotary
    expanded: tuple[torch.Tensor, torch.Tensor] = type(part).expand_kv(part, latents, rotary)
    return expanded
