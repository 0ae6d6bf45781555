"""Prefixes: what is cached as a tree of texts, filtered and sorted; choosing one lets its blocks stand out everywhere.

Owns the filter bar, and when a new tree is looked for and shown.
"""

from __future__ import annotations

from typing import ClassVar, Final

from PySide6.QtCore import QTimer
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
from kvscope_app.views.prefixes.labels import LABEL_BLOCKS, Labels
from kvscope_app.views.prefixes.model import PrefixModel
from kvscope_app.views.prefixes.node_texts import NodeTexts
from kvscope_app.views.prefixes.search import find
from kvscope_app.views.prefixes.selection import PrefixSelection
from kvscope_app.views.prefixes.shown_nodes import Mask, Which
from kvscope_app.views.prefixes.table import PrefixTable
from kvscope_app.views.prefixes.tree_keeper import TreeKeeper
from kvscope_telemetry.state.mirror import Mirror

_NARROW: Final = 520
_LOW: Final = 320
"""Below this height the rows need all the room there is."""
_COME_BACK_MS: Final = 40
_LATER_MS: Final = 200
NOTHING_YET: Final = "No cached prefixes yet.\nWhen a block is full, its text is kept for prompts that begin the same."
NO_CACHE: Final = "This engine keeps no prefixes: it was started without its prefix cache."
NO_PARENTS: Final = (
    "There is no tree to show.\nThis was told by an older engine, whose blocks do not say which block was before them."
)


class PrefixesView(View):
    """The table, the filter above it, and below it what there is to read of the chosen prefix."""

    title: ClassVar[str] = "Prefixes"
    object_name: ClassVar[str] = "prefixes"
    refresh_hz: ClassVar[float] = 4.0

    def __init__(self, session: Session, parent: QWidget | None = None) -> None:
        super().__init__(session, parent)
        self.keeper = TreeKeeper()
        self.texts = NodeTexts(session, self)
        self.labels = Labels(self.texts.get)
        self.model = PrefixModel(self.labels, self)
        self.table = PrefixTable(self.model)
        self.selection = PrefixSelection(session, self.model, self.table)
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
        self._again = QTimer(self, singleShot=True)
        self._again.timeout.connect(self._come_back)
        self._lay_out()
        self._connect()
        self.setFocusProxy(self.table)

    def refresh(self) -> None:
        mirror = self.session.mirror
        if reason := _why_none(mirror):
            self._show_empty(reason)
            return
        if self.keeper.follow(mirror):
            self._show_tree(mirror)
        if not self.keeper.is_settled:
            self._again.start(_COME_BACK_MS if self.keeper.is_working else _LATER_MS)
        self.selection.show()
        self._want_texts()

    @property
    def is_settled(self) -> bool:
        return self.keeper.is_settled

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

    def _show_tree(self, mirror: Mirror) -> None:
        tree = self.keeper.tree
        assert tree is not None, "there is a tree to show"
        if mirror.hello is None or self.keeper.epoch != mirror.epoch:
            return
        moment = Moment(tree, self.keeper.step, mirror.hello.cache)
        self.labels.forget(moment)
        self.model.show_moment(moment)
        if not len(tree):
            self._show_empty(NOTHING_YET)
            return
        self._stack.setCurrentIndex(1)
        self.selection.follow()
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
        words = f"{plural(tree.num_texts, 'text')}, {plural(int(tree.num_blocks.sum()), 'block')}"
        if self.model.which is not Which.ALL or self.search.text().strip():
            words = f"{count(shown.num_matching)} of {plural(len(tree), 'row')}"
        if shown.num_left_out:
            words += f"; the first {count(len(shown.nodes))} rows are shown"
        self.count.setText(words)

    def _want_texts(self) -> None:
        moment = self.model.moment
        if moment is None or not self.isVisible():
            return
        nodes = [node for row in self.table.visible_rows() if (node := self.model.node_at(row)) is not None]
        wanted = [pair for node in nodes for pair in moment.tree.blocks_of(node, LABEL_BLOCKS)]
        if (chosen := self.selection.current) is not None:
            wanted += moment.tree.blocks_of(chosen, MAX_BLOCKS)
        self.texts.want(wanted)

    def _on_texts(self) -> None:
        self.labels.forget(self.model.moment)
        self.model.tell_texts()
        self._show_detail()
        self._want_texts()

    def _on_chosen(self) -> None:
        self._show_detail()
        self._want_texts()

    def _show_detail(self) -> None:
        moment, node = self.model.moment, self.selection.current
        if moment is None or node is None or node >= len(moment.tree) or self.height() < _LOW:
            self.detail.hide()
            return
        self.detail.show_node(moment, node, self.labels.text(node, MAX_BLOCKS))

    def _on_reordered(self) -> None:
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
        self.model.reordered.connect(self._on_reordered)
        self.selection.changed.connect(self._on_chosen)
        self.texts.arrived.connect(self._on_texts)
        self.table.verticalScrollBar().valueChanged.connect(self._want_texts)
        self.which.currentIndexChanged.connect(self._on_filter)
        self.search.textChanged.connect(self._on_filter)

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
