"""View of cached texts as a tree with filter and sort order. A selected node highlights its blocks in every view.

Owns the filter bar, and decides when a new tree is built and shown.
"""

from __future__ import annotations

from collections.abc import Set
from typing import ClassVar, Final

import numpy as np
from msgspec.structs import replace
from PySide6.QtCore import QMargins, QSettings, QSignalBlocker, Qt, QTimer
from PySide6.QtGui import QResizeEvent, QTextOption
from PySide6.QtWidgets import (
    QComboBox,
    QHBoxLayout,
    QLineEdit,
    QPlainTextEdit,
    QStackedLayout,
    QVBoxLayout,
    QWidget,
)

from kvscope_app.session.session import Session
from kvscope_app.setting_names import PREFIX_FILTER, PREFIX_ORDER
from kvscope_app.ui.flow_layout import FlowLayout
from kvscope_app.ui.fonts import mono
from kvscope_app.ui.number_text import count, num_bytes, plural
from kvscope_app.ui.theme import Theme
from kvscope_app.ui.widget_factories import empty_state, head_row, label
from kvscope_app.ui.widgets import ElidedLabel
from kvscope_app.ui.zoom import scaled
from kvscope_app.views.base import View
from kvscope_app.views.block_locations import group_name
from kvscope_app.views.prefixes.node_labels import LABEL_BLOCKS, NodeLabels
from kvscope_app.views.prefixes.prefix_columns import COLUMNS, PrefixMoment, holders_text, idle_text, tiers_text
from kvscope_app.views.prefixes.prefix_model import PrefixModel
from kvscope_app.views.prefixes.prefix_selection import PrefixSelection
from kvscope_app.views.prefixes.prefix_table import PrefixTable
from kvscope_app.views.prefixes.shown_nodes import Mask, PrefixFilter
from kvscope_app.views.prefixes.step_times import StepTimes
from kvscope_app.views.prefixes.tree_builder import PrefixTreeBuilder
from kvscope_app.views.visibility import is_on_screen
from kvscope_telemetry.block_texts.block_texts import BlockTextLookup
from kvscope_telemetry.ledger import NO_OWNER
from kvscope_telemetry.messages.telemetry import CacheInfo, KVGroup
from kvscope_telemetry.mirror.mirror import Mirror
from kvscope_telemetry.prefixes.cached_blocks import group_of_tree
from kvscope_telemetry.summaries.summary import SECOND_NS

MAX_BLOCKS: Final = 64
"""Maximum number of the selected node's blocks whose texts are read."""
_NUM_TEXT_LINES: Final = 4
_MAX_DIGITS = 10
_LOW_BELOW: Final = 320
"""Height in pixels below which the text of the selected node is hidden, because the rows need the space."""
_BORDERS_PX: Final = 6
_POLL_INTERVAL_MS: Final = 40
_IDLE_INTERVAL_MS: Final = 200
_REORDER_MS: Final = 150
MIN_LETTERS: Final = 2
MAX_SEARCHED: Final = 8192
_ORDERS: Final = {"ascending": Qt.SortOrder.AscendingOrder, "descending": Qt.SortOrder.DescendingOrder}
NOTHING_YET: Final = "No cached prefixes yet.\nFull blocks are kept for prompts with the same prefix."
NO_POOL: Final = "This address reports devices only; it has no prefix cache."
NO_CACHE: Final = "This engine was started without a prefix cache."
NO_PARENTS: Final = "No tree: this engine does not report which block precedes another."

SEVERAL_GROUPS: Final = "Prefixes of one KV group: a prompt can reuse only what all KV groups have cached of it"


