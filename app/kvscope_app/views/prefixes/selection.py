"""The selection's way between the prefix table and the session.

Owns which nodes were chosen in the table, by their keys: while they are, their blocks stand out in every view, as the
tree grows too. What is selected elsewhere is shown at its place in the tree, and stays selected there. Nothing here
keeps a node's number: it is another node's in the next tree, or nobody's.
"""

from __future__ import annotations

import numpy as np
from PySide6.QtCore import QItemSelection, QItemSelectionModel, QObject, Signal

from kvscope_app.session.session import Session
from kvscope_app.views.prefixes.model import PrefixModel
from kvscope_app.views.prefixes.prefix_columns import PrefixMoment
from kvscope_app.views.prefixes.prefix_table import PrefixTable
from kvscope_telemetry.prefixes.request_blocks import blocks_of_request


class PrefixSelection(QObject):
    """Between one table and one session."""

    changed = Signal()
    """Another node is the one to read about."""

    def __init__(self, session: Session, model: PrefixModel, table: PrefixTable) -> None:
        super().__init__(table)
        self._session, self._model, self._table = session, model, table
        self._chosen: list[int] = []
        self._place: int | None = None
        """Key of the node where the block is that is selected elsewhere."""
        self._is_ours = False
        """The selection changes because of this object, or rows are about to hold other nodes."""
        model.reordering.connect(self._begin)
        model.reordered.connect(self._end)
        table.selectionModel().selectionChanged.connect(self._on_rows)
        table.released.connect(lambda: session.select_request(None))
        session.selection_changed.connect(self._on_session)

    @property
    def current(self) -> int | None:
        """The node to read about: the one chosen last, or the place of what is selected elsewhere."""
        moment = self._model.moment
        if moment is None:
            return None
        key = self._chosen[-1] if self._chosen else self._place
        return None if key is None else moment.tree.node_with(key)

    def follow(self) -> None:
        """There is another tree: the chosen nodes may have other blocks, what is selected elsewhere another place."""
        if self._chosen and self._session.selected_blocks is not None:
            self._choose(self._chosen)
        else:
            self._place = None
            self.show()

    def show(self) -> None:
        """Mark what is selected."""
        moment = self._model.moment
        if moment is None:
            return
        if self._chosen:
            self._mark(self._nodes(moment))
            return
        node = place_of_selection(moment, self._session)
        place = None if node is None else int(moment.tree.key[node])
        if place == self._place and (place is not None or not self._table.chosen_rows()):
            return
        self._place = place
        row = None if node is None else self._model.reveal(node)
        self._mark([] if node is None else [node])
        if row is not None:
            self._table.scrollTo(self._model.index(row, 0))
        self.changed.emit()

    def _choose(self, keys: list[int]) -> None:
        """Let the blocks of these nodes stand out."""
        moment = self._model.moment
        self._chosen = keys
        nodes = [] if moment is None else self._nodes(moment)
        was_ours, self._is_ours = self._is_ours, True
        if moment is None or not keys:
            self._session.select_request(None)
        else:  # none of them, where the chosen are not there at this moment: they may be at another
            rows = [np.empty(0, np.int64), *(moment.tree.rows_of(n) for n in nodes)]
            self._session.select_blocks(np.concatenate(rows).astype(np.uint32))
        self._is_ours = was_ours
        self.changed.emit()

    def _nodes(self, moment: PrefixMoment) -> list[int]:
        return [node for key in self._chosen if (node := moment.tree.node_with(key)) is not None]

    def _on_rows(self) -> None:
        if self._is_ours:
            return
        keys = [key for row in self._table.chosen_rows() if (key := self._model.key_at(row)) is not None]
        current = self._model.key_at(self._table.currentIndex().row())
        if current in keys:  # the one pointed at last is the one to read
            keys = [*(key for key in keys if key != current), current]
        self._choose(keys)

    def _on_session(self) -> None:
        if self._is_ours:
            return
        self._chosen, self._place = [], None
        if self._table.isVisible():
            self.show()
        self.changed.emit()

    def _begin(self) -> None:
        self._is_ours = True

    def _end(self) -> None:
        moment = self._model.moment
        if moment is not None and self._chosen:
            self._mark(self._nodes(moment))
        elif (place := self.current) is not None:
            self._mark([place])
        self._is_ours = False

    def _mark(self, nodes: list[int]) -> None:
        """Select the rows that hold `nodes` now."""
        rows = [row for node in nodes if (row := self._model.row_of(node)) is not None]
        if sorted(rows) == self._table.chosen_rows():
            return
        selection = QItemSelection()
        for row in rows:
            index = self._model.index(row, 0)
            selection.select(index, index)
        flags = QItemSelectionModel.SelectionFlag
        was_ours, self._is_ours = self._is_ours, True
        self._table.selectionModel().select(selection, flags.ClearAndSelect | flags.Rows)
        if rows:
            self._table.selectionModel().setCurrentIndex(self._model.index(rows[-1], 0), flags.NoUpdate)
        self._is_ours = was_ours


def place_of_selection(moment: PrefixMoment, session: Session) -> int | None:
    """The node of the selected block, or the last node of the selected request's text, also after it ended."""
    block, tree = session.selected_block, moment.tree
    if block is not None:
        return tree.node_of(block)
    if session.selected_request is None:
        return None
    nodes = tree.nodes_of(blocks_of_request(session.mirror, session.selected_request))
    return int(nodes[np.argmax(tree.level[nodes])]) if nodes.size else None
