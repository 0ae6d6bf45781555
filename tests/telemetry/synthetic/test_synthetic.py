"""The synthetic engine: conserves its blocks, repeats itself by seed, and serves from the command line."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from collections.abc import Callable

import numpy as np
import pytest
from msgspec.structs import asdict

from kvscope_telemetry.errors import BadInput
from kvscope_telemetry.ledger import BlockState
from kvscope_telemetry.messages.request_state import RequestState
from kvscope_telemetry.messages.telemetry import Moves
from kvscope_telemetry.source import Update
from kvscope_telemetry.state.coalesce import coalesce
from kvscope_telemetry.state.mirror import Mirror
from kvscope_telemetry.synthetic.engine import SyntheticEngine


def _check_conserved(engine: SyntheticEngine) -> None:
    truth = Mirror()
    truth.reset(engine.snapshot())
    held = Counter(b for n in truth.requests.number.tolist() for b in truth.requests.table(n).tolist())
    ledger = engine.ledger
    expected = np.zeros(ledger.num_blocks, np.int32)
    expected[list(held)] = list(held.values())
    np.testing.assert_array_equal(ledger.ref_count, expected)
    np.testing.assert_array_equal(ledger.state == BlockState.ACTIVE, expected > 0)
    assert (ledger.filled[ledger.state == BlockState.CACHED] == engine.hello.cache.block_size).all()
    assert not ledger.filled[ledger.state == BlockState.FREE].any()


@pytest.mark.parametrize(("num_blocks", "seed"), [(90, 1), (400, 2), (5000, 3)])
def test_reference_counts_equal_the_tables_after_every_step(num_blocks: int, seed: int) -> None:
    engine = SyntheticEngine(num_blocks=num_blocks, num_running=12, seed=seed)
    for step in range(400):
        engine.advance()
        if step % 7 == 0:
            _check_conserved(engine)
    counters = engine.snapshot().counters
    assert counters.preemptions
    assert counters.finished


@pytest.mark.parametrize(("num_host", "num_disk"), [(60, 150), (0, 90), (400, 0)])
def test_lower_tiers_conserve_blocks_and_tell_their_moves(num_host: int, num_disk: int) -> None:
    engine = SyntheticEngine(num_blocks=300, num_running=12, seed=2, num_host_blocks=num_host, num_disk_blocks=num_disk)
    mirror = Mirror()
    mirror.apply(Update(snapshot=engine.snapshot()))
    moved: Counter[str] = Counter()
    for step in range(600):
        frame = engine.advance()
        mirror.apply(coalesce([frame]))
        moved.update({name: len(ids) // 4 for name, ids in asdict(frame.moves).items()})
        if step % 7 == 0:
            _check_conserved(engine)
            _check_places(engine, mirror)
    assert mirror.ledger.equals(engine.ledger)
    totals = engine.snapshot().counters
    assert moved["saved"] == totals.swapped_blocks + totals.offloaded_blocks
    assert moved["loaded"] == totals.loaded_blocks > 0
    assert moved["evicted"] == totals.evicted_blocks > 0
    assert moved["copied"] == totals.copied_blocks > 0
    assert totals.swapped_blocks
    assert totals.offloaded_blocks


def _check_places(engine: SyntheticEngine, mirror: Mirror) -> None:
    cache, ledger = engine.hello.cache, engine.ledger
    assert ledger.num_blocks == cache.num_rows
    expected = np.repeat([0, 1, 2], [cache.num_blocks, cache.num_host_blocks, cache.num_disk_blocks])
    np.testing.assert_array_equal(ledger.tier, expected)
    for number, state in zip(mirror.requests.number.tolist(), mirror.requests.state.tolist(), strict=True):
        lower = mirror.requests.table(number) >= cache.num_blocks
        assert lower.all() if state == RequestState.PREEMPTED else not lower.any()


def test_a_swapped_request_keeps_its_tokens() -> None:
    engine = SyntheticEngine(num_blocks=300, num_running=6, seed=2, num_host_blocks=200)
    mirror = Mirror()
    mirror.apply(Update(snapshot=engine.snapshot()))
    seen = 0
    for _ in range(200):
        mirror.apply(coalesce([engine.advance()]))
        for row in np.flatnonzero(mirror.requests.state == RequestState.PREEMPTED).tolist():
            table = mirror.requests.table(int(mirror.requests.number[row]))
            assert mirror.ledger.filled[table].sum() == mirror.requests.num_computed_tokens[row]
            seen += 1
    assert seen


def test_without_lower_tiers_nothing_is_told_of_them() -> None:
    engine = SyntheticEngine(num_blocks=90, num_running=12, seed=1)
    frames = [engine.advance() for _ in range(300)]
    assert all(frame.moves == Moves() for frame in frames)
    assert frames[-1].counters.evicted_blocks
    with pytest.raises(BadInput, match="-1 host"):
        SyntheticEngine(num_host_blocks=-1)


def test_the_same_seed_gives_the_same_states() -> None:
    one, same, other = (SyntheticEngine(num_blocks=300, seed=seed) for seed in (4, 4, 5))
    for engine in (one, same, other):
        for _ in range(100):
            engine.advance()
    assert one.ledger.equals(same.ledger)
    assert not one.ledger.equals(other.ledger)


def test_submitted_requests_get_all_their_tokens_and_aborted_ones_end() -> None:
    engine = SyntheticEngine(num_blocks=2000, num_running=2)
    first, second = engine.submit("a", 20, 6), engine.submit("b", 20, 500)
    for _ in range(10):
        engine.advance()
    assert engine.abort(second)
    assert not engine.abort(second)
    engine.advance()
    of_first = [o for o in engine.outputs if o.number == first]
    assert [o.num_output for o in of_first if not o.reason] == [1, 2, 3, 4, 5, 6]
    assert of_first[-1].reason == "length"
    assert [o.reason for o in engine.outputs if o.number == second and o.reason] == ["abort"]
    _check_conserved(engine)


def test_it_serves_from_the_command_line(make_endpoint: Callable[[str], str]) -> None:
    command = [sys.executable, "-m", "kvscope_telemetry.synthetic"]
    options = ["--endpoint", make_endpoint("ipc"), "--blocks", "100", "--seconds", "0.2"]
    done = subprocess.run([*command, *options], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert "serving ipc://" in done.stdout
    bad = subprocess.run([*command, "--endpoint", "nowhere"], capture_output=True, text=True)
    assert bad.returncode == 2
    assert "'nowhere'" in bad.stderr
    assert "Traceback" not in bad.stderr
