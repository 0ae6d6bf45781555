"""Tests of the forecast of when free blocks run out."""

from __future__ import annotations

import time

import pytest

from kvscope_app.views.memory.memory_view import MemoryView
from kvscope_telemetry.summaries.summary import SECOND_NS, Summary


@pytest.fixture
def view(session, qtbot):
    made = MemoryView(session)
    qtbot.addWidget(made)
    made.resize(300, 500)
    made.show()
    return made


def fill(session, rate):
    """Extend the overview by the last 20 seconds of a pool of 1,000 blocks."""
    now = time.time_ns() // SECOND_NS - 1
    room = [420 - rate * (at + 20) for at in range(-19, 1)]
    session.overview.extend(
        Summary(time_ns=(now + at) * SECOND_NS, epoch=7, active_blocks=1000 - left, cached_blocks=left)
        for at, left in zip(range(-19, 1), room, strict=True)
    )


def test_forecast_warns_while_blocks_run_out_soon(view, session):
    view.refresh()
    assert view.forecast.text == ""
    fill(session, rate=10)
    view.refresh()
    assert view.forecast.text == "Cached blocks run out in 22 s at this rate"
    assert view.forecast.sign.isVisible()


def test_distant_forecast_is_no_warning(view, session):
    fill(session, rate=2)
    view.refresh()
    assert view.forecast.text == "Cached blocks run out in 3:10 min at this rate"
    assert not view.forecast.sign.isVisible()


def test_steady_pool_has_no_forecast(view, session):
    fill(session, rate=0)
    view.refresh()
    assert view.forecast.isHidden()


def test_paused_engine_has_no_forecast(view, session):
    fill(session, rate=10)
    session.overview.stops.begin(int(session.overview.time_ns[-3]), "Ada")
    view.refresh()
    assert view.forecast.isHidden()
