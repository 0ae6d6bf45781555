"""Finds MLA attention modules by structure, and changes them to store latents, without expanding keys and values.

In transformers' modules, `expand_kv` converts latents and rotary keys to keys and values; only this method is replaced.
Projections, norms, rotation and scaling of the module stay in use. `hook_check` verifies the result. If it is wrong, or
an MLA module has another structure, keys and values are stored, and `components` reports the memory that this takes.
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
    """Make each MLA attention in `module` pass latents to the attention implementation `attention_name`.

    Other implementations still get keys and values.
    """
    for submodule in module.modules():
        if latents_of(submodule) is None and _is_latent(submodule):
            submodule.kvscope_latents = Latents(submodule)  # type: ignore[assignment]
            submodule.expand_kv = partial(_latents_of, submodule, attention_name)  # type: ignore[assignment]


def store_expanded(module: nn.Module) -> bool:
    """Undo `store_latents`. Returns whether any module stored latents."""
    attentions = [submodule for submodule in module.modules() if latents_of(submodule) is not None]
    for submodule in attentions:
        del submodule.kvscope_latents, submodule.expand_kv
    return bool(attentions)


def _is_latent(submodule: nn.Module) -> bool:
    sizes = [getattr(submodule, name, None) for name in _SIZES]
    projection = getattr(submodule, "kv_b_proj", None)
    if not all(isinstance(size, int) for size in sizes) or type(projection) is not nn.Linear:
        return False
    if not hasattr(type(submodule), "expand_kv") or not uses_interface(type(submodule)) or projection.bias is not None:
        return False
    latent, content, _, value, _ = sizes
    outputs, inputs = projection.weight.shape
    return inputs == latent and outputs % (content + value) == 0


def _latents_of(
    attention: Any, attention_name: str, latents: torch.Tensor, rotary: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return latents (1, 1, T, latent_dim) and rotary keys (1, 1, T, rotary_dim) unchanged if `attention_name` is
    active.

    For another attention implementation, return keys and values.
    """
    if attention.config._attn_implementation == attention_name:
        return latents, rotary
    expanded: tuple[torch.Tensor, torch.Tensor] = type(attention).expand_kv(attention, latents, rotary)
    return expanded
