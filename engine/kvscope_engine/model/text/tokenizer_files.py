"""Reading a model's tokenizer from its folder, and writing it so that the next start reads it fast."""

from __future__ import annotations

import json
import math
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Final

import numpy as np
import tokenizers

from kvscope_engine.model.text.tokenizer import Tokenizer
from kvscope_telemetry.errors import BadInput

SPACE: Final = "\u2581"
"""What SentencePiece writes for a space."""
PIECE_BYTES: Final = 1 << 18
KEEPING: Final = frozenset(("ByteLevel", "Digits", "Metaspace", "Punctuation", "Split", "UnicodeScripts"))
"""Kinds of pre-tokenizers that cut a text and drop nothing of it, unless their `behavior` says so."""
TOKENIZER_FILE: Final = "tokenizer.json"
EXTRAS_FILE: Final = "kvscope_tokenizer.json"
"""Beside a `tokenizer.json` that is exact: special tokens by role, and the chat template."""
_ANY_OF: Final = (TOKENIZER_FILE, "tokenizer.model", "vocab.json", "vocab.txt", "tekken.json", "spiece.model")


def load_tokenizer(folder: Path) -> Tokenizer | None:
    """The tokenizer in `folder`, None when it holds none. Raises BadInput when it cannot be read."""
    if (folder / EXTRAS_FILE).is_file():
        extras = json.loads((folder / EXTRAS_FILE).read_bytes())
        codec = FastCodec.from_file(folder / TOKENIZER_FILE)
        return Tokenizer(codec, extras["special_tokens"], extras["chat_template"])
    if not any((folder / name).is_file() for name in _ANY_OF):
        return None
    from transformers import AutoTokenizer

    try:
        source = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # a external file: transformers raises nearly anything
        line = (str(error).splitlines() or [type(error).__name__])[0]
        raise BadInput(f"the tokenizer in {str(folder)!r} cannot be read: {line:.200}") from error
    return from_transformers(source)


def from_transformers(source: Any) -> Tokenizer:
    """Ours, for one of transformers' tokenizers."""
    codec = FastCodec(source.backend_tokenizer) if source.is_fast else PythonCodec(source)
    template = source.chat_template
    if isinstance(template, dict):
        template = template.get("default")
    return Tokenizer(codec, source.special_tokens_map, template)


def save_tokenizer(source: Any, folder: Path) -> None:
    """Write transformers' tokenizer into `folder`, so that `load_tokenizer` needs no transformers for it."""
    source.save_pretrained(folder)
    if not source.is_fast:
        return
    extras = {"special_tokens": dict(source.special_tokens_map), "chat_template": source.chat_template}
    (folder / EXTRAS_FILE).write_text(json.dumps(extras, ensure_ascii=False), encoding="utf-8")


# The two ways a tokenizer comes: as a `tokenizers` file, or as one of transformers' classes in Python.
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


