"""Prefixes: what is cached as a tree of texts, filtered and sorted; choosing one lets its blocks stand out everywhere.

Owns the selection's way between the table and the session, and the filter. What is selected elsewhere is shown at its
place in the tree.
"""

from __future__ import annotations

from typing import ClassVar, Final, Protocol, runtime_checkable

import numpy as np
from PySide6.QtCore import QItemSelection, QItemSelectionModel, QTimer
from PySide6.QtGui import QResizeEvent
from PySide6.QtWidgets import (
    QBoxLayout,
    QComboBox,
    QHBoxLayout,
    QLineEdit,
    QSizePolicy,
    QStackedLayout,
    QVBoxLayout,
    QWidget,
)

from kvscope_app.look.makers import empty_state
from kvscope_app.look.number_text import count, plural
from kvscope_app.look.theme import Theme
from kvscope_app.look.widgets import ElidedLabel
from kvscope_app.session.session import Session
from kvscope_app.views.base import View
from kvscope_app.views.prefixes.columns import Moment
from kvscope_app.views.prefixes.detail import MAX_BLOCKS, PrefixDetail
from kvscope_app.views.prefixes.model import PrefixModel
from kvscope_app.views.prefixes.node_texts import NodeTexts
from kvscope_app.views.prefixes.search import find
from kvscope_app.views.prefixes.shown_nodes import Mask, Which
from kvscope_app.views.prefixes.table import PrefixTable
from kvscope_app.views.prefixes.tree_keeper import TreeKeeper
from kvscope_telemetry.state.mirror import Mirror

_NARROW: Final = 520
_LOW: Final = 260
_COME_BACK_MS: Final = 40
_LATER_MS: Final = 200
_LABEL_BLOCKS: Final = 3
"""Whose text a row shows: more than fits into most."""
NOTHING_YET: Final = "No cached prefixes yet.\nWhen a block is full, its text is kept for prompts that begin the same."
NO_CACHE: Final = "This engine keeps no prefixes: it was started without its prefix cache."
NO_PARENTS: Final = (
    "There is no tree to show.\nThis was told by an older engine, whose blocks do not say which block was before them."
)


@runtime_checkable
class SelectsBlock(Protocol):
    """A session in which one block can be selected."""

    selected_block: int | None


