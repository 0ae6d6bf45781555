"""LM head of a 16-bit model with logits in float32: in 16 bits, the logits of the most likely tokens would tie.

Decides how the float32 logits are computed. A GPU returns the float32 accumulators of the matmul. On a CPU, the
matmul's result is rounded to 16 bits, so logits near the largest one are recomputed. Must not depend on sampling or the
rest of the model.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import nn
from torch.nn import functional

from kvscope_engine.model.layers.fused.packed_linear import PackedLinear, can_pack
from kvscope_engine.model.quantization.stored_weight import concatenate_stored_weight_readers
from kvscope_kernels import ops_for
from kvscope_kernels.linear.skinny_linear import FewRows

LOW_PRECISION: Final = (torch.bfloat16, torch.float16)
NEAR_LOGITS: Final = 8.0
"""Distance from a row's largest logit within which a CPU recomputes logits exactly.

Logits of other tokens stay rounded to 16 bits; each of these tokens is at least e^8 (3,000) times less likely than the
best token.
"""
MAX_NEAR: Final = 2048
"""Maximum number of tokens of a row whose logits are recomputed individually. With more tokens near the largest logit,
the whole row is recomputed.
"""
PART_TOKENS: Final = 1024
"""Number of tokens whose weights are converted to float32 at a time, small enough for a core's cache."""


class Float32Head(nn.Module):
    """LM head: `x @ weight.T + bias` in float32 from weights and inputs of 16 bits."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.weight = weight
        self.bias = None if bias is None else nn.Parameter(bias.detach().float(), requires_grad=False)
        self._packed = PackedLinear(weight, None) if can_pack(weight.dtype, weight.device) else None
        self.few_rows: FewRows | None = None
        """Implementation of matmuls with few rows; see `skinny_linear.linear`."""
        self._ops = ops_for(weight.device.type)
        self.tile_rows = 0
        """Number of rows per matmul on a CPU, so that a row's result does not depend on other rows; 0 to compute all
        rows together.
        """
        self._has_float32_product = weight.device.type != "cpu" and has_float32_product(weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map (..., in_features) to (..., out_features), float32."""
        rows = x.reshape(-1, self.in_features)
        logits = self._on_cpu(rows) if x.device.type == "cpu" else self._on_gpu(rows)
        if self.bias is not None:
            logits += self.bias
        return logits.view(*x.shape[:-1], self.out_features)

    def _on_gpu(self, rows: torch.Tensor) -> torch.Tensor:
        if not self._has_float32_product:
            return functional.linear(rows, self.weight).float()
        return self._ops.linear(rows, self.weight, dtype=torch.float32, few_rows=self.few_rows)

    def _on_cpu(self, rows: torch.Tensor) -> torch.Tensor:
        logits = self._product(rows).float()
        limits = logits.amax(-1, keepdim=True).sub_(NEAR_LOGITS)
        near = logits >= limits
        large_rows = [
            row for row, count in enumerate(near.sum(-1).tolist()) if self._refine(row, count, rows, near, logits)
        ]
        rows_at_once = 1 if self.tile_rows else max(len(large_rows), 1)
        for start in range(0, len(large_rows), rows_at_once):
            self._compute_whole(large_rows[start : start + rows_at_once], rows, logits)
        return logits

    def _product(self, rows: torch.Tensor) -> torch.Tensor:
        count = len(rows)
        if self.tile_rows:
            rows = functional.pad(rows, (0, 0, 0, -count % self.tile_rows))
        tiles = torch.split(rows, self.tile_rows) if self.tile_rows else (rows,)
        products = [self._packed(t) if self._packed is not None else functional.linear(t, self.weight) for t in tiles]
        return products[0][:count] if len(products) == 1 else torch.cat(products)[:count]

    def _refine(self, row: int, count: int, rows: torch.Tensor, near: torch.Tensor, logits: torch.Tensor) -> bool:
        """Recompute the logits near the maximum of a row. Returns True, without recomputing, if more than `MAX_NEAR`
        are near.
        """
        if count > MAX_NEAR:
            return True
        tokens = near[row].nonzero()[:, 0]
        logits[row, tokens] = self.weight[tokens].float() @ rows[row].float()
        return False

    def _compute_whole(self, row_indices: list[int], rows: torch.Tensor, logits: torch.Tensor) -> None:
        indices = torch.tensor(row_indices)
        exact = rows[indices].float()
        for start in range(0, self.out_features, PART_TOKENS):
            part = self.weight[start : start + PART_TOKENS].float()
            logits[indices, start : start + PART_TOKENS] = exact @ part.t()


def use_float32_logits(module: nn.Module) -> bool:
    """Replace the LM head of a 16-bit model, in place. Returns whether it had a plain linear head.

    Must be called before linear layers are packed, because packing releases the head's plain weights.
    """
    model: Any = module
    head = model.get_output_embeddings()
    if type(head) is not nn.Linear or head.weight.dtype not in LOW_PRECISION:
        return False
    float32_head = Float32Head(head.weight, head.bias)
    concatenate_stored_weight_readers([head], float32_head)
    model.set_output_embeddings(float32_head)
    return model.get_output_embeddings() is not head


def has_float32_product(weight: torch.Tensor) -> bool:
    """Whether this torch version can return the float32 accumulators of a 16-bit matmul, tested on one row."""
    try:
        torch.mm(weight[:1], weight[:1].t(), out_dtype=torch.float32)
    except (RuntimeError, NotImplementedError, TypeError):
        return False
    return True
