"""Describes how memory is divided into blocks: which layers share a block table, what a block contains, and which
blocks are freed.

Represents the engine's KV groups. Independent of requests and allocators.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Final

from kvscope_engine.policy.kv_groups import GroupRule
from kvscope_telemetry.errors import BadInput
from kvscope_telemetry.messages.telemetry import KVGroup
from kvscope_telemetry.messages.what_if import Memory

MAX_GROUPS: Final = 64
_MAX_COUNT: Final = 1 << 40
_NOT_COMPARED: Final = frozenset(("cross", "chunks"))
"""Kinds of KV groups whose size per request does not follow from the request's number of tokens."""
_EVERYTHING: Final = GroupRule()


@dataclass(frozen=True, slots=True)
class BlockGroup:
    """KV group: layers that share a block table."""

    num_tokens: int
    """Tokens per block; 0 if a request has one block, whatever its length (recurrent states)."""
    rule: GroupRule = _EVERYTHING
    readers: tuple[tuple[float, GroupRule], ...] = ((1.0, _EVERYTHING),)
    """Pairs of a fraction of the group's bytes and the rule that determines the tokens of which this fraction
    is read. The fractions add up to 1.
    """

    def num_blocks(self, num_tokens: int) -> int:
        """Return the number of block table entries of a request with `num_tokens` tokens."""
        return -(-num_tokens // self.num_tokens) if self.num_tokens else 1

    def num_null_blocks(self, num_tokens: int) -> int:
        return self.rule.num_unread(num_tokens, self.num_tokens) if self.num_tokens else 0

    def num_unread(self, num_tokens: int) -> int:
        """Return the number of a request's tokens that no later token reads. A token that only some layers
        still read counts as a fraction.
        """
        return int(sum(share * rule.first_read(num_tokens) for share, rule in self.readers))


@dataclass(frozen=True, slots=True)
class PoolLayout:
    """One pool: `num_blocks` blocks of `block_size` slots, and the KV groups in it. The slots that remain after
    the last block are unused.
    """

    num_slots: int
    block_size: int
    slot_bytes: float
    """Bytes per slot; 0 if unknown."""
    groups: tuple[BlockGroup, ...]
    max_blocks: int = _MAX_COUNT
    """Additional limit on the number of blocks, besides the number of slots."""

    @property
    def num_blocks(self) -> int:
        return min(self.num_slots // self.block_size, self.max_blocks)


@dataclass(frozen=True, slots=True)
class _PublishedGroup:
    block_size: int
    block_bytes: int
    rule: GroupRule
    num_layers: int
    own_blocks: int
    is_latent: bool
    expanded_bytes: int

    @property
    def token_bytes(self) -> float:
        return self.block_bytes / self.block_size


class GroupedMemory:
    """The engine's KV memory, divided by KV group. Raises BadInput for invalid groups."""

    def __init__(self, memory: Memory) -> None:
        self._memory = memory
        _check(memory.groups)
        compared_groups = [group for group in memory.groups if group.kind not in _NOT_COMPARED]
        self._groups = (
            [_published_group(group, memory) for group in compared_groups if group.kind != "state"]
            if compared_groups
            else [_single_group(memory)]
        )
        self._states = [group for group in compared_groups if group.kind == "state"]
        self._has_separate_pools = bool(compared_groups) and all(group.num_blocks for group in compared_groups)

    @property
    def has_windows(self) -> bool:
        """Whether some layers have a window or chunks, so that blocks are freed while their request runs."""
        return any(kind.rule.window for kind in self._groups)

    @property
    def holds_latents(self) -> bool:
        return any(kind.is_latent for kind in self._groups)

    @property
    def has_tokens(self) -> bool:
        """Whether some layers store keys and values (or latents) for each token."""
        return bool(self._groups)

    @property
    def num_layers(self) -> int:
        return sum(kind.num_layers for kind in self._groups) or self._memory.num_layers

    @property
    def why_not_without_freeing(self) -> str:
        """Reason why `without_freeing` cannot be computed (the memory needed if no layer freed tokens outside its
        window); "" if it can.
        """
        if self._states and not self._has_separate_pools:
            return "States of recurrent layers are stored in its blocks."
        if len(self._groups) > 1 and not all(kind.block_bytes for kind in self._groups):
            return "The engine does not report how many bytes each KV group takes."
        return ""

    @property
    def why_not_expanded(self) -> str:
        """Reason why the size of keys and values instead of latents is unknown; "" if it is known."""
        if any(kind.is_latent and not kind.expanded_bytes for kind in self._groups):
            return "The engine does not report how large the keys and values of its heads would be."
        return self.why_not_without_freeing or ("" if self._memory.block_bytes else "The size of a block is not known.")

    def by_group(self, block_size: int) -> tuple[PoolLayout, ...]:
        """Return the engine's pools and groups, with blocks of `block_size` tokens instead of the engine's
        block size.
        """
        memory = self._memory
        if self._has_separate_pools:
            pools = [
                PoolLayout(
                    kind.own_blocks * kind.block_size,
                    self._scaled(kind, block_size),
                    kind.token_bytes,
                    (_block_group(kind, self._scaled(kind, block_size)),),
                )
                for kind in self._groups
            ]
            return (*pools, *self._state_pools())
        groups = [
            _block_group(kind, max(1, self._scaled(kind, block_size) // self._pool_blocks_per_block(kind)))
            for kind in self._groups
        ]
        groups += [BlockGroup(0)] * len(self._states)
        return (PoolLayout(memory.num_slots, block_size, memory.block_bytes / memory.block_size, tuple(groups)),)

    def without_freeing(self, block_size: int) -> tuple[PoolLayout, ...]:
        """Return pools with all layers in one group without a window. `why_not_without_freeing` must be empty."""
        token_bytes = sum(kind.token_bytes for kind in self._groups)
        if len(self._groups) == 1:
            shares = [(1.0, self._groups[0].rule)]
        else:
            shares = [(kind.token_bytes / token_bytes, kind.rule) for kind in self._groups]
        slots = self._memory.num_slots if len(self._groups) == 1 else int(self._kv_bytes // token_bytes)
        if self._has_separate_pools and len(self._groups) == 1:
            slots = self._groups[0].own_blocks * self._groups[0].block_size
        group = BlockGroup(block_size, _EVERYTHING, tuple(shares))
        return (PoolLayout(slots, block_size, token_bytes, (group,)), *self._state_pools())

    def expanded(self) -> tuple[PoolLayout, ...]:
        """Return the engine's pools with keys and values instead of latents. `why_not_expanded` must be empty."""
        size = self._memory.block_size
        wide = [
            replace(
                kind,
                block_bytes=kind.expanded_bytes,
                own_blocks=kind.own_blocks * kind.block_bytes // kind.expanded_bytes,
            )
            if kind.is_latent
            else kind
            for kind in self._groups
        ]
        if self._has_separate_pools:
            pools = [
                PoolLayout(
                    kind.own_blocks * kind.block_size,
                    kind.block_size,
                    kind.token_bytes,
                    (_block_group(kind, kind.block_size),),
                )
                for kind in wide
            ]
            return (*pools, *self._state_pools())
        block_bytes = max(kind.block_bytes for kind in wide)
        groups = tuple(_block_group(kind, kind.block_size) for kind in wide)
        return (PoolLayout(int(self._kv_bytes // block_bytes) * size, size, block_bytes / size, groups),)

    @property
    def _kv_bytes(self) -> int:
        if self._has_separate_pools:
            return sum(kind.own_blocks * kind.block_bytes for kind in self._groups)
        return self._memory.num_blocks * self._memory.block_bytes

    def _state_pools(self) -> Iterator[PoolLayout]:
        if self._has_separate_pools:
            for group in self._states:
                yield PoolLayout(group.num_blocks, 1, group.block_bytes, (BlockGroup(0),))

    def _scaled(self, kind: _PublishedGroup, block_size: int) -> int:
        return max(1, kind.block_size * block_size // self._memory.block_size)

    def _pool_blocks_per_block(self, kind: _PublishedGroup) -> int:
        """Return how many blocks of the pool one block of `kind` takes: more than 1 if it has more bytes than a block
        of the pool.
        """
        if len(self._groups) == 1 or not self._memory.block_bytes:
            return 1
        return max(1, round(kind.block_bytes / self._memory.block_bytes))


def _block_group(kind: _PublishedGroup, num_tokens: int) -> BlockGroup:
    return BlockGroup(num_tokens, kind.rule, ((1.0, kind.rule),))


def _single_group(memory: Memory) -> _PublishedGroup:
    return _PublishedGroup(
        memory.block_size, memory.block_bytes, _EVERYTHING, memory.num_layers, 0, is_latent=False, expanded_bytes=0
    )


def _published_group(group: KVGroup, memory: Memory) -> _PublishedGroup:
    """Convert a KV group. If the group is the only one, its block size in bytes is taken from `memory`."""
    num_bytes, expanded = group.block_bytes, group.expanded_bytes
    if len(memory.groups) == 1 and memory.block_bytes:
        expanded = expanded * memory.block_bytes // num_bytes if num_bytes else 0
        num_bytes = memory.block_bytes
    return _PublishedGroup(
        group.block_size or memory.block_size,
        num_bytes,
        GroupRule(group.window, group.kind == "chunked"),
        group.num_layers,
        group.num_blocks,
        group.kind == "latent",
        expanded,
    )


def _check(groups: tuple[KVGroup, ...]) -> None:
    if len(groups) > MAX_GROUPS:
        raise BadInput(f"{len(groups)} KV groups are too many: at most {MAX_GROUPS} are compared")
    for group in groups:
        counts = (group.block_size, group.block_bytes, group.window, group.num_blocks, group.expanded_bytes)
        if not all(0 <= count <= _MAX_COUNT for count in (*counts, group.num_layers)):
            raise BadInput(f"KV group {group.kind!r:.40}: {counts} are not all from 0 to {_MAX_COUNT}")
