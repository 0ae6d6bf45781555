"""Tests of the roofline's points, logarithmic axes and texts."""

from __future__ import annotations

import numpy as np
import pytest

from kvscope_app.ui.number_text import num_bytes
from kvscope_app.views.roofline.log_scale import LogScale, bounds, tick_text, with_prefix
from kvscope_app.views.roofline.point_text import bound_text
from kvscope_app.views.roofline.points import PointKind, points_of
from kvscope_app.views.roofline.step_facts import execution_facts, phases_of, work_facts
from kvscope_app.views.timeline.steps import StepColumns
from kvscope_telemetry.messages.telemetry import DeviceInfo, Frame, Timings, Work

DEVICE = DeviceInfo(kind="cuda", read_bytes_per_s=1_000, flops_per_s=8_000)


def steps_of(rows):
    """Return step columns from rows of (end, prefill, decode, flops, bytes, forward)."""
    end, prefill, decode, flops, num_bytes, forward = np.array(rows, np.int64).reshape(len(rows), 6).T
    size = len(rows)
    starts = np.arange(size + 1)
    numbers = np.arange(size) + 1
    ones = np.ones(size, np.int64)
    step = np.arange(size) + 10
    return StepColumns(
        0, 10**12, end - 1, end, ones, step, prefill, decode, starts, numbers, ones, flops, num_bytes, forward
    )


def test_roofline_points_are_rates_of_the_forward_pass_of_each_step():
    rows = [
        (10, 0, 2, 400, 100, 10**9),
        (20, 5, 2, 600, 300, 5 * 10**8),
        (30, 5, 0, 0, 0, 10**9),
        (40, 9, 0, 800, 100, 10**9),
        (99, 9, 0, 800, 100, 10**9),
    ]
    points = points_of(steps_of(rows), 10, 50)
    assert points.step_index.tolist() == [0, 1, 3]
    assert points.intensity.tolist() == [4, 2, 8]
    assert points.flops_per_s.tolist() == [400, 1200, 800]
    assert points.bytes_per_s.tolist() == [100, 600, 100]
    assert points.kind.tolist() == [PointKind.DECODE, PointKind.MIXED, PointKind.PREFILL]
    assert points.index_of_step(1, 13) == 2
    assert points.index_of_step(1, 12) is None
    assert points.index_of_step(2, 13) is None


def test_step_without_reported_work_has_no_roofline_point():
    assert len(points_of(steps_of([(10, 0, 2, 0, 0, 10**9)]), 0, 50)) == 0


def test_roofline_log_scale_places_values_and_round_ticks():
    scale = LogScale(1.0, 1000.0, 0.0, 300.0)
    assert scale.position_of(10.0) == pytest.approx(100)
    assert scale.ticks() == [1, 10, 100, 1000]
    assert LogScale(1.0, 1e6, 0.0, 200.0).ticks() == [1, 1e3, 1e6]
    assert LogScale(1.5, 8.0, 0.0, 200.0).ticks() == [2, 5]
    low, high = bounds(np.array([2.0, 50.0]))
    assert low < 2 < 50 < high
    assert bounds(np.empty(0)) == (1, 10)


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.25, "0.25 B/s"), (999, "999 B/s"), (1_234, "1.23 kB/s"), (5e10, "50.0 GB/s"), (2e15, "2.00 PB/s")],
)
def test_roofline_rates_are_formatted_with_a_unit_prefix(value, text):
    assert with_prefix(value, "B/s") == text


def test_roofline_tick_texts_use_short_unit_prefixes():
    assert [tick_text(value, "FLOP/s") for value in (1e9, 1e11)] == ["1 GFLOP/s", "100 GFLOP/s"]
    assert [tick_text(value, "") for value in (0.1, 10, 1000)] == ["0.1", "10", "1 k"]


def test_work_facts_compare_a_step_with_the_limits_of_the_device():
    work = Work(flops=800, attention_flops=200, weights_bytes=150, kv_read_bytes=50, graph_size=8, wait_ns=2_000)
    values = {fact.name: fact.value for fact in work_facts(work, 10**9, DEVICE)}
    assert values["Weights"] == "150 B, 75 %"
    assert values["Computed"] == "800 FLOP, attention 25 %"
    assert values["Memory"] == "200 B/s, 20 % of memory bandwidth"
    assert values["Compute"] == "800 FLOP/s, 10 % of peak FLOP/s"
    assert values["Bound by"] == "memory"
    assert bound_text(100, 4_000, DEVICE) == "compute"
    assert bound_text(100, 400, DEVICE) == "overhead (neither memory nor compute)"
    frame = Frame(epoch=1, seq=1, step=1, time_ns=1, work=work)
    assert {fact.name: fact.value for fact in execution_facts(frame, DEVICE)} == {
        "Execution": "a CUDA graph of 8 requests",
        "Waited": "2 µs",
    }


def test_work_facts_show_weights_streamed_from_the_host():
    work = Work(flops=800, weights_bytes=150, streamed_bytes=3_000)
    values = {fact.name: fact.value for fact in work_facts(work, 10**9, DEVICE)}
    assert values["Streamed"] == f"{num_bytes(3_000)}, 3.00 kB/s"
    assert values["Moved"] == "150 B", "streamed bytes are not device memory traffic"
    assert "Streamed" not in {fact.name for fact in work_facts(Work(flops=1, weights_bytes=1), 10**9, DEVICE)}


def test_execution_fact_names_graphs_or_eager_mode():
    def execution(device: DeviceInfo, **how: int) -> str:
        frame = Frame(epoch=1, seq=1, step=1, time_ns=1, work=Work(flops=1, **how))
        return next(iter(execution_facts(frame, device))).value

    gpu = DeviceInfo(kind="cuda")
    assert execution(gpu) == "kernel by kernel"
    assert execution(gpu, graph_size=1) == "a CUDA graph of 1 request"
    assert execution(gpu, graph_tokens=64) == "CUDA graphs of 64 tokens, attention kernel by kernel"
    assert execution(DeviceInfo(kind="cpu")) == "eager"


def test_step_without_reported_work_has_no_facts():
    frame = Frame(epoch=1, seq=1, step=1, time_ns=1)
    assert [*execution_facts(frame, DEVICE), *work_facts(frame.work, 10**9, DEVICE)] == []
    unknown = DeviceInfo(kind="cpu")
    values = {fact.name: fact.value for fact in work_facts(Work(flops=8, weights_bytes=4), 10**9, unknown)}
    assert values["Memory"] == "4.00 B/s"
    assert "Bound by" not in values


def test_step_phases_are_limited_to_the_time_of_the_whole_step():
    phases = {p.name: p.time_ns for p in phases_of(Timings(schedule_ns=1, run_ns=10, forward_ns=12, commit_ns=2))}
    assert phases == {"Schedule": 1, "Forward": 10, "Sample, wait": 0, "Commit": 2, "Record": 0}


def test_step_without_reported_forward_time_shows_its_run_time_as_run_and_not_as_sampling():
    phases = {p.name: p.time_ns for p in phases_of(Timings(schedule_ns=1, run_ns=10, commit_ns=2))}
    assert phases == {"Schedule": 1, "Forward": 0, "Run": 10, "Commit": 2, "Record": 0}
