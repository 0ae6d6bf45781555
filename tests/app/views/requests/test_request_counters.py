"""Test of the request counters that are shown instead of rows."""

from __future__ import annotations

import pytest

from kvscope_app.ui.number_text import NOTHING
from kvscope_app.views.requests.numbers import RequestNumbers
from kvscope_telemetry.messages.capabilities import Capabilities
from kvscope_telemetry.messages.telemetry import CacheInfo, Counters, DeviceInfo, Hello, ModelInfo
from kvscope_telemetry.mirror.mirror import Mirror


@pytest.mark.parametrize(("aborts", "shown"), [(True, "0"), (False, NOTHING)])
def test_unreported_number_of_aborted_requests_is_a_dash(qtbot, aborts, shown):
    made, mirror = RequestNumbers(), Mirror()
    qtbot.addWidget(made)
    mirror.hello = Hello(
        epoch=1,
        time_ns=1,
        wall_time_ns=1,
        model=ModelInfo(name="m"),
        cache=CacheInfo(num_blocks=8, block_size=16),
        device=DeviceInfo(kind="unknown"),
        capabilities=Capabilities(engine="sglang", requests=False, aborts=aborts),
    )
    mirror.counters = Counters(finished=3)
    made.show_numbers(mirror)
    assert made.value("aborted") == shown
    assert made.value("finished") == "3"
