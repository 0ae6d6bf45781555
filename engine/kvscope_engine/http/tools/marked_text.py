"""An answer's text with the marks around calls in it, where these are tokens that its text does not show."""

from __future__ import annotations

from collections.abc import Sequence

from kvscope_engine.http.tools.formats import ToolFormat
from kvscope_engine.model.text.detokenizer import IncrementalDecoder
from kvscope_engine.model.text.tokenizer import Tokenizer
from kvscope_telemetry.messages.commands import Finished, Tokens


class MarkedText:
    """Of one completion: made here from its tokens."""

    def __init__(self, tokenizer: Tokenizer, hidden: frozenset[int]) -> None:
        def decode(ids: Sequence[int]) -> str:
            return tokenizer.decode([token for token in ids if token not in hidden])

        self._decoder = IncrementalDecoder(decode)

    def add(self, said: Tokens | Finished) -> str:
        """What it adds."""
        if isinstance(said, Finished):
            return self._decoder.flush()
        return "".join(map(self._decoder.add, said.token_ids))


def hidden_tokens(tool_format: ToolFormat, tokenizer: Tokenizer) -> frozenset[int] | None:
    """Tokens that stay hidden when the format's marks are shown; None where its marks are text anyway."""
    shown = {token for text, token in tokenizer.special_texts.items() if text and text in tool_format.marks}
    return tokenizer.special_token_ids - shown if shown else None
