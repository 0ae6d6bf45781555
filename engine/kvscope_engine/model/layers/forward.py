"""Run the model on a flattened batch.

Owns how transformers' model classes are called. Does not know requests or how a step was scheduled.
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
    """Callable wrapper of a model; its inputs are token ids and positions of shape (T,)."""

    def __init__(self, module: nn.Module) -> None:
        self._module: Any = module
        self._output_type: Any = None
        self._keeps_rows = "logits_to_keep" in inspect.signature(module.forward).parameters

    def parts(self) -> Iterator[nn.Module]:
        """Iterate over all submodules of the model, itself included."""
        modules: Iterator[nn.Module] = self._module.modules()
        return modules

    def logits(
        self, ids: torch.Tensor, positions: torch.Tensor, paged: AttentionContext, rows: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return logits (R, vocabulary) for `rows` of the batch, or for all T rows if `rows` is None."""
        own = own_forward(self._module)
        if own is not None:
            return own.run(ids, paged, rows)
        kept = {"logits_to_keep": rows} if rows is not None and self._keeps_rows else {}
        output = self._module(input_ids=ids[None], position_ids=positions[None], use_cache=False, paged=paged, **kept)
        logits: torch.Tensor = output.logits[0]
        return logits if rows is None or self._keeps_rows else logits[rows]

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

        Calls the whole model with its decoder stubbed out, so that scaling or softcapping around the head is applied
        too.
        """
        with _answering(self._module.base_model, self._output_type(last_hidden_state=hidden[rows][None])):
            logits: torch.Tensor = self._module(input_ids=rows[None], use_cache=False).logits[0]
        return logits


@contextmanager
def _answering(module: Any, answer: object) -> Iterator[None]:
    """Make calls of `module` return `answer` inside the context, whatever the arguments."""
    own = module.__dict__.get("forward")
    module.forward = lambda *_, **__: answer
    try:
        yield
    finally:
        if own is None:
            del module.forward
        else:
            module.forward = own
