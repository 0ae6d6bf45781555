"""Matmuls between latents and an MLA layer's heads: expanded keys and values, or absorbed queries.

With c the latent of a token and W the layer's `kv_b_proj`, of which head h has rows W_K and W_V, a head's key is (W_K
c, r) with the rotary key r that all heads share, and its value W_V c. So q . key = (W_K^T q_c) . c + q_r . r, and a
weighted sum of values is W_V times that of the latents: attention over latents alone, which all heads share.

Must not depend on blocks. Weights are read from the module at each call, since they may be streamed.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


class Latents:
    """Dimensions of an MLA attention module with `kv_b_proj`, and matmuls of its heads with latents."""

    def __init__(self, attention: Any) -> None:
        self._attention = attention
        self.latent_dim = int(attention.kv_lora_rank)
        self.rotary_dim = int(attention.qk_rope_head_dim)
        self.content_dim = int(attention.qk_nope_head_dim)
        """Dimension of the part of queries and keys that is not rotated."""
        self.value_dim = int(attention.v_head_dim)
        self.num_heads: int = attention.kv_b_proj.weight.shape[0] // (self.content_dim + self.value_dim)

    @property
    def stored_dim(self) -> int:
        """Number of elements stored per token: the latent, then the rotary key."""
        return self.latent_dim + self.rotary_dim

    @property
    def key_dim(self) -> int:
        """Number of elements of a head's key after expansion."""
        return self.content_dim + self.rotary_dim

    @property
    def expanded_dim(self) -> int:
        """Head dimension of a cache with expanded keys and values, stored with equal width."""
        return max(self.key_dim, self.value_dim)

    def absorb(self, query: torch.Tensor) -> torch.Tensor:
        """Convert queries (T, H, key_dim) to (T, H, stored_dim). Their dot product with the stored data is the
        attention score.
        """
        content, rotary = torch.split(query, [self.content_dim, self.rotary_dim], dim=-1)
        absorbed = torch.bmm(content.transpose(0, 1), self._keys())
        out = query.new_empty(query.shape[0], self.num_heads, self.stored_dim)
        out[..., : self.latent_dim].copy_(absorbed.transpose(0, 1))
        out[..., self.latent_dim :].copy_(rotary)
        return out

    def values(self, attended: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """Convert weighted sums of latents (T, H, latent_dim) to values (T, H, value_dim), in `out` if given."""
        values = torch.bmm(attended.transpose(0, 1), self._values()).transpose(0, 1)
        return values if out is None else out.copy_(values)

    def expand(
        self, stored: torch.Tensor, first: int = 0, count: int | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return keys (n, count, key_dim) and values (n, count, value_dim) of stored data (n, stored_dim).

        Args:
            first: First head to expand.
            count: Number of heads; None for all heads.
        """
        heads = slice(first, self.num_heads if count is None else first + count)
        latent, rotary = torch.split(stored, [self.latent_dim, self.rotary_dim], dim=-1)
        key_weights, value_weights = self._keys()[heads], self._values()[heads]
        keys = stored.new_empty(len(stored), len(key_weights), self.key_dim)
        content = torch.mm(latent, key_weights.reshape(-1, self.latent_dim).t())
        keys[..., : self.content_dim].copy_(content.view(*keys.shape[:2], -1))
        keys[..., self.content_dim :].copy_(rotary[:, None])
        values = torch.mm(latent, value_weights.transpose(0, 1).reshape(self.latent_dim, -1))
        return keys, values.view(*keys.shape[:2], -1)

    def _keys(self) -> torch.Tensor:
        """Return the key rows of `kv_b_proj`, (H, content_dim, latent_dim)."""
        projection = self._attention.kv_b_proj
        if isinstance(projection, SplitProjection):
            return projection.keys
        return self._by_head(projection.weight)[:, : self.content_dim]

    def _values(self) -> torch.Tensor:
        """Return the value rows of `kv_b_proj`, transposed: (H, latent_dim, value_dim)."""
        projection = self._attention.kv_b_proj
        if isinstance(projection, SplitProjection):
            return projection.values
        return self._by_head(projection.weight)[:, self.content_dim :].transpose(1, 2)

    def _by_head(self, weight: torch.Tensor) -> torch.Tensor:
        return weight.view(self.num_heads, self.content_dim + self.value_dim, self.latent_dim)

    def split(self) -> None:
        """Replace `kv_b_proj` by a `SplitProjection`."""
        self._attention.kv_b_proj = SplitProjection(self._keys(), self._values())


class SplitProjection(nn.Module):
    """Key and value rows of `kv_b_proj` as two contiguous tensors.

    On a CPU, the 16-bit matmul for values then takes a tenth of the time.
    """

    def __init__(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        super().__init__()
        self.keys = nn.Parameter(keys.detach().clone(memory_format=torch.contiguous_format), requires_grad=False)
        self.values = nn.Parameter(values.detach().clone(memory_format=torch.contiguous_format), requires_grad=False)


def latents_of(attention: nn.Module) -> Latents | None:
    """Return the `Latents` that `store_latents` attached to a module; None if its cache stores keys and values."""
    latents: Latents | None = getattr(attention, "kvscope_latents", None)
    return latents
