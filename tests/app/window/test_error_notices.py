"""Tests of the notices about uncaught errors: shown once in the window, reported without prompt text, and printed."""

from __future__ import annotations

import codecs
import gc
import sys
import threading
from contextlib import contextmanager

import numpy as np
import pytest
from PySide6.QtCore import QTimer, qCritical
from PySide6.QtGui import QGuiApplication
from PySide6.QtWidgets import QMainWindow, QPushButton, QWidget

from kvscope_app.actions.action_registry import ActionSpec
from kvscope_app.views.prefixes.prefixes_view import PrefixesView
from kvscope_app.window.error_notices import MAX_ERRORS, ErrorNotices, InternalErrors
from kvscope_telemetry.errors import BadInput

SECRET = "a prompt that nobody else may read"


@pytest.fixture
def errors(qapp):
    made = InternalErrors(parent=qapp)
    yield made
    made.deleteLater()


@pytest.fixture
def notices(errors, themes):
    made = ErrorNotices(errors, themes)
    yield made
    made.deleteLater()


@pytest.fixture
def window(session, make_window, notices):
    return make_window(session, with_views=("prefixes",))


@contextmanager
def expected(errors, qtbot):
    """Context in which uncaught errors are expected; pytest-qt captures them as well."""
    with qtbot.captureExceptions() as caught, errors.listening():
        yield caught


def raise_in_slot(errors, qtbot, error):
    """Raise `error` in a slot of a timer, as a view may."""

    def slot():
        raise error

    with expected(errors, qtbot) as caught:
        QTimer.singleShot(1, slot)
        qtbot.waitUntil(lambda: len(caught) == 1)


def test_error_in_a_slot_is_shown_and_its_report_contains_the_code_line(
    window, notices, session, qtbot, monkeypatch, capsys
):
    def broken(self):
        raise IndexError(f"index 20 is out of bounds: '{SECRET}'")

    monkeypatch.setattr(PrefixesView, "refresh", broken)
    prefixes = window.views["prefixes"]
    window.focus_view("prefixes")
    with expected(notices.errors, qtbot) as caught:
        window.refresher.touch(prefixes)
        qtbot.waitUntil(lambda: notices.strip is not None and notices.strip.isVisible())
    assert caught[0][0] is IndexError
    assert notices.strip.window() is window
    assert notices.strip.text.startswith("Something went wrong")
    copy = next(b for b in notices.strip.findChildren(QPushButton) if b.text() == "Copy report")
    copy.click()
    report = QGuiApplication.clipboard().text()
    assert "raise IndexError(f\"index 20 is out of bounds: '{SECRET}'\")" in report, (
        "the report contains the code line but not the value"
    )
    assert "refresher.py" in report
    assert "PySide6" in report
    assert SECRET not in report
    assert "internal error, IndexError" in capsys.readouterr().err


def test_error_notice_names_the_view_of_the_innermost_call(window, notices, session, qtbot, poll, monkeypatch):
    view = window.views["prefixes"]
    monkeypatch.setattr(view.builder, "update", lambda mirror: 1 / 0)
    with expected(notices.errors, qtbot):
        QTimer.singleShot(1, view.refresh)
        qtbot.waitUntil(lambda: notices.strip is not None and notices.strip.text != "")
    assert notices.strip.text == "Something went wrong in Prefixes"


def test_error_notice_names_the_failed_action_and_the_exception(window, notices, session, qtbot):
    def fail():
        raise KeyError(SECRET)

    window.actions_by_name.add_action(ActionSpec("test", "Copy &everything…", "Edit", fail))
    with expected(notices.errors, qtbot):
        window.actions_by_name["test"].trigger()
        qtbot.waitUntil(lambda: notices.strip is not None and notices.strip.text != "")
    assert notices.strip.text == "“Copy everything” failed"
    assert "KeyError in fail (" in notices.strip.accessibleName()
    assert "during “Copy everything”" in notices.errors.report
    assert SECRET not in notices.strip.accessibleName() + notices.errors.report


def test_error_outside_the_views_names_its_feature(errors):
    code = compile("1 / 0", "/home/someone/kvscope_app/recording/recording_actions.py", "exec")
    record_error(errors, lambda: exec(code))
    assert errors.newest.feature == "Recording"


def test_repeated_error_is_counted_and_stays_dismissed(window, notices, errors, qtbot, capsys):
    def fail():
        raise ValueError("again")

    with expected(notices.errors, qtbot):
        for _ in range(12):
            QTimer.singleShot(1, fail)
        qtbot.waitUntil(lambda: errors.newest is not None and errors.newest.count == 12)
        qtbot.waitUntil(lambda: notices.strip is not None and "12 times" in notices.strip.accessibleName())
        assert len(errors.errors) == 1
        assert capsys.readouterr().err.count("internal error") == 2  # printed for the first and the tenth occurrence
        notices.strip.hide()
        QTimer.singleShot(1, fail)
        qtbot.waitUntil(lambda: errors.newest.count == 13)
        qtbot.wait(20)
        assert not notices.strip.isVisible()
    raise_in_slot(errors, qtbot, KeyError("another"))
    qtbot.waitUntil(notices.strip.isVisible)
    assert "1 other error earlier" in notices.strip.accessibleName()


