"""Block hashes of vLLM in the ledger's format, and the adapter, cache salt and media that they depend on.

Reads of vLLM's requests only what never changes again, or only grows.
"""

from __future__ import annotations

from typing import Any, Final

from kvscope_inside.cached_texts import BlockNotes

_U8: Final = (1 << 64) - 1
_GROUP_MIX: Final = 0x9E3779B97F4A7C15
"""Distinguishes the hashes of the same text in different KV groups."""


def key_of(request: Any) -> tuple[str, str]:
    """Return the adapter and the cache salt, which are part of the hashes of the request's blocks."""
    adapter = getattr(request, "lora_request", None)
    return "" if adapter is None else str(adapter.lora_name), str(getattr(request, "cache_salt", None) or "")


def notes_of(request: Any, start: int, count: int) -> BlockNotes:
    """Return facts about `count` tokens from `start` on: adapter, salt, and the images and audio that they
    represent.
    """
    adapter, salt = key_of(request)
    notes = [(name, words) for name, words in (("LoRA", adapter), ("Cache salt", salt)) if words]
    for part in getattr(request, "mm_features", None) or ():
        begin = part.mm_position.offset
        end = begin + part.mm_position.length
        if begin < start + count and start < end:
            notes.append((str(part.modality).capitalize(), f"tokens {begin} to {end - 1} of the prompt"))
    return tuple(notes)


def low_bits(value: Any, group: int) -> int:
    """Return the low 64 bits of a block's hash, mixed with its KV group; never 0."""
    number = value if isinstance(value, int) else int.from_bytes(value, "big")
    return (number & _U8) ^ (group * _GROUP_MIX & _U8) or 1


def hash_of_row(value: Any) -> int:
    """Return the ledger's hash of a block in vLLM's pool; 0 without one.

    vLLM's hash ends with the group's number in four bytes.
    """
    return 0 if value is None else low_bits(value[:-4], int.from_bytes(value[-4:], "big"))