class PrefixesView(View):
    """The table, the filter above it, and below it what there is to read of the chosen prefix."""

    title: ClassVar[str] = "Prefixes"
    object_name: ClassVar[str] = "prefixes"
    refresh_hz: ClassVar[float] = 4.0

    def __init__(self, session: Session, parent: QWidget | None = None) -> None:
        super().__init__(session, parent)
        self.keeper = TreeKeeper()
        self.texts = NodeTexts(session, self)
        self.model = PrefixModel(self._label, self)
        self.table = PrefixTable(self.model)
        self.detail = PrefixDetail()
        self.which = QComboBox()
        self.which.addItems([which.value for which in Which])
        self.which.setAccessibleName("Which prefixes")
        self.search = QLineEdit()
        self.search.setAccessibleName("Find in prefixes")
        self.search.setPlaceholderText("Find text, a block, or #12 for a request")
        self.search.setClearButtonEnabled(True)
        self.count = ElidedLabel()
        self._empty = empty_state(NOTHING_YET)
        self._chosen: list[int] = []
        """Keys of the nodes that a person chose here."""
        self._is_ours = False
        """Whether the selection changes because of this view."""
        self._shown_target: int | None = None
        self._again = QTimer(self, singleShot=True)
        self._again.timeout.connect(self._come_back)
        self._lay_out()
        self._connect()
        self.setFocusProxy(self.table)

    def refresh(self) -> None:
        mirror = self.session.mirror
        reason = _why_none(mirror)
        if reason:
            self._show_empty(reason)
            return
        if self.keeper.follow(mirror) or (self.model.moment is None and self.keeper.tree is not None):
            self._show_tree(mirror)
        if not self.keeper.is_settled:
            self._again.start(_COME_BACK_MS if self.keeper.is_working else _LATER_MS)
        self._show_selection()

    def shut_down(self) -> None:
        self._again.stop()
        self.keeper.close()

    def apply_theme(self, theme: Theme) -> None:
        super().apply_theme(theme)
        self.model.theme = theme
        self.table.apply_theme(theme)
        self.detail.apply_theme(theme)

    def resizeEvent(self, event: QResizeEvent) -> None:
        """Where it is narrow, the filter has a line of its own; where it is low, the text is not shown."""
        super().resizeEvent(event)
        directions = QBoxLayout.Direction
        self._bar.setDirection(directions.TopToBottom if self.width() < _NARROW else directions.LeftToRight)
        self.table.fit(self.width() - 4)
        self._show_detail()

    def choose(self, keys: list[int]) -> None:
        """Let the blocks of these nodes stand out."""
        moment = self.model.moment
        self._chosen = keys
        nodes = [] if moment is None else [n for key in keys if (n := moment.tree.node_with(key)) is not None]
        self._is_ours = True
        if moment is None or not nodes:
            self.session.select_request(None)
        else:
            rows = np.concatenate([moment.tree.rows_of(node) for node in nodes])
            self.session.select_blocks(rows.astype(np.uint32))
        self._is_ours = False
        self._show_detail()

    def _show_tree(self, mirror: Mirror) -> None:
        tree = self.keeper.tree
        assert tree is not None, "there is a tree to show"
        if mirror.hello is None or self.keeper.epoch != mirror.epoch:
            return
        self.model.show_moment(Moment(tree, self.keeper.step, mirror.hello.cache))
        if not len(tree):
            self._show_empty(NOTHING_YET)
            return
        self._stack.setCurrentIndex(1)
        self._shown_target = None
        if self._chosen and self.session.selected_blocks is not None:
            self.choose(self._chosen)  # its blocks may be others now
        self._show_count()
        self._want_texts()
        self._show_detail()

    def _show_empty(self, why: str) -> None:
        if self._empty.text() != why:
            self._empty.setText(why)
        self._stack.setCurrentIndex(0)

    def _show_count(self) -> None:
        moment = self.model.moment
        if moment is None:
            return
        tree, shown = moment.tree, self.model.shown
        texts, blocks = plural(tree.num_texts, "text"), plural(int(tree.num_blocks.sum()), "block")
        words = f"{texts}, {blocks}"
        if self.model.which is not Which.ALL or self.search.text().strip():
            words = f"{count(shown.num_matching)} of {plural(len(tree), 'prefix')}".replace("prefixs", "prefixes")
        if shown.num_left_out:
            words += f"; the first {count(len(shown.nodes))} rows are shown"
        self.count.setText(words)

    def _label(self, node: int) -> str | None:
        """The text a row shows, None where it is not known."""
        moment = self.model.moment
        text = None if moment is None else self._text(moment, node, _LABEL_BLOCKS)
        return None if text is None else " ".join(text.split()) or "⏎"

    def _text(self, moment: Moment, node: int, at_most: int) -> str | None:
        """Of its first blocks, as far as they follow each other."""
        parts: list[str] = []
        for block_hash, _ in moment.tree.blocks_of(node, at_most):
            text = self.texts.get(block_hash)
            if text is None:
                break
            parts.append(text)
        if not parts:
            return None
        return "".join(parts) + ("…" if len(parts) < moment.tree.num_blocks[node] else "")

    def _want_texts(self) -> None:
        moment = self.model.moment
        if moment is None or not self.isVisible():
            return
        nodes = [node for row in self.table.visible_rows() if (node := self.model.node_at(row)) is not None]
        wanted = [pair for node in nodes for pair in moment.tree.blocks_of(node, _LABEL_BLOCKS)]
        if (chosen := self._current(moment)) is not None:
            wanted += moment.tree.blocks_of(chosen, MAX_BLOCKS)
        self.texts.want(wanted)

    def _on_texts(self) -> None:
        self.model.tell_texts()
        self._show_detail()
        self._want_texts()

    def _current(self, moment: Moment) -> int | None:
        """The node whose text is to be read: what was chosen here last, or the place of what is selected elsewhere."""
        if self._chosen:
            return moment.tree.node_with(self._chosen[-1])
        return self._shown_target

    def _show_detail(self) -> None:
        moment = self.model.moment
        node = None if moment is None else self._current(moment)
        if moment is None or node is None or node >= len(moment.tree) or self.height() < _LOW:
            self.detail.hide()
            return
        self.detail.show_node(moment, node, self._text(moment, node, MAX_BLOCKS))

    def _on_rows_chosen(self) -> None:
        if self._is_ours or self._is_reordering:
            return
        keys = [key for row in self.table.chosen_rows() if (key := self.model.key_at(row)) is not None]
        current = self.model.key_at(self.table.currentIndex().row())
        if current in keys:  # the one pointed at last is the one to read
            keys = [*(key for key in keys if key != current), current]
        self.choose(keys)
        self._want_texts()

    def _on_selection_changed(self) -> None:
        if self._is_ours:
            return
        if self.session.selected_blocks is None or not self._chosen:
            self._chosen = []
        self._shown_target = None
        if self.isVisible():
            self._show_selection()

    def _show_selection(self) -> None:
        """Mark the rows of what was chosen here, or the place of what is selected elsewhere."""
        moment = self.model.moment
        if moment is None:
            return
        if self._chosen:
            self._mark([n for key in self._chosen if (n := moment.tree.node_with(key)) is not None])
            return
        target = _place_of_selection(moment, self.session)
        if target == self._shown_target and (target is not None or not self.table.chosen_rows()):
            return
        self._shown_target = target
        self._mark([] if target is None else [target], is_revealed=True)
        self._show_detail()
        self._want_texts()

    def _mark(self, nodes: list[int], *, is_revealed: bool = False) -> None:
        """Select the rows that hold `nodes` now."""
        rows = [row for node in nodes if (row := self._row_of(node, is_revealed)) is not None]
        if rows == self.table.chosen_rows() or sorted(rows) == self.table.chosen_rows():
            return
        selection = QItemSelection()
        for row in rows:
            index = self.model.index(row, 0)
            selection.select(index, index)
        flags = QItemSelectionModel.SelectionFlag
        was_ours, self._is_ours = self._is_ours, True
        self.table.selectionModel().select(selection, flags.ClearAndSelect | flags.Rows)
        if rows:
            self.table.selectionModel().setCurrentIndex(self.model.index(rows[-1], 0), flags.NoUpdate)
        self._is_ours = was_ours
        if is_revealed and rows:
            self.table.scrollTo(self.model.index(rows[-1], 0))

    def _row_of(self, node: int, is_revealed: bool) -> int | None:
        return self.model.reveal(node) if is_revealed else self.model.row_of(node)

    def _on_reordering(self) -> None:
        self._is_reordering = True

    def _on_reordered(self) -> None:
        moment = self.model.moment
        if moment is not None and self._chosen:
            self._mark([n for key in self._chosen if (n := moment.tree.node_with(key)) is not None])
        self._is_reordering = False
        self._show_count()
        self._want_texts()

    def _on_filter(self) -> None:
        words = self.search.text().strip()
        self.model.which = Which(self.which.currentText())
        self.model.found = None if not words else self._found
        self.model.reorder()

    def _found(self, moment: Moment) -> Mask:
        words = self.search.text().strip()
        return find(moment, words, self.session.mirror, self.texts.containing(words))

    def _come_back(self) -> None:
        if self.isVisible():
            self.refresh()

    def _connect(self) -> None:
        self._is_reordering = False
        self.model.reordering.connect(self._on_reordering)
        self.model.reordered.connect(self._on_reordered)
        self.texts.arrived.connect(self._on_texts)
        self.table.selectionModel().selectionChanged.connect(self._on_rows_chosen)
        self.table.verticalScrollBar().valueChanged.connect(self._want_texts)
        self.table.released.connect(lambda: self.session.select_request(None))
        self.which.currentIndexChanged.connect(self._on_filter)
        self.search.textChanged.connect(self._on_filter)
        self.session.selection_changed.connect(self._on_selection_changed)

    def _lay_out(self) -> None:
        rest = QHBoxLayout()
        rest.addWidget(self.which)
        rest.addWidget(self.count, 1)
        self._bar = QBoxLayout(QBoxLayout.Direction.LeftToRight)
        self._bar.setContentsMargins(8, 6, 8, 4)
        self._bar.setSpacing(8)
        self._bar.addWidget(self.search, 2)
        self._bar.addLayout(rest, 3)
        head = QWidget()
        head.setLayout(self._bar)
        head.setSizePolicy(QSizePolicy.Policy.Ignored, QSizePolicy.Policy.Fixed)  # a narrow dock stays narrow
        body = QWidget()
        column = QVBoxLayout(body)
        column.setContentsMargins(0, 0, 0, 0)
        column.setSpacing(0)
        column.addWidget(head)
        column.addWidget(self.table, 1)
        column.addWidget(self.detail)
        self._stack = QStackedLayout(self)
        self._stack.addWidget(self._empty)
        self._stack.addWidget(body)


def _why_none(mirror: Mirror) -> str:
    """Why there can be no tree, "" where there can."""
    if mirror.hello is None:
        return NOTHING_YET
    if not mirror.hello.cache.prefix_caching:
        return NO_CACHE
    return "" if mirror.hello.cache.has_parents else NO_PARENTS


def _place_of_selection(moment: Moment, session: Session) -> int | None:
    """The node of the selected block, or of the last block of the selected request that has one."""
    block = session.selected_block if isinstance(session, SelectsBlock) else None
    if block is not None:
        return moment.tree.node_of(block)
    if session.selected_request is None:
        return None
    table = session.mirror.requests.table(session.selected_request)
    for row in reversed(table.tolist()):
        if session.mirror.ledger.hash[row]:
            return moment.tree.node_of(row)
    return None
