"""Synchronizes the selection between the prefix table and the session.

Owns the nodes selected in the table, by key: their blocks are highlighted in every view, also as the tree grows. A
selection made in another view is shown at its position in the tree and not changed. Node indices are never stored,
because they differ from tree to tree.
"""

from __future__ import annotations

import numpy as np
from PySide6.QtCore import QItemSelection, QItemSelectionModel, QObject, Signal

from kvscope_app.session.session import Session
from kvscope_app.views.prefixes.prefix_columns import PrefixMoment
from kvscope_app.views.prefixes.prefix_model import PrefixModel
from kvscope_app.views.prefixes.prefix_table import PrefixTable
from kvscope_telemetry.prefixes.request_blocks import blocks_of_request


class PrefixSelection(QObject):
    changed = Signal()

    def __init__(self, session: Session, model: PrefixModel, table: PrefixTable) -> None:
        super().__init__(table)
        self._session, self._model, self._table = session, model, table
        self._selected_keys: list[int] = []
        self._other_view_key: int | None = None
        """Key of the node whose block or request is selected in another view, or None."""
        self._is_changing = False
        """Whether this object is changing the selection, or rows are about to be assigned to other nodes."""
        model.reordering.connect(self._on_reordering)
        model.reordered.connect(self._on_reordered)
        table.selectionModel().selectionChanged.connect(self._on_rows)
        table.released.connect(lambda: session.selection.select_request(None))
        session.selection.changed.connect(self._on_session)

    @property
    def current(self) -> int | None:
        """Node to describe: the one selected last in the table, or the one that a selection in another view
        belongs to.
        """
        moment = self._model.moment
        if moment is None:
            return None
        key = self._selected_keys[-1] if self._selected_keys else self._other_view_key
        return None if key is None else moment.tree.node_with(key)

    def on_new_tree(self) -> None:
        """Update the selection after a new tree was built.

        In the new tree, the selected nodes may have other blocks, and a selected block may belong to another node.
        """
        if self._selected_keys and self._session.selection.highlighted_rows is not None:
            self._select_keys(self._selected_keys)
        else:
            self._other_view_key = None
            self.update_table()

    def update_table(self) -> None:
        moment = self._model.moment
        if moment is None:
            return
        if self._selected_keys:
            self._select_rows(self._selected_nodes(moment))
            return
        node = node_of_selection(moment, self._session)
        key = None if node is None else int(moment.tree.key[node])
        if key == self._other_view_key and (key is not None or not self._table.selected_rows()):
            return
        self._other_view_key = key
        row = None if node is None else self._model.reveal(node)
        self._select_rows([] if node is None else [node])
        if row is not None:
            self._table.scrollTo(self._model.index(row, 0))
        self.changed.emit()

    def _select_keys(self, keys: list[int]) -> None:
        moment = self._model.moment
        self._selected_keys = keys
        nodes = [] if moment is None else self._selected_nodes(moment)
        was_changing, self._is_changing = self._is_changing, True
        if moment is None or not keys:
            self._session.selection.select_request(None)
        else:  # empty if the nodes do not exist at this moment; they may exist at another
            rows = [np.empty(0, np.int64), *(moment.tree.rows_of(n) for n in nodes)]
            self._session.selection.highlight_rows(np.concatenate(rows).astype(np.uint32))
        self._is_changing = was_changing
        self.changed.emit()

    def _selected_nodes(self, moment: PrefixMoment) -> list[int]:
        return [node for key in self._selected_keys if (node := moment.tree.node_with(key)) is not None]

    def _on_rows(self) -> None:
        if self._is_changing:
            return
        keys = [key for row in self._table.selected_rows() if (key := self._model.key_at(row)) is not None]
        current = self._model.key_at(self._table.currentIndex().row())
        if current in keys:  # the current row comes last
            keys = [*(key for key in keys if key != current), current]
        self._select_keys(keys)

    def _on_session(self) -> None:
        if self._is_changing:
            return
        self._selected_keys, self._other_view_key = [], None
        if self._table.isVisible():
            self.update_table()
        self.changed.emit()

    def _on_reordering(self) -> None:
        self._is_changing = True

    def _on_reordered(self) -> None:
        moment = self._model.moment
        if moment is not None and self._selected_keys:
            self._select_rows(self._selected_nodes(moment))
        elif (current := self.current) is not None:
            self._select_rows([current])
        self._is_changing = False

    def _select_rows(self, nodes: list[int]) -> None:
        rows = [row for node in nodes if (row := self._model.row_of(node)) is not None]
        if sorted(rows) == self._table.selected_rows():
            return
        selection = QItemSelection()
        for row in rows:
            index = self._model.index(row, 0)
            selection.select(index, index)
        flags = QItemSelectionModel.SelectionFlag
        was_changing, self._is_changing = self._is_changing, True
        self._table.selectionModel().select(selection, flags.ClearAndSelect | flags.Rows)
        if rows:
            self._table.selectionModel().setCurrentIndex(self._model.index(rows[-1], 0), flags.NoUpdate)
        self._is_changing = was_changing


def node_of_selection(moment: PrefixMoment, session: Session) -> int | None:
    """Return the node of the selected block, or the deepest node of the selected request's text.

    A request's node is found even after the request ended. None if nothing is selected or found.
    """
    block, tree = session.selection.block, moment.tree
    if block is not None:
        return tree.node_of(block)
    if session.selection.request is None:
        return None
    nodes = tree.nodes_of(blocks_of_request(session.mirror, session.selection.request))
    return int(nodes[np.argmax(tree.level[nodes])]) if nodes.size else None
