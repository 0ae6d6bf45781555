"""Divides a model's layers into KV groups, whose layers share block tables, by the attention that each layer uses.

Layers that read the same earlier tokens have the same rule. Layers of a rule are divided into groups of equal size, so
that a block has the same number of bytes in any group: layer i of each group is stored in tensor i, and a block id
belongs to one group at a time. The group size is the number of layers of one of the rules, chosen so that a request of
`REFERENCE_TOKENS` takes the fewest bytes. A rule's last group may waste memory.

docs/internals/decisions/0020-kv-groups-share-one-pool.md has the waste for known models, and the alternatives.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from kvscope_engine.model.kv_cache.kv_storage import LayerShape
from kvscope_engine.policy.kv_groups import GroupRule

REFERENCE_TOKENS: Final = 32_768
"""Length of the request for which the division into groups is chosen, unless the model's limit is shorter."""
_BLOCK_SIZE: Final = 16
"""Tokens per block with which divisions are compared; the engine's may be another."""


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """KV group: layers that share block tables."""

    rule: GroupRule
    layers: tuple[int, ...]
    """Indices of the layers among all attention layers, ascending."""


def group_layers(rules: Sequence[GroupRule], shapes: Sequence[LayerShape], max_tokens: int) -> tuple[LayerGroup, ...]:
    """Return the KV groups of the layers that store KV, those with full attention first.

    A window of at least `max_tokens`, the longest possible request, counts as full attention.
    """
    layers_by_rule: dict[GroupRule, list[int]] = {}
    for layer in own_layers(shapes):
        # A layer's KV is also read by the layers that share it.
        reader_rules = {rules[other] for other, shape in enumerate(shapes) if layer in (other, shape.shares_with)}
        rule = reader_rules.pop() if len(reader_rules) == 1 else GroupRule()  # readers differ: keep all tokens
        layers_by_rule.setdefault(rule if 0 < rule.window < max_tokens else GroupRule(), []).append(layer)
    if not layers_by_rule:
        return one_group(shapes)
    ordered = sorted(layers_by_rule.items(), key=lambda kind: (kind[0].window > 0, kind[1][0]))
    choices = [_divide(ordered, size) for size in sorted({len(layers) for _, layers in ordered})]
    return min(
        choices, key=lambda groups: (_request_elements(groups, shapes, min(max_tokens, REFERENCE_TOKENS)), len(groups))
    )


def one_group(shapes: Sequence[LayerShape]) -> tuple[LayerGroup, ...]:
    """Return a single group of all layers that store KV. Its blocks are retained for all tokens."""
    return (LayerGroup(GroupRule(), tuple(own_layers(shapes))),)


def own_layers(shapes: Sequence[LayerShape]) -> list[int]:
    return [layer for layer, shape in enumerate(shapes) if shape.shares_with is None]


def _divide(layers_by_rule: Sequence[tuple[GroupRule, list[int]]], size: int) -> tuple[LayerGroup, ...]:
    return tuple(
        LayerGroup(rule, tuple(layers[first : first + size]))
        for rule, layers in layers_by_rule
        for first in range(0, len(layers), size)
    )


def _request_elements(groups: Sequence[LayerGroup], shapes: Sequence[LayerShape], num_tokens: int) -> int:
    """Return the maximum number of stored elements of a request of `num_tokens`."""
    indices = range(max(len(group.layers) for group in groups))
    block_elements = sum(
        max(shapes[group.layers[index]].num_elements for group in groups if index < len(group.layers))
        for index in indices
    )
    return block_elements * sum(
        group.rule.max_held_blocks(num_tokens, max_chunk=1, block_size=_BLOCK_SIZE) for group in groups
    )
