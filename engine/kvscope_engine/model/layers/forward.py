"""Calling the model on a flattened batch. Owns how transformers' classes are to be called, nothing of a step."""

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
    """A model on (T,) token ids and positions."""

    def __init__(self, module: nn.Module) -> None:
        self._module: Any = module
        self._output_type: Any = None
        self._keeps_rows = "logits_to_keep" in inspect.signature(module.forward).parameters

    def parts(self) -> Iterator[nn.Module]:
        """All modules that it is made of."""
        modules: Iterator[nn.Module] = self._module.modules()
        return modules

    def logits(
        self, ids: torch.Tensor, positions: torch.Tensor, paged: AttentionContext, rows: torch.Tensor | None = None
    ) -> torch.Tensor:
        """(R, vocabulary) of the given rows of the batch; None gives all T."""
        own = own_forward(self._module)
        if own is not None:
            return own.run(ids, paged, rows)
        kept = {"logits_to_keep": rows} if rows is not None and self._keeps_rows else {}
        output = self._module(input_ids=ids[None], position_ids=positions[None], use_cache=False, paged=paged, **kept)
        logits: torch.Tensor = output.logits[0]
        return logits if rows is None or self._keeps_rows else logits[rows]

    def fill(self, ids: torch.Tensor, positions: torch.Tensor, paged: AttentionContext) -> None:
        """Write keys and values; without the head, since nothing else is wanted."""
        own = own_forward(self._module)
        if own is not None:
            own.run(ids, paged, ids[:0])
            return
        self._module.base_model(input_ids=ids[None], position_ids=positions[None], use_cache=False, paged=paged)

    def hidden(self, ids: torch.Tensor, positions: torch.Tensor, paged: AttentionContext) -> torch.Tensor:
        """(T, hidden) that the head is given. Raises RuntimeError where the model does not tell it."""
        base = self._module.base_model
        output = base(input_ids=ids[None], position_ids=positions[None], use_cache=False, paged=paged)
        hidden = getattr(output, "last_hidden_state", None)
        if hidden is None or base is self._module:
            raise RuntimeError(f"{type(self._module).__name__} keeps what its head is given to itself")
        self._output_type = type(output)
        return hidden[0]  # type: ignore[no-any-return]

    def logits_of(self, hidden: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """(R, vocabulary) of the given rows of what `hidden` gave; the model's own words around its head included."""
        with _answering(self._module.base_model, self._output_type(last_hidden_state=hidden[rows][None])):
            logits: torch.Tensor = self._module(input_ids=rows[None], use_cache=False).logits[0]
        return logits


@contextmanager
def _answering(module: Any, answer: object) -> Iterator[None]:
    """`module` gives `answer`, whatever it is called with."""
    own = module.__dict__.get("forward")
    module.forward = lambda *_, **__: answer
    try:
        yield
    finally:
        if own is None:
            del module.forward
        else:
            module.forward = own
