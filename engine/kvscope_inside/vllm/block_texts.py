"""What a block of vLLM's holds: its hash as the ledger has it, and the text that the hash is of.

Reads of vLLM's requests only what never changes again, or only grows.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from typing import Any, Final

_U8: Final = (1 << 64) - 1
_GROUP_MIX: Final = 0x9E3779B97F4A7C15
"""Keeps apart the hashes that several KV groups have for one text."""
Notes = tuple[tuple[str, str], ...]
"""Of a block beside its tokens: names and values."""


@dataclass(slots=True)
class BlockText:
    """What a cached block holds."""

    number: int
    """Of the request that it was written for."""
    start: int
    """Where in that one's text it begins."""
    token_ids: array[int]
    key: tuple[str, str]
    """The adapter and the salt that its hash is of as well."""
    notes: Notes


def text_of(request: Any, number: int, start: int, count: int) -> BlockText:
    """Of `count` tokens of a request from `start` on."""
    tokens = array("i", request.all_token_ids[start : start + count])
    return BlockText(number, start, tokens, key_of(request), notes_of(request, start, count))


def key_of(request: Any) -> tuple[str, str]:
    """The adapter and the salt that its blocks' hashes are of beside its tokens."""
    adapter = getattr(request, "lora_request", None)
    return "" if adapter is None else str(adapter.lora_name), str(getattr(request, "cache_salt", None) or "")


def notes_of(request: Any, start: int, count: int) -> Notes:
    """Of `count` tokens of its text from `start` on: adapter, salt, and the images and sounds that they stand for."""
    adapter, salt = key_of(request)
    notes = [(name, words) for name, words in (("LoRA", adapter), ("Cache salt", salt)) if words]
    for part in getattr(request, "mm_features", None) or ():
        begin = part.mm_position.offset
        end = begin + part.mm_position.length
        if begin < start + count and start < end:
            notes.append((str(part.modality).capitalize(), f"tokens {begin} to {end - 1} of the prompt"))
    return tuple(notes)


def low_bits(value: Any, group: int) -> int:
    """Of a block's hash as many bits as the ledger has, never 0; others in each KV group."""
    number = value if isinstance(value, int) else int.from_bytes(value, "big")
    return (number & _U8) ^ (group * _GROUP_MIX & _U8) or 1


def hash_of_row(value: Any) -> int:
    """Of a row of vLLM's pool, whose hash has the group's number in its last four bytes; 0: it has none."""
    return 0 if value is None else low_bits(value[:-4], int.from_bytes(value[-4:], "big"))
