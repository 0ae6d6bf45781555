"""The benchmark of KV events applies the decoded events to a mirror."""

from __future__ import annotations

import pytest

from benchmarks import kv_events


def test_events_are_decoded_translated_and_mirrored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_events, "NUM_BLOCKS", 1_000)
    monkeypatch.setattr(kv_events, "BATCH_EVENTS", 20)
    monkeypatch.setattr(kv_events, "NUM_FRAMES", 3)
    assert all(figure > 0 for figure in kv_events.measure(4))
