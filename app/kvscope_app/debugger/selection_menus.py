"""Context menus for the selected block on the page map and the selected request in the request table."""

from __future__ import annotations

from typing import TYPE_CHECKING

from PySide6.QtCore import QPoint, Qt
from PySide6.QtGui import QAction
from PySide6.QtWidgets import QMenu

from kvscope_app.actions.action_registry import Actions
from kvscope_app.debugger.debug_actions import BLOCK_ACTIONS, REQUEST_ACTIONS
from kvscope_app.session_window import SessionWindow

if TYPE_CHECKING:
    from kvscope_app.views.requests.requests_table import RequestTable


def add_selection_menus(window: SessionWindow, actions: Actions) -> None:
    """Add a context menu to the page map. For a request table, call `add_to_requests` once the table exists."""
    canvas = window.page_map.canvas

    def show_menu(position: QPoint) -> None:
        window.page_map.select_holder(canvas.current_block)
        actions.refresh()
        menu = QMenu(window)
        menu.setAttribute(Qt.WidgetAttribute.WA_DeleteOnClose)
        menu.setToolTipsVisible(True)
        menu.addActions([actions[name] for name in BLOCK_ACTIONS])
        menu.addSeparator()
        menu.addActions([actions[name] for name in REQUEST_ACTIONS])
        menu.popup(position)

    canvas.menu_requested.connect(show_menu)


def add_to_requests(table: RequestTable, actions: Actions) -> None:
    """Append the debugger's actions on requests to the table's context menu.

    The table's own Abort action is removed, because the debugger's also aborts requests of other clients.
    """
    table.removeAction(table.abort)
    separator = QAction(table)
    separator.setSeparator(True)
    table.addActions([separator, *(actions[name] for name in REQUEST_ACTIONS)])
