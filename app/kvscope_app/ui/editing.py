"""Opens the editor of an item in a list or table, even while the editor of another item is open."""

from __future__ import annotations

from PySide6.QtCore import QModelIndex, QPersistentModelIndex, Qt
from PySide6.QtWidgets import QAbstractItemView


def edit_item(view: QAbstractItemView, index: QModelIndex | QPersistentModelIndex) -> None:
    """Open the editor of the item at `index`, or focus the editor if it is open already.

    If the editor of another item is open, it is committed and closed first. Nothing happens for an invalid index or an
    item that cannot be edited. `QAbstractItemView.edit` would print `edit: editing failed` and do nothing in each of
    these cases.
    """
    needed = Qt.ItemFlag.ItemIsEditable | Qt.ItemFlag.ItemIsEnabled
    if not index.isValid() or index.flags() & needed != needed:
        return
    editor = view.indexWidget(index)
    if editor is not None:
        editor.setFocus()
        return
    target = QPersistentModelIndex(index)  # committing what another editor holds may reset the model
    view.setCurrentIndex(index)  # commits and closes the editor of the item that was current
    if target.isValid() and view.state() != QAbstractItemView.State.EditingState:
        view.edit(target)
