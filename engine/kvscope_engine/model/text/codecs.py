"""The two ways a tokenizer comes: as a `tokenizers` file, or as one of transformers' classes in Python."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers

from kvscope_engine.model.text.fewest_tokens import FewestTokens
from kvscope_telemetry.errors import BadInput


class FastCodec:
    """A `tokenizers.Tokenizer`."""

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        """Padding and truncation that the file asks for are switched off."""
        backend.no_padding()
        backend.no_truncation()
        self._backend = backend

    @classmethod
    def from_file(cls, path: Path) -> FastCodec:
        """The tokenizer in `path`. Raises BadInput when it is none."""
        try:
            return cls(tokenizers.Tokenizer.from_file(str(path)))
        except Exception as error:  # tokenizers raises bare Exception
            raise BadInput(f"{path} is not a tokenizer: {error!s:.200}") from error

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        # Of a batch, because `encode` itself holds the interpreter until it is through: a long text, the whole engine.
        return list(self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids)

    def decode(self, ids: Sequence[int], skip_special_tokens: bool) -> str:
        return str(self._backend.decode(ids, skip_special_tokens=skip_special_tokens))

    def vocabulary(self) -> Mapping[str, int]:
        return dict(self._backend.get_vocab(with_added_tokens=True))

    def special_ids(self) -> frozenset[int]:
        added = self._backend.get_added_tokens_decoder()
        return frozenset(token_id for token_id, token in added.items() if token.special)

    def is_byte_level(self) -> bool:
        return "ByteLevel" in str(self._backend.decoder)

    def has_any_character(self) -> bool:
        """Whether every character has tokens of its own, so that none becomes unknown."""
        parts = f"{self._backend.pre_tokenizer} {self._backend.decoder}"
        return "ByteLevel" in parts or "ByteFallback" in parts

    def fewest_tokens(self, text: str, enough: int) -> int:
        return self._fewest_tokens(text, enough)

    @cached_property
    def _fewest_tokens(self) -> FewestTokens:
        any_character = self.has_any_character()
        return FewestTokens(self._backend, is_byte_level=self.is_byte_level(), has_any_character=any_character)


class PythonCodec:
    """One of transformers' tokenizers that has no `tokenizers` form."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=add_special_tokens))

    def decode(self, ids: Sequence[int], skip_special_tokens: bool) -> str:
        return str(
            self._tokenizer.decode(
                list(ids), skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
            )
        )

    def vocabulary(self) -> Mapping[str, int]:
        return dict(self._tokenizer.get_vocab())

    def special_ids(self) -> frozenset[int]:
        return frozenset(self._tokenizer.all_special_ids)

    def is_byte_level(self) -> bool:
        return "Ġ" in self._tokenizer.get_vocab()

    def fewest_tokens(self, text: str, enough: int) -> int:
        return 0  # what it does with a text is its own code