def test_errors_in_threads_and_finalizers_are_shown_and_printed(window, notices, errors, qtbot, capsys):
    def work():
        raise RuntimeError("in a thread")

    class Bad:
        def __del__(self):
            raise OSError("while it went")

    with pytest.MonkeyPatch.context() as patch:  # pytest's own hooks would fail the test
        patch.setattr(threading, "excepthook", threading.__excepthook__)
        patch.setattr(sys, "unraisablehook", sys.__unraisablehook__)
        with errors.listening():
            thread = threading.Thread(target=work)
            thread.start()
            thread.join()
            Bad()
            gc.collect()
    qtbot.waitUntil(lambda: {each.kind for each in errors.errors} >= {"RuntimeError", "OSError"})
    qtbot.waitUntil(lambda: notices.strip is not None and notices.strip.isVisible())
    printed = capsys.readouterr().err
    assert "in a thread" in printed
    assert "while it went" in printed


@pytest.mark.qt_no_exception_capture
@pytest.mark.no_qt_log
def test_critical_qt_message_is_reported_without_quoted_text(errors, qtbot, capsys):
    with errors.listening():
        qCritical(f"the display went away: '{SECRET}'")
    assert [each.kind for each in errors.errors] == ["Qt"]
    assert "the display went away" in errors.report
    assert SECRET not in errors.report
    assert "the display went away" in capsys.readouterr().err


def test_number_of_stored_errors_is_bounded(errors, qtbot):
    for number in range(MAX_ERRORS + 5):
        errors.record(type(f"Error{number}", (Exception,), {}), None, None)
    assert len(errors.errors) == MAX_ERRORS
    assert errors.num_more == 5
    assert "and 5 other errors" in errors.report


def test_report_contains_messages_of_python_without_quoted_values(errors):
    secret = f"""it's {SECRET}, "so" don't tell"""
    record_error(errors, lambda: [1, 2][20:][0])
    record_error(errors, lambda: np.zeros((2, 3)) + np.zeros(4))
    record_error(errors, lambda: int(secret))
    record_error(errors, lambda: {}[secret])
    record_error(errors, lambda: getattr(errors, secret))
    assert "IndexError: list index out of range" in errors.report
    assert "could not be broadcast together" in errors.report
    assert "ValueError: invalid literal for int() with base 10: '…'" in errors.report
    for word in (SECRET, "tell", "don't"):
        assert word not in errors.report


def test_report_contains_no_custom_exception_messages(errors):
    """A custom message may contain a prompt without quotation marks."""

    def refuse():
        raise ValueError(f"cannot show {SECRET}")

    def expect():
        assert not SECRET, SECRET

    def look_up():
        codecs.lookup(SECRET.replace(" ", "-"))

    def chained():
        try:
            refuse()
        except ValueError as error:
            raise BadInput(SECRET) from error

    for what in (refuse, expect, look_up, chained):
        record_error(errors, what)
    errors.record(
        ValueError, ValueError(f"cannot read '{SECRET}"), None
    )  # without a traceback, the author of the message is unknown
    assert len(errors.errors) == 5
    assert 'in refuse: raise ValueError(f"cannot show {SECRET}")' in errors.report
    for written in (SECRET, SECRET.replace(" ", "-")):
        assert written not in errors.report
    assert "BadInput" in errors.report


@pytest.mark.no_qt_log
def test_unterminated_quotation_in_a_qt_message_is_left_out(errors, qtbot):
    with errors.listening():
        qCritical(f'cannot read "{SECRET}')
        qCritical(f"cannot read '{SECRET}' or 'it's {SECRET}'")
    assert "cannot read" in errors.report
    assert SECRET not in errors.report


def record_error(errors, what):
    """Pass the exception that `what` raises to `errors`, with its traceback."""
    try:
        what()
    except Exception as error:
        errors.record(type(error), error, error.__traceback__)


def test_error_notice_is_removed_with_its_window(notices, errors, qtbot):
    window = QMainWindow()
    window.setCentralWidget(QWidget())
    window.resize(800, 400)
    window.show()
    raise_in_slot(errors, qtbot, ValueError("first"))
    qtbot.waitUntil(lambda: notices.strip is not None)
    window.close()
    window.deleteLater()
    qtbot.waitUntil(lambda: notices.strip is None)
    raise_in_slot(errors, qtbot, KeyError("second"))  # there is no window to show it; nothing must raise
    assert len(errors.errors) == 2


def test_exception_hooks_are_restored(qapp):
    before = sys.excepthook, threading.excepthook, sys.unraisablehook
    errors = InternalErrors(parent=qapp)
    with errors.listening():
        assert sys.excepthook is not before[0]
    assert (sys.excepthook, threading.excepthook, sys.unraisablehook) == before
    errors.deleteLater()
