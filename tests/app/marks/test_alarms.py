"""Alarms in a window: told once, kept with the session, set on a sheet, and where they would have rung in a file."""

from __future__ import annotations

import time

import pytest
from msgspec.structs import replace
from PySide6.QtCore import QTimer
from PySide6.QtWidgets import QDialogButtonBox

from kvscope_app.marks import alarm_strip
from kvscope_app.marks.alarm_line import AlarmLine
from kvscope_app.marks.alarm_sheet import AlarmSheet
from kvscope_app.marks.alarm_watch import AlarmWatch
from kvscope_app.setting_names import ALARM_RULES
from kvscope_telemetry.alarms.alarm_engine import Alarm
from kvscope_telemetry.alarms.rules import DEFAULT_RULES, KINDS, decode_rules, encode_rules
from kvscope_telemetry.recordings.writer import RecordingWriter
from kvscope_telemetry.summaries.bookmark import settled
from kvscope_telemetry.summaries.summary import SECOND_NS, Summary
from kvscope_telemetry.synthetic.engine import SyntheticEngine
from kvscope_telemetry.timeline.tape import Tape

WAIT_MS = 120_000
START_NS = 1_700_000_000 * SECOND_NS


def all_off(*on):
    """Rules that are off but for these."""
    given = {rule.kind: rule for rule in on}
    return tuple(given.get(rule.kind, replace(rule, is_on=False)) for rule in DEFAULT_RULES)


def second(at, used=50, **more):
    return Summary(time_ns=START_NS + at * SECOND_NS, epoch=7, active_blocks=used, free_blocks=100 - used, **more)


def tell(session, summaries):
    """The course grows, as the ring's writer makes it."""
    session.course.extend(summaries)
    session.course_changed.emit()


@pytest.fixture
def scripted(session, make_window, qtbot):
    """A window whose course the test writes."""
    window = make_window(session)
    session.course_changed.emit()
    qtbot.wait(1)
    return window


def test_one_trouble_is_one_notice_and_one_bookmark(scripted, session):
    strip = scripted.alarm_strip
    assert not strip.isVisible()
    for at in range(30):
        tell(session, [second(at, used=97 if at >= 5 else 50)])
    assert strip.isVisible()
    assert strip.kinds == ["kv_usage"]
    assert strip.text.startswith("KV usage over 95 % for 5 s since ")
    (mark,) = session.bookmarks.shown
    assert (mark.kind, mark.time_ns, mark.until_ns) == ("kv_usage", START_NS + 5 * SECOND_NS, 0)
    for at in range(30, 50):
        tell(session, [second(at)])
    assert "over after 25.0 s, up to 97.0 %" in strip.text
    (mark,) = session.bookmarks.shown
    assert mark.until_ns == START_NS + 30 * SECOND_NS
    assert strip.isVisible()


def test_a_notice_of_what_is_over_goes_by_itself(scripted, session, monkeypatch, qtbot):
    monkeypatch.setattr(alarm_strip, "GOES_AFTER_S", 0.0)
    tell(session, [second(at, used=97 if at < 20 else 50) for at in range(40)])
    strip = scripted.alarm_strip
    assert strip.isVisible()
    strip._forget_old()
    assert not strip.isVisible()
    assert not strip._clock.isActive()
    assert len(session.bookmarks.shown) == 1


def test_what_ends_meanwhile_does_not_put_off_that_a_notice_goes(scripted, monkeypatch, qtbot):
    strip, now_s = scripted.alarm_strip, time.monotonic()
    rung = [Alarm(rule, 7, START_NS, START_NS, 1.0) for rule in DEFAULT_RULES[:2]]
    for alarm in rung:
        strip._on_rang(alarm)
    strip._clock.setInterval(20)
    strip._on_over(rung[0])
    strip._over_s[rung[0].kind] = now_s - 2 * alarm_strip.GOES_AFTER_S
    ending = QTimer(strip, interval=1)
    ending.timeout.connect(lambda: strip._on_over(rung[1]))
    ending.start()
    qtbot.waitUntil(lambda: strip.kinds == [rung[1].kind], timeout=WAIT_MS)
    ending.stop()


def test_several_kinds_one_notice_each_and_the_newest_in_front(scripted, session, qtbot):
    strip = scripted.alarm_strip
    tell(session, [second(at, used=97, longest_wait_s=15.0 if at > 10 else 0.0) for at in range(20)])
    assert strip.kinds == ["kv_usage", "waiting"]
    assert strip.text.startswith("A request waits for its first step for over 10 s")
    assert strip._more.text() == "and 1 more"
    strip.dismiss.click()
    assert strip.kinds == ["kv_usage"]
    went = []
    strip._go_to = went.append
    strip.go.click()
    assert went == [START_NS]
    strip.all.click()
    assert scripted.docks["bookmarks"].isVisible()
    strip.dismiss.click()
    assert not strip.isVisible()
    tell(session, [second(at, used=97) for at in range(20, 30)])
    assert not strip.isVisible()  # it is the same trouble still
    assert len(session.bookmarks.shown) == 2


def test_with_all_rules_off_nobody_looks(session, settings):
    settings.setValue(ALARM_RULES, encode_rules(all_off()))
    watch = AlarmWatch(session, settings)
    assert not watch._is_following
    tell(session, [second(at, used=100) for at in range(60)])
    assert session.bookmarks.shown == []
    watch.set_rules(all_off(KINDS["kv_usage"].rule))
    assert watch._is_following
    watch.set_rules(all_off())
    assert not watch._is_following
    watch.deleteLater()


