"""Tests of a window on an engine that reports only part of its state: unknown values are never shown as 0."""

from __future__ import annotations

import math
import time

import numpy as np
import pytest
from msgspec.structs import replace

from kvscope_app.debugger.permission import why_not_control
from kvscope_app.views.console.console_view import ConsoleView
from kvscope_app.views.heatmap.heatmap_view import HeatmapView
from kvscope_app.views.memory.memory_view import MemoryView
from kvscope_app.views.page_map.color_modes import COLOR_MODES, FILL, STATE
from kvscope_app.views.page_map.page_map_view import summaries
from kvscope_app.views.requests.requests_view import RequestsView
from kvscope_app.views.throughput.panels import _range_text
from kvscope_app.views.throughput.throughput_view import ThroughputView
from kvscope_app.views.what_if.what_if_view import WhatIfView
from kvscope_telemetry.ledger import BlockState
from kvscope_telemetry.messages.capabilities import Capabilities
from kvscope_telemetry.messages.commands import BlockContent, Control, GetBlockText, Submit
from kvscope_telemetry.messages.telemetry import Counters, Histogram, KVGroup, MetricFigure
from kvscope_telemetry.summaries.histograms import PercentileBounds

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
COUNTS = Counters(num_running=3, num_waiting=2, finished=7, generation_tokens=1234)


def histogram(kind, counts, bounds_ms=(10, 50, 100)):
    return Histogram(
        kind=kind,
        bounds_ns=np.array([bound * 1_000_000 for bound in bounds_ms], "<u8").tobytes(),
        counts=np.array(counts, "<u8").tobytes(),
    )


@pytest.fixture
def vllm_engine(make_engine):
    """Engine with two cached blocks and a quarter of the pool in use."""
    engine = make_engine(capabilities=VLLM, device="unknown")
    engine.ledger.hash[[1, 2]] = (11, 12)
    engine.write_blocks([1, 2], owner=0, filled=0, ref_count=0, state=BlockState.CACHED, counters=COUNTS)
    engine.reading(0.25, (histogram("first_token", (1, 8, 1, 0)),))
    return engine


@pytest.fixture
def vllm_session(vllm_engine, make_session):
    return make_session(vllm_engine)


def test_vllm_session_sends_prompts_and_text_queries_but_no_commands(vllm_engine, vllm_session):
    assert not vllm_session.timeline.is_file
    assert vllm_session.accepts_prompts
    assert vllm_session.provides_texts
    assert not vllm_session.accepts_commands
    assert not vllm_session.may_operate
    assert vllm_session.send(Submit(request_id="a", prompt="hello"))
    assert vllm_session.send(GetBlockText(blocks=(1,), tag=1))
    assert not vllm_session.send(Control(action="pause", tag=2))
    assert [type(command) for command in vllm_engine.source.sent] == [Submit, GetBlockText]
    assert why_not_control(vllm_session) == "vLLM can be watched but not controlled"


def test_page_map_disables_color_modes_that_the_engine_does_not_report(vllm_session, make_window):
    window = make_window(vllm_session)
    page_map = window.page_map
    page_map.set_mode(FILL)
    page_map.draw_all()
    assert page_map.mode is STATE
    for mode in COLOR_MODES:
        is_possible = mode is STATE
        action = window.actions_by_name[f"color_{mode}"]
        assert action.isEnabled() == is_possible
        is_explained = any(reason in action.toolTip() for reason in ("does not report", "single KV group"))
        assert is_explained != is_possible
    words, *_ = summaries(vllm_session.mirror, vllm_session.mirror.hello.cache)
    assert "in use: 25.0 %" in words.replace("\u202f", " ").replace("\xa0", " ")
    assert "2 cached prefixes" in words
    assert "cell positions are assigned by kvscope, not by the server" in words
    assert "free" not in words


def test_page_map_shows_capacity_and_block_sizes_of_several_groups(vllm_session):
    groups = (KVGroup(kind="full", block_size=16), KVGroup(kind="state", block_size=256))
    told = replace(vllm_session.mirror.hello.cache, groups=groups, pool_tokens=900)
    words, *_ = summaries(vllm_session.mirror, told)
    assert "16 to 256 tokens each" in words
    assert "room for 900 tokens" in words


def test_chosen_color_mode_returns_with_an_engine_that_reports_it(
    make_engine, make_session, make_window, poll, vllm_engine, vllm_session
):
    page_map = make_window(vllm_session).page_map
    page_map.set_mode(FILL)
    vllm_engine.capabilities = Capabilities()
    vllm_engine.restart(8)
    poll(vllm_session)
    page_map.draw_all()
    assert page_map.mode is FILL


