"""Giving the whole application a theme: Qt's palette and the stylesheet on top of it."""

from __future__ import annotations

from PySide6.QtGui import QColor, QPalette
from PySide6.QtWidgets import QApplication

from kvscope_app.look.theme import Theme, mix
from kvscope_app.look.theming.stylesheet import stylesheet
from kvscope_app.look.zoom import fit_own_fonts, zoom_of


def apply_theme(app: QApplication, theme: Theme) -> None:
    """Give the whole application the palette and stylesheet of `theme`."""
    app.setStyleSheet("")  # one in place of another reaches only the widgets whose rules are remembered
    if app.style().objectName().lower() != "fusion":  # only without a stylesheet it is the style below that tells
        app.setStyle("Fusion")
    app.setPalette(palette(theme))
    app.setStyleSheet(stylesheet(theme, zoom_of(app)))
    fit_own_fonts(app)


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
