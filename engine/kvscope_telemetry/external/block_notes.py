"""What KV events tell of a block beside its tokens, for a person to read: adapter, session, salt, multimodal parts.

These are among what its hash is of, so that equal texts with other notes are other blocks. But for the session: that is
of the request which stored it. Bounded, whatever a publisher sends.
"""

from __future__ import annotations

from typing import Any, Final

from kvscope_telemetry.errors import ProtocolError
from kvscope_telemetry.kv_events.batches import BlockStored
from kvscope_telemetry.kv_events.decoding import read_extra_keys
from kvscope_telemetry.printable import printable

MAX_NOTES: Final = 8
MAX_LETTERS: Final = 80
Notes = tuple[tuple[str, str], ...]
"""Names and values."""
_MSGPACK_NIL: Final = b"\xc0"
_ARRAY_HEAD: Final = 5
"""Bytes before the elements, at most."""


def notes_of(run: BlockStored) -> list[Notes]:
    """Of each block of a run, in order."""
    of_run = _of_run(run)
    count = len(run.block_hashes)
    keys = run.extra_keys
    if keys is None or (len(keys) <= count + _ARRAY_HEAD and keys.endswith(_MSGPACK_NIL * count)):
        return [of_run] * count
    try:
        told = read_extra_keys(keys)
    except ProtocolError:
        return [of_run] * count
    if len(told) != count:
        return [of_run] * count
    return [of_run if not each else (*of_run, *_of_keys(each, run))[:MAX_NOTES] for each in told]


def _of_run(run: BlockStored) -> Notes:
    if run.lora_name is None and run.lora_id is None and run.session_id is None and run.cache_salt is None:
        return ()
    adapter = run.lora_name or ("" if run.lora_id is None else str(run.lora_id))
    pairs = (("LoRA", adapter), ("Session", run.session_id), ("Cache salt", run.cache_salt))
    return tuple([(name, _short(value)) for name, value in pairs if value])


def _of_keys(keys: tuple[Any, ...], run: BlockStored) -> Notes:
    """vLLM tells its keys without their names: a pair is a multimodal part and its place, bytes are a digest of
    embeddings; of words those that are the adapter's name were told already."""
    notes = []
    for key in keys[:MAX_NOTES]:
        if isinstance(key, list | tuple) and len(key) == 2:
            notes.append(("Multimodal part", f"{_short(key[0])}, from token {_short(key[1])} of the block"))
        elif isinstance(key, bytes):
            notes.append(("Embeddings", key.hex()[:MAX_LETTERS]))
        elif key != run.lora_name:
            notes.append(("Cache salt", _short(key)))
    return tuple(notes)


def _short(value: object) -> str:
    return printable(str(value)[:MAX_LETTERS])
