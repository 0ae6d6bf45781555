"""Which updates carry news, and which are only signs of life."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvscope_telemetry.messages.telemetry import DeviceSample, Event, Heartbeat, MemoryBreakdown, Progress
from kvscope_telemetry.source import Update

SIGNS: list[dict[str, Any]] = [
    {},
    {"heartbeat": Heartbeat(epoch=1, time_ns=1, seq=1, step=1)},
    {"samples": (DeviceSample(epoch=1, time_ns=1),)},
    {"memory": MemoryBreakdown(epoch=1, time_ns=1)},
    {"progress": Progress(stage="ready")},
]
NEWS: list[dict[str, Any]] = [
    {"progress": Progress(stage="load")},
    {"series": {"seq": np.zeros(1, np.int64)}},
    {"block_ids": np.zeros(1, np.uint32)},
    {"events": (Event(time_ns=1, kind="evict"),)},
]


@pytest.mark.parametrize("fields", SIGNS, ids=str)
def test_update_without_changes_counts_as_a_sign_of_life_only(fields: dict[str, Any]) -> None:
    assert Update(**fields).is_sign_of_life
    for news in NEWS:
        assert not Update(**(fields | news)).is_sign_of_life