class PrefixesView(View):
    title: ClassVar[str] = "Prefixes"
    object_name: ClassVar[str] = "prefixes"
    refresh_hz: ClassVar[float] = 4.0

    def __init__(self, session: Session, parent: QWidget | None = None) -> None:
        super().__init__(session, parent)
        self.builder = PrefixTreeBuilder()
        self.labels = NodeLabels(self._text_of, self._notes_of)
        self.model = PrefixModel(self.labels, self)
        self.table = PrefixTable(self.model)
        self.selection = PrefixSelection(session, self.model, self.table)
        self.detail = PrefixDetail()
        self.filter_box = QComboBox()
        self.filter_box.addItems([node_filter.value for node_filter in PrefixFilter])
        self.filter_box.setAccessibleName("Filter")
        self.group = QComboBox()
        self.group.setAccessibleName("KV group")
        self.group.setToolTip("Prefixes of one KV group. A prompt can reuse only what all KV groups have cached of it")
        self.group.setSizeAdjustPolicy(QComboBox.SizeAdjustPolicy.AdjustToMinimumContentsLengthWithIcon)
        self.group.setMinimumContentsLength(16)
        self.group.hide()
        self.search = QLineEdit()
        self.search.setAccessibleName("Find in prefixes")
        self.search.setPlaceholderText("Search text, an adapter, a block, or #12 for a request")
        self.search.setClearButtonEnabled(True)
        self.count = ElidedLabel()
        self.empty_label = empty_state(NOTHING_YET)
        self.note = label(look="muted", wraps=True, elastic=True)
        """Label that says why there are no texts, or what the tree of one KV group omits."""
        self._groups: tuple[KVGroup, ...] = ()
        self._shown_time = (-1, -1)
        self._reorder_timer = QTimer(self, singleShot=True, interval=_REORDER_MS)
        self._reorder_timer.timeout.connect(self.model.reorder)
        self._refresh_timer = QTimer(self, singleShot=True)
        self._refresh_timer.timeout.connect(self._refresh_again)
        self._lay_out()
        self._connect()
        self.setFocusProxy(self.table)

    def refresh(self) -> None:
        mirror = self.session.mirror
        if reason := _why_none(mirror):
            self._show_empty(reason)
            return
        self._update_groups(mirror)
        if self.builder.update(mirror):
            self._show_tree(mirror)
        elif self.builder.failure and self.builder.tree is None:
            self._show_empty(_failure_text(self.builder.failure))
        self._update_time(mirror)
        if not self.builder.is_loaded:
            self._refresh_timer.start(_POLL_INTERVAL_MS if self.builder.is_working else _IDLE_INTERVAL_MS)
        self.selection.update_table()
        self._request_texts()

    @property
    def is_loaded(self) -> bool:
        return self.builder.is_loaded

    def shut_down(self) -> None:
        self.session.texts.request(self, ())
        self._refresh_timer.stop()
        self._reorder_timer.stop()
        self.builder.close()

    def restore_settings(self, settings: QSettings) -> None:
        filter_name, order = str(settings.value(PREFIX_FILTER, "")), str(settings.value(PREFIX_ORDER, "")).split()
        if self.filter_box.findText(filter_name) >= 0:
            self.filter_box.setCurrentText(filter_name)
        titles = [column.title.replace(" ", "_") for column in COLUMNS]
        if len(order) == 2 and order[0] in titles and order[1] in _ORDERS:
            self.table.sortByColumn(titles.index(order[0]), _ORDERS[order[1]])

    def save_settings(self, settings: QSettings) -> None:
        header = self.table.horizontalHeader()
        title = COLUMNS[header.sortIndicatorSection()].title.replace(" ", "_")
        order = next(name for name, each in _ORDERS.items() if each == header.sortIndicatorOrder())
        settings.setValue(PREFIX_FILTER, self.filter_box.currentText())
        settings.setValue(PREFIX_ORDER, f"{title} {order}")

    def apply_theme(self, theme: Theme) -> None:
        super().apply_theme(theme)
        self.model.theme = theme
        self.table.apply_theme(theme)
        self.detail.apply_theme(theme)

    def resizeEvent(self, event: QResizeEvent) -> None:
        super().resizeEvent(event)
        self.table.fit(self.width() - _BORDERS_PX - self.table.verticalScrollBar().sizeHint().width())
        self._show_detail()

    def _show_tree(self, mirror: Mirror) -> None:
        tree = self.builder.tree
        assert tree is not None, "the builder has a tree"
        if mirror.hello is None or self.builder.epoch != mirror.epoch:
            return
        times = StepTimes(self.session.overview, mirror)
        cache = cache_of_group(mirror.hello.cache, self.builder.group)
        moment = PrefixMoment(tree, cache, times, self.session.timeline.cursor_ns, mirror.capabilities)
        self.model.show_moment(moment)
        if not len(tree):
            self._show_empty(NOTHING_YET)
            return
        self._stack.setCurrentIndex(1)
        self.selection.on_new_tree()
        self._show_detail()

    def _update_groups(self, mirror: Mirror) -> None:
        assert mirror.hello is not None, "there may be a tree"
        cache = mirror.hello.cache
        if cache.groups != self._groups:
            self._groups = cache.groups
            first = group_of_tree(cache)
            with QSignalBlocker(self.group):
                self.group.clear()
                self.group.addItems([f"{number}: {group_name(group)}" for number, group in enumerate(cache.groups)])
                self.group.setCurrentIndex(first or 0)
            self.group.setVisible(first is not None)
            self.builder.group = first

    def _on_group(self, number: int) -> None:
        self.builder.group = number
        self.refresh()

    def _update_time(self, mirror: Mirror) -> None:
        overview, cursor_ns = self.session.overview, self.session.timeline.cursor_ns
        state = (overview.version, cursor_ns // SECOND_NS)
        if state != self._shown_time:
            self._shown_time = state
            self.model.update_time(StepTimes(overview, mirror), cursor_ns)
            if self.detail.isVisible():
                self._show_detail()

    def _text_of(self, block_hash: int) -> str | None:
        content = self.session.texts.get(self._lookup_of(block_hash, 0))
        return None if content is None else content.text or " ".join(map(str, content.token_ids))

    def _notes_of(self, block_hash: int) -> str:
        content = self.session.texts.get(self._lookup_of(block_hash, 0))
        return "" if content is None else ", ".join(f"{name} {value}" for name, value in content.notes)

    def _lookup_of(self, block_hash: int, row: int) -> BlockTextLookup:
        return BlockTextLookup(self.session.mirror.epoch or 0, row, 0, 0, block_hash)

    def _show_empty(self, reason: str) -> None:
        if self.empty_label.text() != reason:
            self.empty_label.setText(reason)
        self._stack.setCurrentIndex(0)

    def _show_count(self) -> None:
        moment = self.model.moment
        if moment is None:
            return
        tree, rows = moment.tree, self.model.shown
        text = f"{plural(tree.num_texts, 'text')}, {plural(int(tree.num_blocks.sum()), 'block')}"
        if self.model.node_filter is not PrefixFilter.ALL or self.search.text().strip():
            text = f"{count(rows.num_matching)} of {plural(len(tree), 'row')}"
        if rows.num_left_out:
            text += f"; the first {count(len(rows.nodes))} rows are shown"
        self.count.setText(text)

    def _show_note(self) -> None:
        failure = self.builder.failure
        several = self._groups_text()
        note = (
            _failure_text(failure) if failure else "  ".join(filter(None, (several, self.session.texts.why_no_texts)))
        )
        if note != self.note.text():
            self.note.setText(note)
        self.note.setVisible(bool(note))

    def _groups_text(self) -> str:
        hello = self.session.mirror.hello
        if self.builder.group is None or hello is None:
            return ""
        sizes, smallest = sorted(set(hello.cache.hit_block_sizes)), hello.cache.smallest_hit
        if sizes == [smallest]:
            return f"{SEVERAL_GROUPS}."
        text = f"{SEVERAL_GROUPS}. A reusable prefix has at least {count(smallest)} tokens"
        if smallest < sizes[-1]:
            return f"{text}."
        sizes_text = f"{', '.join(map(count, sizes[:-1]))} and {count(sizes[-1])}"
        return f"{text}, because blocks of {sizes_text} tokens first end at the same position there."

    def _request_texts(self) -> None:
        moment = self.model.moment
        if moment is None or not is_on_screen(self):
            return
        nodes = [node for row in self.table.visible_rows() if (node := self.model.node_at(row)) is not None]
        pairs = [pair for node in nodes for pair in moment.tree.blocks_of(node, LABEL_BLOCKS)]
        if (selected := self.selection.current) is not None:
            pairs += moment.tree.blocks_of(selected, MAX_BLOCKS)
        if self._is_text_search():  # also all blocks that may match the search
            searched = slice(MAX_SEARCHED)
            pairs += zip(moment.tree.row_hash[searched].tolist(), moment.tree.rows[searched].tolist(), strict=True)
        unique = dict(pairs[:MAX_SEARCHED])
        self.session.texts.request(self, [self._lookup_of(block_hash, row) for block_hash, row in unique.items()])
        self._show_note()

    def _on_texts(self) -> None:
        if not self.isVisible():
            return
        self.labels.clear(self.model.moment)
        self.model.update_texts()
        self._show_detail()
        self._request_texts()
        if self._is_text_search() and not self._reorder_timer.isActive():
            self._reorder_timer.start()

    def _is_text_search(self) -> bool:
        query = self.search.text().strip()
        return len(query) >= MIN_LETTERS and not query.startswith("#") and not query.isdecimal()

    def _on_chosen(self) -> None:
        self._show_detail()
        self._request_texts()

    def _show_detail(self) -> None:
        moment, node = self.model.moment, self.selection.current
        if moment is None or node is None or self.height() < scaled(_LOW_BELOW):
            self.detail.hide()
            return
        self.detail.show_node(moment, node, self.labels.text(node, MAX_BLOCKS))

    def _on_reordered(self) -> None:
        self._show_count()
        self._request_texts()

    def _on_filter(self) -> None:
        query = self.search.text().strip()
        self.model.node_filter = PrefixFilter(self.filter_box.currentText())
        self.model.search = None if not query else self._search_mask
        self.model.reorder()

    def _search_mask(self, moment: PrefixMoment) -> Mask:
        query = self.search.text().strip()
        epoch = self.session.mirror.epoch
        matching_hashes = {
            block_hash for text_epoch, block_hash in self.session.texts.containing(query) if text_epoch == epoch
        }
        return matching_nodes(moment, query, self.session.mirror, matching_hashes)

    def _refresh_again(self) -> None:
        if is_on_screen(self):
            self.refresh()

    def _connect(self) -> None:
        self.model.reordered.connect(self._on_reordered)
        self.selection.changed.connect(self._on_chosen)
        self.session.texts.arrived.connect(self._on_texts)
        self.table.verticalScrollBar().valueChanged.connect(self._request_texts)
        self.filter_box.currentIndexChanged.connect(self._on_filter)
        self.group.currentIndexChanged.connect(self._on_group)
        self.search.textChanged.connect(self._on_filter)

    def _lay_out(self) -> None:
        bar = FlowLayout(self.search, self.filter_box, self.group, self.count, margins=QMargins(8, 6, 8, 4))
        body = QWidget()
        column = QVBoxLayout(body)
        column.setContentsMargins(0, 0, 0, 0)
        column.setSpacing(0)
        column.addWidget(head_row(bar))
        note_row = QHBoxLayout()
        note_row.setContentsMargins(10, 0, 10, 4)
        note_row.addWidget(self.note)
        column.addLayout(note_row)
        column.addWidget(self.table, 1)
        column.addWidget(self.detail)
        self._stack = QStackedLayout(self)
        self._stack.addWidget(self.empty_label)
        self._stack.addWidget(body)


def cache_of_group(cache: CacheInfo, group: int | None) -> CacheInfo:
    if group is None:
        return cache
    block_bytes = cache.groups[group].block_bytes or cache.block_bytes
    return replace(cache, block_size=cache.block_sizes[group], block_bytes=block_bytes)


def _failure_text(failure: str) -> str:
    return f"The tree could not be built: {failure}"


def _why_none(mirror: Mirror) -> str:
    if mirror.hello is None:
        return NOTHING_YET
    if not mirror.capabilities.blocks:
        return NO_POOL
    if not mirror.hello.cache.prefix_caching:
        return NO_CACHE
    return "" if mirror.hello.cache.has_parents else NO_PARENTS


def matching_nodes(moment: PrefixMoment, query: str, mirror: Mirror, containing: Set[int]) -> Mask:
    """Return which nodes match a search, shape (nodes,).

    Args:
        moment: Tree to search.
        query: `#12` matches nodes of a request, `345` the node of a block, anything else nodes with that text.
        mirror: State with the requests and blocks of the tree.
        containing: Hashes of the blocks that are known to contain the text.
    """
    tree = moment.tree
    is_match = np.zeros(len(tree), np.bool_)
    number = query.removeprefix("#").strip()
    is_number = number.isdecimal() and len(number) <= _MAX_DIGITS
    if query.startswith("#"):
        request_number = int(number) if is_number else NO_OWNER - 1
        is_match |= tree.owner == request_number
        is_match[tree.nodes_of(mirror.requests.table(request_number))] = True
        return is_match
    if is_number:
        is_match[tree.nodes_of(np.array([int(number)]))] = True
    has_text = np.isin(tree.row_hash, np.array(list(containing), np.uint64))
    is_match[tree.nodes_of(tree.rows[has_text])] = True
    return is_match


class PrefixDetail(QWidget):
    def __init__(self) -> None:
        super().__init__()
        self.facts = ElidedLabel()
        self.text = QPlainTextEdit()
        self.text.setReadOnly(True)
        self.text.setWordWrapMode(QTextOption.WrapMode.WrapAnywhere)
        self.text.setAccessibleName("Text of the selected prefix")
        self.text.setTabChangesFocus(True)
        column = QVBoxLayout(self)
        column.setContentsMargins(8, 4, 8, 6)
        column.setSpacing(4)
        column.addWidget(self.facts)
        column.addWidget(self.text)
        self.hide()

    def apply_theme(self, theme: Theme) -> None:
        self.text.setFont(mono(0.92))
        self.text.setFixedHeight(_NUM_TEXT_LINES * self.text.fontMetrics().lineSpacing() + 12)

    def show_node(self, moment: PrefixMoment, node: int, text: str | None) -> None:
        """Show a node. `text` is the known part of its text, None if nothing is known."""
        facts = facts_line(moment, node)
        if facts != self.facts.text():
            self.facts.setText(facts)
        self.text.setVisible(bool(text))
        if text and text != self.text.toPlainText():
            self.text.setPlainText(text)
        self.show()


def facts_line(moment: PrefixMoment, node: int) -> str:
    tree, capabilities = moment.tree, moment.capabilities
    blocks, owner, num_before = int(tree.num_blocks[node]), int(tree.owner[node]), int(tree.num_before[node])
    if not blocks:
        return f"The beginning of {plural(int(tree.num_with_all[node]), 'block')} below was evicted"
    position = (
        "after what was evicted" if num_before < 0 else f"from token {count(num_before * moment.cache.block_size)}"
    )
    parts = [
        f"{plural(blocks, 'block')}, {plural(int(moment.num_tokens[node]), 'token')} {position}",
        f"in {tiers_text(tree, node)}",
        *([num_bytes(int(moment.num_bytes[node]))] if moment.cache.block_bytes else []),
        *([holders_text(int(tree.holders[node]))] if capabilities.ref_counts else []),
        *([f"used {idle_text(moment, node)}{' ago' if moment.idle_s(node) else ''}"] if capabilities.last_used else []),
        *([plural(int(tree.hits[node]), "hit")] if capabilities.prefix_hits and tree.hits[node] else []),
        *([f"written by request #{owner}"] if capabilities.owners and owner != NO_OWNER and owner else []),
    ]
    return "  ·  ".join(parts)
