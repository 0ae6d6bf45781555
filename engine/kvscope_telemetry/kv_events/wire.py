"""KV events as they lie in msgpack: maps since vLLM 0.24 and SGLang 0.5.23, arrays with fixed places before.

Owns names, places and types of the fields of both layouts. A field that is not there is UNSET, which is not None: so
fields that nobody here knows can be counted.
"""

from __future__ import annotations

from typing import Annotated, Any, Final

import msgspec
from msgspec import UNSET, Meta, UnsetType

MAX_BATCH_BYTES: Final = 16 << 20
"""A million tokens with their hashes; more is a mistake, not a step."""
MAX_EVENTS: Final = 1 << 18
"""Of one batch."""
MAX_TEXT: Final = 4096
"""Characters of a name."""

BlockHash = int | bytes
Token = Annotated[int, Meta(ge=0, le=(1 << 31) - 1)]
Count = Annotated[int, Meta(ge=0, le=(1 << 31) - 1)]
Name = Annotated[str, Meta(max_length=MAX_TEXT)]


class Metadata(msgspec.Struct, gc=False):
    """SGLang 0.5.18's seventh field of a stored block, where vLLM has the adapter's name."""

    cache_salt: Name | None = None


class _Stored(msgspec.Struct, gc=False):
    """The first eleven are also the places of vLLM 0.23's array."""

    block_hashes: tuple[BlockHash, ...]
    parent_block_hash: BlockHash | None
    token_ids: tuple[Token, ...]
    block_size: Annotated[int, Meta(ge=1, le=(1 << 31) - 1)]
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
    """SGLang under speculative decoding: a token is sent with the one after it."""

    token_ids: tuple[tuple[Token, Token], ...]  # type: ignore[assignment]


class _Removed(msgspec.Struct, gc=False):
    block_hashes: tuple[BlockHash, ...]
    medium: Name | UnsetType | None = UNSET
    group_idx: Count | UnsetType | None = UNSET
    locality: Name | UnsetType | None = UNSET
    ownership: Name | UnsetType | None = UNSET


class StoredMap(_Stored, gc=False, tag="BlockStored"):
    """A map, `"type": "BlockStored"` first."""


class StoredPairsMap(_StoredPairs, gc=False, tag="BlockStored"):
    """A map with pairs of tokens."""


class RemovedMap(_Removed, gc=False, tag="BlockRemoved"):
    """A map."""


class ClearedMap(msgspec.Struct, gc=False, tag="AllBlocksCleared"):
    """A map of nothing but its type."""


class StoredArray(_Stored, gc=False, tag="BlockStored", array_like=True):
    """An array, `"BlockStored"` first."""


class StoredPairsArray(_StoredPairs, gc=False, tag="BlockStored", array_like=True):
    """An array with pairs of tokens."""


class RemovedArray(_Removed, gc=False, tag="BlockRemoved", array_like=True):
    """An array."""


class ClearedArray(msgspec.Struct, gc=False, tag="AllBlocksCleared", array_like=True):
    """An array of nothing but its name."""


class BatchArray(msgspec.Struct, gc=False, array_like=True):
    """A batch is an array in every version; events are read one by one, so that one can be left out."""

    ts: float
    events: Annotated[list[msgspec.Raw], Meta(max_length=MAX_EVENTS)]
    data_parallel_rank: Count | None = None


class HeadMap(msgspec.Struct, gc=False):
    """What names an event of any kind."""

    type: Annotated[str, Meta(max_length=MAX_TEXT)]


class HeadArray(msgspec.Struct, gc=False, array_like=True):
    """What names an event of any kind."""

    type: Annotated[str, Meta(max_length=MAX_TEXT)]


KNOWN_TYPES: Final = frozenset(("BlockStored", "BlockRemoved", "AllBlocksCleared"))
ExtraKeys = tuple[tuple[Any, ...] | None, ...]
