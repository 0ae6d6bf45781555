"""Index of the full blocks by chained digests of their text, as in vLLM's prefix cache.

A block's digest is `sha256(parent digest + its token ids as little-endian int32 + extra)`, so it identifies the whole
text up to and including the block. The chain starts from a random salt of this engine, so that the 64-bit hashes that
telemetry publishes cannot be guessed or compared between engines. The extra consists of the key of the LoRA adapter and
the client's cache salt. It is part of the first block only, since all later digests depend on the first.

Owns the mapping from digest to block and the contents of hashed blocks. Independent of reference counts and requests.
"""

from __future__ import annotations

import hashlib
import secrets
import struct
from collections.abc import Sequence
from functools import lru_cache
from typing import Final

import msgspec

SALT_BYTES: Final = 32
DIGEST_BYTES: Final = hashlib.sha256().digest_size
_ADAPTER_KEY_TAG: Final = b"\xff"
"""First byte before an adapter's key. No salt starts with this byte, since it is not valid in UTF-8."""


def published_hash(digest: bytes) -> int:
    """Return the low 64 bits of a digest as the ledger publishes them; never 0, which means "not hashed".

    The hashes of equal blocks differ between KV groups.
    """
    return int.from_bytes(digest[-8:], "big") or 1


class Prefix(msgspec.Struct, frozen=True, gc=False):
    """Contents of a hashed block: `tokens` (little-endian int32) from position `start` of its text.

    There is one instance per cached block; `gc=False` exempts up to a million of them from garbage collection.
    """

    digest: bytes
    """Digest of the text up to the end of the block, followed by the number of the KV group if it is not 0
    (`group_digest`).
    """
    start: int
    tokens: bytes
    parent: bytes = b""
    """Digest of the previous block in the text, with the KV group as in `digest`; empty for the first block."""
    salt: str = ""
    """Client's cache salt, part of the digest of a text's first block; empty in later blocks."""
    adapter: str = ""
    """Name of the LoRA adapter that the block was computed with, for display; set in every block."""
    adapter_key: bytes = b""
    """`Adapter.key`, part of the digest of a text's first block."""

    @property
    def group(self) -> int:
        return self.digest[DIGEST_BYTES] if len(self.digest) > DIGEST_BYTES else 0

    @property
    def predecessor_key(self) -> bytes:
        """Key shared by the blocks that may follow the same text.

        It is the parent's digest or, for a first block, the bytes that its digest contains for adapter and salt.
        """
        return self.parent or first_extra(self.salt, self.adapter_key)

    @property
    def published_parent(self) -> int:
        """Published hash of the previous block; 0 for the first block of a text."""
        return published_hash(self.parent) if self.parent else 0

    @property
    def token_ids(self) -> tuple[int, ...]:
        return struct.unpack(f"<{len(self.tokens) // 4}i", self.tokens)


class PrefixIndex:
    """One-to-one mapping between full blocks and the digests of the text up to their end."""

    def __init__(self, block_size: int, salt: bytes | None = None) -> None:
        self._block_size = block_size
        self._root = hashlib.sha256(secrets.token_bytes(SALT_BYTES) if salt is None else salt).digest()
        self._block_of: dict[bytes, int] = {}
        self._prefix_of: dict[int, Prefix] = {}

    def __len__(self) -> int:
        return len(self._block_of)

    def block_digest(self, parent: bytes | None, tokens: bytes, extra: bytes = b"") -> bytes:
        """Return the digest of a block of packed `tokens`.

        `parent` is the digest of the previous block, or None for the first block of a text. `extra` separates texts
        that must not share blocks although their tokens are equal.
        """
        return hashlib.sha256((parent or self._root) + tokens + extra).digest()

    def extend(self, digests: list[bytes], token_ids: Sequence[int], salt: str = "", adapter_key: bytes = b"") -> None:
        """Append the missing digests of the full blocks of `token_ids` to `digests`, which contains the digests of the
        first blocks already.

        `salt` and `adapter_key` become part of the first block's digest, so that texts that differ in them share no
        blocks.
        """
        size = 4 * self._block_size
        packed = pack_tokens(token_ids)
        parent = digests[-1] if digests else None
        for low in range(0, len(packed) - size + 1, size):
            extra = first_extra(salt, adapter_key) if parent is None else b""
            parent = self.block_digest(parent, packed[low : low + size], extra)
            digests.append(parent)

    def insert(self, block: int, prefix: Prefix) -> bool:
        """Add a full block. Returns False, and does nothing, if another block has the same digest."""
        if self._block_of.setdefault(prefix.digest, block) != block:
            return False
        self._prefix_of[block] = prefix
        return True

    def remove(self, block: int) -> Prefix:
        """Remove a block, which must be in the index. Returns its prefix."""
        prefix = self._prefix_of.pop(block)
        del self._block_of[prefix.digest]
        return prefix

    def get(self, digest: bytes) -> int | None:
        return self._block_of.get(digest)

    def clear(self) -> list[int]:
        blocks = list(self._prefix_of)
        self._prefix_of.clear()
        self._block_of.clear()
        return blocks

    def prefix(self, block: int) -> Prefix | None:
        return self._prefix_of.get(block)

    def items(self) -> list[tuple[int, Prefix]]:
        """Return every (block, prefix). Raises AssertionError if the mappings from digest to block and from
        block to prefix disagree.
        """
        assert len(self._block_of) == len(self._prefix_of), (
            f"the prefix index has {len(self._block_of)} digests for {len(self._prefix_of)} blocks"
        )
        for block, prefix in self._prefix_of.items():
            indexed_block = self._block_of.get(prefix.digest)
            assert indexed_block == block, (
                f"the digest of block {block} leads to block {indexed_block} in the prefix index"
            )
        return list(self._prefix_of.items())


def first_extra(salt: str, adapter_key: bytes) -> bytes:
    """Return the bytes that adapter and salt add to the digest of a text's first block; empty if the text has
    neither.
    """
    return (_ADAPTER_KEY_TAG + adapter_key if adapter_key else b"") + salt.encode()


def pack_tokens(token_ids: Sequence[int]) -> bytes:
    """Return token ids as little-endian int32."""
    return _tokens_struct(len(token_ids)).pack(*token_ids)


@lru_cache(maxsize=64)
def _tokens_struct(count: int) -> struct.Struct:
    return struct.Struct(f"<{count}i")
