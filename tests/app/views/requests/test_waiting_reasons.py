"""Tests of the texts about waiting and refused requests and about the phases of a request."""

from __future__ import annotations

import json

import numpy as np
import pytest
from msgspec.structs import replace
from PySide6.QtCore import Qt
from PySide6.QtGui import QGuiApplication

from kvscope_app.session.request_times import RequestTimes
from kvscope_app.ui.theme import THEMES
from kvscope_app.views.requests.phase_text import phases
from kvscope_app.views.requests.request_model import COLUMNS
from kvscope_app.views.requests.requests_view import RequestsView
from kvscope_app.views.requests.waiting_text import first_waiting, num_ahead, queue_text, why_waits
from kvscope_telemetry.ledger import BlockState
from kvscope_telemetry.messages.request_state import WaitsFor
from kvscope_telemetry.messages.telemetry import Event, EventData, RequestRows
from kvscope_telemetry.request_log import Ending

WAITING, RUNNING, PREEMPTED, FINISHED = range(4)
SECOND_NS = 1_000_000_000


@pytest.fixture
def busy_session(engine, session, poll):
    """Session in which request 1 holds all but four of 64 blocks, request 2 was preempted, and 3 waits behind it."""
    engine.request(2, blocks=(), state=PREEMPTED, num_prompt_tokens=100, num_output_tokens=30)
    engine.request(3, blocks=(), state=WAITING, num_prompt_tokens=40, num_output_tokens=0)
    engine.request(1, blocks=range(58), state=RUNNING)
    engine.write_blocks(range(58), owner=1)
    engine.write_blocks([58, 59], owner=9, state=BlockState.CACHED, ref_count=0)
    poll(session)
    return session


@pytest.fixture
def view(busy_session, qtbot):
    view = RequestsView(busy_session)
    qtbot.addWidget(view)
    view.resize(900, 500)
    view.apply_theme(THEMES["dark"])
    view.show()
    view.refresh()
    yield view
    view.shut_down()


def test_waiting_reason_names_needed_blocks_and_position(busy_session):
    mirror = busy_session.mirror
    assert first_waiting(mirror) == 2
    assert num_ahead(mirror, mirror.requests.row_of(3)) == 1
    assert why_waits(mirror, 2) == (
        "it needs up to 9 blocks, 4 free and 2 idle in the cache; 1 block is reserved for running requests"
    )
    assert why_waits(mirror, 3).startswith("1 request is ahead of it; it needs up to 3 blocks")
    assert why_waits(mirror, 1) == ""
    assert why_waits(mirror, 77) == ""


@pytest.mark.parametrize(("allocator", "needed"), [("contiguous", 64), ("buddy", 16), ("virtual", "up to 9")])
def test_waiting_reason_includes_reserved_blocks(busy_session, allocator, needed):
    """The request has 130 tokens, 30 of them output, 16 per block; the model takes at most 1,000 tokens."""
    hello = busy_session.mirror.hello
    cache, model = replace(hello.cache, allocator=allocator), replace(hello.model, max_model_len=1000)
    busy_session.mirror.hello = replace(hello, cache=cache, model=model)
    wanted = f"it needs {needed} blocks" + (" in a row" if allocator != "virtual" else "")
    assert why_waits(busy_session.mirror, 2).startswith(wanted)


@pytest.mark.parametrize(
    ("reason", "words"),
    [
        (WaitsFor.GRAMMAR, "the grammar of its answer is being compiled"),
        (WaitsFor.REMOTE_KV, "its KV is being loaded from elsewhere, into blocks that it holds"),
        (WaitsFor.BLOCKS, "it needs up to 9 blocks, 4 free and 2 idle in the cache"),
    ],
)
def test_waiting_reason_reported_by_the_engine_takes_precedence(reason, words, busy_session):
    requests, hello = busy_session.mirror.requests, busy_session.mirror.hello
    requests.waits_for[requests.row_of(2)] = reason
    busy_session.mirror.hello = replace(hello, capabilities=replace(hello.capabilities, engine="vllm"))
    assert why_waits(busy_session.mirror, 2) == words, "reserved blocks are a rule of kvscope's engine only"


def test_waiting_reason_names_the_request_limit(busy_session):
    busy_session.mirror.limits = (1, 0)
    assert why_waits(busy_session.mirror, 2).startswith("1 request runs, the maximum")


def test_waiting_reason_of_an_unblocked_request_is_the_next_step(engine, session, poll):
    """Such a request arrived after the last step was planned, or that step had no tokens left for it."""
    engine.request(2, blocks=(), state=WAITING, num_prompt_tokens=40, num_output_tokens=0)
    poll(session)
    waits = "it needs up to 3 blocks, 64 free; it starts in the next step that has tokens left and needs no preemption"
    assert why_waits(session.mirror, 2) == waits
    session.mirror.limits = (8, 2048)
    assert why_waits(session.mirror, 2) == f"{waits} (at most 2\u202f048 tokens a step)"
    session.mirror.requests.waits_for[session.mirror.requests.row_of(2)] = WaitsFor.BUDGET
    assert why_waits(session.mirror, 2) == (
        "other requests use up the step's token budget (at most 2\u202f048 tokens a step)"
    )


