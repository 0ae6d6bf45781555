"""Questions about past requests: choices, progress, answer, cancellation, and reasons why one cannot be asked."""

from __future__ import annotations

import sys

import msgspec
import pytest
from PySide6.QtCore import Qt

from kvscope_app.media_export.picture import is_control
from kvscope_app.session.session import Session
from kvscope_app.views.inspector.event_facts import event_facts
from kvscope_app.views.inspector.facts import Link, LinkTarget
from kvscope_app.views.what_if.comparison_answer import figure_rows, reliability, verdict
from kvscope_app.views.what_if.question_panel import QuestionPanel
from kvscope_app.views.what_if.questions import setting_changes
from kvscope_telemetry.messages.telemetry import Event
from kvscope_telemetry.messages.what_if_question import WhatIfComparison, WhatIfFigures
from kvscope_telemetry.playback.playback_source import PlaybackSource
from kvscope_telemetry.recordings.reader import Recording
from kvscope_telemetry.recordings.sample import sample_recording
from kvscope_telemetry.summaries.summary import TimedEvent

MEASURED = WhatIfFigures(
    ttft_p50_s=1.0, ttft_p99_s=4.0, tpot_p50_s=0.05, tpot_p99_s=0.1, tokens_per_s=100.0, num_preemptions=10
)
CHANGED = msgspec.structs.replace(MEASURED, ttft_p50_s=0.5, num_preemptions=0)
COMPARISON = WhatIfComparison(measured=MEASURED, unchanged=MEASURED, changed=CHANGED, num_requests=39, num_runs=9)
ANSWERS = f"""
import sys
for line in sys.stdin:
    sys.stderr.write(line)
    print('{{"share_done": 0.5}}', flush=True)
    print({msgspec.json.encode(COMPARISON).decode()!r}, flush=True)
"""
WAITS = "import sys\nfor line in sys.stdin: print('{\"share_done\": 0.25}', flush=True)"
REFUSES = 'import sys\nfor line in sys.stdin: print(\'{"error": "line 1: no request fits"}\', flush=True)'


@pytest.fixture
def make_panel(qtbot):
    """Function that creates a panel for the sample recording with a scripted child process."""
    panels, sessions = [], []

    def make(code):
        session = Session(PlaybackSource(Recording.open(sample_recording()), is_playing=False))
        sessions.append(session)
        panel = QuestionPanel(session, command=[sys.executable, "-c", code])
        panels.append(panel)
        qtbot.addWidget(panel)
        panel.resize(900, 400)
        panel.show()

        def is_shown():
            session.poll()
            return session.mirror.hello is not None

        qtbot.waitUntil(is_shown, timeout=60_000)
        panel.refresh()
        return panel

    yield make
    for panel, session in zip(panels, sessions, strict=True):
        panel.close_process()
        assert not panel.process.child.is_running
        session.close()
        session.deleteLater()


def wait_for_answer(panel, qtbot):
    with qtbot.waitSignal(panel.process.answered, timeout=120_000):
        qtbot.mouseClick(panel.run_button, Qt.MouseButton.LeftButton)


def test_first_question_is_twice_the_blocks_and_the_answer_is_a_sentence_with_a_table(make_panel, qtbot):
    panel = make_panel(ANSWERS)
    assert (panel.change_box.currentText(), panel.value_box.currentText()) == (
        "more blocks",
        "twice as many: 128 instead of 64",
    )
    wait_for_answer(panel, qtbot)
    assert panel.answer.isVisible()
    assert panel.answer.title.text() == "128 instead of 64 blocks:"
    assert panel.answer.verdict.text() == "Yes: median time to first token 1.00 s → 500 ms and preemptions 10 → 0."
    assert panel.answer.cell_texts()[1] == ["Time to first token, median", "1.00 s", "1.00 s", "500 ms", "−50 %"]
    assert panel.run_button.isVisible()
    assert not panel.bar.isVisible()


def test_pictures_contain_the_question_only_if_it_is_answered(make_panel, qtbot):
    panel = make_panel(ANSWERS)
    assert is_control(panel)
    wait_for_answer(panel, qtbot)
    assert not is_control(panel)


