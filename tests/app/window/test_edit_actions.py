"""Tests of the Edit menu: undo, redo, and copying tables as tab-separated text."""

from __future__ import annotations

import pytest
from PySide6.QtCore import QAbstractListModel, QModelIndex, Qt
from PySide6.QtGui import QGuiApplication, QStandardItem, QStandardItemModel
from PySide6.QtWidgets import QDockWidget, QListView, QTableView

from kvscope_app.ui.table_text import as_tsv
from kvscope_app.views.console.conversation import Message

CONTROL = Qt.KeyboardModifier.ControlModifier


@pytest.fixture
def window(engine, session, make_window, poll, qtbot):
    for number in (1, 2, 3):
        engine.request(number, blocks=[number])
        engine.write_blocks([number], owner=number)
    poll(session)
    made = make_window(session, with_views=("console", "requests"), size=(1500, 900))
    made.activateWindow()
    qtbot.waitUntil(made.isActiveWindow)
    return made


def clipboard():
    return QGuiApplication.clipboard().text()


def test_selected_rows_are_copied_with_visible_columns_in_shown_order(window, qtbot):
    view = window.views["requests"]
    window.focus_view("requests")
    view.refresh()
    view.table.selectRow(0)
    view.table.setFocus()
    qtbot.keyClick(view.table, Qt.Key.Key_C, CONTROL)
    title, *rows = [line.split("\t") for line in clipboard().splitlines()]
    assert (title[0], rows[0][0], len(rows)) == ("#", "3", 1)
    assert "running" in rows[0][title.index("State")].lower()
    view.table.setColumnHidden(0, True)
    view.table.horizontalHeader().moveSection(view.table.horizontalHeader().visualIndex(3), 0)
    window.actions_by_name["copy_table"].trigger()
    title, *rows = [line.split("\t") for line in clipboard().splitlines()]
    assert title[0] == view.model.headerData(3, Qt.Orientation.Horizontal)
    assert "#" not in title
    assert [row[0] for row in rows] == [view.model.index(row, 3).data() for row in range(3)]


def test_list_without_columns_is_copied_as_one_line_per_row(qtbot):
    class Names(QAbstractListModel):
        def rowCount(self, parent=QModelIndex()):  # noqa: B008
            return 2

        def data(self, index, role):
            return ["first", "second"][index.row()] if role == Qt.ItemDataRole.DisplayRole else None

    view = QListView()
    qtbot.addWidget(view)
    view.setModel(Names(view))
    assert as_tsv(view, [0, 1]) == "first\nsecond\n"


def test_rows_shown_as_cards_are_copied_with_all_columns(qtbot):
    model = QStandardItemModel(1, 3)
    model.setHorizontalHeaderLabels(["Time", "Kind", "Why"])
    for column, text in enumerate(("10:00", "evicted", "no\troom\nleft")):
        model.setItem(0, column, QStandardItem(text))
    table = QTableView()
    qtbot.addWidget(table)
    table.setModel(model)
    table.setColumnHidden(0, True)
    table.horizontalHeader().hide()
    assert as_tsv(table, [0]) == "Time\tKind\tWhy\n10:00\tevicted\tno room left\n"


def test_copy_in_a_text_field_copies_the_selected_text(window, qtbot):
    line = window.views["requests"].search
    window.focus_view("requests")
    line.setText("chat-2")
    line.setFocus()
    line.selectAll()
    qtbot.keyClick(line, Qt.Key.Key_C, CONTROL)
    assert clipboard() == "chat-2"
    window.page_map.canvas.setFocus()
    window.actions_by_name["copy_rows"].trigger()
    assert "No focused table" in window.statusBar().currentMessage()


def test_closing_a_dock_can_be_undone_and_redone(window, qtbot):
    undo, redo = (window.actions_by_name[name] for name in ("undo", "redo"))
    assert (undo.text(), undo.isEnabled()) == ("Undo", False)
    window.docks["memory"].close()
    qtbot.waitUntil(undo.isEnabled)
    assert undo.text() == "Undo closing memory"
    undo.trigger()
    assert not window.docks["memory"].isHidden()
    assert (redo.text(), undo.isEnabled()) == ("Redo closing memory", False)
    redo.trigger()
    assert window.docks["memory"].isHidden()
    undo.trigger()
    qtbot.wait(300)
    assert window.undo.count() == 1, "an undo is not itself an undo step"


def test_floating_a_dock_can_be_undone(window, qtbot):
    dock: QDockWidget = window.docks["throughput"]
    dock.setFloating(True)
    qtbot.waitUntil(window.undo.canUndo)
    assert window.undo.undoText() == "floating throughput"
    window.actions_by_name["undo"].trigger()
    assert not dock.isFloating()


def test_deleted_chat_is_restored_once_by_undo(window):
    page = window.views["console"].page
    page.current.title = "Of caches"
    page.current.messages.append(Message(role="user", content="What is a block?"))
    key = page.current.key
    window.actions_by_name["delete_chat"].trigger()
    assert page.current.key != key
    assert window.actions_by_name["undo"].text() == "Undo deleting “Of caches”"
    page.undo.click()
    window.actions_by_name["undo"].trigger()
    assert [c.key for c in page.chat.conversations].count(key) == 1
    assert page.current.key == key
    window.actions_by_name["redo"].trigger()
    assert page.chat.find(key) is None
    window.actions_by_name["undo"].trigger()
    assert page.chat.find(key).messages[0].content == "What is a block?"


def test_dock_shortcuts_work_only_while_the_dock_has_the_focus(window, qtbot):
    console = window.views["console"]
    console.page.current.messages.append(Message(role="user", content="a"))
    before = console.page.current
    window.page_map.canvas.setFocus()
    qtbot.keyClick(window.page_map.canvas, Qt.Key.Key_N, CONTROL)
    assert console.page.current is before
    console.page.composer.edit.setFocus()
    qtbot.keyClick(console.page.composer.edit, Qt.Key.Key_N, CONTROL)
    assert console.page.current is not before


def test_escape_in_the_request_table_clears_the_selection(window, session, qtbot):
    table = window.views["requests"].table
    window.focus_view("requests")
    session.selection.select_request(2)
    table.setFocus()
    qtbot.keyClick(table, Qt.Key.Key_Escape)
    assert session.selection.request is None
