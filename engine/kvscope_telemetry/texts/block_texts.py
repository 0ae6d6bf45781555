"""The texts of blocks in a recording. They are written only where somebody asked for it, because prompts are private.

Owns what is written of a block, as JSON with a schema, and how what was written is found again. Knows no file.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

import msgspec

from kvscope_telemetry.errors import ProtocolError
from kvscope_telemetry.messages.commands import BlockContent
from kvscope_telemetry.messages.sampling_params import SamplingParams

MAX_TEXT_BYTES: Final = 1 << 20
"""Of one block as JSON."""
MAX_KEPT_BYTES: Final = 96 << 20
"""Of texts in memory, about; of longer recordings the newest are kept."""
_OVERHEAD_BYTES: Final = 400


class AskedRequest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """How a request was asked for: with its tokens enough to run it again."""

    request_id: str
    num_prompt_tokens: int
    """Of its `token_ids`; the others are what it said."""
    sampling: SamplingParams
    """With all that the model and the engine put in where nothing was said; of one completion."""
    finish_reason: str = ""
    """As in `Finished`."""
    index: int = 0
    """Which of the completions of its prompt it is."""
    priority: int = 0
    cache_salt: str = ""


class RecordedText(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """The tokens of a block, as they were once it held so many. A block is another with each owner and hash."""

    time_ns: int = 0
    """By the recording's clock: nanoseconds since 1970, up to some seconds after it was so."""
    epoch: int
    block: int
    """Row of the ledger, lower tiers included."""
    owner: int
    """Request that wrote it, by its number."""
    hash: str = ""
    """Of the ledger, 16 hexadecimal digits; empty: it had none yet."""
    number: int = 0
    """Request whose tokens they are."""
    start: int = 0
    """Place of the first of them in the request."""
    token_ids: tuple[int, ...] = ()
    text: str = ""
    notes: tuple[tuple[str, str], ...] = ()
    """What else was told of it: names and values."""
    request: AskedRequest | None = None
    """Given where it is no block's but a request's that ended, all its tokens in one; `block` is -1 then."""

    @property
    def content(self) -> BlockContent:
        """As an engine answers."""
        return BlockContent(
            block=self.block,
            number=self.number,
            start=self.start,
            token_ids=self.token_ids,
            text=self.text,
            notes=self.notes,
        )


@dataclass(frozen=True, slots=True)
class Asked:
    """Which state of a block is meant."""

    epoch: int
    block: int
    owner: int
    filled: int
    hash: int


_decoder: Final = msgspec.json.Decoder(RecordedText)
_encoder: Final = msgspec.json.Encoder()


def encode_text(text: RecordedText) -> bytes:
    """As JSON."""
    return _encoder.encode(text)


def decode_text(data: bytes) -> RecordedText:
    """Raises ProtocolError for what is none."""
    if len(data) > MAX_TEXT_BYTES:
        raise ProtocolError(f"the text of a block of {len(data)} bytes: at most {MAX_TEXT_BYTES} are accepted")
    try:
        return _decoder.decode(data)
    except (msgspec.DecodeError, msgspec.ValidationError, RecursionError) as error:
        raise ProtocolError(f"the text of a block that cannot be read: {error}") from None


def hash_text(block_hash: int) -> str:
    """A ledger's hash as it is written."""
    return f"{block_hash:016x}" if block_hash else ""


class TextIndex:
    """Texts in the order of time, found by block and what it was then."""

    def __init__(self, max_bytes: int = MAX_KEPT_BYTES) -> None:
        self._by_block: defaultdict[int, list[RecordedText]] = defaultdict(list)
        self._by_hash: dict[tuple[int, str], RecordedText] = {}
        self._max_bytes = max_bytes
        self._num_bytes = 0

    def extend(self, texts: Iterable[RecordedText]) -> int:
        """Add more; the time of the newest, -1 where there was none."""
        newest_ns = -1
        for text in texts:
            if text.request is not None:
                continue
            self._by_block[text.block].append(text)
            if text.hash:
                self._by_hash.setdefault((text.epoch, text.hash), text)
            self._num_bytes += _num_bytes(text)
            newest_ns = max(newest_ns, text.time_ns)
            if self._num_bytes > self._max_bytes:
                self._thin_out()
        return newest_ns

    def find(self, asked: Asked, at_ns: int) -> BlockContent | None:
        """What the block held: of one that was filling, as it was soon after `at_ns`, which may be some tokens more.

        A hash names a text wherever it was: a block that moved to another tier holds what it held before.
        """
        if asked.hash:
            same = self._by_hash.get((asked.epoch, hash_text(asked.hash)))
            return None if same is None else same.content
        written = [
            text
            for text in self._by_block.get(asked.block, ())
            if (text.epoch, text.owner) == (asked.epoch, asked.owner)
        ]
        enough = [text for text in written if len(text.token_ids) >= asked.filled]
        if enough:
            return min(enough, key=lambda text: (text.time_ns < at_ns, abs(text.time_ns - at_ns))).content
        before = [text for text in written if text.time_ns <= at_ns]
        return before[-1].content if before else None

    def containing(self, words: str, limit: int) -> list[RecordedText]:
        """The first `limit` texts with `words` in them, whatever their case, each once, in the order of time."""
        needle = words.casefold()
        found: dict[tuple[int, str, int], RecordedText] = {}
        for text in (text for texts in self._by_block.values() for text in texts):
            key = (text.epoch, text.hash, -1) if text.hash else (text.epoch, f"of {text.owner}", text.block)
            if needle in text.text.casefold() and (key not in found or text.time_ns < found[key].time_ns):
                found[key] = text
        full = {(text.epoch, text.block, text.owner) for text in found.values() if text.hash}
        once = (text for text in found.values() if text.hash or (text.epoch, text.block, text.owner) not in full)
        return sorted(once, key=lambda text: text.time_ns)[:limit]

    def _thin_out(self) -> None:
        """The older half of each block's goes."""
        for texts in self._by_block.values():
            gone = texts[: (len(texts) + 1) // 2]
            del texts[: len(gone)]
            for text in gone:
                if self._by_hash.get((text.epoch, text.hash)) is text:
                    del self._by_hash[text.epoch, text.hash]
            self._num_bytes -= sum(_num_bytes(text) for text in gone)


def _num_bytes(text: RecordedText) -> int:
    return _OVERHEAD_BYTES + len(text.text) + 32 * len(text.token_ids)
