"""Tests of exporting from a window: formats, ranges, and failures."""

from __future__ import annotations

import pytest
from PySide6.QtWidgets import QFileDialog

from kvscope_app.recording.export_actions import ask_export
from kvscope_app.recording.export_dialog import ExportDialog, _start_export

WAIT_MS = 120_000


def export(window, qtbot, path, what, form="CSV"):
    dialog = ask_export(window)
    dialog.content.setCurrentText(what)
    dialog.table_form.setCurrentText(form)
    selection = dialog.selection()
    dialog.reject()
    _start_export(window, selection, str(path))
    qtbot.waitUntil(
        lambda: path.name in window.statusBar().currentMessage() or bool(window.banner.text), timeout=WAIT_MS
    )
    return selection


def test_each_export_format_is_written_from_the_recent_history(window, qtbot, tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    begins = {"HTML report": b"<!", "Perfetto trace": b"\n", "Table of metrics": b"", "Table of bookmarks": b""}
    for number, (what, begin) in enumerate(begins.items()):
        selection = export(window, qtbot, out / f"{number}.of", what)
        assert (selection.from_ns, selection.until_ns) == (None, None)  # the whole history
        assert (out / f"{number}.of").read_bytes().startswith(begin)
    assert sorted(path.name for path in out.iterdir()) == [f"{number}.of" for number in range(len(begins))]


def test_export_dialog_proposes_the_range_of_the_loop(window):
    begin_ns, end_ns = window.session.timeline.range_ns
    third_ns = (end_ns - begin_ns) // 3
    window.session.timeline.loop.set_range(begin_ns + third_ns, end_ns - third_ns)
    dialog = ask_export(window)
    assert (dialog.first.minimum(), dialog.first.value()) == (0.0, pytest.approx(third_ns / 1e9, abs=0.1))
    selection = dialog.selection()
    assert selection.from_ns == pytest.approx(begin_ns + third_ns, abs=1e8)
    assert selection.until_ns == pytest.approx(end_ns - third_ns, abs=1e8)
    window.session.timeline.loop.clear()


def test_export_replaces_an_existing_file_and_reports_failures(window, qtbot, tmp_path):
    (tmp_path / "report.html").write_text("old")
    export(window, qtbot, tmp_path / "report.html", "HTML report")
    assert (tmp_path / "report.html").read_text() != "old"
    export(window, qtbot, tmp_path / "none" / "of.html", "HTML report")
    assert "export failed" in window.banner.text


def test_export_action_asks_for_the_format_and_then_the_file(window):
    window.actions_by_name["export"].trigger()
    dialog = window.findChild(ExportDialog)
    assert not dialog.table_form.isVisible()
    dialog.content.setCurrentText("Table of events")
    assert dialog.table_form.isVisible()
    dialog.table_form.setCurrentText("Parquet")
    dialog.accept()
    files = window.findChild(QFileDialog)
    assert files.selectedFiles()[0].endswith("-events.parquet")
    files.reject()


def test_export_without_a_history_shows_a_message(session, make_window):
    window = make_window(session)
    assert ask_export(window) is None
    assert "No history" in window.statusBar().currentMessage()
