"""Text to token ids and back, of whoever knows the model's tokens: a folder on this machine, the server, or nobody.

Where nobody does, a word of a story counts as a token: lengths are then about right, and the report says so.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol

import msgspec

from kvscope_engine.bench.workloads import sample_text
from kvscope_engine.model.fetching.cache_folder import cache_folder
from kvscope_engine.model.fetching.checksum import remembered_sha256
from kvscope_engine.model.fetching.default_model import DEFAULT_GGUF_SHA256
from kvscope_engine.model.fetching.names import ModelName
from kvscope_engine.model.gguf.entries import entry_of
from kvscope_engine.model.text.tokenizer_files import load_tokenizer
from kvscope_telemetry.errors import BadInput, KvscopeError
from kvscope_telemetry.foreign.address import ForeignAddress
from kvscope_telemetry.foreign.http_get import HttpGet, NoAnswer


class Codec(Protocol):
    """Without special tokens, but for the number of those that a server puts before a prompt."""

    name: str
    num_special: int
    """Tokens that a prompt gets beside its own."""
    is_exact: bool
    """Whether these are the model's own tokens."""

    def encode(self, text: str) -> list[int]:
        """Ids of a text."""

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids."""


class Words:
    """A word is a token: for servers whose tokens nobody here knows."""

    name = "words, for nobody tells the server's"
    num_special = 0
    is_exact = False

    def __init__(self) -> None:
        self._words = sorted(set(sample_text().split()))
        self._ids = {word: number for number, word in enumerate(self._words)}

    def encode(self, text: str) -> list[int]:
        """Ids of words that are known; others count as the first."""
        return [self._ids.get(word, 0) for word in text.split()]

    def decode(self, ids: Sequence[int]) -> str:
        """With a space between words."""
        return " ".join(self._words[number] for number in ids)


class FolderCodec:
    """Of a tokenizer's files on this machine. Raises BadInput where there is none."""

    is_exact = True

    def __init__(self, folder: Path, name: str = "") -> None:
        try:
            found = load_tokenizer(folder)
        except (KvscopeError, OSError, ValueError) as error:
            raise BadInput(f"--tokenizer {str(folder)!r} is not accepted: {error}") from None
        if found is None:
            raise BadInput(f"--tokenizer {str(folder)!r} is not accepted: a folder with a tokenizer.json")
        self._tokenizer = found
        self.name = name or str(folder)
        self.num_special = len(found.encode("a")) - len(found.encode("a", add_special_tokens=False))

    def encode(self, text: str) -> list[int]:
        """Ids of a text."""
        return self._tokenizer.encode(text, add_special_tokens=False)

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids."""
        return self._tokenizer.decode(ids)


@dataclass(frozen=True, slots=True)
class _Dialect:
    """How a server is asked: fields of the question, and where the text of an answer is."""

    asked: str
    specials: str
    told: str


DTYPES: Final = ("bfloat16", "float16", "float32")
"""Of the weights that our engine makes of a .gguf file; the tokenizer beside them is the same."""
_DIALECTS: Final = (_Dialect("prompt", "add_special_tokens", "prompt"), _Dialect("content", "add_special", "content"))
"""Of vLLM, SGLang and ours; of llama.cpp's own server."""


class ServerCodec:
    """What the server says under /tokenize and /detokenize. Raises NoAnswer where it says nothing of the kind."""

    name = "the server's tokenizer"
    is_exact = True

    def __init__(self, address: ForeignAddress, model: str) -> None:
        self._http, self._model = HttpGet(address), model
        self._dialect = self._found()
        self.num_special = len(self._ids("a", True)) - len(self._ids("a", False))

    def encode(self, text: str) -> list[int]:
        """Ids of a text."""
        return self._ids(text, False)

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids."""
        text = self._ask("/detokenize", {"tokens": list(ids)}).get(self._dialect.told)
        if not isinstance(text, str):
            raise NoAnswer("the server's /detokenize tells no text")
        return text

    def _found(self) -> _Dialect:
        for dialect in _DIALECTS:
            self._dialect = dialect
            try:
                if self.decode(self._ids("a word", False)).strip() == "a word":
                    return dialect
            except NoAnswer:
                pass
        raise NoAnswer("the server reports no tokens")

    def _ids(self, text: str, specials: bool) -> list[int]:
        tokens = self._ask("/tokenize", {self._dialect.asked: text, self._dialect.specials: specials}).get("tokens")
        if not isinstance(tokens, list) or not all(isinstance(token, int) for token in tokens):
            raise NoAnswer("the server's /tokenize tells no tokens")
        return tokens

    def _ask(self, path: str, fields: dict[str, Any]) -> dict[str, Any]:
        names = {"model": self._model} if self._dialect is _DIALECTS[0] else {}
        _, body = self._http.get(path, msgspec.json.encode(names | fields))
        try:
            return msgspec.json.decode(body, type=dict[str, Any])
        except (msgspec.DecodeError, UnicodeError, RecursionError):
            raise NoAnswer(f"the server's {path} tells no tokens") from None


def codec_of(address: ForeignAddress, served: str, model: ModelName | None) -> Codec:
    """The best there is for a server that runs: of the files of `model`, of the server, or words."""
    if model is not None and (known := tokenizer_folder(model)) is not None:
        return FolderCodec(known, "the model's own tokenizer")
    try:
        return ServerCodec(address, served)
    except NoAnswer:
        return Words()


def tokenizer_folder(model: ModelName) -> Path | None:
    """Where the tokenizer of a model lies on this machine once our engine has loaded it; None where it does not."""
    if model.kind in ("default", "gguf"):
        sha256 = DEFAULT_GGUF_SHA256
        if model.kind == "gguf":
            sha256 = remembered_sha256(model.path, cache_folder() / "stamps")
        return next((entry for dtype in DTYPES if (entry := entry_of(sha256, dtype)).is_dir()), None)
    return model.path if model.kind == "folder" else None
