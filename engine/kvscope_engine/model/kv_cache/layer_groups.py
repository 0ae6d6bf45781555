"""Divides a model's layers into KV groups, whose layers share block tables, by the attention that each layer uses.

Layers that read the same earlier tokens are of one kind. A kind is divided into groups of equal size, so that a block
has the same number of bytes in any group: layer i of each group is stored in tensor i, and a block id belongs to one
group at a time. The group size is the number of layers of one of the kinds, chosen so that a request of
`REFERENCE_TOKENS` holds the fewest bytes. A kind's last group may waste memory: 2.4 % of Gemma 3 27B's KV at 32k tokens
(10 full layers, 52 with a window: groups of 10), 0.5 % of MiMo V2 Flash's (9 and 39), and at most 0.4 % of Gemma 2's,
OLMo 3's, EXAONE 4's, gpt-oss's, Command R7B's, Mistral's and Llama 4's, where one kind's size divides the other's. A
separate pool per kind would avoid this waste, but lose the memory that another kind leaves unused.

See docs/internals/decisions/0020-kv-groups-share-one-pool.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from kvscope_engine.model.kv_cache.kv_storage import LayerShape
from kvscope_engine.policy.kv_groups import GroupRule

REFERENCE_TOKENS: Final = 32_768
_BLOCK: Final = 16


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """Layers with their own block tables."""

    rule: GroupRule
    layers: tuple[int, ...]
    """Indices of the layers among all attention layers, ascending."""


def group_layers(rules: Sequence[GroupRule], shapes: Sequence[LayerShape], max_tokens: int) -> tuple[LayerGroup, ...]:
    """Return the KV groups of the layers that store KV, those with full attention first.

    A window of at least `max_tokens`, the longest possible request, counts as full attention.
    """
    kinds: dict[GroupRule, list[int]] = {}
    for layer in own_layers(shapes):
        readers = {rules[other] for other, shape in enumerate(shapes) if layer in (other, shape.shares_with)}
        rule = readers.pop() if len(readers) == 1 else GroupRule()  # readers differ: keep all tokens
        kinds.setdefault(rule if 0 < rule.window < max_tokens else GroupRule(), []).append(layer)
    if not kinds:
        return one_group(shapes)
    ordered = sorted(kinds.items(), key=lambda kind: (kind[0].window > 0, kind[1][0]))
    choices = [_cut(ordered, size) for size in sorted({len(layers) for _, layers in ordered})]
    return min(choices, key=lambda groups: (_held(groups, shapes, min(max_tokens, REFERENCE_TOKENS)), len(groups)))


def one_group(shapes: Sequence[LayerShape]) -> tuple[LayerGroup, ...]:
    """Return a single group of all layers that store KV, which never frees blocks outside a window."""
    return (LayerGroup(GroupRule(), tuple(own_layers(shapes))),)


def own_layers(shapes: Sequence[LayerShape]) -> list[int]:
    return [layer for layer, shape in enumerate(shapes) if shape.shares_with is None]


def _cut(kinds: Sequence[tuple[GroupRule, list[int]]], size: int) -> tuple[LayerGroup, ...]:
    return tuple(
        LayerGroup(rule, tuple(layers[first : first + size]))
        for rule, layers in kinds
        for first in range(0, len(layers), size)
    )


def _held(groups: Sequence[LayerGroup], shapes: Sequence[LayerShape], num_tokens: int) -> int:
    """Return the number of elements that a request of `num_tokens` holds at most."""
    places = range(max(len(group.layers) for group in groups))
    in_block = sum(
        max(shapes[group.layers[place]].numbers for group in groups if place < len(group.layers)) for place in places
    )
    return in_block * sum(group.rule.max_held_blocks(num_tokens, 1, _BLOCK) for group in groups)
