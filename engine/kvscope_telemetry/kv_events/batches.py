"""KV events and batches of them: blocks stored, blocks removed, all blocks cleared.

The types are the same for all publishers, and all hashes are integers (`block_key`). `decoding` and `encoding` convert
them from and to bytes; `event_stream` owns the sockets.
"""

from __future__ import annotations

from typing import Final

import msgspec

HASH_MASK: Final = (1 << 64) - 1

END_SEQ: Final = b"\xff" * 8
"""Bytes that are sent instead of a sequence number to mark the end of a replay."""


class BlockStored(msgspec.Struct, frozen=True, gc=False):
    """Consecutive blocks of one token sequence were stored in the cache. Fields have vLLM's names and order."""

    block_hashes: tuple[int, ...]
    """One hash per block (`block_key`), in token order."""
    parent_block_hash: int | None
    """Hash of the block before the first one; None if the first block starts the token sequence."""
    token_ids: tuple[int, ...]
    """Tokens of all blocks, -1 for an unknown one. There are fewer than `block_size` per block if the publisher omitted
    some.
    """
    block_size: int
    """Tokens per block; 0 in vLLM's events about offloaded blocks, which give no tokens either."""
    lora_id: int | None = None
    medium: str | None = None
    """`GPU`, `CPU`, `STORAGE` (vLLM); `GPU`, `CPU_PINNED`, `DISK`, `EXTERNAL` (SGLang). None means the GPU."""
    lora_name: str | None = None
    extra_keys: bytes | None = None
    """Other inputs of the hashes, one entry per block, still encoded (`decoding.read_extra_keys`)."""
    group_idx: int | None = None
    """Index of the KV cache group, if layers differ in kind. A hash may be stored once in each group."""
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None
    locality: str | None = None
    ownership: str | None = None
    session_id: str | None = None
    lookahead_token_ids: tuple[tuple[int, ...], ...] | None = None
    cache_salt: str | None = None
    """Cache salt as sent by SGLang. vLLM sends it in the extra keys."""


class BlockRemoved(msgspec.Struct, frozen=True, gc=False):
    """Blocks were removed from `medium`. Other media or groups may still have them."""

    block_hashes: tuple[int, ...]
    medium: str | None = None
    group_idx: int | None = None
    locality: str | None = None
    ownership: str | None = None


class AllBlocksCleared(msgspec.Struct, frozen=True, gc=False):
    pass


KvEvent = BlockStored | BlockRemoved | AllBlocksCleared


class EventBatch(msgspec.Struct, frozen=True):
    """Events of one engine step, in order."""

    ts: float
    """Seconds since 1970 on the publisher's clock."""
    events: tuple[KvEvent, ...]
    data_parallel_rank: int | None = None
    num_unknown_events: int = 0
    """Number of skipped events of kinds that this version does not have."""
    num_unknown_fields: int = 0
    """Number of unknown fields of decoded events and of the batch."""
    num_unreadable_events: int = 0
    """Number of events of known kinds that could not be decoded. After one, the cache contents are uncertain."""
    unreadable: str = ""
    """Error of the first event that could not be decoded; empty if there is none."""


def block_key(block_hash: int | bytes) -> int:
    """Convert a hash to the common type: its low 64 bits, unsigned.

    vLLM derives hashes from a digest. It sends an unsigned integer or, if configured so, the digest itself, which ends
    with the 8 bytes of that integer. SGLang sends 64 bits as a signed integer.
    """
    if isinstance(block_hash, bytes):
        return int.from_bytes(block_hash[-8:], "big")
    return block_hash & HASH_MASK
