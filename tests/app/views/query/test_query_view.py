"""Tests of the query view: ready questions, the editor, errors, stopping, export, and selection of requests."""

from __future__ import annotations

import importlib.util

import pytest
from PySide6.QtCore import QSettings, Qt

from kvscope_app.session.session import Session
from kvscope_app.ui.table_text import as_tsv
from kvscope_app.ui.theme import THEMES
from kvscope_app.views.query import query_view
from kvscope_app.views.query.query_view import QueryView
from kvscope_telemetry.exports.query.ready_questions import READY_QUESTIONS
from kvscope_telemetry.playback.playback_source import PlaybackSource
from kvscope_telemetry.recordings.reader import Recording
from kvscope_telemetry.recordings.sample import sample_recording

WAIT_MS = 120_000
ENDLESS = "select count(*) from range(1000000000) a, range(1000000000) b"


@pytest.fixture
def view(qtbot):
    session = Session(PlaybackSource(Recording.open(sample_recording()), is_playing=False))
    session.start()
    view = QueryView(session)
    qtbot.addWidget(view)
    view.apply_theme(THEMES["dark"])
    view.resize(900, 400)
    view.show()
    yield view
    view.shut_down()
    session.close()


@pytest.fixture
def ask(view, qtbot):
    """Function that types SQL, presses Ctrl+Enter, waits for the end, and returns the cells of all rows."""

    def run(sql):
        view.editor.setPlainText(sql)
        qtbot.keyClick(view.editor, Qt.Key.Key_Return, Qt.KeyboardModifier.ControlModifier)
        qtbot.waitUntil(lambda: view.is_loaded, timeout=WAIT_MS)
        return cells(view)

    return run


def cells(view):
    model = view.model
    return [
        [model.index(row, column).data() for column in range(model.columnCount())] for row in range(model.rowCount())
    ]


def test_chosen_question_is_shown_as_sql_and_answered(view, qtbot):
    index = 1 + next(at for at, each in enumerate(READY_QUESTIONS) if each.name == "most-preempted")
    view.questions.setCurrentIndex(index)
    view.questions.activated.emit(index)
    qtbot.waitUntil(lambda: view.is_loaded, timeout=WAIT_MS)
    assert view.editor.toPlainText() == READY_QUESTIONS[index - 1].sql
    assert cells(view)[0][:3] == ["19", "request-14", "3"]
    assert view.status.text() == "20 rows"
    view.editor.insertPlainText(" ")
    assert view.questions.currentText() == query_view.OWN_QUERY


def test_rows_are_sorted_by_a_column_and_copied_with_unknown_values_last(view, ask, qtbot):
    ask("select * from (values (2, 'b'), (null, 'c'), (10, 'a')) as t(number, name)")
    view.table.sortByColumn(0, Qt.SortOrder.DescendingOrder)
    assert cells(view) == [["10", "a"], ["2", "b"], ["–", "c"]]
    view.table.sortByColumn(0, Qt.SortOrder.AscendingOrder)
    assert as_tsv(view.table, [0, 1]) == "number\tname\n2\tb\n10\ta\n"


def test_current_row_selects_its_request(view, ask):
    ask("select number from requests order by number desc limit 3")
    view.table.setCurrentIndex(view.model.index(1, 0))
    assert view.session.selection.request == 38


def test_bad_sql_is_explained_in_one_line_and_earlier_rows_stay(view, ask):
    rows = ask("select 1 as a")
    assert ask("selec 1") == rows
    assert view.status.text() == 'Parser Error: syntax error at or near "selec"'
    assert "\n" not in view.status.text()


def test_running_query_can_be_stopped_and_the_next_one_runs(view, ask, qtbot):
    ask("select 1")
    view.editor.setPlainText(ENDLESS)
    qtbot.mouseClick(view.run, Qt.MouseButton.LeftButton)
    assert view.cancel.isEnabled()
    assert not view.run.isEnabled()
    qtbot.mouseClick(view.cancel, Qt.MouseButton.LeftButton)
    qtbot.waitUntil(lambda: view.is_loaded, timeout=WAIT_MS)
    assert view.status.text() == "Stopped."
    assert ask("select 7 as a") == [["7"]]


def test_selected_row_stays_selected_when_the_rows_are_sorted(view, ask):
    ask("select * from (values (1, 'c'), (2, null), (3, 'a')) as rows(number, name)")
    view.table.selectRow(0)
    view.model.sort(1, Qt.SortOrder.AscendingOrder)
    (selected,) = view.table.selectionModel().selectedRows()
    assert (selected.row(), view.model.value(selected.row(), "number")) == (1, 1)


def test_closing_the_view_stops_a_running_query(view, ask):
    ask("select 1")
    view.editor.setPlainText(ENDLESS)
    view.run_query()
    work = view._work
    view.shut_down()
    assert work.wait(WAIT_MS / 1000)


def test_export_writes_all_rows_to_a_csv_file(view, qtbot, tmp_path, monkeypatch):
    monkeypatch.setattr(query_view, "ask_save", lambda *given: given[-1](str(tmp_path / "out.csv")))
    (tmp_path / "out.csv").write_text("replaced after the user agreed")
    view.editor.setPlainText("select number, request_id from requests order by number")
    qtbot.mouseClick(view.export, Qt.MouseButton.LeftButton)
    qtbot.waitUntil(lambda: view.is_loaded, timeout=WAIT_MS)
    lines = (tmp_path / "out.csv").read_text("utf-8-sig").splitlines()
    assert lines[:2] == ["number,request_id", "1,request-0"]
    assert len(lines) == 40
    assert view.status.text() == f"Exported 39 rows to {tmp_path / 'out.csv'}"
    assert [path.name for path in tmp_path.iterdir()] == ["out.csv"]


def test_sql_is_kept_for_the_next_start(view, tmp_path):
    settings = QSettings(str(tmp_path / "kvscope.ini"), QSettings.Format.IniFormat)
    view.restore_settings(settings)
    assert view.editor.toPlainText() == READY_QUESTIONS[0].sql
    view.editor.setPlainText("select 'mine'")
    view.save_settings(settings)
    view.editor.clear()
    view.restore_settings(settings)
    assert view.editor.toPlainText() == "select 'mine'"


def test_missing_duckdb_and_missing_data_are_explained(view, ask, engine, make_session, qtbot, monkeypatch):
    without_history = QueryView(make_session(engine))
    qtbot.addWidget(without_history)
    without_history.editor.setPlainText("select 1")
    without_history.run_query()
    qtbot.waitUntil(lambda: without_history.is_loaded, timeout=WAIT_MS)
    assert without_history.status.text() == "there is no recorded data: recent history is off"
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    ask("select 1")
    assert view.status.text() == "queries need duckdb, which is not installed: pip install 'kvscope[query]'"
