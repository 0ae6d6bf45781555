"""Giving the whole application a theme: Qt's palette and the stylesheet on top of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import shiboken6
from PySide6.QtCore import QCoreApplication, QEvent, Qt
from PySide6.QtGui import QColor, QPalette
from PySide6.QtWidgets import QApplication, QWidget

from kvscope_app.look.theme import Theme, mix
from kvscope_app.look.theming.stylesheet import stylesheet
from kvscope_app.look.zoom import fit_own_font, zoom_of


def apply_theme(app: QApplication, theme: Theme) -> None:
    """Give the whole application the palette and stylesheet of `theme`."""
    for _ in restyled(app, theme):
        pass


def restyled(app: QApplication, theme: Theme) -> Iterator[None]:
    """The same in two steps: the first is for what is seen, the second for the rest.

    Qt itself would go to every widget three times: to take back the old stylesheet, to forget it, and for the new one.
    """
    if app.style().objectName().lower() != "fusion" and not app.styleSheet():  # a stylesheet's style has no name
        app.setStyle("Fusion")
    forget_rules(app)  # who is remembered would be polished by Qt, and his children, and theirs again
    app.setPalette(palette(theme))
    app.setStyleSheet(stylesheet(theme, zoom_of(app)))
    polished = [widget for widget in app.allWidgets() if widget.testAttribute(Qt.WidgetAttribute.WA_WState_Polished)]
    unseen = []
    for widget in _parents_first(polished):
        if widget.visibleRegion().isEmpty():
            unseen.append(widget)
        else:
            _polish(app, widget)
    yield
    around = set()
    for widget in unseen:
        if shiboken6.isValid(widget):
            _polish(app, widget)
            around.add(widget.parentWidget())
    for parent in around:
        if parent is not None and parent.isVisible():  # a status bar is as high as its hidden labels too
            QCoreApplication.sendEvent(parent, QEvent(QEvent.Type.LayoutRequest))


def _parents_first(widgets: Sequence[QWidget]) -> list[QWidget]:
    """Sort `widgets` by depth. Polishing gives a widget the font that its parent has at that moment, and Qt passes no
    later one on: before its parent a widget would keep the text size of a zoom that was left before all was polished.
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
    fit_own_font(app, widget)


def forget_rules(app: QApplication) -> None:
    """Give back what the stylesheet remembers of widgets that are gone.

    Qt remembers by address which rules are a widget's until the widget is destroyed, but never hears of the end of the
    line edit in a spin box and the frame of a combo box's list: some 60 KB stay with each window. So all is forgotten;
    what lives is looked up again when it is next drawn.
    """
    app.style().unpolish(app)


def palette(theme: Theme) -> QPalette:
    """The Qt palette of `theme`, with readable disabled text."""
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
