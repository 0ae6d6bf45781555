"""Tests of alarms in a window: notices, bookmarks, the dialog of rules, webhooks, and alarms found in recordings."""

from __future__ import annotations

import time
from types import SimpleNamespace

import pytest
from msgspec.structs import replace
from PySide6.QtCore import QRect, Qt, QTimer
from PySide6.QtWidgets import QDialogButtonBox
from shiboken6 import isValid
from tests.app import window_driver as driver
from tests.simulated_engine.engine import SimulatedEngine

from kvscope_app.alarms import alarm_strip
from kvscope_app.alarms.alarm_dialog import AlarmDialog
from kvscope_app.alarms.alarm_evaluator import AlarmEvaluator
from kvscope_app.alarms.alarm_strip import AlarmLine, AlarmStrip
from kvscope_app.settings.settings_store import SettingsStore
from kvscope_telemetry.alarms.alarm_engine import Alarm
from kvscope_telemetry.alarms.alarm_figures import SECOND_FIGURES
from kvscope_telemetry.alarms.rules import DEFAULT_RULES, Rule, parse_rule
from kvscope_telemetry.messages.capabilities import Capabilities
from kvscope_telemetry.messages.telemetry import Stop
from kvscope_telemetry.recordings.reader import Recording
from kvscope_telemetry.recordings.writer import RecordingWriter
from kvscope_telemetry.summaries.bookmark import newest_revisions
from kvscope_telemetry.summaries.summary import SECOND_NS, Summary

WAIT_MS = 120_000
START_NS = 1_700_000_000 * SECOND_NS


RULES = {rule.name: rule for rule in DEFAULT_RULES}
KV_USAGE = "KV usage high"
SOON = replace(RULES[KV_USAGE], expression="kv_usage > 0.01", seconds=1.0)


def second(at, used=50, **more):
    return Summary(time_ns=START_NS + at * SECOND_NS, epoch=7, active_blocks=used, free_blocks=100 - used, **more)


def extend_overview(session, summaries):
    """Append summaries to the session's overview, as the writer of the recent history does."""
    session.overview.extend(summaries)
    session.overview_changed.emit()


@pytest.fixture
def window_with_scripted_overview(session, make_window, qtbot):
    """Window of a session whose overview is extended by the test."""
    window = make_window(session)
    session.overview_changed.emit()
    qtbot.wait(1)
    return window


def test_lasting_alarm_makes_one_notice_and_one_bookmark(window_with_scripted_overview, session):
    strip = window_with_scripted_overview.alarm_strip
    assert not strip.isVisible()
    for at in range(30):
        extend_overview(session, [second(at, used=97 if at >= 5 else 50)])
    assert strip.isVisible()
    assert strip.names == [KV_USAGE]
    assert strip.text.startswith("KV usage high share of the pool held by requests > 95.0 % for 5 s, since ")
    (mark,) = session.bookmarks.shown
    assert (mark.kind, mark.time_ns, mark.until_ns) == (KV_USAGE, START_NS + 5 * SECOND_NS, 0)
    for at in range(30, 50):
        extend_overview(session, [second(at)])
    assert "over after 25.0 s, up to 97.0 %" in strip.text
    (mark,) = session.bookmarks.shown
    assert mark.until_ns == START_NS + 30 * SECOND_NS
    assert strip.isVisible()


def test_ongoing_alarm_shows_its_worst_value_so_far(window_with_scripted_overview, session):
    extend_overview(session, [second(at, longest_wait_s=float(at)) for at in range(12)])
    strip, at_first = window_with_scripted_overview.alarm_strip, session.bookmarks.shown
    assert strip.text.endswith(", up to 11 s so far")
    assert [mark.text for mark in at_first] == ["up to 11 s"]
    for at in range(12, 96):
        extend_overview(session, [second(at, longest_wait_s=float(at))])
    assert strip.text.endswith(", up to 95 s so far")
    assert [(mark.bookmark_id, mark.text) for mark in session.bookmarks.shown] == [
        (at_first[0].bookmark_id, "up to 95 s")
    ]


def test_renamed_bookmark_of_an_ongoing_alarm_keeps_its_name(window_with_scripted_overview, session):
    extend_overview(session, [second(at, longest_wait_s=float(at)) for at in range(12)])
    session.bookmarks.rename(session.bookmarks.shown[0], "the long one")
    extend_overview(session, [second(at, longest_wait_s=float(at)) for at in range(12, 20)])
    assert [mark.text for mark in session.bookmarks.shown] == ["the long one"]


