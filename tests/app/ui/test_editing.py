"""Tests of opening an item editor while another editor is open."""

from __future__ import annotations

import pytest
from PySide6.QtCore import QModelIndex, Qt
from PySide6.QtGui import QStandardItem, QStandardItemModel
from PySide6.QtWidgets import QLineEdit, QListView

from kvscope_app.ui.editing import edit_item


@pytest.fixture
def list_view(qtbot):
    """List view with two editable items and one fixed item."""
    view = QListView()
    qtbot.addWidget(view)
    model = QStandardItemModel(view)
    for name in ("first", "second", "fixed"):
        model.appendRow(QStandardItem(name))
    model.item(2).setEditable(False)
    view.setModel(model)
    view.show()
    qtbot.waitExposed(view)
    return view


def open_editor_texts(list_view):
    """Return the texts of open editors by row."""
    rows = (list_view.model().index(row, 0) for row in range(list_view.model().rowCount()))
    found = {index.row(): list_view.indexWidget(index) for index in rows}
    return {row: editor.text() for row, editor in found.items() if isinstance(editor, QLineEdit)}


def test_editing_an_item_again_keeps_its_open_editor(list_view):
    index = list_view.model().index(0, 0)
    edit_item(list_view, index)
    list_view.indexWidget(index).setText("begun")
    edit_item(list_view, index)
    assert open_editor_texts(list_view) == {0: "begun"}
    assert list_view.window().focusWidget() is list_view.indexWidget(index)


def test_editing_another_item_commits_the_open_editor(list_view):
    edit_item(list_view, list_view.model().index(0, 0))
    list_view.indexWidget(list_view.model().index(0, 0)).setText("changed")
    edit_item(list_view, list_view.model().index(1, 0))
    assert open_editor_texts(list_view) == {1: "second"}
    assert list_view.model().item(0).text() == "changed"


@pytest.mark.parametrize("row", [2, None])
def test_editing_a_fixed_or_missing_item_opens_no_editor(list_view, row):
    edit_item(list_view, QModelIndex() if row is None else list_view.model().index(row, 0))
    assert open_editor_texts(list_view) == {}
    assert not list_view.findChildren(QLineEdit)


def test_editing_an_item_that_committing_removes_opens_no_editor(list_view):
    model = list_view.model()
    model.itemChanged.connect(lambda _: model.removeRow(1), Qt.ConnectionType.SingleShotConnection)
    edit_item(list_view, model.index(0, 0))
    list_view.indexWidget(model.index(0, 0)).setText("changed")
    edit_item(list_view, model.index(1, 0))
    assert open_editor_texts(list_view) == {}
