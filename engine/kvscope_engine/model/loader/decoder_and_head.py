"""Causal language model composed of a decoder and a head, for models that transformers contains only inside a
multimodal model.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

_LOGIT_OPERATIONS: Final[dict[str, Callable[[torch.Tensor, float], torch.Tensor]]] = {
    "final_logit_softcapping": lambda logits, number: torch.tanh(logits / number) * number,
    "logits_scaling": lambda logits, number: logits / number,
    "output_multiplier": lambda logits, number: logits * number,
}


class DecoderAndHead(PreTrainedModel):  # type: ignore[no-untyped-call]
    """Decoder with a head. `attributes` are the config attributes that change the head's logits, such as a softcap."""

    base_model_prefix = "model"

    def __init__(self, decoder: Any, head: nn.Module, attributes: tuple[str, ...] = ()) -> None:
        super().__init__(decoder.config)
        self.model = decoder
        self.lm_head = head
        self._operations = [(attribute, getattr(decoder.config, attribute)) for attribute in attributes]
        self.all_tied_weights_keys: dict[str, str] = {}

    def forward(
        self, input_ids: torch.Tensor, logits_to_keep: int | torch.Tensor = 0, **options: Any
    ) -> CausalLMOutputWithPast:
        """Return the logits of the rows in `logits_to_keep`, or of that many last rows (0 for all), as transformers'
        models do.
        """
        hidden = self.model(input_ids=input_ids, **options)[0]
        rows = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.lm_head(hidden[:, rows, :])
        for attribute, number in self._operations:
            logits = logits if number is None else _LOGIT_OPERATIONS[attribute](logits, number)
        return CausalLMOutputWithPast(logits=logits)

    @classmethod
    def _can_set_attn_implementation(cls) -> bool:
        return True

    @classmethod
    def _can_set_experts_implementation(cls) -> bool:
        return True
