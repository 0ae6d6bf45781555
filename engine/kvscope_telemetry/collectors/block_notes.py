"""Labels of a block from its KV events, for display: adapter, session, cache salt, multimodal parts.

All except the session are part of the block's hash, so equal text with other labels is another block. The session is
that of the request that stored the block. Number and size are bounded, because publishers are not trusted.
"""

from __future__ import annotations

from typing import Any, Final

from kvscope_telemetry.errors import ProtocolError
from kvscope_telemetry.kv_events.batches import BlockStored
from kvscope_telemetry.kv_events.decoding import read_extra_keys
from kvscope_telemetry.printable import printable

MAX_NOTES: Final = 8
MAX_CHARACTERS: Final = 80
Notes = tuple[tuple[str, str], ...]
"""Description of a block for display: pairs of name and value."""
_MSGPACK_NIL: Final = b"\xc0"
_ARRAY_HEAD: Final = 5
"""Maximum number of bytes of a MessagePack array's header, which precedes its elements."""


def notes_of(run: BlockStored) -> list[Notes]:
    run_notes = _run_notes(run)
    count = len(run.block_hashes)
    keys = run.extra_keys
    if keys is None or (len(keys) <= count + _ARRAY_HEAD and keys.endswith(_MSGPACK_NIL * count)):
        return [run_notes] * count
    try:
        extra_keys = read_extra_keys(keys)
    except ProtocolError:
        return [run_notes] * count
    if len(extra_keys) != count:
        return [run_notes] * count
    return [
        run_notes if not block_keys else (*run_notes, *_key_notes(block_keys, run))[:MAX_NOTES]
        for block_keys in extra_keys
    ]


def _run_notes(run: BlockStored) -> Notes:
    if run.lora_name is None and run.lora_id is None and run.session_id is None and run.cache_salt is None:
        return ()
    adapter = run.lora_name or ("" if run.lora_id is None else str(run.lora_id))
    pairs = (("LoRA", adapter), ("Session", run.session_id), ("Cache salt", run.cache_salt))
    return tuple([(name, _short(value)) for name, value in pairs if value])


def _key_notes(keys: tuple[Any, ...], run: BlockStored) -> Notes:
    """Return the description of a block that its extra keys in vLLM's KV event give. Extra keys have no names; the type
    of a key tells its meaning.

    A pair is a multimodal part and its position, and bytes are a hash of prompt embeddings. A string is the adapter's
    name, which the event contains separately, or a cache salt.
    """
    notes = []
    for key in keys[:MAX_NOTES]:
        if isinstance(key, list | tuple) and len(key) == 2:
            notes.append(("Multimodal part", f"{_short(key[0])}, from token {_short(key[1])} of the block"))
        elif isinstance(key, bytes):
            notes.append(("Embeddings", key.hex()[:MAX_CHARACTERS]))
        elif key != run.lora_name:
            notes.append(("Cache salt", _short(key)))
    return tuple(notes)


def _short(value: object) -> str:
    return printable(str(value)[:MAX_CHARACTERS])
