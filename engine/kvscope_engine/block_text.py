"""What blocks hold as text, asked for by a person who points at one. Never on the telemetry socket."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from kvscope_telemetry.messages.commands import BlockContent

if TYPE_CHECKING:
    from kvscope_engine.model.text.tokenizer import Tokenizer


def with_text(content: BlockContent, tokenizer: Tokenizer | None) -> BlockContent:
    """The same content with its tokens decoded; a model without a tokenizer has no text."""
    if tokenizer is None or not content.token_ids:
        return content
    return msgspec.structs.replace(content, text=tokenizer.decode(list(content.token_ids)))