def test_notice_of_an_ended_alarm_disappears_after_a_delay(window_with_scripted_overview, session, monkeypatch, qtbot):
    monkeypatch.setattr(alarm_strip, "HIDE_AFTER_S", 0.0)
    extend_overview(session, [second(at, used=97 if at < 20 else 50) for at in range(40)])
    strip = window_with_scripted_overview.alarm_strip
    assert strip.isVisible()
    qtbot.waitUntil(lambda: not strip.isVisible(), timeout=WAIT_MS)
    assert driver.has_no_running_timer(strip)
    assert len(session.bookmarks.shown) == 1


def test_other_alarms_ending_does_not_delay_the_removal_of_a_notice(window_with_scripted_overview, monkeypatch, qtbot):
    strip, now_s = window_with_scripted_overview.alarm_strip, [time.monotonic()]
    monkeypatch.setattr(alarm_strip, "time", SimpleNamespace(monotonic=lambda: now_s[0]))
    rung = [Alarm(rule, 7, START_NS, START_NS, 1.0) for rule in DEFAULT_RULES[:2]]
    for alarm in rung:
        window_with_scripted_overview.alarms.alarm_started.emit(alarm)
    (clock,) = strip.findChildren(QTimer)
    clock.setInterval(20)
    window_with_scripted_overview.alarms.alarm_ended.emit(rung[0])
    now_s[0] += 2 * alarm_strip.HIDE_AFTER_S
    ending = QTimer(strip, interval=1)
    ending.timeout.connect(lambda: window_with_scripted_overview.alarms.alarm_ended.emit(rung[1]))
    ending.start()
    qtbot.waitUntil(lambda: strip.names == [rung[1].name], timeout=WAIT_MS)
    ending.stop()


def test_each_alarm_has_one_notice_and_the_newest_is_shown_first(window_with_scripted_overview, session, qtbot):
    strip, went = window_with_scripted_overview.alarm_strip, []
    alone = AlarmStrip(window_with_scripted_overview.alarms, went.append, lambda: None)
    qtbot.addWidget(alone)
    extend_overview(session, [second(at, used=97, longest_wait_s=15.0 if at > 10 else 0.0) for at in range(20)])
    assert strip.names == [KV_USAGE, "Long wait"]
    assert strip.text.startswith("Long wait longest wait of a request for its first step > 10 s, since ")
    assert "and 1 more" in driver.visible_texts(strip)
    strip.dismiss_button.click()
    assert strip.names == [KV_USAGE]
    alone.go_button.click()
    alone.dismiss_button.click()
    alone.go_button.click()
    assert went == [START_NS + 11 * SECOND_NS, START_NS]
    strip.all_button.click()
    assert window_with_scripted_overview.docks["bookmarks"].isVisible()
    strip.dismiss_button.click()
    assert not strip.isVisible()
    extend_overview(session, [second(at, used=97) for at in range(20, 30)])
    assert not strip.isVisible()  # the alarm is still the same one
    assert len(session.bookmarks.shown) == 2


@pytest.fixture
def settings_store(settings):
    return SettingsStore(settings)


def test_no_alarm_is_evaluated_while_all_rules_are_off(session, settings_store):
    settings_store.change(alarm_rules=tuple(replace(rule, is_on=False) for rule in DEFAULT_RULES))
    watch, looks = AlarmEvaluator(session, settings_store), []
    watch.evaluated.connect(lambda: looks.append(1))
    extend_overview(session, [second(at, used=100) for at in range(60)])
    assert session.bookmarks.shown == looks == []
    settings_store.change(alarm_rules=(RULES[KV_USAGE],))
    extend_overview(session, [second(at, used=100) for at in range(60, 70)])
    assert session.bookmarks.shown
    assert looks
    watch.deleteLater()


def test_alarms_are_found_in_a_long_overview_that_is_read_in_parts(session, settings_store, qtbot):
    session.overview.extend(second(at, used=97 if at % 100 < 20 else 50) for at in range(1000))
    watch = AlarmEvaluator(session, settings_store)
    qtbot.waitUntil(lambda: len(session.bookmarks.shown) == 10, timeout=WAIT_MS)
    assert all(mark.until_ns for mark in session.bookmarks.shown)
    watch.deleteLater()


