"""Tests of views of step timings, device figures and block counters."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from tests.app import window_driver as driver

from kvscope_app.session.request_times import RequestTimes
from kvscope_app.views.memory.memory_view import MemoryView
from kvscope_app.views.requests.request_rows import read_columns
from kvscope_app.views.throughput.throughput_view import ThroughputView
from kvscope_app.window.status_bar import StatusBar, device_text
from kvscope_telemetry.messages.capabilities import Capabilities
from kvscope_telemetry.messages.telemetry import Counters, DeviceInfo, DeviceSample, RequestInfo, RequestRows
from kvscope_telemetry.mirror.mirror import Mirror
from kvscope_telemetry.source import SERIES_FIELDS, Update

GPU = DeviceSample(epoch=7, time_ns=1, utilization=0.87, power_watts=212.4, temperature_celsius=64.0)


def publish_step(engine, **values):
    """Publish a frame with the given values in its series."""
    engine.frame()
    series = engine.source.updates[-1].series
    assert set(values) <= set(SERIES_FIELDS)
    for name, value in values.items():
        series[name][0] = value


@pytest.fixture
def view(session, qtbot):
    made = ThroughputView(session)
    qtbot.addWidget(made)
    made.resize(500, 1200)
    made.show()
    return made


def test_step_panel_is_shown_once_step_times_are_reported(engine, session, view, poll):
    engine.frame()
    poll(session)
    view.charts.refresh_all()
    assert "step" not in view.charts.shown
    publish_step(
        engine, schedule_ns=200_000, run_ns=9_000_000, forward_ns=8_000_000, commit_ns=300_000, record_ns=100_000
    )
    poll(session)
    view.charts.refresh_all()
    assert view.charts.panels["step"].isVisible()
    drawn = {name: values[np.isfinite(values)] for name, values in view.charts.drawn["step"].values.items()}
    if all(values.size for values in drawn.values()):  # the bin in progress is not drawn yet
        assert drawn["forward_s"][-1] <= 0.008


def test_device_panels_are_shown_once_figures_are_reported(engine, session, view, poll):
    engine.heartbeat()
    engine.source.updates.append(Update(samples=(DeviceSample(epoch=7, time_ns=1),)))
    poll(session)
    view.charts.refresh_all()
    assert not {"busy", "power", "temperature"}.intersection(view.charts.shown)
    engine.source.updates.append(Update(samples=(GPU,)))
    poll(session)
    view.charts.refresh_all()
    assert view.charts.panels["busy"].isVisible()
    assert view.charts.panels["power"].isVisible()
    assert view.charts.panels["temperature"].isVisible()
    assert view.charts.panels["temperature"].legend.values["temperature_celsius"] in ("64 °C", "–")


def test_status_bar_shows_the_device_figures(engine, session, poll, qtbot):
    bar = StatusBar(session)
    qtbot.addWidget(bar)
    bar.refresh()
    assert driver.child_named(bar, "device").text() == ""
    engine.source.updates.append(Update(samples=(GPU,)))
    poll(session)
    bar.refresh()
    assert driver.child_named(bar, "device").text() == "Engine 87 % of the CPUs  ·  212 W  ·  64 °C"
    hello = session.live_mirror.hello
    gpu = msgspec.structs.replace(hello, device=DeviceInfo(kind="cuda"))
    half = DeviceSample(epoch=1, time_ns=1, utilization=0.5)
    assert device_text(half, gpu) == "GPU 50 %"
    alone = msgspec.structs.replace(hello, capabilities=Capabilities(engine="devices", blocks=False))
    assert device_text(half, alone) == "CPU 50 %"
    assert device_text(DeviceSample(epoch=1, time_ns=1), gpu) == ""


def test_memory_view_shows_evicted_and_copied_blocks(engine, session, poll, qtbot):
    view = MemoryView(session)
    qtbot.addWidget(view)
    view.refresh()
    assert "Evicted" not in view.details.rows
    engine.frame(counters=Counters(admitted=3, evicted_blocks=1234, copied_blocks=1, preemptions=2))
    poll(session)
    view.refresh()
    assert view.details.value("Evicted") == "1\u202f234 blocks"
    assert view.details.value("Copied on write") == "1 block"
    assert view.details.value("Preempted") == "2 ×"


def rows(number, state):
    tokens = np.zeros(1, "<u4").tobytes()
    return RequestRows(
        number=np.array([number], "<u4").tobytes(),
        state=np.array([state], "u1").tobytes(),
        num_output_tokens=tokens,
    )


def test_queue_time_ends_when_a_request_first_runs(make_engine):
    times = RequestTimes()
    times.add_rows(rows(1, 0), 1_000)
    assert times.started_ns(np.array([1]))[0] < 0
    times.add_rows(rows(1, 1), 5_000)
    times.add_rows(rows(1, 1), 9_000)
    assert times.started_ns(np.array([1]))[0] == 5_000
    times.add_snapshot(rows(2, 1))  # it was running before the first update
    times.add_rows(rows(2, 1), 9_000)
    assert times.started_ns(np.array([2]))[0] < 0


def test_request_columns_contain_the_queue_time(make_engine):
    mirror, times = Mirror(), RequestTimes()
    mirror.apply(make_engine().source.updates[0])
    info = RequestInfo(number=1, request_id="a", arrival_ns=1_000_000_000, num_prompt_tokens=3)
    mirror.requests.apply((info,), RequestRows(), time_ns=1_000_000_000)
    mirror.time_ns = 1_500_000_000
    assert read_columns(mirror, times).queue_s[0] == pytest.approx(0.5)
    times.add_rows(rows(1, 1), 1_250_000_000)
    assert read_columns(mirror, times).queue_s[0] == pytest.approx(0.25)
