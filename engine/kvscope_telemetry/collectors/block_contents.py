"""Returns the tokens of cached blocks, and their text if the tokenizer is on this machine.

Downloads nothing and queries no server, because a monitor must not contact other hosts on its own.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Final

from kvscope_telemetry.collectors.block_tokens import BlockTokens
from kvscope_telemetry.messages.commands import BlockContent

FILE_NAME: Final = "tokenizer.json"
MAX_FILE_BYTES: Final = 64 << 20
Decode = Callable[[tuple[int, ...]], str]


class BlockContents:
    """Returns block contents by ledger row. Thread-safe. The tokenizer is loaded on the first call.

    `hash_in` returns the hash of the block in a ledger row, or 0.
    """

    def __init__(self, tokens: BlockTokens, hash_in: Callable[[int], int], tokenizer: str = "") -> None:
        self._tokens = tokens
        self._hash_in = hash_in
        self._tokenizer = tokenizer
        self._decoders: dict[str, Decode] = {}

    def of_rows(self, rows: Iterable[int], model: str) -> tuple[BlockContent, ...]:
        """Return block contents in the order of `rows`. An empty row, or a block with unknown tokens, has no tokens."""
        name = self._tokenizer or model
        decode = self._decoders.get(name)
        if decode is None:
            decode = self._decoders[name] = decoder_of(name)
        return tuple([self._content(row, decode) for row in rows])

    def _content(self, row: int, decode: Decode) -> BlockContent:
        block_hash = self._hash_in(row)
        stored = self._tokens.get(block_hash)
        if stored is None:
            return BlockContent(block=row)
        start, token_ids = stored
        notes = self._tokens.notes(block_hash)
        return BlockContent(block=row, start=start, token_ids=token_ids, text=decode(token_ids), notes=notes)


def decoder_of(name: str) -> Decode:
    """Return a function that decodes with the tokenizer `name`, or formats token ids as numbers if there is none.

    `name` is a file, a directory, or a model in this machine's Hugging Face cache.
    """
    path = next(_paths(name), None)
    tokenizer = None if path is None else _read(path)
    if tokenizer is None:
        return _format_ids

    def decode(token_ids: tuple[int, ...]) -> str:
        try:
            return str(tokenizer.decode(list(token_ids), skip_special_tokens=False))
        except (OverflowError, TypeError, ValueError):
            return _format_ids(token_ids)

    return decode


def _format_ids(token_ids: tuple[int, ...]) -> str:
    return " ".join(map(str, token_ids))


def _paths(name: str) -> Iterator[Path]:
    """Yield existing paths of the file `tokenizer.json` for `name`, most likely first."""
    if not name or "\0" in name:
        return
    named_path = Path(name).expanduser()
    folder = f"models--{name.replace('/', '--')}"
    cached_paths = (
        sorted((_hub_folder() / folder / "snapshots").glob(f"*/{FILE_NAME}"), reverse=True) if ".." not in name else []
    )
    for path in (named_path, named_path / FILE_NAME, *cached_paths):
        if path.is_file():
            yield path


def _hub_folder() -> Path:
    home = os.environ.get("HF_HOME") or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "huggingface"
    return Path(os.environ.get("HF_HUB_CACHE") or Path(home) / "hub").expanduser()


def _read(path: Path) -> Any:
    """Load a tokenizer file; None if it cannot be read, is too large, or the `tokenizers` library is not installed."""
    try:
        from tokenizers import Tokenizer  # an optional dependency, and slow to import

        return Tokenizer.from_file(str(path)) if path.stat().st_size <= MAX_FILE_BYTES else None
    except Exception:  # the library raises Exception itself for a malformed file
        return None
