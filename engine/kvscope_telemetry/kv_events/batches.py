"""The events of a KV events publisher: blocks stored, blocks removed, all cleared; and batches of them.

Owns what these mean to us, whoever sent them and in whichever layout: hashes are of one type. Knows neither bytes nor
sockets: those are `decoding`, `encoding` and `stream`.
"""

from __future__ import annotations

from typing import Final

import msgspec

HASH_MASK: Final = (1 << 64) - 1

END_SEQ: Final = b"\xff" * 8
"""In place of a sequence number: the end of a replay."""


class BlockStored(msgspec.Struct, frozen=True, gc=False):
    """A run of blocks of one text can be found from now on. Fields have vLLM's names, and its order."""

    block_hashes: tuple[int, ...]
    """One a block, in the order of the text; see `block_key`."""
    parent_block_hash: int | None
    """Of the block before the run; None where the run begins a text."""
    token_ids: tuple[int, ...]
    """Of the run; fewer than `block_size` a block where the publisher left some out."""
    block_size: int
    lora_id: int | None = None
    medium: str | None = None
    """`GPU`, `CPU`, `STORAGE` (vLLM); `GPU`, `CPU_PINNED`, `DISK`, `EXTERNAL` (SGLang); None: not said, a GPU's."""
    lora_name: str | None = None
    extra_keys: bytes | None = None
    """What the hashes are of beside tokens, one entry a block, as it came: see `decoding.read_extra_keys`."""
    group_idx: int | None = None
    """Of the KV cache, where layers differ in kind: a hash may be stored once in each group."""
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None
    locality: str | None = None
    ownership: str | None = None
    session_id: str | None = None
    lookahead_token_ids: tuple[tuple[int, ...], ...] | None = None
    cache_salt: str | None = None
    """SGLang's; vLLM has it among the extra keys."""


class BlockRemoved(msgspec.Struct, frozen=True, gc=False):
    """Blocks can no longer be found in `medium`; another medium or group may have them still."""

    block_hashes: tuple[int, ...]
    medium: str | None = None
    group_idx: int | None = None
    locality: str | None = None
    ownership: str | None = None


class AllBlocksCleared(msgspec.Struct, frozen=True, gc=False):
    """Nothing can be found any more."""


KvEvent = BlockStored | BlockRemoved | AllBlocksCleared


class EventBatch(msgspec.Struct, frozen=True):
    """What happened in one step of an engine, in order."""

    ts: float
    """Seconds since 1970 on the publisher's clock."""
    events: tuple[KvEvent, ...]
    data_parallel_rank: int | None = None
    num_unknown_events: int = 0
    """Of kinds that only a later version knows, left out."""
    num_unknown_fields: int = 0
    """Of events that were understood without them, and of the batch."""
    num_unreadable_events: int = 0
    """Of kinds that are known and with content that is not: what is cached is uncertain from here on."""
    unreadable: str = ""
    """What was wrong with the first of them."""


def block_key(block_hash: int | bytes) -> int:
    """The one type of hashes: the low 64 bits, unsigned.

    vLLM sends those of a digest as an unsigned integer or, when asked to, the digest itself, whose last 8 bytes they
    are; SGLang sends 64 bits as a signed one.
    """
    if isinstance(block_hash, bytes):
        return int.from_bytes(block_hash[-8:], "big")
    return block_hash & HASH_MASK
