"""Calling the model on a flattened batch. Owns how transformers' classes are to be called, nothing of a step."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import nn

from kvscope_engine.model.running.attention import AttentionContext


class Forward:
    """A model on (T,) token ids and positions."""

    def __init__(self, module: nn.Module) -> None:
        self._module: Any = module
        self._keeps_rows = "logits_to_keep" in inspect.signature(module.forward).parameters

    def logits(
        self, ids: torch.Tensor, positions: torch.Tensor, paged: AttentionContext, rows: torch.Tensor | None = None
    ) -> torch.Tensor:
        """(R, vocabulary) of the given rows of the batch; None gives all T."""
        kept = {"logits_to_keep": rows} if rows is not None and self._keeps_rows else {}
        output = self._module(input_ids=ids[None], position_ids=positions[None], use_cache=False, paged=paged, **kept)
        logits: torch.Tensor = output.logits[0]
        return logits if rows is None or self._keeps_rows else logits[rows]

    def fill(self, ids: torch.Tensor, positions: torch.Tensor, paged: AttentionContext) -> None:
        """Write keys and values; without the head, since nothing else is wanted."""
        self._module.base_model(input_ids=ids[None], position_ids=positions[None], use_cache=False, paged=paged)
