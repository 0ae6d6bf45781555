"""Opening an item's editor works, or does nothing, whatever other editor is open."""

from __future__ import annotations

import pytest
from PySide6.QtCore import QModelIndex, Qt
from PySide6.QtGui import QStandardItem, QStandardItemModel
from PySide6.QtWidgets import QLineEdit, QListView

from kvscope_app.ui.editing import edit_item


@pytest.fixture
def items(qtbot):
    """A list of two items that can be edited, and one that cannot."""
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


def editors(items):
    """Texts of the editors that are open."""
    rows = (items.model().index(row, 0) for row in range(items.model().rowCount()))
    found = {index.row(): items.indexWidget(index) for index in rows}
    return {row: editor.text() for row, editor in found.items() if isinstance(editor, QLineEdit)}


def test_editing_an_item_again_keeps_its_open_editor(items):
    index = items.model().index(0, 0)
    edit_item(items, index)
    items.indexWidget(index).setText("begun")
    edit_item(items, index)
    assert editors(items) == {0: "begun"}
    assert items.window().focusWidget() is items.indexWidget(index)


def test_editing_another_item_commits_the_open_editor(items):
    edit_item(items, items.model().index(0, 0))
    items.indexWidget(items.model().index(0, 0)).setText("changed")
    edit_item(items, items.model().index(1, 0))
    assert editors(items) == {1: "second"}
    assert items.model().item(0).text() == "changed"


@pytest.mark.parametrize("row", [2, None])
def test_editing_a_fixed_or_missing_item_opens_no_editor(items, row):
    edit_item(items, QModelIndex() if row is None else items.model().index(row, 0))
    assert editors(items) == {}
    assert not items.findChildren(QLineEdit)


def test_editing_an_item_that_committing_removes_opens_no_editor(items):
    model = items.model()
    model.itemChanged.connect(lambda _: model.removeRow(1), Qt.ConnectionType.SingleShotConnection)
    edit_item(items, model.index(0, 0))
    items.indexWidget(model.index(0, 0)).setText("changed")
    edit_item(items, model.index(1, 0))
    assert editors(items) == {}
