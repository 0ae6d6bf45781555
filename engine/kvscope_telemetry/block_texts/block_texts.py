"""Schema and index of the texts of KV blocks in a recording. Texts are recorded only if the user requests it, because
prompts are private.

Owns the JSON schema of a recorded text, and the index that finds the text of a block at a given time. Does no file I/O.
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
MAX_CACHED_BYTES: Final = 96 << 20
"""Approximate memory limit of the texts in a `TextIndex`, in bytes. Above it, the oldest texts of each block
are dropped.
"""
_OVERHEAD_BYTES: Final = 400


class RecordedRequestParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """Parameters of a recorded request. Together with the tokens they suffice to run the request again."""

    request_id: str
    num_prompt_tokens: int
    """Number of prompt tokens, which are the first entries of `RecordedText.token_ids`; the following ones are
    output tokens.
    """
    sampling: SamplingParams
    """Sampling parameters of this completion, with the defaults of the model and the engine filled in."""
    finish_reason: str = ""
    index: int = 0
    priority: int = 0
    cache_salt: str = ""


class RecordedText(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """The tokens that a block held at one time, or all tokens of a finished request.

    A block is identified by its index, owner and hash: after reuse for another request it counts as a different block.
    """

    time_ns: int = 0
    """Time in nanoseconds since 1970, by the recording's clock; may be some seconds too late."""
    epoch: int
    block: int
    """Ledger row of the block, in the pool or a lower tier; -1 for the text of a request."""
    owner: int
    """Number of the request that wrote the block."""
    hash: str = ""
    """Block hash as 16 hexadecimal digits; empty if the block had no hash yet."""
    number: int = 0
    """Number of the request whose text contains `token_ids` from position `start` on. For a block shared by
    several requests, it may differ from `owner`.
    """
    start: int = 0
    token_ids: tuple[int, ...] = ()
    text: str = ""
    notes: tuple[tuple[str, str], ...] = ()
    request: RecordedRequestParams | None = None
    """Parameters of the request if this is the text of a finished request (all its tokens); None for a block's text."""

    @property
    def content(self) -> BlockContent:
        """This text as a `BlockContent`, as in an engine's reply to `GetBlockText`."""
        return BlockContent(
            block=self.block,
            number=self.number,
            start=self.start,
            token_ids=self.token_ids,
            text=self.text,
            notes=self.notes,
        )


@dataclass(frozen=True, slots=True)
class BlockTextLookup:
    epoch: int
    block: int
    owner: int
    filled: int
    hash: int


_decoder: Final = msgspec.json.Decoder(RecordedText)
_encoder: Final = msgspec.json.Encoder()


def encode_text(text: RecordedText) -> bytes:
    return _encoder.encode(text)


def decode_text(data: bytes) -> RecordedText:
    if len(data) > MAX_TEXT_BYTES:
        raise ProtocolError(f"the text of a block of {len(data)} bytes: at most {MAX_TEXT_BYTES} are accepted")
    try:
        return _decoder.decode(data)
    except (msgspec.DecodeError, msgspec.ValidationError, RecursionError) as error:
        raise ProtocolError(f"the text of a block that cannot be read: {error}") from None


def hash_text(block_hash: int) -> str:
    """Format a ledger hash as 16 hexadecimal digits; empty for 0 (no hash)."""
    return f"{block_hash:016x}" if block_hash else ""


class TextIndex:
    """Index of recorded texts of blocks. Texts must be added in order of time. `find` finds the text of a block
    by the block's hash or, if it has none, by its index, owner and time.
    """

    def __init__(self, max_bytes: int = MAX_CACHED_BYTES) -> None:
        self._by_block: defaultdict[int, list[RecordedText]] = defaultdict(list)
        self._by_hash: dict[tuple[int, str], RecordedText] = {}
        self._max_bytes = max_bytes
        self._num_bytes = 0

    def extend(self, texts: Iterable[RecordedText]) -> int:
        """Add block texts; texts of requests are skipped. Returns the latest time among the added texts, or -1
        if none was added.
        """
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

    def find(self, lookup: BlockTextLookup, at_ns: int) -> BlockContent | None:
        """Return the content of a block at `at_ns`, or None if it is not known.

        A block with a hash is found by the hash alone, because moving to another tier does not change its content. For
        a block that was still being filled, the result is the text nearest in time with at least `lookup.filled`
        tokens, preferably at or after `at_ns`, and may have a few tokens more. If no text has that many tokens, the
        result is the latest text before `at_ns`.
        """
        if lookup.hash:
            full_block_text = self._by_hash.get((lookup.epoch, hash_text(lookup.hash)))
            return None if full_block_text is None else full_block_text.content
        texts = [
            text
            for text in self._by_block.get(lookup.block, ())
            if (text.epoch, text.owner) == (lookup.epoch, lookup.owner)
        ]
        enough = [text for text in texts if len(text.token_ids) >= lookup.filled]
        if enough:
            return min(enough, key=lambda text: (text.time_ns < at_ns, abs(text.time_ns - at_ns))).content
        earlier = [text for text in texts if text.time_ns <= at_ns]
        return earlier[-1].content if earlier else None

    def search(self, query: str, limit: int) -> list[RecordedText]:
        """Return the `limit` earliest texts that contain `query` (case-insensitive), without duplicates, in
        order of time.
        """
        needle = query.casefold()
        found: dict[tuple[int, str, int], RecordedText] = {}
        for text in (text for texts in self._by_block.values() for text in texts):
            key = (text.epoch, text.hash, -1) if text.hash else (text.epoch, f"of {text.owner}", text.block)
            if needle in text.text.casefold() and (key not in found or text.time_ns < found[key].time_ns):
                found[key] = text
        full = {(text.epoch, text.block, text.owner) for text in found.values() if text.hash}
        once = (text for text in found.values() if text.hash or (text.epoch, text.block, text.owner) not in full)
        return sorted(once, key=lambda text: text.time_ns)[:limit]

    def _thin_out(self) -> None:
        for texts in self._by_block.values():
            dropped = texts[: (len(texts) + 1) // 2]
            del texts[: len(dropped)]
            for text in dropped:
                if self._by_hash.get((text.epoch, text.hash)) is text:
                    del self._by_hash[text.epoch, text.hash]
            self._num_bytes -= sum(_num_bytes(text) for text in dropped)


def _num_bytes(text: RecordedText) -> int:
    return _OVERHEAD_BYTES + len(text.text) + 32 * len(text.token_ids)
