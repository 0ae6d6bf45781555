"""Qt model of the prefix table: the expanded part of a tree, one row per node.

Owns the expanded nodes (by key), the sort order and the filter. Cell texts are created when they are painted.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, Final

import numpy as np
from PySide6.QtCore import QModelIndex, QObject, Qt, Signal

from kvscope_app.ui.plain_text import plain_tip
from kvscope_app.ui.theme import DARK, Theme
from kvscope_app.views.prefixes.node_labels import LABEL_BLOCKS, TIP_BLOCKS, NodeLabels
from kvscope_app.views.prefixes.prefix_columns import COLUMNS, IDLE, PREFIX, WITH_BELOW, PrefixMoment, node_text
from kvscope_app.views.prefixes.shown_nodes import Mask, PrefixFilter, ShownNodes, matches, visible_nodes
from kvscope_app.views.prefixes.step_times import StepTimes
from kvscope_app.views.table import Index, TableHead, TableModel
from kvscope_app.views.tier_style import TIER_STYLES
from kvscope_telemetry.ledger import Tier
from kvscope_telemetry.prefixes.tree import ROOT
from kvscope_telemetry.tier_rows import BLOCK_TIERS

_NO_NODES: Final = ShownNodes(np.empty(0, np.int64), 0)


class PrefixModel(TableModel):
    """Model of a `PrefixMoment`. Nodes are identified by key, because their indices differ from tree to tree."""

    table_head: ClassVar[TableHead] = TableHead.of(COLUMNS)

    reordering = Signal()
    """Emitted before rows are assigned to other nodes. Any change of the selection between this signal and `reordered`
    is made by Qt, not by the user.
    """
    reordered = Signal()

    def __init__(self, labels: NodeLabels, parent: QObject | None = None) -> None:
        super().__init__(parent)
        self.theme: Theme = DARK
        self.moment: PrefixMoment | None = None
        self.node_filter = PrefixFilter.ALL
        self.search: Callable[[PrefixMoment], Mask] | None = None
        """Function that returns which nodes a search matches, shape (nodes,); None if no search is active."""
        self._labels = labels
        self._expanded: set[int] = set()
        self._sort_column, self._descending = WITH_BELOW, True
        self._shown = _NO_NODES

    def show_moment(self, moment: PrefixMoment | None) -> None:
        new_nodes = _NO_NODES
        if moment is not None:
            is_match = None if self.search is None else self.search(moment)
            passes_filter = matches(moment.tree, self.node_filter, is_match)
            sort_by = COLUMNS[self._sort_column].sort_by(moment)
            new_nodes = visible_nodes(moment.tree, self._expanded, sort_by, self._descending, passes_filter)
        self.reordering.emit()
        self._replace(moment, new_nodes)
        self.reordered.emit()

    def reorder(self) -> None:
        self.show_moment(self.moment)

    def sort(self, column: int, order: Qt.SortOrder = Qt.SortOrder.AscendingOrder) -> None:
        self._sort_column, self._descending = column, order is Qt.SortOrder.DescendingOrder
        self.reorder()

    @property
    def shown(self) -> ShownNodes:
        """Visible nodes in row order, and the number of rows left out."""
        return self._shown

    def node_at(self, row: int) -> int | None:
        return int(self._shown.nodes[row]) if 0 <= row < len(self._shown.nodes) else None

    def key_at(self, row: int) -> int | None:
        node = self.node_at(row)
        return None if node is None or self.moment is None else int(self.moment.tree.key[node])

    def row_of(self, node: int) -> int | None:
        rows = np.flatnonzero(self._shown.nodes == node)
        return int(rows[0]) if rows.size else None

    def level_at(self, row: int) -> int:
        node = self.node_at(row)
        return 0 if node is None or self.moment is None else int(self.moment.tree.level[node])

    def has_children(self, row: int) -> bool:
        node = self.node_at(row)
        return node is not None and self.moment is not None and bool(self.moment.tree.children_of(node).size)

    def is_expanded(self, row: int) -> bool:
        return self.key_at(row) in self._expanded

    def set_expanded(self, row: int, is_expanded: bool) -> None:
        key = self.key_at(row)
        if key is not None and self.has_children(row) and is_expanded != self.is_expanded(row):
            self._expanded ^= {key}
            self.reorder()

    def set_all_expanded(self, is_expanded: bool) -> None:
        tree = None if self.moment is None else self.moment.tree
        self._expanded = set(tree.key.tolist()) if is_expanded and tree is not None else set()
        self.reorder()

    def reveal(self, node: int) -> int | None:
        """Expand the ancestors of `node`. Returns its row, or None if the filter hides it."""
        assert self.moment is not None, "a node is of a tree"
        tree = self.moment.tree
        ancestor_keys = {int(tree.key[each]) for each in tree.path_to(node)[:-1]}
        if not ancestor_keys <= self._expanded:
            self._expanded |= ancestor_keys
            self.reorder()
        return self.row_of(node)

    def parent_row(self, row: int) -> int | None:
        node = self.node_at(row)
        parent = ROOT if node is None or self.moment is None else int(self.moment.tree.parent[node])
        return None if parent == ROOT else self.row_of(parent)

    def update_texts(self) -> None:
        if len(self._shown.nodes):
            self.dataChanged.emit(self.index(0, PREFIX), self.index(len(self._shown.nodes) - 1, PREFIX))

    def update_time(self, times: StepTimes, now_ns: int) -> None:
        if self.moment is not None:
            self.moment.update_time(times, now_ns)
        if len(self._shown.nodes):
            self.dataChanged.emit(self.index(0, IDLE), self.index(len(self._shown.nodes) - 1, IDLE))

    def line(self, row: int) -> list[str]:
        node = self.node_at(row)
        if node is None or self.moment is None:
            return []
        indent = "  " * self.level_at(row)
        cells = [column.plain(self.moment, node) for column in COLUMNS]
        return [f"{indent}{self._labels.text(node, LABEL_BLOCKS) or cells[PREFIX]}", *cells[1:]]

    def rowCount(self, parent: Index = QModelIndex()) -> int:  # noqa: B008
        return 0 if parent.isValid() else len(self._shown.nodes)

    def data(self, index: Index, role: int = Qt.ItemDataRole.DisplayRole) -> Any:
        node, column, moment = self.node_at(index.row()), index.column(), self.moment
        if node is None or moment is None:
            return None
        if role == Qt.ItemDataRole.DisplayRole:
            text = self._labels.label(node) if column == PREFIX else None
            return text or COLUMNS[column].text(moment, node)
        if role == Qt.ItemDataRole.TextAlignmentRole:
            return self.table_head.side(column)
        if role == Qt.ItemDataRole.ToolTipRole and column == PREFIX:
            return plain_tip(self._labels.text(node, TIP_BLOCKS) or node_text(moment.tree, node, moment.cache))
        if role == Qt.ItemDataRole.ForegroundRole and column == PREFIX and not self._labels.label(node):
            return self.theme.color("muted")
        if role == Qt.ItemDataRole.DecorationRole and column == PREFIX:
            return self.theme.color(state_color(moment, node))
        return None

    def _replace(self, moment: PrefixMoment | None, new_nodes: ShownNodes) -> None:
        """Replace the nodes of all rows. Rows are inserted and removed only at the end; dataChanged is emitted for all
        other rows.
        """
        old_count, new_count = len(self._shown.nodes), len(new_nodes.nodes)
        if new_count > old_count:
            self.beginInsertRows(QModelIndex(), old_count, new_count - 1)
            # until the insertion is complete, existing rows keep their nodes, and new ones repeat the last node
            if old_count:
                interim = np.concatenate((self._shown.nodes, np.repeat(self._shown.nodes[-1:], new_count - old_count)))
                self._shown = ShownNodes(interim, 0)
            else:
                self._set_nodes(moment, new_nodes)
            self.endInsertRows()
        elif new_count < old_count:
            self.beginRemoveRows(QModelIndex(), new_count, old_count - 1)
            self._shown = ShownNodes(self._shown.nodes[:new_count], 0)
            self.endRemoveRows()
        self._set_nodes(moment, new_nodes)
        if new_count:
            self.dataChanged.emit(self.index(0, 0), self.index(new_count - 1, len(COLUMNS) - 1))

    def _set_nodes(self, moment: PrefixMoment | None, new_nodes: ShownNodes) -> None:
        """Replace nodes and labels together, so that a node index of one tree is never used with another."""
        if moment is not self.moment:
            self._labels.clear(moment)
        self.moment, self._shown = moment, new_nodes


def state_color(moment: PrefixMoment, node: int) -> str:
    """Return the name of the theme colour with which the page map shows most of the node's blocks."""
    tree = moment.tree
    in_tier = tree.num_in_tier[node]
    if not in_tier.any():
        return "flash_evicted"
    if not in_tier[BLOCK_TIERS.index(Tier.HBM)]:
        return TIER_STYLES[BLOCK_TIERS[int(in_tier.nonzero()[0][0])]].color
    holders = int(tree.holders[node])
    return "block_shared" if holders > 1 else "block_active" if holders else "block_cached"