def test_a_long_course_is_looked_at_in_parts(session, settings, qtbot):
    session.course.extend(second(at, used=97 if at % 100 < 20 else 50) for at in range(1000))
    watch = AlarmWatch(session, settings)
    qtbot.waitUntil(lambda: len(session.bookmarks.shown) == 10, timeout=WAIT_MS)
    assert all(mark.until_ns for mark in session.bookmarks.shown)
    watch.deleteLater()


def test_rules_that_change_end_what_goes_on_by_the_old_ones(scripted, session):
    tell(session, [second(at, used=97) for at in range(20)])
    scripted.alarms.set_rules(all_off(replace(KINDS["kv_usage"].rule, threshold=99.0)))
    (mark,) = session.bookmarks.shown
    assert mark.until_ns
    tell(session, [second(at, used=98) for at in range(20, 40)])
    assert len(session.bookmarks.shown) == 1


def test_the_sheet_is_what_rules_are_and_what_is_kept(scripted, settings, qtbot):
    scripted.actions_by_name["alarm_rules"].trigger()
    sheet = next(found for found in scripted.findChildren(AlarmSheet) if found.isVisible())
    assert list(sheet.rows) == list(KINDS)
    row = sheet.rows["kv_usage"]
    row.threshold.setValue(80)
    row.seconds.setValue(2)
    sheet.rows["hot"].is_on.click()
    assert not sheet.rows["hot"].threshold.isEnabled()
    assert sheet.rows["stuck"].seconds is None
    sheet.buttons.button(QDialogButtonBox.StandardButton.Ok).click()
    rules = {rule.kind: rule for rule in decode_rules(settings.value(ALARM_RULES))}
    assert (rules["kv_usage"].threshold, rules["kv_usage"].seconds) == (80.0, 2.0)
    assert not rules["hot"].is_on
    assert rules["stuck"] == KINDS["stuck"].rule
    assert scripted.alarms.rules == tuple(rules.values())
    again = AlarmSheet(scripted.alarms, scripted)
    assert again.rows["kv_usage"].threshold.value() == 80
    again.buttons.button(QDialogButtonBox.StandardButton.RestoreDefaults).click()
    assert tuple(row.rule for row in again.rows.values()) == DEFAULT_RULES
    again.all.setChecked(True)
    again.all.click()
    assert not any(row.is_on.isChecked() for row in again.rows.values())
    again.close()


def test_live_alarms_are_kept_in_the_ring(window, qtbot):
    """On real sockets: a threshold that is passed at once."""
    session = window.session
    window.alarms.set_rules(all_off(replace(KINDS["kv_usage"].rule, threshold=1.0, seconds=1.0)))
    qtbot.waitUntil(lambda: window.alarm_strip.isVisible(), timeout=WAIT_MS)
    assert [mark.kind for mark in session.bookmarks.shown] == ["kv_usage"]
    assert session.kept.ring.flush(60.0)
    tape = Tape.open(session.kept.ring.folder, session.kept.ring.origin_ns)
    assert list(settled(tape.bookmarks()).values()) == session.bookmarks.shown
    window.alarm_strip.go.click()
    assert session.paused
    qtbot.waitUntil(lambda: session.cursor_ns <= session.bookmarks.shown[0].time_ns + 1000, timeout=WAIT_MS)


def test_a_recording_shows_where_they_would_have_rung(play, settings, tmp_path, qtbot):
    settings.setValue(ALARM_RULES, encode_rules(all_off(replace(KINDS["kv_usage"].rule, threshold=1.0, seconds=1.0))))
    path, now = tmp_path / "r.mcap", [1_000_000_000]

    def tick():
        now[0] += 25_000_000
        return now[0]

    engine = SyntheticEngine(num_blocks=100, num_running=6, clock=tick)
    with RecordingWriter(path) as writer:
        writer.write(engine.snapshot(), wait=True)
        for _ in range(200):
            writer.write(engine.advance(), wait=True)
    window = play(path)
    session = window.session
    qtbot.waitUntil(lambda: len(session.bookmarks.shown) == 1, timeout=WAIT_MS)
    (mark,) = session.bookmarks.shown
    assert mark.kind == "kv_usage"
    assert not session.bookmarks.is_kept(mark)
    assert not window.alarm_strip.isVisible()  # nothing rings now
    window.alarms.set_rules(all_off())
    assert session.bookmarks.shown == []
    window.alarms.set_rules(all_off(replace(KINDS["kv_usage"].rule, threshold=1.0, seconds=2.0)))
    qtbot.waitUntil(lambda: len(session.bookmarks.shown) == 1, timeout=WAIT_MS)


def test_a_rule_that_has_no_room_beside_its_time_goes_on_below(qtbot):
    line = AlarmLine()
    qtbot.addWidget(line)
    line.tell("A request waits for its first step for over 10 s", "over after 25.0 s, up to 97.0 %; from 12:00:00.000")
    line.resize(2_000, 40)
    line.show()
    assert not line.is_narrow
    low = line.heightForWidth(2_000) if line.hasHeightForWidth() else line.sizeHint().height()
    line.resize(round(line.rule.fontMetrics().horizontalAdvance(line.rule.text()) * 0.7), 200)
    assert line.is_narrow
    assert line.rule.height() >= 2 * line.rule.fontMetrics().height(), "two lines of the rule"
    assert line.heightForWidth(line.width()) > 2 * low
    line.resize(2_000, 40)
    assert not line.is_narrow
