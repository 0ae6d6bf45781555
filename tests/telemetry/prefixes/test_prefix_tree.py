"""Prefix trees built from written-down blocks, complete and with missing parts."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
import pytest
from msgspec.structs import replace

from kvscope_telemetry.ledger import Ledger
from kvscope_telemetry.messages.telemetry import CacheInfo, KVGroup
from kvscope_telemetry.prefixes.cached_blocks import CachedBlocks, LedgerCopy, blocks_of, group_of_tree
from kvscope_telemetry.prefixes.tree import ROOT, PrefixTree, build, fold, levels


def blocks(*pairs: tuple[int, int], tiers: Sequence[int] = (), hits: Sequence[int] = ()) -> CachedBlocks:
    """Return one row per (hash, parent) pair."""
    size = len(pairs)
    return CachedBlocks(
        hash=np.array([h for h, _ in pairs], np.uint64),
        parent=np.array([p for _, p in pairs], np.uint64),
        row=np.arange(size),
        tier=np.array(tiers or [0] * size, np.uint8),
        ref_count=np.zeros(size, np.int32),
        prefix_hits=np.array(hits or [0] * size, np.uint16),
        last_used_step=np.arange(size, dtype=np.uint32),
        owner=np.arange(size, dtype=np.int32) + 1,
    )


def child_keys(tree: PrefixTree, node: int = ROOT) -> list[int]:
    return sorted(tree.key[tree.children_of(node)].tolist())


def test_prefix_tree_shows_the_first_kv_group_that_keeps_whole_texts() -> None:
    window, full, chunks = KVGroup(kind="window", window=8), KVGroup(kind="full"), KVGroup(kind="chunks")
    cache = CacheInfo(num_blocks=4, block_size=16)
    assert group_of_tree(cache) is None
    assert group_of_tree(replace(cache, groups=(window, chunks, full, full))) == 2
    assert group_of_tree(replace(cache, groups=(chunks, KVGroup(kind="")))) == 1
    assert group_of_tree(replace(cache, groups=(window, window))) == 0
    ledger = Ledger(4)
    ledger.hash[:3], ledger.group[:3] = (7, 7, 8), (0, 1, 0)
    copied = LedgerCopy()
    copied.copy_from(ledger)
    assert copied.blocks(0).row.tolist() == [0, 2]
    assert copied.blocks(1).row.tolist() == [1]
    assert len(copied.blocks()) == 3


def test_empty_ledger_gives_an_empty_tree() -> None:
    tree = build(blocks())
    assert (len(tree), tree.num_texts, tree.node_of(0), tree.node_with(3)) == (0, 0, None, None)
    assert tree.children_of(ROOT).size == 0


def test_blocks_without_branches_form_one_prefix_tree_node() -> None:
    tree = build(blocks((11, 0), (12, 11), (13, 12), (14, 13), (24, 13), (25, 24), (9, 0)))
    assert child_keys(tree) == [9, 11]
    trunk = tree.node_with(11)
    assert trunk is not None
    assert tree.rows_of(trunk).tolist() == [0, 1, 2]
    assert child_keys(tree, trunk) == [14, 24]
    branch = tree.node_of(5)
    assert branch == tree.node_with(24)
    assert branch is not None
    assert tree.path_to(branch) == [trunk, branch]
    assert (tree.num_blocks[trunk], tree.num_with_all[trunk], tree.num_before[branch]) == (3, 6, 3)
    assert (tree.num_texts, tree.level[branch], tree.last_used_step[branch]) == (3, 1, 5)


def test_blocks_whose_parent_was_evicted_start_a_tree() -> None:
    tree = build(blocks((12, 11), (13, 12), (22, 99), (23, 99), hits=(1, 2, 5, 7)))
    assert child_keys(tree) == [11, 99]
    alone, several = (tree.node_with(key) for key in (11, 99))
    assert alone is not None
    assert several is not None
    assert tree.is_cut[[alone, several]].all()
    assert tree.rows_of(alone).tolist() == [0, 1]
    assert tree.rows_of(several).size == 0
    assert (tree.num_blocks[several], tree.num_with_all[several], tree.hits[several]) == (0, 2, 7)
    assert child_keys(tree, several) == [22, 23]
    assert (tree.num_before[tree.children_of(several)] == -1).all()


def test_block_in_several_tiers_is_counted_once() -> None:
    tree = build(blocks((12, 11), (11, 0), (11, 0), (12, 11), (13, 12), tiers=(0, 0, 1, 2, 1)))
    assert len(tree) == 1
    assert (tree.num_blocks.tolist(), tree.num_in_tier.tolist()) == ([3], [[2, 2, 1, 0]])
    assert tree.rows_of(0).tolist() == [1, 2, 0, 3, 4]


@pytest.mark.parametrize("seed", range(3))
def test_row_order_does_not_change_the_tree(seed: int) -> None:
    pairs = [(place + 1, 0 if place < 5 else random.Random(place).randint(1, place)) for place in range(300)]
    expected = build(blocks(*pairs))
    random.Random(seed).shuffle(pairs)
    found = build(blocks(*pairs))
    assert sorted(expected.key.tolist()) == sorted(found.key.tolist())
    for key in expected.key.tolist():
        one, other = expected.node_with(key), found.node_with(key)
        assert one is not None
        assert other is not None
        assert expected.num_with_all[one] == found.num_with_all[other]
        assert child_keys(expected, one) == child_keys(found, other)


def test_prefix_tree_of_blocks_whose_parents_form_a_cycle_contains_each_block_once() -> None:
    tree = build(blocks((1, 2), (2, 3), (3, 1), (4, 4), (5, 3), (6, 5), (7, 6)))
    assert sorted(tree.rows.tolist()) == list(range(7))
    assert sum(tree.num_blocks.tolist()) == 7
    assert (fold(np.array([1, 2, 0])).position == 0).all()
    assert levels(np.array([-1, 0, 3, 2])).tolist() == [0, 1, -1, -1]


def test_long_chain_is_one_node() -> None:
    size = 5000
    tree = build(blocks(*((place + 1, place) for place in range(size))))
    assert tree.rows_of(0).tolist() == list(range(size))


def test_ledger_copy_does_not_follow_later_changes() -> None:
    ledger = Ledger(8)
    ledger.hash[[2, 5]], ledger.parent[5] = (7, 9), 7
    copied = LedgerCopy()
    copied.copy_from(ledger)
    ledger.hash[:] = 0
    assert build(copied.blocks()).rows.tolist() == [2, 5]
    copied.copy_from(ledger)
    assert len(copied.blocks()) == len(blocks_of(ledger)) == 0
