"""Fixtures: summaries made by hand, and a heatmap on a session with an overview."""

from __future__ import annotations

import numpy as np
import pytest

from kvscope_app.session.session import Session
from kvscope_app.session.source_timeline import SourceTimeline
from kvscope_app.ui.theme import DARK
from kvscope_telemetry.summaries.address_bins import bin_rows, count_by_size, free_run_lengths
from kvscope_telemetry.summaries.session_overview import SessionOverview
from kvscope_telemetry.summaries.summary import SECOND_NS, Summary

BEGIN_NS = 1_790_000_000 * SECOND_NS


class TimedSession(Session):
    """Session with a given overview and a cursor that jumps immediately."""

    def __init__(self, source, overview):
        super().__init__(source)
        self.overview = overview
        self.timeline.deleteLater()
        self.timeline = FakeTimeline(source, overview, self)


class FakeTimeline(SourceTimeline):
    """Timeline whose cursor can be set, although nothing is recorded."""

    cursor_ns = 0

    def go_to(self, time_ns):
        self.cursor_ns = time_ns


def make_second(index, ledger, *, num_pool=None, epoch=7, block_size=16):
    """Return the summary of second `index` with the given ledger."""
    pool = ledger.part(0, num_pool or ledger.num_blocks)
    runs = free_run_lengths(pool.state)
    return Summary(
        time_ns=BEGIN_NS + index * SECOND_NS,
        epoch=epoch,
        active_blocks=int((pool.state == 1).sum()),
        cached_blocks=int((pool.state == 2).sum()),
        free_blocks=int((pool.state == 0).sum()),
        used_slots=int(pool.filled[pool.state == 1].sum()),
        longest_free_run=int(runs.max(initial=0)),
        num_free_runs=len(runs),
        free_runs=count_by_size(runs),
        num_rows=ledger.num_blocks,
        bins=bin_rows(ledger, block_size),
    )


def scramble_ledger(ledger, rng):
    """Fill the ledger with random states."""
    size = ledger.num_blocks
    ledger.state[:] = rng.integers(0, 3, size)
    ledger.ref_count[:] = np.where(ledger.state == 1, rng.integers(1, 3, size), 0)
    ledger.filled[:] = np.where(ledger.state == 1, rng.integers(1, 17, size), np.where(ledger.state == 2, 16, 0))
    ledger.owner[:] = np.where(ledger.state == 1, rng.integers(0, 300, size), -1)


@pytest.fixture
def begin_ns():
    """Start time of second 0."""
    return BEGIN_NS


@pytest.fixture
def make_summary():
    """Function `make_summary(index, ledger, …)` that returns a summary."""
    return make_second


@pytest.fixture
def scramble():
    """Function `scramble(ledger, rng)` that fills a ledger with random states."""
    return scramble_ledger


@pytest.fixture
def rng():
    return np.random.default_rng(5)


@pytest.fixture
def overview():
    return SessionOverview()


@pytest.fixture
def make_view(qtbot, poll):
    """Function `make_view(engine, overview)` that returns a visible view, large enough for all its parts."""
    from kvscope_app.views.heatmap.heatmap_view import HeatmapView

    sessions = []

    def make(engine, overview, theme=DARK, size=(620, 700)):
        session = TimedSession(engine.source, overview)
        sessions.append(session)
        poll(session)
        view = HeatmapView(session)
        qtbot.addWidget(view)
        view.apply_theme(theme)
        view.resize(*size)
        view.show()
        view.refresh()
        return view

    yield make
    for session in sessions:
        session.close()
        session.deleteLater()