def test_changing_the_rules_ends_ongoing_alarms_of_the_old_rules(window_with_scripted_overview, session):
    extend_overview(session, [second(at, used=97) for at in range(20)])
    window_with_scripted_overview.themes.settings.change(
        alarm_rules=(replace(RULES[KV_USAGE], expression="kv_usage > 0.99"),)
    )
    (mark,) = session.bookmarks.shown
    assert mark.until_ns
    extend_overview(session, [second(at, used=98) for at in range(20, 40)])
    assert len(session.bookmarks.shown) == 1


def test_custom_rule_fires_unless_the_engine_is_paused_or_its_figure_is_unknown(window_with_scripted_overview, session):
    rule = parse_rule("Too full: free_blocks < 0.05 * num_blocks and running > 8 for 3 s")
    window_with_scripted_overview.themes.settings.change(alarm_rules=(rule, parse_rule("temperature_celsius > 20")))
    stops = (Stop(begin_ns=START_NS, end_ns=START_NS + 10 * SECOND_NS),)
    extend_overview(session, [second(at, used=97, num_running=9, stops=stops if at == 0 else ()) for at in range(10)])
    assert session.bookmarks.shown == []
    extend_overview(session, [second(at, used=97, num_running=8 if at % 2 else 9) for at in range(10, 20)])
    assert session.bookmarks.shown == []
    extend_overview(session, [second(at, used=97, num_running=9) for at in range(20, 30)])
    (mark,) = session.bookmarks.shown
    assert (mark.kind, mark.text, mark.time_ns) == ("Too full", "down to 3 blocks", START_NS + 20 * SECOND_NS)
    assert window_with_scripted_overview.alarm_strip.text.startswith(
        "Too full free blocks < 0.05 * blocks of the pool and requests running > 8 for 3 s, since "
    )


def test_command_line_rules_apply_in_addition_to_saved_rules(window_with_scripted_overview, session):
    window_with_scripted_overview.alarms.set_run_rules([parse_rule("Busy: running > 3")])
    extend_overview(session, [second(at, used=97, num_running=9) for at in range(10)])
    assert {mark.kind for mark in session.bookmarks.shown} == {"Busy", KV_USAGE}
    assert window_with_scripted_overview.themes.settings.values.alarm_rules == DEFAULT_RULES
    assert "Busy" in window_with_scripted_overview.alarms.command_line_text


@pytest.fixture
def dialog(window_with_scripted_overview, qtbot):
    """Alarm dialog, opened by the menu action."""
    window_with_scripted_overview.actions_by_name["alarm_rules"].trigger()
    found = next(each for each in window_with_scripted_overview.findChildren(AlarmDialog) if each.isVisible())
    yield found
    if isValid(found):  # the dialog deletes itself when it is closed
        found.close()


def ok_button(dialog):
    return dialog.buttons.button(QDialogButtonBox.StandardButton.Ok)


def test_dialog_shows_the_rules_and_saves_edits_to_the_settings(window_with_scripted_overview, dialog, settings, qtbot):
    assert dialog.rules == DEFAULT_RULES
    row = dialog.rows[0]
    row.expression.selectAll()
    qtbot.keyClicks(row.expression, "kv_usage > 0.8")
    row.seconds.setValue(2)
    dialog.rows[4].on_box.click()
    dialog.rows[6].remove_button.click()
    ok_button(dialog).click()
    kept = SettingsStore(settings).values.alarm_rules
    assert kept[0] == Rule(name=KV_USAGE, expression="kv_usage > 0.8", seconds=2.0)
    assert not kept[4].is_on
    assert kept[1:4] == DEFAULT_RULES[1:4]
    assert len(kept) == len(DEFAULT_RULES) - 1
    assert window_with_scripted_overview.alarms.rules == kept
    again = AlarmDialog(
        window_with_scripted_overview.alarms, window_with_scripted_overview.themes.theme, window_with_scripted_overview
    )
    again.add_button.click()
    again.rows[-1].expression.setText("running > 8")
    again.buttons.button(QDialogButtonBox.StandardButton.RestoreDefaults).click()
    assert again.rules[:-1] == DEFAULT_RULES
    assert again.rules[-1].expression == "running > 8"
    again.all_box.setChecked(True)
    again.all_box.click()
    assert not any(rule.is_on for rule in again.rules)
    again.close()


