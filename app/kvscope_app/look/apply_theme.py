"""Giving the whole application a theme: Qt's palette and the stylesheet on top of it."""

from __future__ import annotations

from PySide6.QtGui import QColor, QPalette
from PySide6.QtWidgets import QApplication

from kvscope_app.look.stylesheet import stylesheet
from kvscope_app.look.theme import Theme, mix


def apply_theme(app: QApplication, theme: Theme) -> None:
    """Give the whole application the palette and stylesheet of `theme`."""
    if app.style().objectName().lower() != "fusion":
        app.setStyle("Fusion")
    app.setPalette(palette(theme))
    app.setStyleSheet(stylesheet(theme))


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
