"""Computes a lower bound of the number of tokens in a text from its bytes.

Prompts that are too long are thus refused before they are tokenized.
"""

from __future__ import annotations

import json
import math
import unicodedata
from collections.abc import Callable, Iterator
from typing import Any, Final

import numpy as np
import tokenizers

SPACE: Final = "\u2581"
"""Character by which SentencePiece represents a space."""
MAX_NFC_GROWTH: Final = 3
"""Maximum factor by which NFC makes a text longer in UTF-8."""
PIECE_BYTES: Final = 1 << 18
_LOSSLESS_PRE_TOKENIZERS: Final = frozenset(
    ("ByteLevel", "Digits", "Metaspace", "Punctuation", "Split", "UnicodeScripts")
)
"""Types of pre-tokenizers that split a text without dropping any of its characters, unless their `behavior` is
"Removed".
"""


class FewestTokens:
    """Computes a lower bound of the number of tokens in a text, for one tokenizer.

    Each byte of a text is in exactly one of its tokens. Let `longest(b)` be the length in bytes of the longest token
    that contains byte b. A token of n bytes contains only bytes with longest(b) >= n. If each byte counts 1 /
    longest(b), the bytes of one token add up to at most 1, and therefore

        tokens >= sum over the text's bytes b of 1 / longest(b)

    The bound is never too high, and needs only a histogram of the bytes. It holds for tokenizers that keep a text's
    bytes, or change them by NFC or by writing spaces as U+2581, which is taken into account; for others the bound is 0.
    Bytes without a token of their own count 0, and so do spaces if a special token may strip those next to it.
    """

    def __init__(self, backend: tokenizers.Tokenizer, *, is_byte_level: bool, has_any_character: bool) -> None:
        normalizers, pre_tokenizers = _component_configs(backend.normalizer), _component_configs(backend.pre_tokenizer)
        kinds = {str(part["type"]) for part in normalizers}
        added = backend.get_added_tokens_decoder().values()
        writes_spaces = any(part["type"] == "Metaspace" for part in pre_tokenizers) or any(
            map(_writes_spaces, normalizers)
        )
        self._composes = "NFC" in kinds
        self._writes_spaces = writes_spaces
        self._swallows_spaces = any(token.lstrip or token.rstrip for token in added)
        is_bounded = (
            has_any_character
            and all(map(_keeps_bytes, normalizers))
            and all(
                part["type"] in _LOSSLESS_PRE_TOKENIZERS and part.get("behavior") != "Removed"
                for part in pre_tokenizers
            )
            and type(backend.model) in (tokenizers.models.BPE, tokenizers.models.Unigram)
        )
        self._shares = _shares(backend, is_byte_level=is_byte_level) if is_bounded else np.zeros(256)

    def __call__(self, text: str, enough: int) -> int:
        """Return a lower bound of the number of tokens in `text`. Counting stops when the bound exceeds `enough`."""
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
        return math.ceil(total * (1 - 1e-9))  # the margin exceeds the rounding error of the sums


def is_certainly_shorter(text: str, num_tokens: int) -> bool:
    """Whether `text` has so few bytes that it has fewer than `num_tokens` tokens. Every token has a byte."""
    num_bytes = len(text) if text.isascii() else MAX_NFC_GROWTH * len(text.encode("utf-8", "surrogatepass"))
    return num_bytes < num_tokens


def _shares(backend: tokenizers.Tokenizer, *, is_byte_level: bool) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Return 1 / longest(byte) for each byte, shape (256,) float64; 0 for bytes that no single-byte token
    represents.
    """
    shares = np.zeros(256)
    seen: set[int] = set()
    tokens = sorted(_token_bytes(backend, is_byte_level=is_byte_level), key=len, reverse=True)
    for token in tokens:
        if not seen.issuperset(token):
            new = set(token) - seen
            shares[list(new)] = 1 / len(token)
            seen |= new
    own = {token[0] for token in tokens if len(token) == 1}
    shares[[byte for byte in range(256) if byte not in own]] = 0
    return shares


def _token_bytes(backend: tokenizers.Tokenizer, *, is_byte_level: bool) -> Iterator[bytes]:
    to_bytes = _byte_level_bytes() if is_byte_level else _byte_fallback_bytes
    added = backend.get_added_tokens_decoder()
    for text, token_id in backend.get_vocab(with_added_tokens=True).items():
        yield added[token_id].content.encode() if token_id in added else to_bytes(text)


def _byte_fallback_bytes(text: str) -> bytes:
    if len(text) == 6 and text.startswith("<0x") and text.endswith(">"):
        return bytes.fromhex(text[3:5])
    return text.replace(SPACE, " ").encode()


def _byte_level_bytes() -> Callable[[str], bytes]:
    """Return a function from a token's text to its bytes. Characters outside GPT-2's alphabet stand for themselves."""
    letters = _letters()
    as_latin_1 = {ord(letter): byte[0] for letter, byte in letters.items()}
    as_latin_1 |= {code: 0xFFFF for code in range(256) if chr(code) not in letters}  # cannot be encoded

    def to_bytes(text: str) -> bytes:
        try:
            return text.translate(as_latin_1).encode("latin-1")
        except UnicodeEncodeError:
            return b"".join(letters.get(letter) or letter.encode() for letter in text)

    return to_bytes


def _letters() -> dict[str, bytes]:
    """Return a map from each character of GPT-2's byte-level alphabet to the byte that it represents.

    Printable bytes are represented by themselves, the others by the characters from 256 on.
    """
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): bytes([byte]) for byte in printable} | {
        chr(256 + offset): bytes([byte]) for offset, byte in enumerate(others)
    }


def _component_configs(component: Any) -> list[dict[str, Any]]:
    """Return the configuration of a normalizer or pre-tokenizer, with sequences flattened."""
    return [] if component is None else list(_flatten(json.loads(component.__getstate__())))


def _flatten(part: dict[str, Any]) -> Iterator[dict[str, Any]]:
    if part["type"] != "Sequence":
        yield part
        return
    for inner in part.get("normalizers") or part.get("pretokenizers") or ():
        yield from _flatten(inner)


def _writes_spaces(normalizer: dict[str, Any]) -> bool:
    if normalizer["type"] != "Replace":
        return False
    return (normalizer["pattern"], normalizer["content"]) == ({"String": " "}, SPACE)


def _keeps_bytes(normalizer: dict[str, Any]) -> bool:
    return normalizer["type"] in ("NFC", "Prepend", "ByteLevel") or _writes_spaces(normalizer)
