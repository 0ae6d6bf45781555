"""Layout of the KV memory of a simulated model: KV groups, and recurrent states per request."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from math import gcd
from typing import Final

from kvscope_engine.policy.kv_groups import GroupRule
from kvscope_engine.policy.step_plan import Scheduled
from kvscope_telemetry.messages.telemetry import CacheInfo, KVGroup

_SEPARATE_KINDS: Final = frozenset(("cross", "chunks", "state"))
_MAX_GROUPS: Final = 64


@dataclass(frozen=True, slots=True)
class SimulatedGroup:
    """KV group: layers that share a block table."""

    kind: str
    """A value of `KVGroup.kind`."""
    rule: GroupRule
    num_layers: int
    token_bytes: float
    """Bytes per token, summed over the group's layers."""
    expanded_bytes: float = 0.0
    """Bytes per token if keys and values were stored instead of latents (MLA); 0 if the group stores no latents
    or the size is unknown.
    """


@dataclass(frozen=True, slots=True)
class KVLayout:
    """KV groups and recurrent states of a model. Blocks of all groups have the same size in bytes."""

    groups: tuple[SimulatedGroup, ...]
    state_bytes: int = 0
    """Bytes of recurrent states per request, over all layers; 0 if the model has none."""

    @property
    def token_bytes(self) -> float:
        """Bytes of KV per token, summed over all layers."""
        return sum(group.token_bytes for group in self.groups)

    @property
    def num_layers(self) -> int:
        """Number of layers that store keys and values."""
        return sum(group.num_layers for group in self.groups)

    @property
    def rules(self) -> tuple[GroupRule, ...]:
        return tuple(group.rule for group in self.groups)

    @property
    def has_windows(self) -> bool:
        """Whether some layers have a window or chunks, so that blocks are freed while their request runs."""
        return any(rule.window for rule in self.rules)

    @property
    def why_not_expanded(self) -> str:
        """Reason why storing keys and values instead of latents cannot be simulated; "" if it can."""
        latents = [group for group in self.groups if group.kind == "latent"]
        if not latents:
            return "no layer holds latents"
        return "" if all(group.expanded_bytes for group in latents) else "the recording does not contain their size"

    def block_bytes(self, block_size: int) -> int:
        """Return the bytes of a block of the pool, which are determined by the largest group."""
        return round(max(group.token_bytes for group in self.groups) * block_size)

    def merged(self) -> KVLayout:
        """Return a layout with all layers in one group without a window."""
        return replace(self, groups=(SimulatedGroup("full", GroupRule(), self.num_layers, self.token_bytes),))

    def expanded(self) -> KVLayout:
        wide = (
            replace(group, kind="full", token_bytes=group.expanded_bytes) if group.kind == "latent" else group
            for group in self.groups
        )
        return replace(self, groups=tuple(wide))

    def read_bytes(self, scheduled: Iterable[Scheduled]) -> float:
        """Return the bytes that attention reads in a step, limited by each group's window.

        The bytes of recurrent states count twice, because they are read and written.
        """
        total = 0.0
        for item in scheduled:
            end = item.start + item.num_tokens
            total += sum(group.token_bytes * (end - group.rule.first_read(item.start)) for group in self.groups)
            total += 2 * self.state_bytes
        return total

    def mean_pairs(self, scheduled: Iterable[Scheduled]) -> float:
        """Return the number of pairs of a scheduled token and a position that it attends to, as the mean over
        layers.
        """
        shares = [(group.rule, group.num_layers / max(1, self.num_layers)) for group in self.groups]
        return sum(
            share * (_num_pairs(rule, item.start + item.num_tokens) - _num_pairs(rule, item.start))
            for item in scheduled
            for rule, share in shares
        )


def recorded_layout(cache: CacheInfo) -> KVLayout | None:
    """Return the layout of a recorded engine; None if the recording names no KV groups or not their sizes.

    If the groups have separate pools, each is split into groups of equally many layers (the greatest common divisor).
    """
    block_groups = [group for group in cache.groups if group.kind not in _SEPARATE_KINDS]
    states = [group.block_bytes for group in cache.groups if group.kind == "state"]
    if not block_groups or not all(group.block_bytes and group.num_layers for group in block_groups):
        return None
    groups = [_recorded_group(group, cache.block_size) for group in block_groups]
    if any(group.num_blocks for group in block_groups):
        groups = _split_equally(groups)
    return KVLayout(tuple(groups), sum(states))


def recorded_token_bytes(cache: CacheInfo) -> float:
    """Return the KV bytes per token, over all layers, of an engine whose blocks hold all layers; 0 if unknown."""
    return cache.block_bytes / cache.block_size if cache.block_size else 0.0


def recorded_slots(cache: CacheInfo) -> int:
    """Return the capacity of a recorded pool in tokens; 0 if unknown."""
    return cache.pool_tokens or (cache.num_physical_blocks or cache.num_blocks) * cache.block_size


def recorded_pool_bytes(cache: CacheInfo) -> float:
    """Return the bytes of a recorded pool, including its recurrent states; 0 if unknown."""
    blocks = (cache.num_physical_blocks or cache.num_blocks) * cache.block_bytes
    return float(blocks + cache.num_states * cache.state_bytes)


def recorded_tiers(cache: CacheInfo) -> tuple[int, int]:
    """Return the bytes of host memory and of disk below a recorded pool, each 0 if the tier does not exist or
    its size is unknown.
    """
    return cache.host_tier_bytes, cache.num_disk_blocks * cache.block_bytes


def _recorded_group(group: KVGroup, block_size: int) -> SimulatedGroup:
    tokens = group.block_size or block_size
    rule = GroupRule(group.window, group.kind == "chunked")
    return SimulatedGroup(group.kind, rule, group.num_layers, group.block_bytes / tokens, group.expanded_bytes / tokens)


def _split_equally(groups: Sequence[SimulatedGroup]) -> list[SimulatedGroup]:
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


def _num_pairs(rule: GroupRule, num_tokens: int) -> int:
    """Return the number of pairs of a token and a position that it attends to, over the first `num_tokens`
    tokens of a sequence.
    """
    window = rule.window or num_tokens
    if rule.is_chunked:
        chunks, remainder = divmod(num_tokens, window)
        return chunks * _triangle(window) + _triangle(remainder)
    return _triangle(min(num_tokens, window)) + max(0, num_tokens - window) * window


def _triangle(count: int) -> int:
    return count * (count + 1) // 2
