"""Test of the scales of the timeline's lanes."""

from __future__ import annotations

from kvscope_app.views.timeline.lane_picture import peak_requests
from kvscope_telemetry.summaries.session_overview import SessionOverview
from kvscope_telemetry.summaries.summary import SECOND_NS, Summary


def test_request_lanes_are_scaled_to_the_peak_within_a_second():
    overview = SessionOverview()
    assert peak_requests(overview, "running") == 0
    overview.extend([Summary(time_ns=0, epoch=1, num_running=4, num_waiting=2)])
    assert peak_requests(overview, "waiting") == 2, "without a peak, the value itself counts"
    overview.extend([Summary(time_ns=SECOND_NS, epoch=1, num_running=10, peak_running=11, num_waiting=9)])
    assert (peak_requests(overview, "running"), peak_requests(overview, "waiting")) == (11, 9)
