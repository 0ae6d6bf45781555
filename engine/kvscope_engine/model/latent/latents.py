"""What a layer makes of its latents: keys and values of its heads, or queries that meet latents as they are.

With c the latent of a token and W the layer's `kv_b_proj`, of which head h has rows W_K and W_V, a head's key is
(W_K c, r) with the rotary key r that all heads share, and its value W_V c. So q . key = (W_K^T q_c) . c + q_r . r, and
a weighted sum of values is W_V times that of the latents: attention over latents alone, which all heads share.
Owns these products; knows no blocks. Weights are read where they lie at each call, since they may be streamed.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


class Latents:
    """Of one attention module with `kv_b_proj`."""

    def __init__(self, attention: Any) -> None:
        self._attention = attention
        self.latent_dim = int(attention.kv_lora_rank)
        self.rotary_dim = int(attention.qk_rope_head_dim)
        self.content_dim = int(attention.qk_nope_head_dim)
        """Of a query and a key, what is not rotated."""
        self.value_dim = int(attention.v_head_dim)
        self.num_heads: int = attention.kv_b_proj.weight.shape[0] // (self.content_dim + self.value_dim)

    @property
    def stored_dim(self) -> int:
        """Numbers a token: its latent, then its rotary key."""
        return self.latent_dim + self.rotary_dim

    @property
    def key_dim(self) -> int:
        """Of an expanded key."""
        return self.content_dim + self.rotary_dim

    def absorb(self, query: torch.Tensor) -> torch.Tensor:
        """Queries (T, H, key_dim) -> (T, H, stored_dim), to be multiplied with what is stored."""
        count = query.shape[0]
        content, rotary = torch.split(query, (self.content_dim, self.rotary_dim), dim=-1)
        moved = torch.bmm(content.transpose(0, 1), self._keys())
        out = query.new_empty(count, self.num_heads, self.stored_dim)
        out[..., : self.latent_dim].copy_(moved.transpose(0, 1))
        out[..., self.latent_dim :].copy_(rotary)
        return out

    def values(self, attended: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """Weighted sums of latents (T, H, latent_dim) -> (T, H, value_dim) of values, in `out` if given."""
        found = torch.bmm(attended.transpose(0, 1), self._values().transpose(1, 2)).transpose(0, 1)
        return found if out is None else out.copy_(found)

    def expand(self, stored: torch.Tensor, first: int = 0, count: int | None = None) -> tuple[torch.Tensor, ...]:
        """Keys (n, heads, key_dim) and values (n, heads, value_dim) of what is stored, (n, stored_dim).

        Of `count` heads from `first` on. Values are a view with a contiguous last axis.
        """
        heads = slice(first, self.num_heads if count is None else first + count)
        latent, rotary = torch.split(stored, (self.latent_dim, self.rotary_dim), dim=-1)
        weight = self._weight()[heads]
        both = torch.mm(latent, weight.flatten(0, 1).t()).view(len(stored), *weight.shape[:2])
        keys = both.new_empty(*both.shape[:2], self.key_dim)
        keys[..., : self.content_dim].copy_(both[..., : self.content_dim])
        keys[..., self.content_dim :].copy_(rotary[:, None])
        return keys, both[..., self.content_dim :]

    def _weight(self) -> torch.Tensor:
        """(H, content_dim + value_dim, latent_dim)"""
        weight: torch.Tensor = self._attention.kv_b_proj.weight
        return weight.view(self.num_heads, self.content_dim + self.value_dim, self.latent_dim)

    def _keys(self) -> torch.Tensor:
        return self._weight()[:, : self.content_dim]

    def _values(self) -> torch.Tensor:
        return self._weight()[:, self.content_dim :]


def held_latents(attention: nn.Module) -> Latents | None:
    """What `hold` put on a module; None where its cache holds keys and values."""
    found: Latents | None = getattr(attention, "kvscope_latents", None)
    return found
