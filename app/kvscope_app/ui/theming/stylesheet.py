"""The stylesheet: shapes and spacing on top of the palette. Lengths are in device-independent pixels.

Values of the property `look`, set with `widget.setProperty("look", name)`: `muted`, `accent`, `warning`, `heading` and
`key` for a QLabel, `card`, `current` (a highlighted card), `tip`, `banner`, `paused`, `notice`, `offer`, `drop` and
`playback` for a QFrame, `primary` and `danger` for a QPushButton, `roomy` (padded cells) for a QTableView.
"""

from __future__ import annotations

import math
import re
from string import Template
from typing import Final

from kvscope_app.ui.icons import check_path, chevron_path
from kvscope_app.ui.theme import Theme, mix

_LENGTH: Final = re.compile(r"(radius: )?\b(\d+)px\b")
_MIN_SCALED_PX: Final = 3
"""Minimum length in pixels that is scaled by the zoom. Shorter lengths are line widths."""
_SHEET: Final = Template("""
QMainWindow, QMainWindow > QWidget#body { background: $window; }
QWidget#page_map { background: $base; }
QWidget#opening { background: $panel; }
QMainWindow::separator { background: $window; width: 6px; height: 6px; }
QMainWindow::separator:hover { background: $accent; }

QDockWidget { titlebar-close-icon: none; titlebar-normal-icon: none; }
QDockWidget > QWidget { background: $panel; }
QWidget#dock_title { background: $panel; border-bottom: 1px solid $border; }
QWidget#dock_title QLabel { color: $text; font-weight: 600; }

QMenuBar { background: $panel; border-bottom: 1px solid $border; padding: 2px 4px; }
QMenuBar::item { padding: 6px 10px; margin: 2px 0; border-radius: 5px; background: transparent; }
QMenuBar::item:selected, QMenuBar::item:pressed { background: $raised; }
QMenu { background: $panel; border: 1px solid $border; padding: 5px; }
QMenu::item { padding: 5px 26px 5px 26px; border-radius: 5px; }
QMenu::item:selected { background: $accent; color: $accent_text; }
QMenu::item:disabled { color: $muted; background: transparent; }
QMenu::separator { height: 1px; background: $border; margin: 5px 8px; }

QToolBar { background: $panel; border: none; border-bottom: 1px solid $border; spacing: 4px; padding: 4px 8px; }
QToolBar::separator { background: $border; width: 1px; margin: 5px 6px; }
QToolButton { background: transparent; border: 1px solid transparent; border-radius: 6px; padding: 4px 8px; }
QToolButton:hover { background: $raised; }
QToolButton:pressed, QToolButton:checked { background: $raised; border-color: $border; }
QToolButton:focus { border-color: $accent; }
QToolButton::menu-indicator { image: none; }

QPushButton { background: $raised; border: 1px solid $border; border-radius: 6px; padding: 5px 14px; }
QPushButton:hover { border-color: $muted; }
QPushButton:pressed { background: $border; }
QPushButton:focus { border-color: $accent; }
QPushButton:disabled { color: $muted; }
QPushButton[look="primary"] { background: $accent; color: $accent_text; border-color: $accent; font-weight: 600; }
QPushButton[look="primary"]:hover { background: $accent_hover; }
QPushButton[look="primary"]:focus { border-color: $text; }
QPushButton[look="primary"]:disabled { background: $raised; color: $muted; border-color: $border; }
QPushButton[look="danger"] { color: $bad; }

QLineEdit, QTextEdit, QPlainTextEdit, QTextBrowser, QSpinBox, QDoubleSpinBox {
    background: $base; border: 1px solid $border; border-radius: 6px; padding: 4px 8px;
    selection-background-color: $accent; selection-color: $accent_text;
}
QLineEdit:focus, QTextEdit:focus, QPlainTextEdit:focus, QSpinBox:focus, QDoubleSpinBox:focus {
    border-color: $accent;
}
QComboBox { combobox-popup: 0; background: $raised; border: 1px solid $border; border-radius: 6px; padding: 4px 10px; }
QComboBox:hover { border-color: $muted; }
QComboBox:focus { border-color: $accent; }
QComboBox::drop-down { border: none; width: 20px; }
QComboBox::down-arrow { image: url("$chevron"); width: 10px; height: 10px; }
QComboBox QAbstractItemView { background: $panel; border: 1px solid $border; padding: 4px; outline: 0; }
QComboBox QAbstractItemView::item { color: $text; padding: 4px 6px; border-radius: 5px; }
QComboBox QAbstractItemView::item:hover, QComboBox QAbstractItemView::item:selected {
    background: $accent; color: $accent_text;
}
QAbstractSpinBox QLineEdit { background: transparent; border: none; border-radius: 0; padding: 0 0 0 8px; }
QAbstractSpinBox::up-button, QAbstractSpinBox::down-button {
    subcontrol-origin: border; width: 20px; border: none; background: transparent;
}
QAbstractSpinBox::up-button { subcontrol-position: top right; }
QAbstractSpinBox::down-button { subcontrol-position: bottom right; }
QAbstractSpinBox::up-arrow { image: url("$chevron_up"); width: 9px; height: 9px; }
QAbstractSpinBox::down-arrow { image: url("$chevron"); width: 9px; height: 9px; }

QTabWidget::pane { border: none; border-top: 1px solid $border; }
QTabBar { background: transparent; }
QTabBar::tab { background: transparent; color: $muted; padding: 6px 12px; border: none;
               border-bottom: 2px solid transparent; }
QMainWindow > QTabBar { qproperty-elideMode: ElideNone; qproperty-usesScrollButtons: true; }
QMainWindow > QTabBar::tab { padding: 6px 9px; }
QTabBar::tab:hover { color: $text; }
QTabBar::tab:selected { color: $text; border-bottom-color: $accent; }
QTabBar::tab:focus { color: $accent; }
QTabBar::scroller { width: 40px; }
QTabBar QToolButton { background: $panel; border: none; border-radius: 0; padding: 0; }
QTabBar QToolButton:hover:enabled, QTabBar QToolButton:focus { background: $raised; }
QTabBar QToolButton::left-arrow { image: url("$chevron_left"); width: 10px; height: 10px; }
QTabBar QToolButton::right-arrow { image: url("$chevron_right"); width: 10px; height: 10px; }
QTabBar QToolButton::left-arrow:disabled, QTabBar QToolButton::right-arrow:disabled { image: none; }

QAbstractItemView { background: $base; border: 1px solid transparent; outline: 0;
                    alternate-background-color: $panel; }
QScrollArea { border: 1px solid transparent; }
QAbstractItemView:focus, QScrollArea:focus { border: 1px solid $accent; }
QHeaderView { background: $panel; border: none; }
QHeaderView::section { background: $panel; color: $muted; border: none; border-bottom: 1px solid $border;
                       padding: 5px 8px; font-weight: 500; }
QHeaderView::section:hover { color: $text; }
QHeaderView::up-arrow, QHeaderView::down-arrow { subcontrol-position: top center; width: 9px; height: 7px; }
QTableView { gridline-color: $grid; selection-background-color: $selected; selection-color: $text; }
QTableView[look="roomy"]::item { padding: 0 5px; }
QListView::item, QTreeView::item { padding: 4px 6px; border-radius: 5px; }
QListView::item:hover { background: $raised; }
QTreeView::item:selected { background: $selected; color: $text; }
QListView::item:selected { background: $accent; color: $accent_text; }

QListView[look="palette"] { background: transparent; }
QListView[look="palette"]::item:selected { background: $selected; color: $text; }
QListView[look="palette"] QWidget { background: transparent; }
QListView[look="palette"] QLabel[look="key"] { background: $raised; }

QAbstractScrollArea::corner { background: transparent; border: none; }
QScrollBar:vertical { background: transparent; width: 10px; margin: 0; }
QScrollBar:horizontal { background: transparent; height: 10px; margin: 0; }
QScrollBar::handle { background: $border; border-radius: 3px; margin: 2px; min-height: 28px; min-width: 28px; }
QScrollBar::handle:hover { background: $muted; }
QScrollBar::add-line, QScrollBar::sub-line { width: 0; height: 0; }
QScrollBar::add-page, QScrollBar::sub-page { background: transparent; }

QProgressBar { background: $raised; border: none; border-radius: 3px; max-height: 6px; min-height: 6px;
    qproperty-textVisible: false; }
QProgressBar::chunk { background: $accent; border-radius: 3px; }
QSlider::groove:horizontal { background: $border; height: 4px; border-radius: 2px; }
QSlider::sub-page:horizontal { background: $accent; border-radius: 2px; }
QSlider::handle:horizontal { background: $text; width: 14px; height: 14px; margin: -5px 0; border-radius: 7px; }
QSlider::handle:horizontal:focus { background: $accent; }
QCheckBox { spacing: 7px; }
QCheckBox::indicator, QAbstractItemView::indicator {
    width: 14px; height: 14px; background: $base; border: 1px solid $muted; border-radius: 4px;
}
QCheckBox::indicator:hover, QCheckBox::indicator:focus { border-color: $accent; }
QCheckBox::indicator:checked, QAbstractItemView::indicator:checked {
    background: $accent; border-color: $accent; image: url("$check");
}
QCheckBox::indicator:disabled { border-color: $border; background: $panel; }
QCheckBox::indicator:checked:disabled { background: $muted; }
QGroupBox { border: 1px solid $border; border-radius: 8px; margin-top: 10px; padding: 10px; }
QGroupBox::title { subcontrol-origin: margin; left: 10px; padding: 0 4px; color: $muted; }

QStatusBar { background: $panel; border-top: 1px solid $border; }
QStatusBar::item { border: none; }
QToolTip { background: $raised; color: $text; border: 1px solid $border; padding: 5px 7px; }

QFrame[look="segments"] { background: $panel; border: 1px solid $border; border-radius: 8px; }
QFrame[look="segments"] QToolButton { color: $muted; padding: 3px 8px; }
QFrame[look="segments"] QToolButton:hover { color: $text; background: transparent; }
QFrame[look="segments"] QToolButton:checked { color: $text; background: $raised; }
QFrame[look="segments"] QToolButton:disabled { color: $faint; }
QFrame[look="card"] { background: $panel; border: 1px solid $border; border-radius: 10px; }
QFrame[look="current"] { background: $panel; border: 1px solid $accent; border-radius: 10px; }
QFrame[look="tip"] { background: $raised; border: 1px solid $border; border-radius: 8px; }
QFrame[look="playback"] { background: $panel; border: none; border-top: 1px solid $border; }
QFrame[look="paused"] { background: $paused; border: 1px solid $warn; border-radius: 8px; }
QFrame[look="notice"] { background: $notice; border: 1px solid $warn; border-radius: 8px; }
QFrame[look="offer"] { background: $dropped; border: 1px solid $accent; border-radius: 8px; }
QFrame[look="drop"] { background: $dropped; border: 2px dashed $accent; border-radius: 12px; }
QFrame[look="banner"] { background: $banner; border: 1px solid $bad; border-radius: 8px; }
QLabel[look="muted"] { color: $muted; }
QLabel[look="warning"] { color: $warn; }
QLabel[look="accent"] { color: $accent; }
QLabel[look="heading"] { color: $text; font-weight: 600; }
QLabel[look="key"] { background: $raised; border: 1px solid $border; border-radius: 4px; padding: 1px 6px; }
QDialog { background: $panel; }
QAbstractButton, QComboBox, QMenu, QTabBar, QTreeView { icon-size: 16px; }
QListView { icon-size: 24px; }
QMessageBox { icon-size: 48px; }
QDialogButtonBox { dialogbuttonbox-buttons-have-icons: 0; }
""")


