"""What a simulated model keeps of each token, as an engine has it: KV groups, and states of recurrent layers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from math import gcd
from typing import Final

from kvscope_engine.policy.kv_groups import GroupRule
from kvscope_engine.policy.plan import Scheduled
from kvscope_telemetry.messages.telemetry import CacheInfo, KVGroup

_KEPT_BESIDE: Final = frozenset(("cross", "chunks", "state"))
_MAX_GROUPS: Final = 64


@dataclass(frozen=True, slots=True)
class SimulatedGroup:
    """Layers with a block table of their own."""

    kind: str
    """A word of `KVGroup.kind`."""
    rule: GroupRule
    num_layers: int
    token_bytes: float
    """Over its layers."""
    expanded_bytes: float = 0.0
    """Of a token of latents as keys and values; 0: no latents, or unknown."""


@dataclass(frozen=True, slots=True)
class KVLayout:
    """Of a model; blocks of all groups are of one size in bytes."""

    groups: tuple[SimulatedGroup, ...]
    state_bytes: int = 0
    """Of all recurrent layers, a request; 0: there are none."""

    @property
    def token_bytes(self) -> float:
        """Of a token that all layers hold."""
        return sum(group.token_bytes for group in self.groups)

    @property
    def num_layers(self) -> int:
        """That keep keys and values."""
        return sum(group.num_layers for group in self.groups)

    @property
    def rules(self) -> tuple[GroupRule, ...]:
        """Of each group."""
        return tuple(group.rule for group in self.groups)

    @property
    def lets_go(self) -> bool:
        """Whether any layers have a window or chunks."""
        return any(rule.window for rule in self.rules)

    @property
    def why_not_expanded(self) -> str:
        """Why it cannot be simulated with keys and values in place of latents; empty where it can."""
        latents = [group for group in self.groups if group.kind == "latent"]
        if not latents:
            return "no layer holds latents"
        return "" if all(group.expanded_bytes for group in latents) else "the recording does not tell their size"

    def block_bytes(self, block_size: int) -> int:
        """Of a block of the pool: that of the largest group."""
        return round(max(group.token_bytes for group in self.groups) * block_size)

    def whole(self) -> KVLayout:
        """All layers in one group that lets go of nothing."""
        return replace(self, groups=(SimulatedGroup("full", GroupRule(), self.num_layers, self.token_bytes),))

    def expanded(self) -> KVLayout:
        """With keys and values in place of latents."""
        wide = (
            replace(group, kind="full", token_bytes=group.expanded_bytes) if group.kind == "latent" else group
            for group in self.groups
        )
        return replace(self, groups=tuple(wide))

    def read_bytes(self, scheduled: Iterable[Scheduled]) -> float:
        """Read by attention in a step: each request's context, as far as a group's layers look back; and states, which
        are read and written."""
        total = 0.0
        for item in scheduled:
            end = item.start + item.num_tokens
            total += sum(group.token_bytes * (end - group.rule.first_read(item.start)) for group in self.groups)
            total += 2 * self.state_bytes
        return total

    def share_of_pairs(self, scheduled: Iterable[Scheduled]) -> float:
        """Pairs of a token and one it attends to, the mean over layers."""
        shares = [(group.rule, group.num_layers / max(1, self.num_layers)) for group in self.groups]
        return sum(
            share * (_pairs(rule, item.start + item.num_tokens) - _pairs(rule, item.start))
            for item in scheduled
            for rule, share in shares
        )


def recorded_layout(cache: CacheInfo) -> KVLayout | None:
    """That of a recorded engine; None where it names no KV groups, or not what they take.

    Groups that have blocks of several sizes are cut into such as have one, of as many layers as divide all.
    """
    kept = [group for group in cache.groups if group.kind not in _KEPT_BESIDE]
    states = [group.block_bytes for group in cache.groups if group.kind == "state"]
    if not kept or not all(group.block_bytes and group.num_layers for group in kept):
        return None
    groups = [_recorded(group, cache.block_size) for group in kept]
    if any(group.num_blocks for group in kept):
        groups = _cut(groups)
    return KVLayout(tuple(groups), sum(states))


def recorded_token_bytes(cache: CacheInfo) -> float:
    """Keys and values of a token over all layers, of an engine whose blocks hold all of them; 0: unknown."""
    return cache.block_bytes / cache.block_size if cache.block_size else 0.0


def recorded_slots(cache: CacheInfo) -> int:
    """Tokens that a recorded pool holds; 0: unknown."""
    return cache.pool_tokens or (cache.num_physical_blocks or cache.num_blocks) * cache.block_size


def recorded_pool_bytes(cache: CacheInfo) -> float:
    """Of a recorded pool and its recurrent states; 0: unknown."""
    blocks = (cache.num_physical_blocks or cache.num_blocks) * cache.block_bytes
    return float(blocks + cache.num_states * cache.state_bytes)


def recorded_tiers(cache: CacheInfo) -> tuple[int, int]:
    """Bytes of host memory and disk below a recorded pool; 0: no such tier, or unknown."""
    return cache.host_tier_bytes, cache.num_disk_blocks * cache.block_bytes


def _recorded(group: KVGroup, block_size: int) -> SimulatedGroup:
    tokens = group.block_size or block_size
    rule = GroupRule(group.window, group.kind == "chunked")
    return SimulatedGroup(group.kind, rule, group.num_layers, group.block_bytes / tokens, group.expanded_bytes / tokens)


def _cut(groups: Sequence[SimulatedGroup]) -> list[SimulatedGroup]:
    size = gcd(*(group.num_layers for group in groups))
    parts = [
        replace(
            group,
            num_layers=size,
            token_bytes=group.token_bytes * size / group.num_layers,
            expanded_bytes=group.expanded_bytes * size / group.num_layers,
        )
        for group in groups
        for _ in range(group.num_layers // size)
    ]
    return parts if len(parts) <= _MAX_GROUPS else list(groups)


def _pairs(rule: GroupRule, num_tokens: int) -> int:
    """Of the first tokens of a text, with those that each attends to."""
    window = rule.window or num_tokens
    if rule.is_chunked:
        chunks, rest = divmod(num_tokens, window)
        return chunks * _triangle(window) + _triangle(rest)
    return _triangle(min(num_tokens, window)) + max(0, num_tokens - window) * window


def _triangle(count: int) -> int:
    return count * (count + 1) // 2
