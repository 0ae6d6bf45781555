"""The simulated engine keeps its blocks consistent, reports all of them, repeats itself by seed, and needs no torch."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter

import numpy as np
import pytest
from msgspec.structs import asdict
from tests.simulated_engine.command import ROOT
from tests.simulated_engine.engine import SimulatedEngine

from kvscope_telemetry.errors import BadInput
from kvscope_telemetry.ledger import BlockState
from kvscope_telemetry.messages.commands import Finished, Tokens
from kvscope_telemetry.messages.request_state import RequestState
from kvscope_telemetry.messages.telemetry import Moves
from kvscope_telemetry.mirror.coalesce import coalesce
from kvscope_telemetry.mirror.mirror import Mirror
from kvscope_telemetry.source import Update


def _check_consistency(engine: SimulatedEngine) -> None:
    engine.scheduler.check_integrity()
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
def test_reference_counts_of_a_simulated_engine_equal_its_block_tables_after_every_step(
    num_blocks: int, seed: int
) -> None:
    engine = SimulatedEngine(num_blocks=num_blocks, num_running=12, seed=seed)
    for step in range(400):
        engine.advance()
        if step % 7 == 0:
            _check_consistency(engine)
    counters = engine.snapshot().counters
    assert counters.preemptions
    assert counters.finished


def test_simulated_engine_starts_with_the_requested_cached_and_held_blocks() -> None:
    engine = SimulatedEngine(num_blocks=4000, num_running=4, cached_share=0.25, parked_share=0.5)
    counts = np.bincount(engine.ledger.state, minlength=3)
    assert counts[BlockState.CACHED] == 1000
    assert counts[BlockState.ACTIVE] == 2000
    _check_consistency(engine)
    is_first = (engine.ledger.state == BlockState.CACHED) & (engine.ledger.parent == 0)
    assert 0 < is_first.sum() < 10
    for _ in range(20):
        engine.advance()
    assert engine.snapshot().counters.num_running == 16 + 4


@pytest.mark.parametrize(("num_host", "num_disk"), [(60, 150), (60, 90), (400, 0)])
def test_lower_tiers_lose_no_blocks_and_report_their_moves(num_host: int, num_disk: int) -> None:
    engine = SimulatedEngine(num_blocks=300, num_running=12, seed=2, num_host_blocks=num_host, num_disk_blocks=num_disk)
    mirror = Mirror()
    mirror.apply(Update(snapshot=engine.snapshot()))
    moved: Counter[str] = Counter()
    for step in range(600):
        frame = engine.advance()
        mirror.apply(coalesce([frame]))
        moved.update({name: len(ids) // 4 for name, ids in asdict(frame.moves).items()})
        if step % 7 == 0:
            _check_consistency(engine)
            _check_tiers(engine, mirror)
    assert mirror.ledger.equals(engine.ledger)
    totals = engine.snapshot().counters
    to_host = totals.swapped_blocks + totals.offloaded_blocks
    assert moved["saved"] >= to_host if num_disk else moved["saved"] == to_host
    assert moved["loaded"] == totals.loaded_blocks > 0
    assert moved["evicted"] == totals.evicted_blocks > 0
    assert moved["copied"] == totals.copied_blocks > 0
    assert totals.swapped_blocks
    assert totals.offloaded_blocks


def _check_tiers(engine: SimulatedEngine, mirror: Mirror) -> None:
    cache, ledger = engine.hello.cache, engine.ledger
    assert ledger.num_blocks == cache.num_rows
    expected = np.repeat([0, 1, 2], [cache.num_blocks, cache.num_host_blocks, cache.num_disk_blocks])
    np.testing.assert_array_equal(ledger.tier, expected)
    for number, state in zip(mirror.requests.number.tolist(), mirror.requests.state.tolist(), strict=True):
        lower = mirror.requests.table(number) >= cache.num_blocks
        assert lower.all() if state == RequestState.PREEMPTED else not lower.any()


def test_swapped_request_keeps_its_blocks() -> None:
    """A request that was swapped out has host rows for all it had computed; its count is 0 until it is back."""
    engine = SimulatedEngine(num_blocks=300, num_running=6, seed=2, num_host_blocks=200)
    mirror = Mirror()
    mirror.apply(Update(snapshot=engine.snapshot()))
    computed: dict[int, int] = {}
    seen = 0
    for _ in range(200):
        mirror.apply(coalesce([engine.advance()]))
        requests = mirror.requests
        for row in np.flatnonzero(requests.state == RequestState.PREEMPTED).tolist():
            number = int(requests.number[row])
            kept = int(mirror.ledger.filled[requests.table(number)].sum())
            assert requests.num_computed_tokens[row] == 0
            assert kept >= computed[number], "not all computed blocks were swapped out"
            seen += 1
        computed = dict(zip(requests.number.tolist(), requests.num_computed_tokens.tolist(), strict=True))
    assert seen


def test_simulated_engine_without_lower_tiers_reports_no_saved_or_loaded_blocks() -> None:
    engine = SimulatedEngine(num_blocks=90, num_running=12, seed=1)
    frames = [engine.advance() for _ in range(300)]
    assert all(not frame.moves.saved and not frame.moves.loaded for frame in frames)
    assert any(frame.moves != Moves() for frame in frames)  # evictions and copies are reported for every pool
    assert frames[-1].counters.evicted_blocks
    with pytest.raises(BadInput, match="-1 host"):
        SimulatedEngine(num_host_blocks=-1)
    with pytest.raises(BadInput, match="without host blocks"):
        SimulatedEngine(num_disk_blocks=5)


def test_same_seed_gives_the_same_states() -> None:
    one, same, other = (SimulatedEngine(num_blocks=300, seed=seed) for seed in (4, 4, 5))
    for engine in (one, same, other):
        for _ in range(100):
            engine.advance()
    assert one.ledger.equals(same.ledger)
    assert not one.ledger.equals(other.ledger)


def test_submitted_requests_get_all_tokens_and_aborted_ones_end() -> None:
    engine = SimulatedEngine(num_blocks=2000, num_running=2)
    engine.submit("a", 20, 6)
    second = engine.submit("b", 20, 500)
    for _ in range(10):
        engine.advance()
    assert engine.abort(second)
    assert not engine.abort(second)
    engine.advance()
    of_first = [output for output in engine.outputs if output.request_id == "a"]
    assert sum(len(output.token_ids) for output in of_first if isinstance(output, Tokens)) == 6
    assert [output.finish_reason for output in of_first if isinstance(output, Finished)] == ["length"]
    assert of_first[-1].usage.completion_tokens == 6
    of_second = [output for output in engine.outputs if output.request_id == "b" and isinstance(output, Finished)]
    assert [output.finish_reason for output in of_second] == ["abort"]
    _check_consistency(engine)


def test_engine_and_server_do_not_import_torch() -> None:
    program = (
        "import sys, tests.simulated_engine.__main__; sys.exit('torch' in sys.modules or 'PySide6' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program], cwd=ROOT).returncode == 0
