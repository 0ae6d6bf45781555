"""Converts block hashes of vLLM to the ledger's format, and reads the adapter, cache salt and media that they depend
on.

Reads only attributes of vLLM's requests that are immutable or append-only.
"""

from __future__ import annotations

from typing import Any, Final

from kvscope_inside.cached_texts import BlockNotes

_U8: Final = (1 << 64) - 1
_GROUP_MIX: Final = 0x9E3779B97F4A7C15
"""Constant that is multiplied by the KV group's number and XORed with hashes, so that the hashes of the same
text differ between KV groups.
"""


def key_of(request: Any) -> tuple[str, str]:
    adapter = getattr(request, "lora_request", None)
    return "" if adapter is None else str(adapter.lora_name), str(getattr(request, "cache_salt", None) or "")


def notes_of(request: Any, start: int, count: int) -> BlockNotes:
    """Return pairs of name and value that describe `count` tokens from position `start` on: adapter, cache
    salt, and images or audio.
    """
    adapter, salt = key_of(request)
    notes = [(name, value) for name, value in (("LoRA", adapter), ("Cache salt", salt)) if value]
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
    """Return the ledger's hash for a block hash of vLLM's pool, whose last four bytes are the KV group; 0 for None."""
    return 0 if value is None else low_bits(value[:-4], int.from_bytes(value[-4:], "big"))
