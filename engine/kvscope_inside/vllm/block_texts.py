"""Hashes of vLLM's blocks as the ledger has them, and what they depend on beside tokens: adapter, salt, media.

Reads of vLLM's requests only what never changes again, or only grows.
"""

from __future__ import annotations

from typing import Any, Final

from kvscope_inside.cached_texts import BlockNotes

_U8: Final = (1 << 64) - 1
_GROUP_MIX: Final = 0x9E3779B97F4A7C15
"""Keeps apart the hashes that several KV groups have for one text."""


def key_of(request: Any) -> tuple[str, str]:
    """The adapter and the salt that its blocks' hashes are of beside its tokens."""
    adapter = getattr(request, "lora_request", None)
    return "" if adapter is None else str(adapter.lora_name), str(getattr(request, "cache_salt", None) or "")


def notes_of(request: Any, start: int, count: int) -> BlockNotes:
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