def test_block_card_shows_unknown_instead_of_0(vllm_session, make_window):
    page_map = make_window(vllm_session).page_map
    facts = page_map.facts_of(1)
    rows = dict(facts.rows)
    assert facts.title == "Slot 1"
    for name in ("Owner", "Held by", "Filled", "Last used"):
        assert rows[name].startswith("unknown"), name
    assert "This engine reports blocks only while" in page_map.facts_of(5).empty_text


def test_requests_view_shows_counters_if_requests_are_not_reported(vllm_session, qtbot):
    view = RequestsView(vllm_session)
    qtbot.addWidget(view)
    view.refresh()
    assert view.stack.currentWidget() is view.numbers
    assert [view.numbers.value(name) for name in ("num_running", "num_waiting", "finished")] == ["3", "2", "7"]


def test_metric_figures_are_shown_with_their_units(vllm_engine, vllm_session, poll, qtbot):
    view = RequestsView(vllm_session)
    qtbot.addWidget(view)
    view.show()
    view.refresh()
    assert not view.numbers.figures.isVisible()
    for value in (0.25, 0.5):
        figures = (
            MetricFigure(name="Host cache in use", value=value, unit="share", metric="vllm:a"),
            MetricFigure(name="Copied to lower tiers", value=3 << 20, unit="bytes"),
            MetricFigure(name="Mean life of a block", value=12.0, unit="s"),
            MetricFigure(name="Waiting: capacity", value=3.0),
        )
        vllm_engine.reading(0.25, figures=figures)
        poll(vllm_session)
        view.refresh()
        assert view.numbers.figures.isVisible()
        assert [text for _, text in view.numbers.figures.lines()] == [
            f"{value:.1%}"[:-1] + " %",
            "3.00 MiB",
            "12.0 s",
            "3",
        ]


@pytest.mark.parametrize("kind", [HeatmapView, WhatIfView])
def test_views_that_need_block_addresses_say_that_vllm_does_not_report_them(kind, vllm_session, qtbot):
    view = kind(vllm_session)
    qtbot.addWidget(view)
    view.show()
    view.refresh()
    words = view.no_addresses_label.text() if kind is HeatmapView else view.empty.text()
    assert "vLLM does not report where blocks are in memory" in words
    view.shut_down()


def test_memory_view_shows_unreported_values_as_unknown(vllm_session, qtbot):
    view = MemoryView(vllm_session)
    qtbot.addWidget(view)
    view.refresh()
    assert "Internal fragmentation" not in view.details.rows
    assert view.details.value("Available") == "unknown"
    assert view.details.value("Saved by sharing") == "unknown"
    assert view.table.value("kv_free") == "unknown"


def test_histogram_percentiles_are_shown_as_ranges(vllm_session, qtbot):
    bounds = vllm_session.history.percentile_bounds("ttft", 0.5, since_ns=0, until_ns=time.monotonic_ns())
    assert bounds == (0.01, 0.05)
    assert _range_text(bounds).replace("\u202f", " ").replace("\xa0", " ") == "10.0 ms – 50.0 ms"
    assert _range_text(PercentileBounds(2.0, math.inf)).startswith("over 2")
    view = ThroughputView(vllm_session)
    qtbot.addWidget(view)
    view.show()
    view.charts.refresh_all()
    assert "queue" not in view.charts.shown
    assert "step" not in view.charts.shown


def test_console_accepts_prompts_only_if_the_engine_does(vllm_session, make_engine, make_session, qtbot, tmp_path):
    console = ConsoleView(vllm_session, folder=tmp_path)
    qtbot.addWidget(console)
    console.refresh()
    assert not console.page.why_blocked()
    mute = make_session(make_engine(capabilities=Capabilities(engine="sglang", commands=False, completions=False)))
    silent = ConsoleView(mute, folder=tmp_path)
    qtbot.addWidget(silent)
    silent.refresh()
    assert silent.page.why_blocked() == "SGLang accepts no prompts"
    assert silent.load.button.toolTip() == "SGLang accepts no prompts"
    for view in (console, silent):
        view.shut_down()


def test_block_texts_known_to_the_source_are_answered_without_a_command(vllm_engine, make_session, qtbot):
    def contents(rows):
        return tuple(BlockContent(block=row, token_ids=(row,), text=f"block {row}") for row in rows)

    vllm_engine.source.contents = contents
    session = make_session(vllm_engine)
    heard = []
    session.replies.connect(heard.extend)
    assert session.send(GetBlockText(blocks=(2, 1), tag=9))
    qtbot.waitUntil(lambda: session.poll() or bool(heard))
    assert [content.text for content in heard[0].contents] == ["block 2", "block 1"]
    assert heard[0].tag == 9
    assert vllm_engine.source.sent == []
