"""What the window says of an own engine that was refused before it answered anybody."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from PySide6.QtCore import QObject, Signal

from kvscope_telemetry.source import SourceState

REASON = "max_model_len=8192 is not accepted with allocator='contiguous': " + "so many blocks are not there, " * 5
REMEDY = "(--max-model-len 2048)"


class Keeper(QObject):
    """Of a process that never was."""

    ended = Signal(str)
    started = Signal()
    is_running = False
    engine = SimpleNamespace(log_text=lambda: "")

    def forget(self):
        """Nothing to forget."""


@pytest.fixture
def refused(make_engine, make_session, make_window):
    """A window whose engine ended with a long reason, and its keeper."""
    engine = make_engine()
    engine.source.updates.clear()
    engine.say(SourceState.CONNECTING)
    keeper = Keeper()
    window = make_window(make_session(engine), keeper=keeper, size=(900, 700))
    keeper.ended.emit(REASON + REMEDY)
    return window, keeper


def test_the_end_of_a_reason_is_not_cut(refused, qtbot):
    window, _ = refused
    words = window.banner._detail
    assert words.text().endswith(REMEDY)
    qtbot.waitUntil(lambda: words.height() >= words.heightForWidth(words.width()), timeout=60_000)
    assert words.height() > 2 * words.fontMetrics().height()


def test_who_is_known_to_have_ended_is_not_waited_for(refused):
    window, keeper = refused
    window.session.poll()
    assert window.session.status.state is SourceState.ENDED
    assert window.statusBar()._labels["state"].text().startswith("Ended: max_model_len=8192")
    keeper.started.emit()
    assert window.session.status.state is SourceState.CONNECTING