def test_waiting_reason_names_a_missing_state_slot(engine, session, poll):
    engine.request(2, blocks=(), state=WAITING, num_prompt_tokens=40, num_output_tokens=0)
    poll(session)
    mirror = session.mirror
    mirror.hello = replace(mirror.hello, cache=replace(mirror.hello.cache, num_states=4))
    mirror.requests.waits_for[mirror.requests.row_of(2)] = WaitsFor.BLOCKS
    assert why_waits(mirror, 2).endswith("64 free; it needs a slot for its recurrent state as well")


def test_line_above_the_requests_names_waiting_and_refused_ones(view, engine, busy_session, poll):
    assert view.note.text().startswith("2 waiting. #2 is next: it needs up to 9 blocks")
    refused = Event(kind="refused", time_ns=5, cause="the prompt has 5000 tokens: send at most 799")
    engine.frame([], events=(refused,))
    poll(busy_session)
    view.refresh()
    assert "1 was refused at" in view.note.text()
    assert "at most 799" in view.note.text()
    state = next(i for i, c in enumerate(COLUMNS) if c.title == "State")
    row = view.model.row_of(3)
    assert "1 request is ahead" in view.model.index(row, state).data(Qt.ItemDataRole.ToolTipRole)


def test_line_above_the_requests_is_empty_if_none_waits(session):
    assert queue_text(session.mirror, session.history.events, 0) == ""
    assert first_waiting(session.mirror) is None


def test_detail_shows_why_a_request_waits(view, busy_session):
    busy_session.selection.select_request(2)
    assert "Waiting: it needs up to 9 blocks" in view.detail.phases.text()
    busy_session.selection.select_request(3)
    assert "Waiting: 1 request is ahead of it" in view.detail.phases.text()


def rows(number, tokens):
    return RequestRows(
        number=np.array([number], "<u4").tobytes(), num_output_tokens=np.array([tokens], "<u4").tobytes()
    )


def phases_of(mirror, number, events=(), times=None, first=-1):
    return dict(phases(mirror, times or RequestTimes(), events, number, lambda: first))


def test_phases_are_computed_from_events_and_token_times(engine, session, poll):
    engine.request(4, blocks=(5, 6), state=RUNNING, num_prompt_tokens=20, num_output_tokens=11)
    poll(session)
    mirror = session.mirror
    row = mirror.requests.row_of(4)
    mirror.requests.arrival_ns[row] = SECOND_NS
    mirror.requests.num_preemptions[row] = 1
    mirror.time_ns = 8 * SECOND_NS
    cause = EventData(kind="preempted", num_needed=2, num_available=1, choice="newest")
    events = (
        Event(kind="admitted", time_ns=3 * SECOND_NS, number=4),
        Event(kind="preempted", time_ns=4 * SECOND_NS, number=4, other=1, num_blocks=2, num_tokens=20, data=cause),
        Event(kind="resumed", time_ns=5 * SECOND_NS, number=4, data=EventData(kind="started", waited_ns=SECOND_NS)),
    )
    found = phases_of(mirror, 4, events, first=int(3.5 * SECOND_NS))
    assert found["Queued"] == "2.00 s"
    assert found["Prefill"] == "500 ms, until its first token: 20 of 20 prompt tokens, 0 cached"
    assert found["Decode"] == "4.50 s including 1.00 s preempted, 11 tokens, 450 ms between tokens"
    assert found["Preempted"] == "1 time, resumed after 1.00 s"
    assert found["Reason"].startswith(
        "Request #1 needed 2 blocks and only 1 was available; request #4 was chosen, being the newest"
    )
    assert "not observed" in phases_of(mirror, 4, events)["Prefill"]


def test_prefill_phase_shows_the_computed_part_of_the_prompt(engine, session, poll):
    engine.request(4, blocks=(5, 6), state=RUNNING, num_prompt_tokens=8_136, num_output_tokens=0)
    poll(session)
    mirror = session.mirror
    row = mirror.requests.row_of(4)
    mirror.requests.arrival_ns[row], mirror.time_ns = SECOND_NS, 43 * SECOND_NS
    mirror.requests.num_computed_tokens[row], mirror.requests.num_cached_tokens[row] = 1_302, 240
    events = (Event(kind="admitted", time_ns=2 * SECOND_NS, number=4),)
    assert phases_of(mirror, 4, events)["Prefill"] == (
        "41.0 s so far: 16 %, 1\u202f302 of 8\u202f136 prompt tokens, 240 of them cached"
    )


def test_start_and_ending_of_a_request_are_known_from_events():
    times = RequestTimes()
    times.add_snapshot(rows(4, 9))
    admitted = Event(kind="admitted", time_ns=77, number=4)
    times.add_events(
        [admitted, Event(kind="admitted", time_ns=88, number=5), Event(kind="finished", time_ns=99, number=4)]
    )
    assert times.started_ns(np.array([4, 5])).tolist() == [77, -1]
    assert times.endings(np.array([4, 5])).tolist() == [Ending.FINISHED, Ending.UNKNOWN]


def test_request_row_is_copied_as_tab_separated_cells_or_json(view):
    view.table.selectRow(view.model.row_of(3))
    view.table.copy_row.trigger()
    titles, cells = (line.split("\t") for line in QGuiApplication.clipboard().text().splitlines())
    assert (titles[0], cells[0]) == ("#", "3")
    view.table.copy_json.trigger()
    copied = json.loads(QGuiApplication.clipboard().text())
    assert (copied["number"], copied["state"], copied["ttft_s"]) == (3, "waiting", None)
