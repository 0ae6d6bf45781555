"""Work on another thread, whose progress and end are reported on the GUI thread."""

from __future__ import annotations

import threading

from PySide6.QtCore import QObject

from kvscope_app.session.background import Background
from kvscope_app.session.background_watch import BackgroundWatch


def test_progress_is_reported_until_the_end_which_is_reported_once(qtbot):
    parent, may_end = QObject(), threading.Event()
    shares, ends = [], []

    def work(report_progress):
        report_progress(0.5)
        may_end.wait(60)
        return "done"

    background = Background(work, "kvscope-test")
    BackgroundWatch(
        background, lambda: ends.append((background.result, threading.current_thread())), parent, shares.append
    )
    qtbot.waitUntil(lambda: 0.5 in shares)
    assert not ends
    may_end.set()
    qtbot.waitUntil(lambda: bool(ends))
    num_shares = len(shares)
    qtbot.wait(100)
    assert ends == [("done", threading.main_thread())]
    assert len(shares) == num_shares


def test_cancelled_watch_cancels_the_work_and_reports_no_end(qtbot):
    parent, started, ends = QObject(), threading.Event(), []

    def work(report_progress):
        started.set()
        while report_progress(0.0):
            threading.Event().wait(0.001)

    background = Background(work, "kvscope-test")
    watch = BackgroundWatch(background, lambda: ends.append(1), parent)
    assert started.wait(60)
    watch.cancel()
    assert background.wait(60)
    qtbot.wait(100)
    assert not ends