def test_rule_expression_is_validated_while_it_is_typed(window_with_scripted_overview, dialog, qtbot):
    dialog.add_button.click()
    row = dialog.rows[-1]
    assert not ok_button(dialog).isEnabled()
    qtbot.keyClicks(row.expression, "ttft_p99 > 500")
    assert row.note.startswith("'ttft_p99' is not a figure (did you mean ttft_p99_ms?); accepted: kv_usage, ")
    assert not ok_button(dialog).isEnabled()
    row.expression.setCursorPosition(len("ttft_p99"))
    qtbot.keyClicks(row.expression, "_ms")
    assert (row.note, ok_button(dialog).isEnabled()) == ("", True)
    row.name.setText(KV_USAGE)
    assert row.note == dialog.rows[0].note == "Another alarm has this name"
    row.name.setText("Slow")
    row.expression.end(False)
    qtbot.keyClicks(row.expression, " for 20 s")
    qtbot.keyClick(row.expression, Qt.Key.Key_Tab)
    assert (row.expression.text(), row.seconds.value()) == ("ttft_p99_ms > 500", 20.0)
    ok_button(dialog).click()
    assert window_with_scripted_overview.alarms.rules[-1] == Rule(
        name="Slow", expression="ttft_p99_ms > 500", seconds=20.0
    )


def test_picking_a_figure_from_the_menu_inserts_its_name(dialog, qtbot):
    groups = [action.menu() for action in dialog.figure_button.menu().actions()]
    entries = {action.text().split("\t")[0]: action for group in groups for action in group.actions()}
    assert set(entries) == set(SECOND_FIGURES)
    dialog.add_button.click()
    entries["free_blocks"].trigger()
    qtbot.keyClicks(dialog.rows[-1].expression, " < 100")
    assert dialog.rules[-1].expression == "free_blocks < 100"


def test_dialog_shows_the_last_value_of_each_figure_or_unknown(window_with_scripted_overview, session, dialog):
    extend_overview(session, [second(at, used=43) for at in range(3)])
    assert dialog.rows[0].shown_value == "last second: 43.0 %"
    assert dialog.rows[4].shown_value == "last second: unknown"


def test_dialog_notes_which_rules_the_engine_cannot_measure(make_engine, make_session, make_window):
    capabilities = Capabilities(engine="vllm", commands=False, free_rows=False, requests=False, steps=False)
    window = make_window(make_session(make_engine(capabilities=capabilities)))
    dialog = AlarmDialog(window.alarms, window.themes.theme, window)
    notes = {row.rule.name: row.note for row in dialog.rows}
    assert notes["Blocks run out"] == "Cannot be measured here: vLLM does not report blocks_run_out_s"
    assert notes["Engine stuck"] == "Cannot be measured here: vLLM does not report stalled_s"
    assert notes[KV_USAGE] == notes["Frames lost"] == ""
    assert ok_button(dialog).isEnabled()  # the rules are valid
    dialog.close()


def test_narrow_dialog_puts_expressions_on_separate_lines(dialog, qtbot):
    dialog.resize(960, 600)
    qtbot.waitUntil(lambda: not dialog.rows[0].is_folded, timeout=WAIT_MS)
    dialog.resize(420, 400)
    qtbot.waitUntil(lambda: all(row.is_folded for row in dialog.rows), timeout=WAIT_MS)
    area = dialog.area
    qtbot.waitUntil(lambda: area.widget().width() <= area.viewport().width(), timeout=WAIT_MS)


def test_live_alarm_bookmarks_are_saved_in_the_recent_history(window, qtbot):
    session = window.session
    window.themes.settings.change(alarm_rules=(SOON,))
    qtbot.waitUntil(lambda: window.alarm_strip.isVisible(), timeout=WAIT_MS)
    assert [mark.kind for mark in session.bookmarks.shown] == [KV_USAGE]
    assert session.disk_history.ring.flush(60.0)
    ring_recording = Recording.open(session.disk_history.ring.folder, origin_ns=session.disk_history.ring.origin_ns)
    assert list(newest_revisions(ring_recording.bookmarks()).values()) == session.bookmarks.shown
    window.alarm_strip.go_button.click()
    assert session.timeline.is_paused
    qtbot.waitUntil(lambda: session.timeline.cursor_ns <= session.bookmarks.shown[0].time_ns + 1000, timeout=WAIT_MS)


