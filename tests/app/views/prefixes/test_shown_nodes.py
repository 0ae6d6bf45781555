"""Test that the shown rows equal those of a plain tree walk, on random trees with random filters."""

from __future__ import annotations

import numpy as np
import pytest

from kvscope_app.views.prefixes import shown_nodes
from kvscope_app.views.prefixes.shown_nodes import visible_nodes
from kvscope_telemetry.prefixes.cached_blocks import CachedBlocks
from kvscope_telemetry.prefixes.tree import ROOT, build


def random_tree(rng, num_blocks):
    """Return a tree in which each block follows a random earlier one or none."""
    parent = [0 if rng.random() < 0.3 or i == 0 else int(rng.integers(1, i + 1)) for i in range(num_blocks)]
    return build(
        CachedBlocks(
            hash=np.arange(1, num_blocks + 1).astype(np.uint64),
            parent=np.array(parent, np.uint64),
            row=np.arange(num_blocks),
            tier=np.zeros(num_blocks, np.uint8),
            ref_count=np.zeros(num_blocks, np.int32),
            prefix_hits=np.zeros(num_blocks, np.uint16),
            last_used_step=np.zeros(num_blocks, np.uint32),
            owner=np.ones(num_blocks, np.int32),
        )
    )


def walk_shown(tree, node, opened, values, kept):
    """Yield the shown nodes of a subtree in order."""
    children = [child for child in tree.children_of(node).tolist() if kept[child]]
    for child in sorted(children, key=lambda each: (values[each], int(tree.key[each]))):
        yield child
        if int(tree.key[child]) in opened:
            yield from walk_shown(tree, child, opened, values, kept)


@pytest.mark.parametrize("seed", range(20))
def test_visible_prefix_tree_rows_equal_those_of_a_plain_tree_walk(seed, monkeypatch):
    rng = np.random.default_rng(seed)
    tree = random_tree(rng, int(rng.integers(0, 80)))
    opened = {key for key in tree.key.tolist() if rng.random() < 0.6} | {999_999}
    values, passing = rng.integers(0, 5, len(tree)), rng.random(len(tree)) < 0.7
    kept = np.zeros(len(tree), np.bool_)
    for node in np.flatnonzero(passing).tolist():
        kept[tree.path_to(node)] = True
    for descending, sign in ((False, 1), (True, -1)):
        wanted = list(walk_shown(tree, ROOT, opened, sign * values, kept))
        shown = visible_nodes(tree, opened, values, descending, passing)
        assert (shown.nodes.tolist(), shown.num_left_out) == (wanted, 0)
        assert shown.num_matching == int(passing.sum())
        monkeypatch.setattr(shown_nodes, "MAX_SHOWN", 7)
        shown = visible_nodes(tree, opened, values, descending, passing)
        assert shown.nodes.tolist() == wanted[:7]
        assert (shown.num_left_out > 0) == (len(wanted) > 7)
        monkeypatch.undo()
