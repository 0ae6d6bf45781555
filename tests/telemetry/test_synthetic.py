"""The synthetic engine: conserves its blocks, repeats itself by seed, and serves from the command line."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from collections.abc import Callable

import numpy as np
import pytest

from kvscope_telemetry.ledger import BlockState
from kvscope_telemetry.mirror import Mirror
from kvscope_telemetry.synthetic_engine import SyntheticEngine


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
    assert engine._counters().preemptions
    assert engine._counters().finished


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
    done = subprocess.run([*command, *options], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    assert "serving ipc://" in done.stdout
    bad = subprocess.run([*command, "--endpoint", "nowhere"], capture_output=True, text=True, timeout=60)
    assert bad.returncode == 2
    assert "'nowhere'" in bad.stderr
    assert "Traceback" not in bad.stderr
