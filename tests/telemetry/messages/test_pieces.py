"""A state in pieces is, put together, what encoding its snapshot gives."""

from __future__ import annotations

import pytest

from kvscope_telemetry.ledger import Ledger
from kvscope_telemetry.messages.pieces import snapshot_pieces
from kvscope_telemetry.messages.wire import encode
from kvscope_telemetry.recordings.keyframes import snapshot_of
from kvscope_telemetry.state.mirror import Mirror
from kvscope_telemetry.synthetic.engine import SyntheticEngine


@pytest.fixture(params=[1, 20, 200, 70_000])
def mirror(request):
    mirror = Mirror()
    mirror.reset(SyntheticEngine(num_blocks=request.param, num_running=request.param // 3, epoch=5).snapshot())
    return mirror


def assert_same(mirror):
    snapshot = snapshot_of(mirror)
    assert b"".join(snapshot_pieces(snapshot, mirror.ledger)) == encode(snapshot)


def test_as_an_engine_has_it(mirror):
    assert_same(mirror)


def test_parents_of_some_rows(mirror):
    mirror.ledger.hash[::3] = 7
    mirror.ledger.parent[::6] = 9
    assert_same(mirror)


def test_no_parents(mirror):
    mirror.ledger.parent[:] = 0
    assert_same(mirror)


def test_no_rows(mirror):
    mirror.ledger = Ledger(0)
    assert_same(mirror)


def test_columns_are_not_copied(mirror):
    pieces = snapshot_pieces(snapshot_of(mirror), mirror.ledger)
    mirror.ledger.owner[:] = 123_456
    assert b"".join(pieces) == encode(snapshot_of(mirror)), "they show the ledger as it is when they are read"
