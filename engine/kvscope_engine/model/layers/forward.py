"""Calls transformers' models on a flattened batch, including models that run their own forward code.

Must not depend on requests or scheduling.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from kvscope_engine.model.layers.attention.paged_attention import AttentionContext
from kvscope_engine.model.layers.own_forward import own_forward


class Forward:
    """Calls a model on a flattened batch. Inputs are token ids and positions of shape (T,)."""

    def __init__(self, module: nn.Module) -> None:
        self._module: Any = module
        self._output_type: Any = None
        self._accepts_logits_to_keep = "logits_to_keep" in inspect.signature(module.forward).parameters

    def parts(self) -> Iterator[nn.Module]:
        modules: Iterator[nn.Module] = self._module.modules()
        return modules

    def logits(
        self, ids: torch.Tensor, positions: torch.Tensor, paged: AttentionContext, rows: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return logits (R, vocabulary) for `rows` of the batch, or for all T rows if `rows` is None."""
        own = own_forward(self._module)
        if own is not None:
            return own.run(ids, paged, rows)
        keywords = {"logits_to_keep": rows} if rows is not None and self._accepts_logits_to_keep else {}
        output = self._module(
            input_ids=ids[None], position_ids=positions[None], use_cache=False, paged=paged, **keywords
        )
        logits: torch.Tensor = output.logits[0]
        return logits if rows is None or self._accepts_logits_to_keep else logits[rows]

    def fill(self, ids: torch.Tensor, positions: torch.Tensor, paged: AttentionContext) -> None:
        """Run the decoder without the LM head, only to write keys and values."""
        own = own_forward(self._module)
        if own is not None:
            own.run(ids, paged, ids[:0])
            return
        self._module.base_model(input_ids=ids[None], position_ids=positions[None], use_cache=False, paged=paged)

    def hidden(self, ids: torch.Tensor, positions: torch.Tensor, paged: AttentionContext) -> torch.Tensor:
        """Return the hidden states (T, hidden) that are the input of the LM head.

        Raises RuntimeError if the model does not expose them.
        """
        base = self._module.base_model
        output = base(input_ids=ids[None], position_ids=positions[None], use_cache=False, paged=paged)
        hidden = getattr(output, "last_hidden_state", None)
        if hidden is None or base is self._module:
            raise RuntimeError(f"{type(self._module).__name__} keeps what its head is given to itself")
        self._output_type = type(output)
        return hidden[0]  # type: ignore[no-any-return]

    def logits_of(self, hidden: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """Return logits (R, vocabulary) of `rows` of the hidden states that `hidden` returned.

        Calls the whole model with a stub in place of its decoder, so that scaling or softcapping around the head is
        applied.
        """
        with _returning(self._module.base_model, self._output_type(last_hidden_state=hidden[rows][None])):
            logits: torch.Tensor = self._module(input_ids=rows[None], use_cache=False).logits[0]
        return logits


@contextmanager
def _returning(module: Any, result: object) -> Iterator[None]:
    """Return a context in which calls of `module` return `result` for any arguments."""
    original_forward = module.__dict__.get("forward")
    module.forward = lambda *_, **__: result
    try:
        yield
    finally:
        if original_forward is None:
            del module.forward
        else:
            module.forward = original_forward
