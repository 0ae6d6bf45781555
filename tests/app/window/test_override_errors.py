"""An error raised in a Python override of a Qt method is reported. On Python 3.11 PySide would crash."""

from __future__ import annotations

import subprocess
import sys
import traceback

import pytest

from kvscope_app.window.override_errors import call_with_exception_objects, remove_placeholder

PROGRAM = """
import sys
from PySide6.QtCore import QCoreApplication, QEvent, Qt
from PySide6.QtGui import QKeyEvent
from PySide6.QtWidgets import QApplication, QWidget
from kvscope_app.window.override_errors import call_with_exception_objects

class Widget(QWidget):
    def focusNextPrevChild(self, forward):
        return int("x")

app = QApplication([])
widget = Widget()
tab = QKeyEvent(QEvent.Type.KeyPress, Qt.Key.Key_Tab, Qt.KeyboardModifier.NoModifier)
try:
    call_with_exception_objects(lambda: QCoreApplication.sendEvent(widget, tab))
except ValueError as error:
    print("reported:", error)
"""


def test_error_of_c_code_in_an_override_is_raised_instead_of_a_crash():
    """In a process of its own, because PySide loses references while it keeps an error."""
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "reported: " in done.stdout
    assert "invalid literal" in done.stdout


def test_crash_workaround_placeholder_is_removed_from_an_exception_and_its_contexts():
    reported = []

    def fail():
        try:
            int("x")
        except ValueError:
            raise KeyError("y")  # noqa: B904 - the context is tested

    def catch():
        try:
            fail()
        except KeyError as error:
            remove_placeholder(error)
            reported.append("".join(traceback.format_exception(error)))

    call_with_exception_objects(catch)
    assert "invalid literal" in reported[0]
    assert "laceholder" not in reported[0]


def test_exception_raised_by_a_guarded_call_has_no_placeholder_as_context():
    with pytest.raises(ValueError, match="invalid literal") as caught:
        call_with_exception_objects(lambda: int("x"))
    assert caught.value.__context__ is None


def test_guarded_call_returns_the_result_of_the_function():
    assert call_with_exception_objects(lambda: 5) == 5