class FewestTokens:
    """How many tokens a text has at least, by its bytes alone: what is too long for a model is refused before it is
    read.

    Each byte of a text is in exactly one of its tokens. With `longest(b)` the length in bytes of the longest token
    that holds byte b somewhere, a token of n bytes holds only bytes with longest(b) >= n. So its bytes add up to at
    most 1 when each counts 1 / longest(b), and

        tokens >= sum over the text's bytes b of 1 / longest(b)

    Never too high, and a histogram is all that it takes. It holds for tokenizers that leave a text's bytes as they
    are, or change them in ways that are followed here (NFC, spaces written as U+2581); of others nothing is claimed.
    Bytes that the vocabulary cannot write count nothing, nor do spaces where a special token may swallow those
    beside it.

    Of one tokenizer.
    """

    def __init__(self, backend: tokenizers.Tokenizer, *, is_byte_level: bool, has_any_character: bool) -> None:
        normalizers, cutters = _parts(backend.normalizer), _parts(backend.pre_tokenizer)
        kinds = {str(part["type"]) for part in normalizers}
        added = backend.get_added_tokens_decoder().values()
        writes_spaces = any(part["type"] == "Metaspace" for part in cutters) or any(map(_writes_spaces, normalizers))
        self._composes = "NFC" in kinds
        self._writes_spaces = writes_spaces
        self._swallows_spaces = any(token.lstrip or token.rstrip for token in added)
        is_followed = (
            has_any_character
            and all(map(_is_followed, normalizers))
            and all(part["type"] in KEEPING and part.get("behavior") != "Removed" for part in cutters)
            and type(backend.model) in (tokenizers.models.BPE, tokenizers.models.Unigram)
        )
        self._shares = _shares(backend, is_byte_level=is_byte_level) if is_followed else np.zeros(256)

    def __call__(self, text: str, enough: int) -> int:
        """A number that `text` has at least; `enough`, or more, ends the counting."""
        if self._composes and not text.isascii() and not unicodedata.is_normalized("NFC", text):
            text = unicodedata.normalize("NFC", text)
        if self._writes_spaces:
            text = text.replace(SPACE, " ")
        if self._swallows_spaces:
            text = "".join(text.split())
        data = np.frombuffer(text.encode("utf-8", "surrogatepass"), np.uint8)
        total = 0.0
        for start in range(0, len(data), PIECE_BYTES):
            total += float(np.bincount(data[start : start + PIECE_BYTES], minlength=256) @ self._shares)
            if total > enough + 1:
                break
        return math.ceil(total * (1 - 1e-9))  # less than any rounding of sums is off


def _shares(backend: tokenizers.Tokenizer, *, is_byte_level: bool) -> np.ndarray[Any, np.dtype[np.float64]]:
    """For each byte 1 / longest(byte); 0 for those that have no token of their own."""
    longest = np.zeros(256, np.int64)
    has_own = np.zeros(256, bool)
    for token in _token_bytes(backend, is_byte_level=is_byte_level):
        held = list(set(token))
        longest[held] = np.maximum(longest[held], len(token))
        if len(token) == 1:
            has_own[token[0]] = True
    return np.divide(1.0, longest, out=np.zeros(256), where=has_own)


def _token_bytes(backend: tokenizers.Tokenizer, *, is_byte_level: bool) -> Iterator[bytes]:
    letters = _letters() if is_byte_level else {}
    added = backend.get_added_tokens_decoder()
    for text, token_id in backend.get_vocab(with_added_tokens=True).items():
        if token_id in added:
            yield added[token_id].content.encode()
        elif is_byte_level:
            yield b"".join(letters.get(letter) or letter.encode() for letter in text)
        elif len(text) == 6 and text.startswith("<0x") and text.endswith(">"):
            yield bytes.fromhex(text[3:5])
        else:
            yield text.replace(SPACE, " ").encode()


def _letters() -> dict[str, bytes]:
    """GPT-2's letter for each byte: its own where that can be seen, else one from 256 on."""
    own = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in own]
    return {chr(byte): bytes([byte]) for byte in own} | {
        chr(256 + place): bytes([byte]) for place, byte in enumerate(others)
    }


def _parts(component: Any) -> list[dict[str, Any]]:
    """A normalizer or pre-tokenizer as data, sequences taken apart."""
    return [] if component is None else list(_flat(json.loads(component.__getstate__())))


def _flat(part: dict[str, Any]) -> Iterator[dict[str, Any]]:
    if part["type"] != "Sequence":
        yield part
        return
    for inner in part.get("normalizers") or part.get("pretokenizers") or ():
        yield from _flat(inner)


def _writes_spaces(normalizer: dict[str, Any]) -> bool:
    if normalizer["type"] != "Replace":
        return False
    return (normalizer["pattern"], normalizer["content"]) == ({"String": " "}, SPACE)


def _is_followed(normalizer: dict[str, Any]) -> bool:
    return normalizer["type"] in ("NFC", "Prepend", "ByteLevel") or _writes_spaces(normalizer)
