"""A causal language model of a decoder and a head, for those that transformers has inside of a larger model alone."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast


class DecoderAndHead(PreTrainedModel):  # type: ignore[no-untyped-call]
    """Logits are what the head gives, and nothing else."""

    base_model_prefix = "model"

    def __init__(self, decoder: Any, head: nn.Module) -> None:
        super().__init__(decoder.config)
        self.model = decoder
        self.lm_head = head
        self.all_tied_weights_keys: dict[str, str] = {}

    def forward(
        self, input_ids: torch.Tensor, logits_to_keep: int | torch.Tensor = 0, **options: Any
    ) -> CausalLMOutputWithPast:
        """Logits of the rows that `logits_to_keep` names, or of its last ones, as transformers' classes do."""
        hidden = self.model(input_ids=input_ids, **options)[0]
        rows = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        return CausalLMOutputWithPast(logits=self.lm_head(hidden[:, rows, :]))

    @classmethod
    def _can_set_attn_implementation(cls) -> bool:
        return True

    @classmethod
    def _can_set_experts_implementation(cls) -> bool:
        return True
