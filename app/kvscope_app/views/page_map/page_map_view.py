"""View of the page map: summary, usage bar, colour modes, the map, its legend, and the hovered block's card."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Final

import numpy as np
import numpy.typing as npt
from PySide6.QtCore import QSignalBlocker, QTimer, Signal
from PySide6.QtGui import QResizeEvent
from PySide6.QtWidgets import QComboBox, QHBoxLayout, QToolButton, QVBoxLayout, QWidget

from kvscope_app.session.session import Session
from kvscope_app.session.session_selection import BlockComparison
from kvscope_app.ui.icons import icon
from kvscope_app.ui.number_text import UNKNOWN, count, num_bytes, percent, plural
from kvscope_app.ui.theme import Theme
from kvscope_app.ui.widgets import FittingLabel, SegmentedControl
from kvscope_app.ui.zoom import scaled
from kvscope_app.views.base import View
from kvscope_app.views.block_locations import group_name, map_sections
from kvscope_app.views.capability_messages import SLOTS
from kvscope_app.views.page_map.block_card import BlockCard
from kvscope_app.views.page_map.block_facts import BlockFacts, block_facts
from kvscope_app.views.page_map.color_modes import COLOR_MODES, STATE, ColorMode
from kvscope_app.views.page_map.comparison_mode import comparison_mode
from kvscope_app.views.page_map.drawing.cells import Ids, distinct
from kvscope_app.views.page_map.drawing.flash_kinds import MOVES, FlashKind
from kvscope_app.views.page_map.drawing.flashes import MAX_MOVES_AT_ONCE
from kvscope_app.views.page_map.drawing.headings import headings
from kvscope_app.views.page_map.drawing.scene import Scene
from kvscope_app.views.page_map.legend_items import may_flash, owners_in, shown_in
from kvscope_app.views.page_map.page_map_canvas import ZOOM_STEP, PageMapCanvas
from kvscope_app.views.page_map.page_map_legend import PageMapLegend
from kvscope_app.views.page_map.usage_bar import UsageBar
from kvscope_app.views.visibility import is_on_screen
from kvscope_telemetry.ledger import BlockState
from kvscope_telemetry.messages.telemetry import CacheInfo, KVGroup
from kvscope_telemetry.mirror.last_use import last_used_steps
from kvscope_telemetry.mirror.mirror import Mirror
from kvscope_telemetry.prefixes.request_blocks import blocks_of_request
from kvscope_telemetry.source import Update

_NO_IDS: Final = np.empty(0, np.uint32)
_ZOOM_TIPS: Final = {"zoom_out": "Zoom out", "zoom_in": "Zoom in", "fit": "Zoom to fit"}
"""Tooltips of the zoom buttons, by the name of the action that has the same effect."""
_SLOW_MS: Final = 250
_LOW_HEIGHT: Final = 380


class PageMapView(View):
    title = "Page map"
    object_name = "page_map"
    refresh_hz = 60.0

    mode_changed = Signal(object)
    inspect_requested = Signal()

    def __init__(self, session: Session, parent: QWidget | None = None) -> None:
        super().__init__(session, parent)
        self.scene = Scene()
        self.canvas = PageMapCanvas(self.scene, self)
        self.card = BlockCard(self.canvas)
        self._pending: list[npt.NDArray[np.uint32]] = []
        self._moves = PendingMoves()
        self._mirror: Mirror | None = None
        self._epoch: int | None = None
        self._last_use_version: tuple[Mirror, int] | None = None
        self._last_state: tuple[Mirror, int | None, int, frozenset[int], float] | None = None
        """State that the texts and counts currently show, to skip updates that would change nothing."""
        self._highlighted: npt.NDArray[np.uint32] | None = None
        self.summary, self.usage, self.legend = FittingLabel(), UsageBar(), PageMapLegend()
        self._chosen_mode = self.scene.mode
        """Colour mode that the user chose, which is in effect only if the engine reports the data that the mode needs.
        """
        self._comparison: BlockComparison | None = None
        """Comparison for which the colours were last set. While there is one, `_comparison_mode` replaces the chosen
        colour mode.
        """
        self._comparison_mode = self.scene.mode
        self._keys: Mapping[str, str] = {}
        self._modes = SegmentedControl(
            [mode.name.capitalize() for mode in COLOR_MODES], "Colour by", is_collapsible=True
        )
        self.group = QComboBox()
        """Selector of the KV group to highlight; hidden if there is a single group."""
        self._groups: tuple[KVGroup, ...] = ()
        self._group_rows: npt.NDArray[np.uint32] | None = None
        self.zoom_buttons = [QToolButton() for _ in range(3)]
        self._build()
        self._connect()
        self._slow_timer = QTimer(self, interval=_SLOW_MS)
        self._slow_timer.timeout.connect(self._refresh_slowly)
        self._slow_timer.start()

    @property
    def mode(self) -> ColorMode:
        """Colour mode in effect unless texts are compared; `STATE` if the engine does not support the chosen one."""
        return STATE if self.why_not(self._chosen_mode) else self._chosen_mode

    def set_mode(self, mode: ColorMode) -> None:
        """Colour blocks by `mode` once the engine reports the data that the mode needs. Ends a comparison."""
        self.session.selection.compare(None)
        if mode == self._chosen_mode:
            return
        self._chosen_mode = mode
        self._apply_capabilities()
        self.mode_changed.emit(mode)

    def set_flashing(self, flashing: bool) -> None:
        self.scene.is_flashing = flashing
        self._show_legend()

    def show_keys(self, keys: Mapping[str, str]) -> None:
        def tip(text: str, name: str) -> str:
            return f"{text} ({keys[name]})" if keys.get(name) else text

        self._keys = keys
        for index, mode in enumerate(COLOR_MODES):
            self._modes.set_tip(index, self.why_not(mode) or tip(mode.tip, f"color_{mode}"))
        for button, (name, text) in zip(self.zoom_buttons, _ZOOM_TIPS.items(), strict=True):
            button.setToolTip(tip(text, name))

    def why_not(self, mode: ColorMode) -> str:
        return mode.why_not(self.session.capabilities)

    def zoom_in(self) -> None:
        self.canvas.zoom(ZOOM_STEP)

    def zoom_out(self) -> None:
        self.canvas.zoom(1 / ZOOM_STEP)

    def fit_all(self) -> None:
        self.canvas.fit_all()

    def select_holder(self, block: int) -> None:
        """Select a request that holds the block or, if none does, the request that wrote it. If one of these is
        selected already, it stays selected.
        """
        candidates = self._candidates(self.facts_of(block))
        if candidates and self.session.selection.request not in candidates:
            self.session.selection.select_request(candidates[0])

    def refresh(self) -> None:
        mirror = self.session.mirror
        if mirror.hello is None:
            return
        cells = self.scene.cells
        if self.scene.mode.depends_on_step:
            self._update_last_use(mirror)
        if mirror is not self._mirror or cells is None or cells.ledger is not mirror.ledger:
            self._show_mirror(mirror, mirror.hello.cache)
        elif self._pending:
            ids = distinct(np.concatenate(self._pending))
            self._pending.clear()
            self.canvas.show_span(self.scene.change(ids, mirror.step, self.canvas.now_ns()))
            self._flash_moves()
            self.canvas.fade()
        self._show_selection()

    def _update_last_use(self, mirror: Mirror) -> None:
        version = (mirror, mirror.version)
        if mirror.hello is not None and version != self._last_use_version:
            self._last_use_version = version
            self.scene.set_last_used(last_used_steps(mirror))

    def draw_all(self) -> None:
        self.refresh()
        self.canvas.fade()
        self._last_state = None
        self._refresh_slowly()

    def use_clock(self, clock: Callable[[], int]) -> None:
        self.canvas.now_ns = clock

    def apply_theme(self, theme: Theme) -> None:
        super().apply_theme(theme)
        self.canvas.apply_theme(theme)
        self.usage.apply_theme(theme)
        self.card.apply_theme(theme)
        for button, name in zip(self.zoom_buttons, ("zoom-out", "zoom-in", "fit"), strict=True):
            button.setIcon(icon(name, theme.muted, size=16))
        self._show_legend()

    def resizeEvent(self, event: QResizeEvent) -> None:
        super().resizeEvent(event)
        self.legend.set_low(self.height() < scaled(_LOW_HEIGHT))
        self._last_state = None

    def _build(self) -> None:
        heading = FittingLabel(self.title, "")  # gives its space to the modes in small windows
        heading.setProperty("look", "heading")
        self.summary.setProperty("look", "muted")
        top = QHBoxLayout()
        top.setSpacing(8)
        top.addWidget(heading, 1)
        self.group.setAccessibleName("KV group")
        self.group.setToolTip("Highlight one KV group, or show all")
        self.group.setSizeAdjustPolicy(QComboBox.SizeAdjustPolicy.AdjustToMinimumContentsLengthWithIcon)
        self.group.setMinimumContentsLength(14)
        self.group.hide()
        top.addWidget(self.group)
        top.addWidget(self._modes)
        bottom = QHBoxLayout()
        bottom.setSpacing(2)
        bottom.addWidget(self.legend, 1)
        for button, tip in zip(self.zoom_buttons, _ZOOM_TIPS.values(), strict=True):
            button.setAccessibleName(tip)
            bottom.addWidget(button)
        self.show_keys({})
        column = QVBoxLayout(self)
        column.setContentsMargins(14, 10, 14, 8)
        column.setSpacing(8)
        column.addLayout(top)
        column.addWidget(self.summary)
        column.addWidget(self.usage)
        column.addWidget(self.canvas, 1)
        column.addLayout(bottom)

    def _connect(self) -> None:
        self.session.timeline.shown.connect(self._on_update)
        self.session.selection.changed.connect(self._show_selection)
        self.group.currentIndexChanged.connect(self._on_group)
        self._modes.chosen.connect(lambda index: self.set_mode(COLOR_MODES[index]))
        for button, slot in zip(self.zoom_buttons, (self.zoom_out, self.zoom_in, self.fit_all), strict=True):
            button.clicked.connect(slot)
        self.canvas.pointed.connect(self._show_card)
        self.canvas.chosen.connect(self._choose)
        self.canvas.inspect_requested.connect(self.inspect_requested)
        self.canvas.dismissed.connect(self.session.selection.clear)
        self.session.texts.arrived.connect(self._texts_arrived)

    def _on_update(self, update: Update) -> None:
        if update.snapshot is not None:
            self._mirror = None
            self._pending.clear()
        if update.block_ids.size:
            self._pending.append(update.block_ids)
            self._moves.add(update)

    def _flash_moves(self) -> None:
        now_ns = self.canvas.now_ns()
        for kind, ids in self._moves.pop().items():
            self.canvas.show_span(self.scene.flash(kind, ids, now_ns))

    def _show_mirror(self, mirror: Mirror, cache: CacheInfo) -> None:
        self._mirror = mirror
        self._pending.clear()
        self._last_state = None
        self._moves.clear()
        if mirror.epoch != self._epoch:
            self._epoch = mirror.epoch
            self._moves.kinds_seen.clear()
        self._apply_capabilities()
        self.scene.set_ledger(mirror.ledger, cache.block_size, mirror.step, map_sections(cache))
        self._show_legend()
        self.canvas.refit_pixels()
        self.canvas.update()
        self._refresh_slowly()

    def _apply_capabilities(self) -> None:
        possible = [not self.why_not(mode) for mode in COLOR_MODES]
        mode = self.mode
        for index, is_possible in enumerate(possible):
            self._modes.set_button_enabled(index, is_possible)
        self._modes.set_current(COLOR_MODES.index(mode))
        capabilities = self.session.capabilities
        self.scene.has_filled, self.scene.has_addresses = capabilities.filled, capabilities.physical_rows
        if self._comparison is not None:
            mode = self._comparison_mode
        if mode is not self.scene.mode:
            if mode.depends_on_step:
                self._update_last_use(self.session.mirror)
            self.canvas.show_span(self.scene.set_mode(mode))
        self.show_keys(self._keys)
        self._show_legend()

    def _show_selection(self) -> None:
        self.canvas.show_selected(self.session.selection.block)
        if self.session.selection.comparison is not self._comparison:
            self._comparison = self.session.selection.comparison
            if self._comparison is not None:
                self._comparison_mode = comparison_mode(self._comparison)
            self._apply_capabilities()
            self.canvas.update()
        number = self.session.selection.request
        numbers = self.session.selection.batch if number is None else (number,)
        request_rows = [blocks_of_request(self.session.mirror, each).astype(np.uint32) for each in numbers]
        rows = np.unique(np.concatenate(request_rows)) if request_rows else self.session.selection.highlighted_rows
        if rows is None:
            rows = self._group_rows
        if rows is not None and not rows.size:
            rows = None  # nothing would be highlighted, so do not dim the map
        if rows is None and self._highlighted is None:
            return
        if rows is not None and self._highlighted is not None and np.array_equal(rows, self._highlighted):
            return
        self._highlighted = rows
        self.canvas.show_span(self.scene.select(rows))

    def _update_groups(self, mirror: Mirror) -> None:
        assert mirror.hello is not None, "there are blocks"
        if mirror.hello.cache.groups != self._groups:
            self._groups = mirror.hello.cache.groups
            with QSignalBlocker(self.group):
                self.group.clear()
                self.group.addItem("All KV groups")
                self.group.addItems([f"{number}: {group_name(group)}" for number, group in enumerate(self._groups)])
            self.group.setVisible(len(self._groups) > 1)
        number, ledger = self.group.currentIndex() - 1, mirror.ledger
        self._group_rows = None
        if number >= 0:
            is_in_group = np.isin(ledger.state, (BlockState.ACTIVE, BlockState.CACHED)) & (ledger.group == number)
            self._group_rows = np.flatnonzero(is_in_group).astype(np.uint32)

    def _on_group(self, number: int) -> None:
        if self.session.mirror.hello is not None:
            self._update_groups(self.session.mirror)
            self._show_selection()

    def _refresh_slowly(self) -> None:
        mirror = self.session.mirror
        inputs = (mirror, mirror.epoch, mirror.seq, mirror.pinned, mirror.used_share)
        if inputs == self._last_state and self.canvas.pointed_block < 0:
            return
        if mirror.hello is None or not is_on_screen(self):
            return
        self._last_state = inputs
        self._update_groups(mirror)
        self.canvas.show_pins(mirror.pinned)
        if mirror.capabilities.free_rows:
            self.usage.show_counts(mirror.num_active, mirror.num_cached, mirror.num_available_blocks)
        else:
            self.usage.show_share(mirror.used_share)
        self.summary.set_variants(*summaries(mirror, mirror.hello.cache))
        self.canvas.show_headings(headings(mirror, mirror.hello.cache, mirror.hello.device))
        self._show_legend()
        self.canvas.show_span(self.scene.redraw_ages(mirror.step))
        if self.canvas.pointed_block >= 0:
            self._show_card(self.canvas.pointed_block)

    def _show_legend(self) -> None:
        flashes = self._moves.kinds_seen if self.scene.is_flashing else ()
        mirror = self.session.mirror
        has_requests = mirror.hello is not None and self.scene.mode.has_request_colors
        owners, num_more = owners_in(mirror) if has_requests else ((), 0)
        shown = replace(
            shown_in(mirror, flashes),
            may_flash=may_flash(mirror) if self.scene.is_flashing else (),
            has_pins=bool(mirror.pinned),
            owners=owners,
            num_more_owners=num_more,
        )
        self.legend.show_mode(self.scene.mode, self.theme, shown)

    def facts_of(self, block: int) -> BlockFacts | None:
        mirror = self.session.mirror
        if mirror.hello is None or not 0 <= block < mirror.num_rows:
            return None
        return block_facts(mirror, block, mirror.hello.cache.block_size)

    def _show_card(self, block: int) -> None:
        facts = self.facts_of(block)
        if facts is None:
            self.card.hide()
            return
        lookup, texts = facts.text_lookup, self.session.texts
        texts.request(self, () if lookup is None else (lookup,))
        content = None if lookup is None else texts.get(lookup)
        self.card.show_block(facts, content, "" if lookup is None else texts.why_not(lookup) or "…")
        self.card.move_next_to(self.canvas.cell_rect(block), self.canvas.map_rect)
        if self.canvas.hasFocus():
            self.canvas.announce(facts.sentence)

    def _texts_arrived(self) -> None:
        if self.card.isVisible() and self.canvas.pointed_block is not None:
            self._show_card(self.canvas.pointed_block)

    def _choose(self, block: int) -> None:
        """Select the block and a request that holds it; another click on a shared block selects its next holder."""
        facts = self.facts_of(block)
        candidates = self._candidates(facts)
        selected = self.session.selection.request
        if not candidates:
            self.session.selection.select_request(None)
        elif selected in candidates:
            self.session.selection.select_request(candidates[(candidates.index(selected) + 1) % len(candidates)])
        else:
            self.session.selection.select_request(candidates[0])
        self.session.selection.select_block(None if facts is None else block)

    @staticmethod
    def _candidates(facts: BlockFacts | None) -> tuple[int, ...]:
        return () if facts is None else facts.holders or ((facts.owner,) if facts.owner is not None else ())


def summaries(mirror: Mirror, cache: CacheInfo) -> tuple[str, ...]:
    """Return one-line summaries of the pool, longest first. Shorter ones omit constant properties of the pool."""
    if not mirror.capabilities.free_rows:
        return _summaries_of_slots(mirror, cache)
    active, cached = f"{count(mirror.num_active)} active", f"{count(mirror.num_cached)} cached"
    if cache.num_physical_blocks:  # rows are addresses: the number of physical blocks matters
        counts = [
            f"{plural(cache.num_physical_blocks, 'block')} of memory in {count(cache.num_blocks)} locations",
            active,
            *([cached] if mirror.num_cached else []),
            f"{count(mirror.num_free)} more mapped",
        ]
    else:
        counts = [plural(cache.num_blocks, "block"), active, cached, f"{count(mirror.num_free)} free"]
        unmapped = mirror.count(BlockState.UNMAPPED) - cache.num_reserved_blocks
        counts += [f"{count(unmapped)} without memory"] if unmapped else []
    counts += [f"{count(len(mirror.pinned))} pinned"] if mirror.pinned else []
    tokens = plural(cache.block_size, "token")
    size = f"{tokens}, {num_bytes(cache.block_bytes)} each" if cache.block_bytes else f"{tokens} each"
    is_quantized = mirror.hello is not None and cache.dtype != mirror.hello.model.dtype
    kind = [f"{cache.dtype} KV"] if is_quantized else []
    facts = ([*counts, size, *kind], [*counts, f"{tokens} each", *kind], [*counts, *kind], counts)
    return (*("  ·  ".join(parts) for parts in facts), " · ".join(counts))


def _summaries_of_slots(mirror: Mirror, cache: CacheInfo) -> tuple[str, ...]:
    """Return the summaries for an engine that does not report block ids. For such an engine, kvscope itself assigns
    blocks to slots.
    """
    in_use = percent(mirror.used_share) if mirror.used_share >= 0 else UNKNOWN
    counts = [plural(cache.num_blocks, "block"), f"in use: {in_use}", f"{count(mirror.num_cached)} cached prefixes"]
    min_size, max_size = min(cache.block_sizes), max(cache.block_sizes)
    tokens = (
        f"{plural(max_size, 'token')} each"
        if min_size == max_size
        else f"{count(min_size)} to {plural(max_size, 'token')} each"
    )
    capacity = [f"room for {plural(cache.pool_tokens, 'token')}"] if cache.pool_tokens else []
    facts = ([*counts, tokens, *capacity, SLOTS], [*counts, *capacity, SLOTS], [*counts, SLOTS], counts)
    return tuple("  ·  ".join(parts) for parts in facts)


class PendingMoves:
    """Block moves received since the map was last drawn, at most the newest `MAX_MOVES_AT_ONCE` of each kind.

    `kinds_seen` has all kinds of moves that this engine has reported.
    """

    def __init__(self) -> None:
        self._ids: dict[FlashKind, Ids] = {}
        self.kinds_seen: set[FlashKind] = set()

    def add(self, update: Update) -> None:
        for kind, ids in zip(MOVES, (update.evicted, update.copied, update.saved, update.loaded), strict=True):
            if ids.size:
                self.kinds_seen.add(kind)
                newest = np.concatenate([self._ids.get(kind, _NO_IDS), ids[-MAX_MOVES_AT_ONCE:]])
                self._ids[kind] = newest[-MAX_MOVES_AT_ONCE:]

    def pop(self) -> dict[FlashKind, Ids]:
        """Return the pending block ids of each kind of move, oldest first, and clear them."""
        pending, self._ids = self._ids, {}
        return pending

    def clear(self) -> None:
        self._ids.clear()
