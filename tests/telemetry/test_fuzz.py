"""A small part of the fuzzing in `fuzz.py`: damage is refused or read, and no unexpected exception is raised."""

from __future__ import annotations

import random
import signal
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from tests.telemetry import fuzz

pytestmark = pytest.mark.skipif(not hasattr(signal, "SIGALRM"), reason="no limit on the time of a case without it")
SEED = 7


def test_mutated_messages_are_refused_or_read(amount: Callable[[int, int], int]) -> None:
    count = amount(2_000, 100_000)
    outcomes = fuzz.fuzz_messages(count, SEED)
    assert sum(outcomes.values()) == count
    assert set(outcomes) >= {"refused", "read"}
    assert fuzz._read_message(msgspec.msgpack.encode({"type": "Nobody"}), None) == "unknown"


def test_mutated_recordings_are_refused_or_read(amount: Callable[[int, int], int], tmp_path: Path) -> None:
    count = amount(30, 10_000)
    outcomes = fuzz.fuzz_recordings(count, SEED, tmp_path)
    assert sum(outcomes.values()) == count
    assert any(outcome.startswith("opened, damaged") for outcome in outcomes)


def test_fuzz_case_is_determined_by_its_seed() -> None:
    data = bytes(range(256)) * 4
    twice = [[fuzz.mutated(data, random.Random(f"7/{case}")) for case in range(50)] for _ in range(2)]
    assert twice[0] == twice[1]
    assert len(set(twice[0])) > 45
    assert fuzz.fuzz_messages(20, SEED, 5) == fuzz.fuzz_messages(20, SEED, 5)
