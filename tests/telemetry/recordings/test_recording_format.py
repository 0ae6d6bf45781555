"""docs/recording-format.md is correct: its independent program finds the same ledger as our reader."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from kvscope_telemetry.ledger import COLUMNS, Ledger
from kvscope_telemetry.messages.telemetry import Frame
from kvscope_telemetry.recordings.layout import PROFILE, TOPICS
from kvscope_telemetry.recordings.reader import Recording

PAGE = Path(__file__).parents[3] / "docs" / "recording-format.md"


@pytest.fixture
def ledger_at(monkeypatch: pytest.MonkeyPatch) -> Callable[[Path, int], dict[str, Any]]:
    """The function of the page's program. Any msgpack reader would do."""
    program = PAGE.read_text(encoding="utf-8").partition("```python\n")[2].partition("```")[0]
    assert "kvscope_" not in program, "it imports nothing of ours"
    monkeypatch.setitem(sys.modules, "msgpack", SimpleNamespace(unpackb=msgspec.msgpack.decode))
    known: dict[str, Any] = {}
    exec(compile(program, PAGE.name, "exec"), known)
    found: Callable[[Path, int], dict[str, Any]] = known["ledger_at"]
    return found


def test_program_in_the_format_documentation_reads_the_same_state_from_a_recording(
    record: Callable[..., Any], ledger_at: Callable[..., Any]
) -> None:
    recording = Recording.open(record(500, keyframe_interval_ns=4_000_000_000).path)
    times = [at_s for at_s, message in recording.messages() if isinstance(message, Frame)]
    for at_s in (times[0], times[-1], *random.sample(times, 10)):
        found, expected = Ledger(0), recording.state_at(at_s).ledger
        found.num_blocks = expected.num_blocks
        for name, column in ledger_at(recording.path, recording.start_ns + round(at_s * 1e9)).items():
            assert column.dtype == COLUMNS[name]
            setattr(found, name, column)
        assert found.differences(expected) == []


def test_page_documents_every_channel_and_the_format_version() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert f"`{PROFILE}`" in page
    assert [topic for topic in TOPICS.values() if f"| `{topic}` |" not in page] == []
