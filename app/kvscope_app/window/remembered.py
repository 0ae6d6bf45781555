"""What a person chose in the views is so again in the next window. Knows the views' choices, not how they show them.

A window begins with what was chosen last, in whichever window that was; those that are open keep what they have.
"""

from __future__ import annotations

from functools import partial
from typing import Final

from PySide6.QtCore import QModelIndex
from PySide6.QtWidgets import QTableView

from kvscope_app.look.zoom import scaled
from kvscope_app.settings.settings_keeper import SettingsKeeper
from kvscope_app.views.base import View
from kvscope_app.views.page_map import PageMapView
from kvscope_app.views.page_map.color_modes import ColorMode

_MADE: Final = "made_widths"
"""Of a table: how wide its columns were made, at 100 %."""


def remember_map(view: PageMapView, choices: SettingsKeeper) -> None:
    """What colours mean, and whether cells light up."""
    chosen = choices.values
    view.set_mode(ColorMode(chosen.color_mode))
    view.set_flashing(chosen.flashes)
    view.mode_changed.connect(lambda mode: choices.change(color_mode=str(mode)))


def remember_view(view: View, choices: SettingsKeeper) -> None:
    """Of a view that was just loaded. It is imported already: asking what it is costs nothing."""
    if view.object_name == "requests":
        _remember_requests(view, choices)
    elif view.object_name == "throughput":
        _remember_range(view, choices)
    elif view.object_name == "events":
        _remember_kinds(view, choices)


def note_widths(view: View, choices: SettingsKeeper) -> None:
    """The window closes: columns that have another width than they were made with are remembered."""
    table = getattr(view, "table", None)
    made = table.property(_MADE) if isinstance(table, QTableView) else None
    if made is None or not isinstance(table, QTableView):
        return
    widths = {title: round(width * 100 / scaled(100)) for title, width in _widths(table).items()}
    changed = {title: width for title, width in widths.items() if abs(width - made[title]) > 1 and width > 0}
    if changed != choices.values.request_columns:
        choices.change(request_columns=changed)


def _remember_requests(view: View, choices: SettingsKeeper) -> None:
    from kvscope_app.views.requests.view import RequestsView

    assert isinstance(view, RequestsView), "it has the name"
    made = {title: round(width * 100 / scaled(100)) for title, width in _widths(view.table).items()}
    view.table.setProperty(_MADE, made)
    for column, title in enumerate(made):
        width = choices.values.request_columns.get(title)
        if width is not None:
            view.table.setColumnWidth(column, scaled(width))
    if view.filter.findText(choices.values.request_filter) >= 0:
        view.filter.setCurrentText(choices.values.request_filter)
    view.filter.textActivated.connect(lambda text: choices.change(request_filter=text))


def _remember_range(view: View, choices: SettingsKeeper) -> None:
    from kvscope_app.views.chart.time_bar import RANGES_S
    from kvscope_app.views.throughput.view import ThroughputView

    assert isinstance(view, ThroughputView), "it has the name"
    seconds = choices.values.chart_range_s
    if seconds in RANGES_S.values():
        view.bar.ranges.set_current(list(RANGES_S.values()).index(seconds))
        view.show_last(seconds)
    view.bar.range_chosen.connect(lambda chosen: choices.change(chart_range_s=chosen))


def _remember_kinds(view: View, choices: SettingsKeeper) -> None:
    from kvscope_app.views.events.view import EventsView

    assert isinstance(view, EventsView), "it has the name"
    for kind in choices.values.event_kinds:
        if kind in view.kind_actions:
            view.kind_actions[kind].setChecked(True)
    for action in view.kind_actions.values():
        action.triggered.connect(partial(_note_kinds, view, choices))


def _note_kinds(view: View, choices: SettingsKeeper, *_: object) -> None:
    actions = getattr(view, "kind_actions", {})
    choices.change(event_kinds=tuple(kind for kind, action in actions.items() if action.isChecked()))


def _widths(table: QTableView) -> dict[str, int]:
    model, header = table.model(), table.horizontalHeader()
    return {
        str(model.headerData(column, header.orientation())): table.columnWidth(column)
        for column in range(model.columnCount(QModelIndex()))
    }
