"""Which block holds which prefix: chained digests of full blocks, as in vLLM's prefix cache.

A block's digest is `sha256(parent digest + its token ids as little-endian int32 + extra)`, so it names the
whole text up to and with the block. The chain starts from a random salt of this engine, which keeps the
64-bit hashes that telemetry publishes from being guessed or compared between engines. The extra is the key of the LoRA
adapter and what a client calls its cache salt, in the first block alone: all that follow it differ by their parents.

Owns digest -> block and what a hashed block holds. Knows neither reference counts nor who uses a block.
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
_KEYED: Final = b"\xff"
"""Before an adapter's key: no salt, which is a text, begins so."""


def published_hash(digest: bytes) -> int:
    """The low 64 bits of a digest, others in each KV group, as the ledger shows them; never 0: that is not hashed."""
    return int.from_bytes(digest[-8:], "big") or 1


class Prefix(msgspec.Struct, frozen=True, gc=False):
    """What a hashed block holds: `tokens` (little-endian int32) from position `start` of its text.

    There is one a cached block: `gc=False` keeps a million of them out of the garbage collector's way.
    """

    digest: bytes
    """With the number of its KV group behind it (`group_digest`), as `parent`."""
    start: int
    tokens: bytes
    parent: bytes = b""
    """Digest of the block before it in its text, empty for the first."""
    salt: str = ""
    """A client's own, in the digest of a first block."""
    adapter: str = ""
    """The LoRA adapter that it was computed with, by name; of every block, for people."""
    adapter_key: bytes = b""
    """Its `Adapter.key`, in the digest of a first block."""

    @property
    def group(self) -> int:
        """Its KV group."""
        return self.digest[DIGEST_BYTES] if len(self.digest) > DIGEST_BYTES else 0

    @property
    def follows(self) -> bytes:
        """What it comes after: the block before it, or the beginning of all texts of its adapter and salt."""
        return self.parent or first_extra(self.salt, self.adapter_key)

    @property
    def published_parent(self) -> int:
        """The hash of the block before it, as the ledger shows it; 0 for the first of its text."""
        return published_hash(self.parent) if self.parent else 0

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The token ids of the block."""
        return struct.unpack(f"<{len(self.tokens) // 4}i", self.tokens)


class PrefixIndex:
    """Full blocks by the digest of the text they end. One block a digest, one digest a block."""

    def __init__(self, block_size: int, salt: bytes | None = None) -> None:
        self._block_size = block_size
        self._root = hashlib.sha256(secrets.token_bytes(SALT_BYTES) if salt is None else salt).digest()
        self._block_of: dict[bytes, int] = {}
        self._prefix_of: dict[int, Prefix] = {}

    def __len__(self) -> int:
        return len(self._block_of)

    def digest(self, parent: bytes | None, tokens: bytes, extra: bytes = b"") -> bytes:
        """The digest of a block of `tokens` after `parent` (None: first of its text).

        `extra` tells apart texts that must not share blocks although their tokens are the same.
        """
        return hashlib.sha256((parent or self._root) + tokens + extra).digest()

    def extend(self, digests: list[bytes], token_ids: Sequence[int], salt: str = "", adapter_key: bytes = b"") -> None:
        """Append to `digests` those of the full blocks of `token_ids`, which follow the ones there.

        `salt` and `adapter_key` keep texts apart from those of others, from the first block on.
        """
        size = 4 * self._block_size
        packed = pack_tokens(token_ids)
        parent = digests[-1] if digests else None
        for low in range(0, len(packed) - size + 1, size):
            extra = first_extra(salt, adapter_key) if parent is None else b""
            parent = self.digest(parent, packed[low : low + size], extra)
            digests.append(parent)

    def insert(self, block: int, prefix: Prefix) -> bool:
        """Enter a full block. False, and nothing done, when another block holds the same already."""
        if self._block_of.setdefault(prefix.digest, block) != block:
            return False
        self._prefix_of[block] = prefix
        return True

    def remove(self, block: int) -> Prefix:
        """Forget a block that is here; returns what it held."""
        prefix = self._prefix_of.pop(block)
        del self._block_of[prefix.digest]
        return prefix

    def get(self, digest: bytes) -> int | None:
        """The block with `digest`, None when none has it."""
        return self._block_of.get(digest)

    def clear(self) -> list[int]:
        """Forget all; returns the blocks that were here."""
        blocks = list(self._prefix_of)
        self._prefix_of.clear()
        self._block_of.clear()
        return blocks

    def prefix(self, block: int) -> Prefix | None:
        """What `block` holds, None when it is not here."""
        return self._prefix_of.get(block)

    def items(self) -> list[tuple[int, Prefix]]:
        """Every (block, prefix); checked against digest -> block, for the integrity check."""
        assert len(self._block_of) == len(self._prefix_of), (
            f"the prefix index has {len(self._block_of)} digests for {len(self._prefix_of)} blocks"
        )
        for block, prefix in self._prefix_of.items():
            held = self._block_of.get(prefix.digest)
            assert held == block, f"the digest of block {block} leads to block {held} in the prefix index"
        return list(self._prefix_of.items())


def first_extra(salt: str, adapter_key: bytes) -> bytes:
    """What keeps texts of the same tokens apart; of no adapter and no salt it is empty."""
    return (_KEYED + adapter_key if adapter_key else b"") + salt.encode()


def pack_tokens(token_ids: Sequence[int]) -> bytes:
    """Token ids as little-endian int32."""
    return _layout(len(token_ids)).pack(*token_ids)


@lru_cache(maxsize=64)
def _layout(count: int) -> struct.Struct:
    return struct.Struct(f"<{count}i")
