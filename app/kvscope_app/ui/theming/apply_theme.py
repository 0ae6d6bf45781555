"""Applies a theme to the whole application: Qt's palette, and the stylesheet on top of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import shiboken6
from PySide6.QtCore import QCoreApplication, QEvent, Qt
from PySide6.QtGui import QColor, QPalette
from PySide6.QtWidgets import QApplication, QWidget

from kvscope_app.ui.theme import Theme, mix
from kvscope_app.ui.theming.stylesheet import stylesheet
from kvscope_app.ui.zoom import restore_own_font, zoom_of


def apply_theme(app: QApplication, theme: Theme) -> None:
    for _ in restyle_in_steps(app, theme):
        pass


def restyle_in_steps(app: QApplication, theme: Theme) -> Iterator[None]:
    """Apply a theme in two steps: visible widgets before the generator yields, hidden widgets after it.

    Qt itself would visit every widget three times: to remove the old stylesheet, to clear its cache, and for the new
    stylesheet.
    """
    if app.style().objectName().lower() != "fusion" and not app.styleSheet():  # the style of a stylesheet has no name
        app.setStyle("Fusion")
    clear_style_cache(app)  # Qt would polish cached widgets and repeatedly their descendants
    app.setPalette(palette(theme))
    app.setStyleSheet(stylesheet(theme, zoom_of(app)))
    polished = [widget for widget in app.allWidgets() if widget.testAttribute(Qt.WidgetAttribute.WA_WState_Polished)]
    hidden = []
    for widget in _parents_first(polished):
        if widget.visibleRegion().isEmpty():
            hidden.append(widget)
        else:
            _polish(app, widget)
    yield
    parents = set()
    for widget in hidden:
        if shiboken6.isValid(widget):
            _polish(app, widget)
            parents.add(widget.parentWidget())
    for parent in parents:
        if parent is not None and parent.isVisible():  # hidden labels also determine a status bar's height
            QCoreApplication.sendEvent(parent, QEvent(QEvent.Type.LayoutRequest))


def _parents_first(widgets: Sequence[QWidget]) -> list[QWidget]:
    """Sort `widgets` by depth.

    Polishing gives a widget the font that its parent has then, and Qt does not propagate later changes. A widget
    polished before its parent would keep the text size of an earlier zoom if the zoom changed twice in short
    succession.
    """
    depths: dict[QWidget | None, int] = {None: 0}

    def depth(widget: QWidget) -> int:
        if widget not in depths:
            parent = widget.parentWidget()
            depths[widget] = 1 if parent is None else depth(parent) + 1
        return depths[widget]

    return sorted(widgets, key=depth)


def _polish(app: QApplication, widget: QWidget) -> None:
    widget.style().polish(widget)
    QCoreApplication.sendEvent(widget, QEvent(QEvent.Type.StyleChange))
    restore_own_font(app, widget)


def clear_style_cache(app: QApplication) -> None:
    """Clear the stylesheet's cache, including entries of deleted widgets.

    Qt caches the rules of a widget by address until the widget is destroyed, but is not notified of that for the line
    edit in a spin box and the frame of a combo box's list: about 60 KB leak per window. Entries of existing widgets are
    created again when they are next painted.
    """
    app.style().unpolish(app)


def palette(theme: Theme) -> QPalette:
    result = QPalette()
    roles = QPalette.ColorRole
    names = {
        roles.Window: theme.panel,
        roles.WindowText: theme.text,
        roles.Base: theme.base,
        roles.AlternateBase: theme.panel,
        roles.ToolTipBase: theme.raised,
        roles.ToolTipText: theme.text,
        roles.PlaceholderText: theme.muted,
        roles.Text: theme.text,
        roles.Button: theme.raised,
        roles.ButtonText: theme.text,
        roles.BrightText: theme.bad,
        roles.Link: theme.accent,
        roles.LinkVisited: theme.accent,
        roles.Highlight: theme.accent,
        roles.HighlightedText: theme.accent_text,
        roles.Light: theme.raised,
        roles.Midlight: theme.raised,
        roles.Mid: theme.border,
        roles.Dark: theme.border,
        roles.Shadow: theme.window,
    }
    for role, name in names.items():
        result.setColor(role, QColor(name))
    for role in (roles.WindowText, roles.Text, roles.ButtonText):
        result.setColor(QPalette.ColorGroup.Disabled, role, QColor(mix(theme.muted, theme.panel, 0.35)))
    return result
