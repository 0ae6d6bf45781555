"""How a memory is cut into blocks: which layers share a block table, what a block is for, and what is let go of.

Owns what is known of the engine's KV groups. Knows no requests, and no allocator.
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
"""Kinds of which a request's tokens do not say what it holds."""
_EVERYTHING: Final = GroupRule()


@dataclass(frozen=True, slots=True)
class BlockGroup:
    """Layers with one block table."""

    num_tokens: int
    """That a block is for; 0: a request has one block, however long it is (states of recurrent layers)."""
    rule: GroupRule = _EVERYTHING
    """By which blocks are let go of."""
    readers: tuple[tuple[float, GroupRule], ...] = ((1.0, _EVERYTHING),)
    """Shares of its bytes, and which tokens are read of them."""

    def num_blocks(self, num_tokens: int) -> int:
        """Places in the table of a request of so many tokens."""
        return -(-num_tokens // self.num_tokens) if self.num_tokens else 1

    def num_let_go(self, num_tokens: int) -> int:
        """Of these, from the first, those that are empty."""
        return self.rule.num_unread(num_tokens, self.num_tokens) if self.num_tokens else 0

    def num_unread(self, num_tokens: int) -> int:
        """Of a request's tokens, those that no later token reads; what only some layers read counts in part."""
        return int(sum(share * rule.first_read(num_tokens) for share, rule in self.readers))


@dataclass(frozen=True, slots=True)
class PoolLayout:
    """One pool: `num_blocks` blocks of `block_size` slots, and who has them. There may be slots beyond, too few for a
    block."""

    num_slots: int
    block_size: int
    slot_bytes: float
    """0: unknown."""
    groups: tuple[BlockGroup, ...]
    at_most: int = _MAX_COUNT
    """Blocks, where something else than slots is short of."""

    @property
    def num_blocks(self) -> int:
        """That requests can have."""
        return min(self.num_slots // self.block_size, self.at_most)


@dataclass(frozen=True, slots=True)
class _Kind:
    """A KV group, as it is told."""

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
    """The engine's memory by its KV groups. Raises BadInput for groups that cannot be."""

    def __init__(self, memory: Memory) -> None:
        self._memory = memory
        _check(memory.groups)
        told = [group for group in memory.groups if group.kind not in _NOT_COMPARED]
        self._kinds = [_kind(group, memory) for group in told if group.kind != "state"] if told else [_one(memory)]
        self._states = [group for group in told if group.kind == "state"]
        self._is_apart = bool(told) and all(group.num_blocks for group in told)

    @property
    def lets_go(self) -> bool:
        """Whether any layers have a window or chunks."""
        return any(kind.rule.window for kind in self._kinds)

    @property
    def holds_latents(self) -> bool:
        """Whether any layers hold latents."""
        return any(kind.is_latent for kind in self._kinds)

    @property
    def has_tokens(self) -> bool:
        """Whether any layers keep something for each token."""
        return bool(self._kinds)

    @property
    def num_layers(self) -> int:
        """That keep keys and values."""
        return sum(kind.num_layers for kind in self._kinds) or self._memory.num_layers

    @property
    def why_not_whole(self) -> str:
        """Why it is not known what all layers together would hold; empty where it is."""
        if self._states and not self._is_apart:
            return "States of recurrent layers lie among its blocks."
        if len(self._kinds) > 1 and not all(kind.block_bytes for kind in self._kinds):
            return "The engine does not tell how many bytes each KV group takes."
        return ""

    @property
    def why_not_expanded(self) -> str:
        """Why it is not known what latents would take as keys and values; empty where it is."""
        if any(kind.is_latent and not kind.expanded_bytes for kind in self._kinds):
            return "The engine does not tell how large the keys and values of its heads would be."
        return self.why_not_whole or ("" if self._memory.block_bytes else "The size of a block is not known.")

    def by_group(self, block_size: int) -> tuple[PoolLayout, ...]:
        """As the engine has it, with blocks of `block_size` tokens in place of its own."""
        memory = self._memory
        if self._is_apart:
            pools = [
                PoolLayout(
                    kind.own_blocks * kind.block_size,
                    self._scaled(kind, block_size),
                    kind.token_bytes,
                    (_of_kind(kind, self._scaled(kind, block_size)),),
                )
                for kind in self._kinds
            ]
            return (*pools, *self._state_pools())
        groups = [_of_kind(kind, max(1, self._scaled(kind, block_size) // self._rows(kind))) for kind in self._kinds]
        groups += [BlockGroup(0)] * len(self._states)
        return (PoolLayout(memory.num_slots, block_size, memory.block_bytes / memory.block_size, tuple(groups)),)

    def whole(self, block_size: int) -> tuple[PoolLayout, ...]:
        """All layers in one group, which lets go of nothing; only where `why_not_whole` is empty."""
        token_bytes = sum(kind.token_bytes for kind in self._kinds)
        if len(self._kinds) == 1:
            shares = [(1.0, self._kinds[0].rule)]
        else:
            shares = [(kind.token_bytes / token_bytes, kind.rule) for kind in self._kinds]
        slots = self._memory.num_slots if len(self._kinds) == 1 else int(self._kv_bytes // token_bytes)
        if self._is_apart and len(self._kinds) == 1:
            slots = self._kinds[0].own_blocks * self._kinds[0].block_size
        group = BlockGroup(block_size, _EVERYTHING, tuple(shares))
        return (PoolLayout(slots, block_size, token_bytes, (group,)), *self._state_pools())

    def expanded(self) -> tuple[PoolLayout, ...]:
        """Keys and values in place of latents, and else as it is; only where `why_not_expanded` is empty."""
        size = self._memory.block_size
        wide = [
            replace(
                kind,
                block_bytes=kind.expanded_bytes,
                own_blocks=kind.own_blocks * kind.block_bytes // kind.expanded_bytes,
            )
            if kind.is_latent
            else kind
            for kind in self._kinds
        ]
        if self._is_apart:
            pools = [
                PoolLayout(
                    kind.own_blocks * kind.block_size,
                    kind.block_size,
                    kind.token_bytes,
                    (_of_kind(kind, kind.block_size),),
                )
                for kind in wide
            ]
            return (*pools, *self._state_pools())
        block_bytes = max(kind.block_bytes for kind in wide)
        groups = tuple(_of_kind(kind, kind.block_size) for kind in wide)
        return (PoolLayout(int(self._kv_bytes // block_bytes) * size, size, block_bytes / size, groups),)

    @property
    def _kv_bytes(self) -> int:
        if self._is_apart:
            return sum(kind.own_blocks * kind.block_bytes for kind in self._kinds)
        return self._memory.num_blocks * self._memory.block_bytes

    def _state_pools(self) -> Iterator[PoolLayout]:
        if self._is_apart:
            for group in self._states:
                yield PoolLayout(group.num_blocks, 1, group.block_bytes, (BlockGroup(0),))

    def _scaled(self, kind: _Kind, block_size: int) -> int:
        return max(1, kind.block_size * block_size // self._memory.block_size)

    def _rows(self, kind: _Kind) -> int:
        """Rows of the pool that a block of the group takes, where groups have blocks of several sizes."""
        if len(self._kinds) == 1 or not self._memory.block_bytes:
            return 1
        return max(1, round(kind.block_bytes / self._memory.block_bytes))


def _of_kind(kind: _Kind, num_tokens: int) -> BlockGroup:
    return BlockGroup(num_tokens, kind.rule, ((1.0, kind.rule),))


def _one(memory: Memory) -> _Kind:
    return _Kind(
        memory.block_size, memory.block_bytes, _EVERYTHING, memory.num_layers, 0, is_latent=False, expanded_bytes=0
    )


def _kind(group: KVGroup, memory: Memory) -> _Kind:
    """One group alone has the blocks that the memory is of."""
    num_bytes, expanded = group.block_bytes, group.expanded_bytes
    if len(memory.groups) == 1 and memory.block_bytes:
        expanded = expanded * memory.block_bytes // num_bytes if num_bytes else 0
        num_bytes = memory.block_bytes
    return _Kind(
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
