"""Which layers of a model share block tables: KV groups, by what each layer was seen to ask of its attention.

Layers that read the same earlier tokens are of one kind. A kind is cut into groups of one size, so that a block of any
group has as many bytes as of any other: layer i of each group lies in the storage's tensor i, and a block id is of one
group at a time. The size is one of the kinds' own numbers of layers: that with which a request of `REFERENCE_TOKENS`
holds least. What is left over in a kind's last group is lost: 2.4 % of Gemma 3 27B's KV at 32k tokens (10 full layers,
52 with a window: groups of 10), 0.5 % of MiMo V2 Flash's (9 and 39), at most 0.4 % of Gemma 2's, OLMo 3's, EXAONE 4's,
gpt-oss's, Command R7B's, Mistral's and Llama 4's, whose kinds divide each other. A pool for each kind would lose that
little as well, and what another kind leaves unused.

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
    """Layers with block tables of their own."""

    rule: GroupRule
    layers: tuple[int, ...]
    """Their numbers among the layers that keep KV, ascending."""


def group_layers(rules: Sequence[GroupRule], shapes: Sequence[LayerShape], max_tokens: int) -> tuple[LayerGroup, ...]:
    """The KV groups of layers that read by `rules` and keep KV of their own; those that read everything come first.

    A window as long as a request of `max_tokens` may be is none.
    """
    kinds: dict[GroupRule, list[int]] = {}
    for layer in own_layers(shapes):
        readers = {rules[other] for other, shape in enumerate(shapes) if layer in (other, shape.shares_with)}
        rule = readers.pop() if len(readers) == 1 else GroupRule()  # what any of them reads is kept
        kinds.setdefault(rule if 0 < rule.window < max_tokens else GroupRule(), []).append(layer)
    if not kinds:
        return one_group(shapes)
    ordered = sorted(kinds.items(), key=lambda kind: (kind[0].window > 0, kind[1][0]))
    choices = [_cut(ordered, size) for size in sorted({len(layers) for _, layers in ordered})]
    return min(choices, key=lambda groups: (_held(groups, shapes, min(max_tokens, REFERENCE_TOKENS)), len(groups)))


def one_group(shapes: Sequence[LayerShape]) -> tuple[LayerGroup, ...]:
    """All layers that keep KV of their own in one, which lets go of nothing."""
    return (LayerGroup(GroupRule(), tuple(own_layers(shapes))),)


def own_layers(shapes: Sequence[LayerShape]) -> list[int]:
    """Layers that keep KV of their own."""
    return [layer for layer, shape in enumerate(shapes) if shape.shares_with is None]


def _cut(kinds: Sequence[tuple[GroupRule, list[int]]], size: int) -> tuple[LayerGroup, ...]:
    return tuple(
        LayerGroup(rule, tuple(layers[first : first + size]))
        for rule, layers in kinds
        for first in range(0, len(layers), size)
    )


def _held(groups: Sequence[LayerGroup], shapes: Sequence[LayerShape], num_tokens: int) -> int:
    """Numbers that a request holds at most."""
    places = range(max(len(group.layers) for group in groups))
    in_block = sum(
        max(shapes[group.layers[place]].numbers for group in groups if place < len(group.layers)) for place in places
    )
    return in_block * sum(group.rule.most_held(num_tokens, 1, _BLOCK) for group in groups)
