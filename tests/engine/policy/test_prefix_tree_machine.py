"""The prefix tree of a mirror compared with the engine's prefix cache, under random load over all tiers."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)
from hypothesis.stateful import run_state_machine_as_test as check_machine

from kvscope_engine.policy.prefixes.prefix_index import published_hash
from kvscope_engine.policy.request import Request
from kvscope_telemetry.ledger import COLUMNS, Ledger, unpack
from kvscope_telemetry.messages import wire
from kvscope_telemetry.messages.telemetry import Frame
from kvscope_telemetry.prefixes.cached_blocks import blocks_of
from kvscope_telemetry.prefixes.tree import ROOT, PrefixTree, build

Make = Callable[..., Any]  # fixture of tests/engine/conftest.py
Shape = dict[int, tuple[Any, ...]]
"""Maps the first hash of a node to its properties and its child nodes, recursively."""


class PrefixTreeMachine(RuleBasedStateMachine):
    """After each rule, a tree is built from what the frames reported."""

    def __init__(self, drive: Make) -> None:
        super().__init__()
        self.make = drive
        self.one: Any = None

    @initialize(
        num_blocks=st.integers(6, 40),
        block_size=st.integers(1, 4),
        num_host=st.sampled_from([0, 3, 12]),
        num_disk=st.sampled_from([0, 5, 40]),
    )
    def begin(self, num_blocks: int, block_size: int, num_host: int, num_disk: int) -> None:
        self.one = self.make(
            num_blocks=num_blocks,
            block_size=block_size,
            max_num_seqs=6,
            max_num_batched_tokens=30,
            max_model_len=num_blocks * block_size,
            num_host=num_host,
            num_disk=num_disk if num_host else 0,
        )
        self.mirrored = Ledger(self.one.pool.ledger.num_blocks)
        self.mirrored.tier[:] = self.one.pool.ledger.tier
        self.seq = 0

    @rule(texts=st.lists(st.integers(0, 1), min_size=1, max_size=24), new=st.integers(1, 12))
    def submit(self, texts: list[int], new: int) -> None:
        if len(texts) + new <= self.one.scheduler.max_request_tokens:
            self.one.submit(texts, new)

    @rule(length=st.integers(1, 20), count=st.integers(1, 3))
    def submit_several(self, length: int, count: int) -> None:
        if length + 6 <= self.one.scheduler.max_request_tokens:
            self.one.siblings([1] * length, 6, count)

    @precondition(lambda self: self.unfinished)
    @rule(times=st.integers(1, 12))
    def step(self, times: int) -> None:
        for _ in range(times):
            self.one.step()

    @precondition(lambda self: self.unfinished)
    @rule(pick=st.integers(0, 99))
    def abort(self, pick: int) -> None:
        self.one.scheduler.abort(self.unfinished[pick % len(self.unfinished)], self.one.now_ns)

    @precondition(lambda self: self.unfinished)
    @rule(pick=st.integers(0, 99))
    def fork(self, pick: int) -> None:
        self.one.fork(self.unfinished[pick % len(self.unfinished)])

    @rule(dice=st.integers(0, 5))
    def reset_prefix_cache(self, dice: int) -> None:
        if not dice:
            self.one.scheduler.reset_prefix_cache(self.one.now_ns)

    @invariant()
    def the_tree_is_the_cache(self) -> None:
        if self.one is None:
            return
        self._send_changes()
        assert self.mirrored.differences(self.one.pool.ledger) == []
        tree = build(blocks_of(self.mirrored))
        assert shape_of(tree) == expected_shape(self.one)
        held = self.one.pool.ledger.hash != 0
        assert sorted(tree.rows.tolist()) == np.flatnonzero(held).tolist()
        for node in range(len(tree)):
            for row in tree.rows_of(node).tolist():
                assert tree.node_of(row) == node

    @property
    def unfinished(self) -> list[Request]:
        return [] if self.one is None else list(self.one.scheduler.requests.values())

    def _send_changes(self) -> None:
        """Encode the changes as a telemetry frame and decode it for the tree."""
        pool, self.seq = self.one.pool, self.seq + 1
        update = Frame(epoch=1, seq=self.seq, step=1, time_ns=1, blocks=pool.ledger.pack(pool.changed_rows.drain()))
        frame = wire.decode_telemetry(wire.encode(update))
        assert isinstance(frame, Frame)
        ids = np.frombuffer(frame.blocks.ids, "<u4")
        for name, column in unpack([frame.blocks]).items():
            getattr(self.mirrored, name)[ids] = column


def shape_of(tree: PrefixTree, node: int = ROOT) -> Shape:
    found: Shape = {}
    for child in tree.children_of(node).tolist():
        assert tree.parent[child] == node
        assert tree.level[child] == (0 if node == ROOT else tree.level[node] + 1)
        rows = tuple(tree.rows_of(child).tolist())
        numbers = (tree.num_blocks[child], tree.num_with_all[child], tree.num_before[child])
        below = shape_of(tree, child)
        found[int(tree.key[child])] = (bool(tree.is_cut[child]), rows, *map(int, numbers), below)
    return found


def expected_shape(one: Any) -> Shape:
    """Return the expected shape from the digests used by the pool and the tiers."""
    tiers = one.scheduler.tiers
    held = [*one.pool.index.items()]
    held += [] if tiers is None else [*tiers.host._prefix_of.items(), *tiers.disk._prefix_of.items()]
    rows: dict[bytes, list[int]] = defaultdict(list)
    after: dict[bytes, set[bytes]] = defaultdict(set)
    for row, prefix in held:
        rows[prefix.digest].append(row)
        after[prefix.parent].add(prefix.digest)
    tops = after[b""] | {parent for parent in after if parent and parent not in rows}
    return {published_hash(top): _node(top, 0 if top in rows else -1, rows, after) for top in tops}


def _node(digest: bytes, before: int, rows: dict[bytes, list[int]], after: dict[bytes, set[bytes]]) -> tuple[Any, ...]:
    chain = [digest]
    while len(after.get(chain[-1], ())) == 1:
        chain += after[chain[-1]]
    is_cut = digest not in rows
    count = len(chain) - is_cut
    below_from = -1 if before < 0 else before + count
    below = {published_hash(d): _node(d, below_from, rows, after) for d in after.get(chain[-1], ())}
    own = tuple(row for digest in chain for row in sorted(rows.get(digest, ())))
    return (is_cut, own, count, count + sum(node[3] for node in below.values()), before, below)


def test_mirrored_prefix_tree_equals_the_cache_of_the_engine(drive: Make, storm: Callable[[int, int], int]) -> None:
    check_machine(
        lambda: PrefixTreeMachine(drive),
        settings=settings(
            max_examples=storm(15, 100),
            stateful_step_count=25,
        ),
    )


def test_every_ledger_column_is_packed() -> None:
    assert set(unpack([Ledger(3).pack_all()])) == set(COLUMNS)
