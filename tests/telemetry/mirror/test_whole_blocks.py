"""Blocks prepared outside of the mirror: the same state, and a ledger that only one mirror uses."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from tests.simulated_engine.engine import SimulatedEngine

from kvscope_telemetry.errors import ProtocolError
from kvscope_telemetry.messages.telemetry import Snapshot
from kvscope_telemetry.mirror.mirror import Mirror
from kvscope_telemetry.mirror.whole_blocks import WholeBlocks
from kvscope_telemetry.source import Update


def _engine(num_blocks: int = 200) -> SimulatedEngine:
    engine = SimulatedEngine(num_blocks=num_blocks, num_running=8)
    for _ in range(20):
        engine.advance()
    return engine


def _ready(snapshot: Snapshot) -> WholeBlocks:
    blocks = WholeBlocks(snapshot)
    blocks.make_ledger()
    return blocks


def test_mirror_takes_over_the_prepared_ledger() -> None:
    engine = _engine()
    snapshot, plain, ready = engine.snapshot(), Mirror(), Mirror()
    plain.apply(Update(snapshot=snapshot))
    ready.apply(Update(snapshot=snapshot, blocks=_ready(snapshot)))
    assert ready.ledger.equals(plain.ledger)
    assert ready.ledger.equals(engine.ledger)
    assert (ready.num_free, ready.num_active, ready.num_cached) == (plain.num_free, plain.num_active, plain.num_cached)


def test_two_mirrors_never_share_a_ledger() -> None:
    snapshot, left, right = _engine().snapshot(), Mirror(), Mirror()
    blocks = _ready(snapshot)
    for mirror in (left, right):
        mirror.apply(Update(snapshot=snapshot, blocks=blocks))
    assert left.ledger.equals(right.ledger)
    assert not np.shares_memory(left.ledger.state, right.ledger.state)
    left.ledger.state[:] = 1
    again = Mirror()
    again.apply(Update(snapshot=snapshot, blocks=blocks))
    assert again.ledger.equals(right.ledger)


def test_resync_with_prepared_blocks_writes_into_the_existing_arrays() -> None:
    engine, mirror = _engine(), Mirror()
    mirror.reset(engine.snapshot())
    view = mirror.ledger.state
    engine.advance()
    snapshot = engine.snapshot()
    mirror.reset(snapshot, _ready(snapshot))
    assert mirror.ledger.state is view
    assert mirror.ledger.equals(engine.ledger)


def test_prepared_blocks_of_another_snapshot_are_ignored() -> None:
    engine, mirror = _engine(), Mirror()
    early = _ready(engine.snapshot())
    for _ in range(20):
        engine.advance()
    mirror.reset(engine.snapshot(), early)
    assert mirror.ledger.equals(engine.ledger)


def test_snapshot_with_negative_reference_counts_is_refused() -> None:
    snapshot = _engine().snapshot()
    bad = msgspec.structs.replace(snapshot.blocks, ref_count=b"\xff" * len(snapshot.blocks.ref_count))
    with pytest.raises(ProtocolError, match="negative reference count"):
        WholeBlocks(msgspec.structs.replace(snapshot, blocks=bad))
