"""Reads and writes the index of a persistent disk tier file: the prefix in each slot, and its checksum.

`FILE.index` is a line that names the format, the BLAKE2b digest of the remaining bytes, and these bytes as MessagePack.
It is replaced atomically. While an engine uses the file, the index lists no slots, so nothing is reused after a crash.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec

from kvscope_engine.policy.prefixes.prefix_index import DIGEST_BYTES as PREFIX_BYTES
from kvscope_engine.policy.prefixes.prefix_index import SALT_BYTES, Prefix

MAGIC: Final = b"kvscope kv index 1\n"
DIGEST_BYTES: Final = 32
MAX_START: Final = 1 << 31


class IndexedBlock(msgspec.Struct, frozen=True, array_like=True):
    slot: int
    checksum: int
    digest: bytes
    start: int
    tokens: bytes
    parent: bytes
    salt: str = ""
    adapter: str = ""
    adapter_key: bytes = b""

    @property
    def prefix(self) -> Prefix:
        """Prefix of the block, in the form that the prefix cache uses as key."""
        return Prefix(self.digest, self.start, self.tokens, self.parent, self.salt, self.adapter, self.adapter_key)


class DiskIndex(msgspec.Struct, frozen=True):
    fingerprint: str
    """Hash of model, dtype and layout. Blocks with another fingerprint cannot be used."""
    salt: bytes
    num_bytes: int
    """Size of the disk tier file in bytes."""
    blocks: list[IndexedBlock]


@dataclass(frozen=True, slots=True)
class IndexRequirements:
    """Properties that a disk tier file's index must match to be used."""

    fingerprint: str
    block_size: int
    num_slots: int

    @property
    def max_bytes(self) -> int:
        """Maximum bytes of an index that is read. The maximum allows for more slots than the file has now,
        because it may have had more in an earlier run.
        """
        return (1 << 26) + 4 * self.num_slots * (4 * self.block_size + 96)


def read_index(path: Path, requirements: IndexRequirements, previous_bytes: int) -> tuple[DiskIndex | None, str]:
    """Read the index at `path` for a disk tier file of `previous_bytes`.

    Returns the index, or None and the reason why it is not used. The reason is empty if there is no index.
    """
    try:
        with open(path, "rb") as file:
            content = file.read(requirements.max_bytes + 1)
    except FileNotFoundError:
        return None, ""
    except OSError as error:
        return None, f"cannot be read ({error.strerror})"
    if len(content) > requirements.max_bytes:
        return None, f"is larger than {requirements.max_bytes} bytes"
    index = _decoded_index(content)
    if index is None:
        return None, "is damaged"
    return _checked_index(index, requirements, previous_bytes)


def write_index(path: Path, index: DiskIndex) -> None:
    """Replace the index at `path` atomically and sync it to the drive. Raises OSError."""
    body = msgspec.msgpack.encode(index)
    fd, name = tempfile.mkstemp(prefix=f"{path.name}.", dir=path.parent)
    try:
        with open(fd, "wb") as file:
            file.write(MAGIC + _digest(body) + body)
            file.flush()
            os.fsync(file.fileno())
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise


def _decoded_index(content: bytes) -> DiskIndex | None:
    head = len(MAGIC) + DIGEST_BYTES
    body = content[head:]
    if content[:head] != MAGIC + _digest(body):
        return None
    try:
        return msgspec.msgpack.decode(body, type=DiskIndex)
    except msgspec.MsgspecError:
        return None


def _checked_index(
    index: DiskIndex, requirements: IndexRequirements, previous_bytes: int
) -> tuple[DiskIndex | None, str]:
    if index.fingerprint != requirements.fingerprint:
        return None, "is of another model or layout"
    if previous_bytes != index.num_bytes:
        return None, f"is for a file of {index.num_bytes} bytes, not {previous_bytes}"
    if len(index.salt) != SALT_BYTES or not all(_is_valid(block, requirements.block_size) for block in index.blocks):
        return None, "is damaged"
    blocks = [block for block in index.blocks if block.slot < requirements.num_slots]
    if len({block.slot for block in blocks}) < len(blocks) or len({block.digest for block in blocks}) < len(blocks):
        return None, "is damaged"
    return msgspec.structs.replace(index, blocks=blocks), ""


def _is_valid(block: IndexedBlock, block_size: int) -> bool:
    return (
        block.slot >= 0
        and 0 <= block.checksum < 1 << 32
        and len(block.digest) in (PREFIX_BYTES, PREFIX_BYTES + 1)
        and len(block.tokens) == 4 * block_size
        and len(block.parent) == (len(block.digest) if block.start else 0)
        and block.parent[PREFIX_BYTES:] in (b"", block.digest[PREFIX_BYTES:])
        and 0 <= block.start < MAX_START
        and block.start % block_size == 0
    )


def _digest(body: bytes) -> bytes:
    return hashlib.blake2b(body, digest_size=DIGEST_BYTES).digest()