def test_cancelled_question_ends_the_process_and_another_one_can_be_asked(make_panel, qtbot):
    panel = make_panel(WAITS)
    with qtbot.waitSignal(panel.process.progressed, timeout=120_000):
        qtbot.mouseClick(panel.run_button, Qt.MouseButton.LeftButton)
    assert panel.bar.value() == panel.bar.maximum() // 4
    qtbot.mouseClick(panel.cancel_button, Qt.MouseButton.LeftButton)
    assert not panel.process.child.is_running
    assert panel.message.text() == "Cancelled."
    assert panel.run_button.isVisible()
    assert panel.run_button.isEnabled()


def test_question_that_cannot_be_answered_shows_the_reason_in_one_line(make_panel, qtbot):
    panel = make_panel(REFUSES)
    with qtbot.waitSignal(panel.process.failed, timeout=120_000):
        qtbot.mouseClick(panel.run_button, Qt.MouseButton.LeftButton)
    assert panel.message.text() == "The simulation stopped: no request fits."
    assert not panel.answer.isVisible()


def test_questions_that_need_unreported_values_are_disabled_with_the_reason(session):
    hello = session.mirror.hello
    cache = msgspec.structs.replace(hello.cache, block_bytes=0, max_num_seqs=0, prefix_caching=False)
    changes = setting_changes(msgspec.structs.replace(hello, cache=cache))
    reasons = {change.label: change.reason for change in changes if change.reason}
    assert reasons == {
        "host memory for swapping": "the size of a block is not reported",
        "another max_num_seqs": "the present limit is not reported",
        "another max_num_batched_tokens": "the present limit is not reported",
        "no prefix caching": "it is off, and without it the beginnings that prompts share are not recorded",
    }


def test_panel_says_that_earlier_requests_are_unknown_without_recent_history(session, qtbot):
    panel = QuestionPanel(session)
    qtbot.addWidget(panel)
    assert not panel.run_button.isEnabled()
    assert panel.message.text() == "Earlier requests are not known, because recent history is off."


def test_answer_with_a_large_error_is_marked_as_unreliable():
    wrong = msgspec.structs.replace(MEASURED, num_preemptions=20)
    comparison = msgspec.structs.replace(COMPARISON, unchanged=wrong)
    assert not comparison.is_reliable
    text = reliability(comparison)
    assert text.startswith("Unreliable: an error is above 20 %.")
    assert "preemptions 100 %" in text


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({}, "No: little would have changed."),
        ({"tokens_per_s": 50.0}, "No, it would have been worse: throughput 100 tokens/s → 50 tokens/s."),
        (
            {"ttft_p99_s": 2.0, "tpot_p50_s": 0.08},
            "Partly: time to first token (p99) 4.00 s → 2.00 s. But median time per output token 50.0 ms → 80.0 ms.",
        ),
        ({"num_refused": 2}, "No, it would have been worse: 2 requests would not fit at all."),
    ],
)
def test_verdict_names_what_would_have_been_better_and_worse(changed, expected):
    assert (
        verdict(msgspec.structs.replace(COMPARISON, changed=msgspec.structs.replace(MEASURED, **changed))) == expected
    )


def test_unknown_figures_are_dashes():
    unknown = msgspec.structs.replace(MEASURED, tpot_p50_s=None)
    rows = figure_rows(msgspec.structs.replace(COMPARISON, measured=unknown, changed=unknown))
    assert rows[2].cells == ("Time per output token, median", "–", "50.0 ms", "–", "–")


def test_preemption_in_the_inspector_and_the_engine_menu_lead_to_the_question(make_window, session, qtbot):
    window = make_window(session, with_views=("what_if", "inspector"), size=(1500, 900))
    timed = TimedEvent(time_ns=1, epoch=1, event=Event(kind="preempted", time_ns=1, number=3))
    links = [fact.link for fact in event_facts(timed, session.mirror.hello.cache, None, is_before=True)]
    assert Link(LinkTarget.WHAT_IF, 0) in links
    window.focus_view("requests")
    window.views["inspector"].table.followed.emit(Link(LinkTarget.WHAT_IF, 0))
    qtbot.waitUntil(window.views["what_if"].question.isVisible, timeout=60_000)
    window.focus_view("requests")
    window.actions_by_name["what_if_question"].trigger()
    qtbot.waitUntil(window.views["what_if"].question.isVisible, timeout=60_000)
