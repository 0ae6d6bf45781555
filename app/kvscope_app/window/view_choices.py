"""Applies the choices that the user last made in views (such as colour mode or column widths) to new windows, and saves
changes of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

from PySide6.QtCore import QModelIndex, QSettings
from PySide6.QtWidgets import QTableView

from kvscope_app.settings.layout_value import Choices
from kvscope_app.settings.settings_store import SettingsStore
from kvscope_app.ui.zoom import scaled
from kvscope_app.views.base import View
from kvscope_app.views.page_map.color_modes import mode_named
from kvscope_app.views.page_map.page_map_view import PageMapView

_INITIAL_WIDTHS: Final = "made_widths"
"""Name of the Qt property with a table's initial column widths, in pixels at 100 % zoom, by title."""


def remember_map(view: PageMapView, settings_store: SettingsStore) -> None:
    """Apply the saved choices (colour mode, flashing) to the page map, and save changes of the colour mode."""
    settings = settings_store.values
    view.set_mode(mode_named(settings.color_mode))
    view.set_flashing(settings.flashes)
    view.mode_changed.connect(lambda mode: settings_store.change(color_mode=str(mode)))


def remember_view(view: View, settings_store: SettingsStore) -> None:
    """Apply the saved choices to a newly loaded view, and save the choices when they change."""
    if view.object_name == "requests":
        _remember_requests(view, settings_store)
    elif view.object_name == "events":
        _remember_kinds(view, settings_store)


def save_widths(view: View, settings_store: SettingsStore) -> None:
    """Save the column widths that differ from the initial ones. Called when the window closes."""
    changed = _changed_widths(view)
    if changed is not None and changed != settings_store.values.request_columns:
        settings_store.change(request_columns=changed)


def choices_of(views: Mapping[str, View]) -> Choices:
    with TemporaryDirectory(prefix="kvscope-") as folder:
        stored = QSettings(str(Path(folder) / "choices.ini"), QSettings.Format.IniFormat)
        for view in views.values():
            view.save_settings(stored)
        view_data = {name: str(stored.value(name)) for name in sorted(stored.allKeys())}
        del stored  # writes its file now, while the folder still exists
    fields: dict[str, object] = {}
    page_map, requests, events = (views.get(name) for name in ("page_map", "requests", "events"))
    if isinstance(page_map, PageMapView):
        fields |= {"color_mode": str(page_map.mode), "flashes": page_map.scene.is_flashing}
    if requests is not None:
        filter_box = getattr(requests, "filter", None)
        fields |= {"request_filter": filter_box.currentText() if filter_box is not None else None}
        fields |= {"request_columns": _changed_widths(requests)}
    if events is not None:
        actions = getattr(events, "kind_actions", {})
        fields |= {"event_kinds": tuple(kind for kind, action in actions.items() if action.isChecked())}
    return Choices(**fields, views=view_data)  # type: ignore[arg-type]  # each by its name


def apply_choices(views: Mapping[str, View], choices: Choices) -> None:
    """Apply `choices` to `views`. Choices that are absent or unknown do not change anything."""
    with TemporaryDirectory(prefix="kvscope-") as folder:
        stored = QSettings(str(Path(folder) / "choices.ini"), QSettings.Format.IniFormat)
        for view in views.values():
            view.save_settings(stored)
        for name, value in choices.views.items():
            stored.setValue(name, value)
        for view in views.values():
            view.restore_settings(stored)
        del stored
    page_map, requests, events = (views.get(name) for name in ("page_map", "requests", "events"))
    if isinstance(page_map, PageMapView):
        if choices.color_mode is not None:
            page_map.set_mode(mode_named(choices.color_mode))
        if choices.flashes is not None:
            page_map.set_flashing(choices.flashes)
    if requests is not None:
        _apply_request_choices(requests, choices)
    if events is not None and choices.event_kinds is not None:
        for kind, action in getattr(events, "kind_actions", {}).items():
            action.setChecked(kind in choices.event_kinds)


def _apply_request_choices(view: View, choices: Choices) -> None:
    from kvscope_app.views.requests.requests_view import RequestsView

    assert isinstance(view, RequestsView), "it has the name"
    if choices.request_filter is not None and view.filter.findText(choices.request_filter) >= 0:
        view.filter.setCurrentText(choices.request_filter)
    if choices.request_columns is not None:
        initial = view.table.property(_INITIAL_WIDTHS) or {}
        for column, title in enumerate(_widths_by_title(view.table)):
            width = choices.request_columns.get(title, initial.get(title))
            if width is not None:
                view.table.setColumnWidth(column, scaled(width))


def _changed_widths(view: View) -> dict[str, int] | None:
    """Return the changed column widths by column title, in pixels at 100 % zoom. Returns None if the view has
    no table with known initial widths.
    """
    table = getattr(view, "table", None)
    initial = table.property(_INITIAL_WIDTHS) if isinstance(table, QTableView) else None
    if initial is None or not isinstance(table, QTableView):
        return None
    widths = {title: round(width * 100 / scaled(100)) for title, width in _widths_by_title(table).items()}
    return {title: width for title, width in widths.items() if abs(width - initial[title]) > 1 and width > 0}


def _remember_requests(view: View, settings_store: SettingsStore) -> None:
    from kvscope_app.views.requests.requests_view import RequestsView

    assert isinstance(view, RequestsView), "it has the name"
    initial = {title: round(width * 100 / scaled(100)) for title, width in _widths_by_title(view.table).items()}
    view.table.setProperty(_INITIAL_WIDTHS, initial)
    for column, title in enumerate(initial):
        width = settings_store.values.request_columns.get(title)
        if width is not None:
            view.table.setColumnWidth(column, scaled(width))
    if view.filter.findText(settings_store.values.request_filter) >= 0:
        view.filter.setCurrentText(settings_store.values.request_filter)
    view.filter.textActivated.connect(lambda text: settings_store.change(request_filter=text))


def _remember_kinds(view: View, settings_store: SettingsStore) -> None:
    from kvscope_app.views.events.events_view import EventsView

    assert isinstance(view, EventsView), "it has the name"
    for kind in settings_store.values.event_kinds:
        if kind in view.kind_actions:
            view.kind_actions[kind].setChecked(True)
    for action in view.kind_actions.values():
        action.triggered.connect(partial(_save_kinds, view, settings_store))


def _save_kinds(view: View, settings_store: SettingsStore, *_: object) -> None:
    actions = getattr(view, "kind_actions", {})
    settings_store.change(event_kinds=tuple(kind for kind, action in actions.items() if action.isChecked()))


def _widths_by_title(table: QTableView) -> dict[str, int]:
    model, header = table.model(), table.horizontalHeader()
    return {
        str(model.headerData(column, header.orientation())): table.columnWidth(column)
        for column in range(model.columnCount(QModelIndex()))
    }
