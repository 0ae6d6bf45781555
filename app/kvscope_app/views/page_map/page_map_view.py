"""View of the page map: summary, usage bar, colour modes, the map, its legend, and the card of the hovered block."""

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

_NOTHING: Final = np.empty(0, np.uint32)
_ZOOM_TIPS: Final = {"zoom_out": "Zoom out", "zoom_in": "Zoom in", "fit": "Zoom to fit"}
"""Tooltips, keyed by the names of the equivalent actions."""
_SLOW_MS: Final = 250
_LOW: Final = 380
"""Height in pixels, at 100 % scale, below which the legend has a single line."""


class PageMapView(View):
    """View with one cell per block."""

    title = "Page map"
    object_name = "page_map"
    refresh_hz = 60.0

    mode_changed = Signal(object)
    inspect_requested = Signal()
    """Emitted when the user asks for the inspector page of the selection."""

    def __init__(self, session: Session, parent: QWidget | None = None) -> None:
        super().__init__(session, parent)
        self.scene = Scene()
        self.canvas = PageMapCanvas(self.scene, self)
        self.card = BlockCard(self.canvas)
        self._pending: list[npt.NDArray[np.uint32]] = []
        self._moves = PendingMoves()
        self._mirror: Mirror | None = None
        self._epoch: int | None = None
        self._last_use_of: tuple[Mirror, int] | None = None
        """Mirror and version for which the scene received the blocks' last use."""
        self._last_state: tuple[Mirror, int | None, int, frozenset[int], float] | None = None
        """Inputs of the texts and counts currently shown, to skip refreshes that would change nothing."""
        self._table: npt.NDArray[np.uint32] | None = None
        self.summary, self.usage, self.legend = FittingLabel(), UsageBar(), PageMapLegend()
        self._chosen_mode = self.scene.mode
        """Mode that the user chose; drawn only if the engine reports what it needs."""
        self._keys: Mapping[str, str] = {}
        self._modes = SegmentedControl(
            [mode.name.capitalize() for mode in COLOR_MODES], "Colour by", is_collapsible=True
        )
        self.group = QComboBox()
        """Selector of the KV group to highlight; hidden if there is a single group."""
        self._groups: tuple[KVGroup, ...] = ()
        self._group_rows: npt.NDArray[np.uint32] | None = None
        self.pool_buttons = [QToolButton() for _ in range(3)]
        self._build()
        self._connect()
        self._slow = QTimer(self, interval=_SLOW_MS)
        self._slow.timeout.connect(self._refresh_slowly)
        self._slow.start()

    @property
    def mode(self) -> ColorMode:
        """Colour mode in effect, which differs from the chosen one while the engine does not support that."""
        return self.scene.mode

    def set_mode(self, mode: ColorMode) -> None:
        """Colour blocks by `mode`: immediately, or once an engine publishes what the mode needs."""
        if mode == self._chosen_mode:
            return
        self._chosen_mode = mode
        self._apply_capabilities()
        self.mode_changed.emit(mode)

    def set_flashing(self, flashing: bool) -> None:
        self.scene.flashing = flashing
        self._show_legend()

    def show_keys(self, keys: Mapping[str, str]) -> None:
        """Add shortcuts to tooltips. `keys` maps names of actions to the shortcuts of the equivalent actions."""

        def tip(words: str, name: str) -> str:
            return f"{words} ({keys[name]})" if keys.get(name) else words

        self._keys = keys
        for index, mode in enumerate(COLOR_MODES):
            self._modes.set_tip(index, self.why_not(mode) or tip(mode.tip, f"color_{mode}"))
        for button, (name, words) in zip(self.pool_buttons, _ZOOM_TIPS.items(), strict=True):
            button.setToolTip(tip(words, name))

    def why_not(self, mode: ColorMode) -> str:
        """Return why blocks cannot be coloured by `mode`, or "" if they can."""
        return mode.why_not(self.session.capabilities)

    def zoom_in(self) -> None:
        self.canvas.zoom(ZOOM_STEP)

    def zoom_out(self) -> None:
        self.canvas.zoom(1 / ZOOM_STEP)

    def fit_all(self) -> None:
        self.canvas.fit_all()

    def select_holder(self, block: int) -> None:
        """Select a request that holds the block, or else the one that wrote it, unless one of these is already
        selected."""
        candidates = self._candidates(self.facts_of(block))
        if candidates and self.session.selection.request not in candidates:
            self.session.selection.select_request(candidates[0])

    def refresh(self) -> None:
        mirror = self.session.mirror
        if mirror.hello is None:
            return
        cells = self.scene.cells
        if self.scene.mode.by_step:
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
        """Pass the blocks' last use to the scene, once per mirror version."""
        state = (mirror, mirror.version)
        if mirror.hello is not None and state != self._last_use_of:
            self._last_use_of = state
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
        for button, name in zip(self.pool_buttons, ("zoom-out", "zoom-in", "fit"), strict=True):
            button.setIcon(icon(name, theme.muted, size=16))
        self._show_legend()

    def resizeEvent(self, event: QResizeEvent) -> None:
        super().resizeEvent(event)
        self.legend.set_low(self.height() < scaled(_LOW))
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
        for button, tip in zip(self.pool_buttons, _ZOOM_TIPS.values(), strict=True):
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
        for button, slot in zip(self.pool_buttons, (self.zoom_out, self.zoom_in, self.fit_all), strict=True):
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
        """Apply the chosen colour mode, or fall back to `STATE` if the engine does not report what it needs."""
        possible = [not self.why_not(mode) for mode in COLOR_MODES]
        mode = STATE if self.why_not(self._chosen_mode) else self._chosen_mode
        for index, is_possible in enumerate(possible):
            self._modes.set_button_enabled(index, is_possible)
        self._modes.set_current(COLOR_MODES.index(mode))
        capabilities = self.session.capabilities
        self.scene.has_filled, self.scene.has_addresses = capabilities.filled, capabilities.physical_rows
        if mode is not self.scene.mode:
            if mode.by_step:
                self._update_last_use(self.session.mirror)
            self.canvas.show_span(self.scene.set_mode(mode))
        self.show_keys(self._keys)
        self._show_legend()

    def _show_selection(self) -> None:
        self.canvas.show_selected(self.session.selection.block)
        number = self.session.selection.request
        numbers = self.session.selection.batch if number is None else (number,)
        held = [blocks_of_request(self.session.mirror, each).astype(np.uint32) for each in numbers]
        table = np.unique(np.concatenate(held)) if held else self.session.selection.highlighted_rows
        if table is None:
            table = self._group_rows
        if table is not None and not table.size:
            table = None  # nothing would be highlighted, so do not dim the map
        if table is None and self._table is None:
            return
        if table is not None and self._table is not None and np.array_equal(table, self._table):
            return
        self._table = table
        self.canvas.show_span(self.scene.select(table))

    def _update_groups(self, mirror: Mirror) -> None:
        """Fill the selector with the KV groups, and find the blocks of the selected group."""
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
            chosen = np.isin(ledger.state, (BlockState.ACTIVE, BlockState.CACHED)) & (ledger.group == number)
            self._group_rows = np.flatnonzero(chosen).astype(np.uint32)

    def _on_group(self, number: int) -> None:
        if self.session.mirror.hello is not None:
            self._update_groups(self.session.mirror)
            self._show_selection()

    def _refresh_slowly(self) -> None:
        """Update what need not follow every frame: texts, usage bar and ages."""
        mirror = self.session.mirror
        state = (mirror, mirror.epoch, mirror.seq, mirror.pinned, mirror.used_share)
        if state == self._last_state and self.canvas.pointed_block < 0:
            return
        if mirror.hello is None or not is_on_screen(self):
            return
        self._last_state = state
        self._update_groups(mirror)
        self.canvas.show_pins(mirror.pinned)
        if mirror.capabilities.free_rows:
            self.usage.show_counts(mirror.num_active, mirror.num_cached, mirror.num_room)
        else:
            self.usage.show_share(mirror.used_share)
        self.summary.set_variants(*summaries(mirror, mirror.hello.cache))
        self.canvas.show_headings(headings(mirror, mirror.hello.cache, mirror.hello.device))
        self._show_legend()
        self.canvas.show_span(self.scene.grow_older(mirror.step))
        if self.canvas.pointed_block >= 0:
            self._show_card(self.canvas.pointed_block)

    def _show_legend(self) -> None:
        flashes = self._moves.kinds_seen if self.scene.flashing else ()
        mirror = self.session.mirror
        has_requests = mirror.hello is not None and self.scene.mode.by_request
        owners, num_more = owners_in(mirror) if has_requests else ((), 0)
        shown = replace(
            shown_in(mirror, flashes),
            may_flash=may_flash(mirror) if self.scene.flashing else (),
            pins=bool(mirror.pinned),
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
        asked, texts = facts.asked, self.session.texts
        texts.request(self, () if asked is None else (asked,))
        content = None if asked is None else texts.get(asked)
        self.card.show_block(facts, content, "" if asked is None else texts.why_not(asked) or "…")
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
        """Return the requests that hold the block; if there is none, the one that wrote it."""
        return () if facts is None else facts.holders or ((facts.owner,) if facts.owner is not None else ())


def summaries(mirror: Mirror, cache: CacheInfo) -> tuple[str, ...]:
    """Return one-line summaries of the pool, longest first; shorter ones omit the facts that never change."""
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
    known = ([*counts, size, *kind], [*counts, f"{tokens} each", *kind], [*counts, *kind], counts)
    return (*("  ·  ".join(parts) for parts in known), " · ".join(counts))


def _summaries_of_slots(mirror: Mirror, cache: CacheInfo) -> tuple[str, ...]:
    """Return the summaries for engines whose rows are slots that kvscope assigns."""
    in_use = percent(mirror.used_share) if mirror.used_share >= 0 else UNKNOWN
    counts = [plural(cache.num_blocks, "block"), f"in use: {in_use}", f"{count(mirror.num_cached)} cached prefixes"]
    fewest, most = min(cache.block_sizes), max(cache.block_sizes)
    tokens = f"{plural(most, 'token')} each" if fewest == most else f"{count(fewest)} to {plural(most, 'token')} each"
    room = [f"room for {plural(cache.pool_tokens, 'token')}"] if cache.pool_tokens else []
    known = ([*counts, tokens, *room, SLOTS], [*counts, *room, SLOTS], [*counts, SLOTS], counts)
    return tuple("  ·  ".join(parts) for parts in known)


class PendingMoves:
    """Block moves received since the map was last drawn; per kind, only the newest `MAX_MOVES_AT_ONCE` are kept.

    Also records which kinds of moves this engine has shown.
    """

    def __init__(self) -> None:
        self._ids: dict[FlashKind, Ids] = {}
        self.kinds_seen: set[FlashKind] = set()

    def add(self, update: Update) -> None:
        for kind, ids in zip(MOVES, (update.evicted, update.copied, update.saved, update.loaded), strict=True):
            if ids.size:
                self.kinds_seen.add(kind)
                kept = np.concatenate([self._ids.get(kind, _NOTHING), ids[-MAX_MOVES_AT_ONCE:]])
                self._ids[kind] = kept[-MAX_MOVES_AT_ONCE:]

    def pop(self) -> dict[FlashKind, Ids]:
        """Return the pending ids of each kind, oldest first, and clear them."""
        taken, self._ids = self._ids, {}
        return taken

    def clear(self) -> None:
        """Drop pending moves, because another engine or another state is shown."""
        self._ids.clear()
