"""Wire format of KV events in MessagePack: maps since vLLM 0.24 and SGLang 0.5.23, arrays with fixed positions before.

Defines names, positions and types of the fields of both layouts. An absent field is UNSET, which differs from None, so
that unknown fields can be counted.
"""

from __future__ import annotations

from typing import Annotated, Any, Final

import msgspec
from msgspec import UNSET, Meta, UnsetType

MAX_BATCH_BYTES: Final = 16 << 20
"""Maximum size of a batch in bytes. A million tokens with their hashes fit, which is more than in any step."""
MAX_EVENTS: Final = 1 << 18
MAX_TEXT: Final = 4096
"""Maximum length of a name in characters."""

BlockHash = int | bytes
Token = Annotated[int, Meta(ge=-1, le=(1 << 31) - 1)]
"""Token id, or -1 for a token that the publisher does not know (vllm-rbln)."""
Count = Annotated[int, Meta(ge=0, le=(1 << 31) - 1)]
Name = Annotated[str, Meta(max_length=MAX_TEXT)]


class Metadata(msgspec.Struct, gc=False):
    """Seventh field of a stored block in SGLang 0.5.18, in the position where vLLM sends the adapter's name."""

    cache_salt: Name | None = None


class _Stored(msgspec.Struct, gc=False):
    """Fields of a stored block. The first eleven have the positions of vLLM 0.23's array."""

    block_hashes: tuple[BlockHash, ...]
    parent_block_hash: BlockHash | None
    token_ids: tuple[Token, ...]
    block_size: Count
    lora_id: int | UnsetType | None = UNSET
    medium: Name | UnsetType | None = UNSET
    lora_name: Name | Metadata | UnsetType | None = UNSET
    extra_keys: msgspec.Raw | UnsetType = UNSET
    group_idx: Count | UnsetType | None = UNSET
    kv_cache_spec_kind: Name | UnsetType | None = UNSET
    kv_cache_spec_sliding_window: int | UnsetType | None = UNSET
    locality: Name | UnsetType | None = UNSET
    ownership: Name | UnsetType | None = UNSET
    session_id: Name | UnsetType | None = UNSET
    lookahead_token_ids: tuple[tuple[Token, ...], ...] | UnsetType | None = UNSET
    cache_salt: Name | UnsetType | None = UNSET


class _StoredPairs(_Stored, gc=False):
    """Stored block of SGLang with speculative decoding, which sends each token with the next one."""

    token_ids: tuple[tuple[Token, Token], ...]  # type: ignore[assignment]


class _Removed(msgspec.Struct, gc=False):
    block_hashes: tuple[BlockHash, ...]
    medium: Name | UnsetType | None = UNSET
    group_idx: Count | UnsetType | None = UNSET
    locality: Name | UnsetType | None = UNSET
    ownership: Name | UnsetType | None = UNSET


class StoredMap(_Stored, gc=False, tag="BlockStored"):
    """Map whose first entry is `"type": "BlockStored"`."""


class StoredPairsMap(_StoredPairs, gc=False, tag="BlockStored"): ...


class RemovedMap(_Removed, gc=False, tag="BlockRemoved"): ...


class ClearedMap(msgspec.Struct, gc=False, tag="AllBlocksCleared"): ...


class StoredArray(_Stored, gc=False, tag="BlockStored", array_like=True):
    """Array whose first element is `"BlockStored"`."""


class StoredPairsArray(_StoredPairs, gc=False, tag="BlockStored", array_like=True): ...


class RemovedArray(_Removed, gc=False, tag="BlockRemoved", array_like=True): ...


class ClearedArray(msgspec.Struct, gc=False, tag="AllBlocksCleared", array_like=True): ...


class BatchArray(msgspec.Struct, gc=False, array_like=True):
    """A batch of events, which is an array in every version. Its events are decoded separately, so that an
    unreadable event can be skipped.
    """

    ts: float
    events: Annotated[list[msgspec.Raw], Meta(max_length=MAX_EVENTS)]
    data_parallel_rank: Count | None = None


class HeadMap(msgspec.Struct, gc=False):
    """Decodes only the type of an event that is encoded as a map."""

    type: Annotated[str, Meta(max_length=MAX_TEXT)]


class HeadArray(msgspec.Struct, gc=False, array_like=True):
    """Decodes only the type of an event that is encoded as an array."""

    type: Annotated[str, Meta(max_length=MAX_TEXT)]


KNOWN_TYPES: Final = frozenset(("BlockStored", "BlockRemoved", "AllBlocksCleared"))
ExtraKeys = tuple[tuple[Any, ...] | None, ...]
