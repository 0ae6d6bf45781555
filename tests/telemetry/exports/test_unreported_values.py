"""Exports of a recording whose engine reports only part of the data: unknown values are empty, left out or None, never
0.
"""

from __future__ import annotations

import io
import time

import numpy as np
import pytest

from kvscope_telemetry.alarms.expression import Expression
from kvscope_telemetry.exports.comparison.comparison import Run, compare
from kvscope_telemetry.exports.content import Content
from kvscope_telemetry.exports.perfetto.trace import write_perfetto
from kvscope_telemetry.exports.report.report import write_report
from kvscope_telemetry.exports.run_summary import summarize_run
from kvscope_telemetry.exports.span import span_of
from kvscope_telemetry.exports.tables.csv_file import write_csv
from kvscope_telemetry.exports.tables.tables import metrics_table
from kvscope_telemetry.ledger import BlockState, Ledger
from kvscope_telemetry.messages.capabilities import OWN_ENGINE, Capabilities
from kvscope_telemetry.messages.telemetry import (
    CacheInfo,
    Counters,
    DeviceInfo,
    Frame,
    Hello,
    Histogram,
    ModelInfo,
    Reading,
    Snapshot,
)
from kvscope_telemetry.mirror.mirror import Mirror
from kvscope_telemetry.playback.playback_source import PlaybackSource
from kvscope_telemetry.recordings.overview import read_overview
from kvscope_telemetry.recordings.reader import Recording
from kvscope_telemetry.recordings.writer import RecordingWriter
from kvscope_telemetry.summaries.run_figures import fragmentation_of, usage_of
from kvscope_telemetry.summaries.summary import SECOND_NS

VLLM = Capabilities(
    engine="vllm",
    commands=False,
    physical_rows=False,
    free_rows=False,
    requests=False,
    owners=False,
    ref_counts=False,
    filled=False,
    prefix_hits=False,
    last_used=False,
    steps=False,
    latencies=False,
)
NUM_SECONDS = 4


def record(path, capabilities):
    """Record a few seconds of an engine with 100 blocks, 3 of them cached, at a quarter of usage."""
    ledger = Ledger(100)
    ledger.state[:3], ledger.hash[:3] = BlockState.CACHED, (1, 2, 3)
    hello = Hello(
        epoch=5,
        time_ns=0,
        wall_time_ns=1_700_000_000 * SECOND_NS,
        model=ModelInfo(name="m"),
        cache=CacheInfo(num_blocks=100, block_size=16),
        device=DeviceInfo(kind="unknown"),
        capabilities=capabilities,
    )
    histogram = Histogram(
        kind="first_token",
        bounds_ns=np.array([10_000_000, 50_000_000], "<u8").tobytes(),
        counts=np.array([1, 8, 1], "<u8").tobytes(),
    )
    with RecordingWriter(path) as writer:
        writer.write(Snapshot(hello=hello, seq=0, step=0, time_ns=0, blocks=ledger.pack_all()))
        for seq in range(1, 2 * NUM_SECONDS):
            time_ns = seq * SECOND_NS // 2
            counters = Counters(generation_tokens=10 * seq, prompt_tokens=seq, num_running=2, num_waiting=1)
            writer.write(Frame(epoch=5, seq=seq, step=seq, time_ns=time_ns, counters=counters))
            writer.write(Reading(epoch=5, time_ns=time_ns, used_share=0.25, latencies=(histogram,)))
    recording = Recording.open(path)
    overview = read_overview(recording)
    return recording, overview, span_of(recording)


@pytest.fixture(scope="module")
def watched(tmp_path_factory):
    return record(tmp_path_factory.mktemp("told") / "vllm.mcap", VLLM)


@pytest.fixture(scope="module")
def own(tmp_path_factory):
    return record(tmp_path_factory.mktemp("told") / "own.mcap", OWN_ENGINE)


def test_recording_has_the_capabilities_of_its_engine(watched):
    assert watched[0].info.hello.capabilities == VLLM


def test_overview_is_nan_for_unknown_figures(watched):
    _, overview, _ = watched
    for name in ("free_blocks", "shared_blocks", "used_slots", "admitted", "num_steps", "run_ns", "longest_free_run"):
        assert np.isnan(overview.column(name)).all(), name
    assert overview.column("num_running")[-1] == 2
    assert overview.column("cached_blocks")[-1] == 3
    assert usage_of(overview)[-1] == 0.25
    assert np.isnan(fragmentation_of(overview)).all()
    assert overview.column("decode_tokens")[1:].max() == 20
    assert overview.column("first_token_p50_s")[-1] == 0.05
    assert overview.column("first_token_p50_above_s")[-1] == 0.01
    assert np.isnan(overview.column("first_token_p99_s")[-1])  # above the last bound


def test_fully_reporting_engine_has_all_figures(own):
    _, overview, _ = own
    assert overview.column("free_blocks")[-1] == 97
    assert np.isnan(overview.column("pool_blocks")).all()


def test_metrics_table_is_empty_for_unknown_figures(watched, own):
    recording, overview, span = watched
    file = io.BytesIO()
    write_csv(metrics_table(Content(recording, overview, span)), file)
    head, first, *_ = (line.split(",") for line in file.getvalue().decode("utf-8-sig").splitlines())
    row = dict(zip(head, first, strict=True))
    assert row["num_steps"] == row["free_blocks"] == row["admitted"] == ""
    assert row["num_running"] == "2"
    assert row["first_token_p50_above_s"]
    assert not any(column.name.endswith("_above_s") for column in metrics_table(Content(*own)).columns)


def test_summary_report_and_trace_leave_out_unknown_figures(watched):
    recording, overview, span = watched
    found = summarize_run(recording, overview, span)
    assert found.totals["admitted"] is None
    assert found.num_steps is None
    assert found.latencies_are_bounds
    report, trace = io.BytesIO(), io.BytesIO()
    write_report(recording, overview, (), span, report)
    page = report.getvalue().decode()
    assert "Refused" not in page
    assert "Blocks by address" not in page
    assert "KV usage, peak" in page
    write_perfetto(recording, overview, (), span, trace)
    names = trace.getvalue()
    assert b"Running" in names
    for name in (b"Longest free run", b"Free blocks", b"Requests", b"Steps"):
        assert name not in names


def test_comparison_has_no_difference_for_unknown_figures(watched, own):
    rows = {row.key: row for row in compare(Run(*watched), Run(*own)).rows}
    assert rows["external_fragmentation"].a is None
    assert rows["external_fragmentation"].difference is None
    assert rows["copied_blocks_per_min"].a is None
    assert rows["running_mean"].a == rows["running_mean"].b == 2


@pytest.mark.parametrize(
    ("figure", "is_known"),
    [("kv_usage", True), ("blocks_run_out_s", False), ("longest_wait_s", False), ("stalled_s", False)],
)
def test_alarm_figure_that_is_unknown_is_nan(watched, figure, is_known):
    _, overview, _ = watched
    values = Expression(f"{figure} > 3").value(overview, slice(0, len(overview)))
    assert np.isnan(values[-1]) != is_known


def test_playback_restores_the_metrics_readings_of_an_external_engine(watched):
    source = PlaybackSource(Recording.open(watched[0].path), is_playing=False)
    try:
        source.seek(2.0)
        deadline = time.monotonic() + 60
        mirror = Mirror()
        while mirror.used_share < 0 and time.monotonic() < deadline:
            update = source.poll_update()
            if update is not None:
                mirror.apply(update)
            elif mirror.hello is not None:
                source.step(1)
        assert mirror.capabilities == VLLM
        assert mirror.used_share == 0.25
    finally:
        source.close()
