"""Tests of requests that missed their latency goals: filter, goodput, and what delayed each."""

from __future__ import annotations

import pytest

from kvscope_app.ui.theme import THEMES
from kvscope_app.views.requests.request_detail import link_requests
from kvscope_app.views.requests.requests_view import RequestsView
from kvscope_telemetry.messages.telemetry import EventData

WAITING, RUNNING, _, FINISHED = range(4)


@pytest.fixture
def view(engine, session, poll, qtbot):
    """View with three requests; a step takes 1 ms.

    Request 1 delays request 2, which is also preempted for it; 3 is fast.
    """
    engine.request(1, state=RUNNING, num_output_tokens=1)
    engine.event(kind="admitted", number=1)
    engine.request(2, state=WAITING, num_output_tokens=0)
    for _step in range(20):
        engine.frame(())
    engine.event(kind="admitted", number=2)
    engine.request(2, state=RUNNING, num_output_tokens=1)
    taken = EventData(kind="preempted", num_needed=3, choice="newest")
    engine.event(kind="preempted", number=2, other=1, num_tokens=21, data=taken)
    for _step in range(30):
        engine.frame(())
    engine.event(kind="resumed", number=2, num_tokens=0)
    engine.request(2, state=RUNNING, num_output_tokens=2)
    for number in (1, 2):
        engine.event(kind="finished", number=number)
        engine.request(number, state=FINISHED, num_output_tokens=2)
    poll(session)
    view = RequestsView(session)
    qtbot.addWidget(view)
    view.resize(900, 700)
    view.apply_theme(THEMES["dark"])
    view.show()
    view.refresh()
    return view


def shown_numbers(view):
    return [view.model.number_at(row) for row in range(view.model.rowCount())]


def set_goals(view, goals):
    view.filter.setCurrentText("Missed goals")
    view.goals.setText(goals)
    view.goals.editingFinished.emit()


def test_missed_goals_filter_lists_no_request_if_no_goals_are_set(view):
    assert not view.goals.isVisible()
    view.filter.setCurrentText("Missed goals")
    assert view.goals.isVisible()
    assert shown_numbers(view) == []
    assert view.count.text() == "No goals set"


def test_filter_shows_requests_that_missed_goals_and_the_goodput(view):
    set_goals(view, "ttft:10")
    assert shown_numbers(view) == [2]
    assert view.count.text() == "goodput 50.0% of 2 finished requests, 1 missed"
    set_goals(view, "ttft:10000")
    assert shown_numbers(view) == []
    assert view.count.text() == "goodput 100.0% of 2 finished requests, 0 missed"


def test_invalid_goal_is_reported_and_the_old_goals_stay(view):
    set_goals(view, "ttft:10")
    set_goals(view, "ttft:soon")
    assert view.count.text() == "Not accepted; write it as ttft:200"
    assert "'ttft:soon' is not accepted" in view.goals.toolTip()
    assert shown_numbers(view) == [2]


def test_link_in_a_delay_selects_the_request_that_caused_it(view, session):
    set_goals(view, "ttft:10")
    session.selection.select_request(2)
    text = view.detail.delays.text()
    assert text.startswith("Missed: TTFT ")
    assert "Waited 2" in text
    assert 'behind <a href="1">#1</a>' in text
    assert 'Preempted for <a href="1">#1</a>' in text
    assert "Recomputed 21 tokens" in text
    view.detail.delays.linkActivated.emit("1")
    assert session.selection.request == 1
    assert "Missed" not in view.detail.delays.text()
    view.detail.delays.linkActivated.emit("77")
    assert session.selection.request == 1, "an unknown request must not be selected"


def test_linked_text_escapes_markup():
    assert link_requests(["<b>#3</b> for #4"], 4) == '&lt;b&gt;<a href="3">#3</a>&lt;/b&gt; for #4'


def test_goals_are_saved_and_restored(view, settings, session, qtbot):
    set_goals(view, "ttft:10 tpot:50")
    view.save_settings(settings)
    other = RequestsView(session)
    qtbot.addWidget(other)
    other.restore_settings(settings)
    assert other.goals.text() == "ttft:10 tpot:50"
    assert other.model.goals == {"ttft": 10.0, "tpot": 50.0}