def test_firing_and_resolved_alarms_are_posted_to_the_webhook(window, webhook_server, qtbot):
    window.themes.settings.change(alarm_rules=(SOON,), alarm_webhook=webhook_server.url)
    qtbot.waitUntil(lambda: len(webhook_server.posts) == 1, timeout=WAIT_MS)
    post = webhook_server.posts[0]
    assert (post["name"], post["state"], post["expression"]) == (KV_USAGE, "firing", "kv_usage > 0.01")
    assert (post["engine"], post["instance"]) == ("kvscope", window.session.source.name)
    assert post["value"] > 0.01
    window.themes.settings.change(alarm_rules=DEFAULT_RULES)
    qtbot.waitUntil(lambda: len(webhook_server.posts) >= 2, timeout=WAIT_MS)
    assert webhook_server.posts[1]["state"] == "resolved"
    assert webhook_server.posts[1]["fingerprint"] == post["fingerprint"]


def test_unreachable_webhook_is_reported_once_without_its_path(
    window_with_scripted_overview, session, qtbot, monkeypatch
):
    monkeypatch.setattr("kvscope_telemetry.alarms.webhook.RETRY_AFTER_S", ())
    received = []
    session.noticed.connect(received.append)
    window_with_scripted_overview.themes.settings.change(alarm_webhook="http://127.0.0.1:9/secret")
    at = iter(range(10_000))

    def ring_until(condition):
        for _ in range(40):
            extend_overview(
                session, [second(next(at), used=97) for _ in range(8)] + [second(next(at)) for _ in range(12)]
            )
            qtbot.wait(50)
            if condition():
                return

    ring_until(lambda: received)
    ring_until(lambda: len(session.bookmarks.shown) > 8)
    (line,) = received
    assert line.startswith("Alarm not posted: webhook at 127.0.0.1:9: ")
    assert "secret" not in line


def test_dialog_rejects_a_webhook_url_that_is_not_http(dialog, window_with_scripted_overview):
    dialog.url.setText("ftp://host/x")
    assert not ok_button(dialog).isEnabled()
    dialog.url.setText(" https://host/x ")
    ok_button(dialog).click()
    assert window_with_scripted_overview.alarms.webhook_url == "https://host/x"


def test_recording_shows_bookmarks_where_alarms_would_have_fired(
    open_playback_window, themes, tmp_path, qtbot, webhook_server
):
    themes.settings.change(alarm_rules=(SOON,), alarm_webhook=webhook_server.url)
    path, now = tmp_path / "r.mcap", [1_000_000_000]

    def tick():
        now[0] += 25_000_000
        return now[0]

    engine = SimulatedEngine(num_blocks=100, num_running=6, clock=tick)
    with RecordingWriter(path) as writer:
        writer.write(engine.snapshot(), wait=True)
        for _ in range(200):
            writer.write(engine.advance(), wait=True)
    window = open_playback_window(path)
    session = window.session
    qtbot.waitUntil(lambda: len(session.bookmarks.shown) == 1, timeout=WAIT_MS)
    (mark,) = session.bookmarks.shown
    assert mark.kind == KV_USAGE
    assert not session.bookmarks.is_stored(mark)
    assert not window.alarm_strip.isVisible()  # no alarm fires live
    window.themes.settings.change(alarm_rules=())
    assert session.bookmarks.shown == []
    window.themes.settings.change(alarm_rules=(parse_rule("Mine: active_blocks > 0 for 2 s"),))
    qtbot.waitUntil(lambda: [mark.kind for mark in session.bookmarks.shown] == ["Mine"], timeout=WAIT_MS)
    assert webhook_server.posts == []


def test_narrow_alarm_line_wraps_rule_and_details_without_clipping(qtbot):
    line = AlarmLine()
    qtbot.addWidget(line)
    rule, detail = "Long wait: longest_wait_s > 10 and running > 8 for 10 s", "up to 97.0 %; since 12:00:00.000, " * 4
    line.show_alarm(rule, detail)
    line.resize(2_000, 40)
    line.show()
    assert not line.is_narrow
    low = line.heightForWidth(2_000) if line.hasHeightForWidth() else line.sizeHint().height()
    width = round(line.rule.fontMetrics().horizontalAdvance(rule) * 0.7)
    line.resize(width, 400)
    assert line.is_narrow
    qtbot.waitUntil(lambda: line.detail.width() == width, timeout=WAIT_MS)
    for label in (line.rule, line.detail):
        metrics = label.fontMetrics()
        needed = metrics.boundingRect(QRect(0, 0, label.width(), 9999), Qt.TextFlag.TextWordWrap, label.text())
        assert needed.height() >= 2 * metrics.height(), "the text should wrap to two lines or more"
        assert label.height() >= needed.height()
        assert label.width() >= needed.width()
    assert line.heightForWidth(width) > 3 * low
    line.resize(2_000, 40)
    assert not line.is_narrow