def stylesheet(theme: Theme, zoom_percent: int = 100) -> str:
    """Return the stylesheet with the colours of `theme`, and lengths except line widths scaled to `zoom_percent`."""
    names = (
        "window",
        "base",
        "panel",
        "raised",
        "border",
        "text",
        "muted",
        "accent",
        "accent_text",
        "bad",
        "warn",
        "grid",
    )
    sheet = _SHEET.substitute(
        {name: getattr(theme, name) for name in names},
        accent_hover=mix(theme.accent, theme.text, 0.15),
        selected=mix(theme.accent, theme.base, 0.72),
        banner=mix(theme.bad, theme.panel, 0.88),
        paused=mix(theme.warn, theme.panel, 0.88),
        faint=mix(theme.muted, theme.panel, 0.5),
        notice=mix(theme.warn, theme.panel, 0.9),
        dropped=mix(theme.accent, theme.panel, 0.88),
        check=check_path(theme.is_dark),
        chevron=chevron_path(theme.is_dark),
        chevron_up=chevron_path(theme.is_dark, "up"),
        chevron_left=chevron_path(theme.is_dark, "left"),
        chevron_right=chevron_path(theme.is_dark, "right"),
    )
    return sheet if zoom_percent == 100 else _LENGTH.sub(lambda match: _at_zoom(match, zoom_percent), sheet)


def _at_zoom(match: re.Match[str], zoom_percent: int) -> str:
    """Return a length in the stylesheet scaled to `zoom_percent`.

    A radius is rounded down, because Qt ignores a radius of more than half the side: a circle would become a square.
    """
    property_name, length = match[1] or "", int(match[2])
    rounding = math.floor if property_name else round
    return f"{property_name}{length if length < _MIN_SCALED_PX else rounding(length * zoom_percent / 100)}px"
