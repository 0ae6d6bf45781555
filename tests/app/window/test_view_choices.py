"""Tests that choices made in views are saved and restored in the next window."""

from __future__ import annotations

import math

from PySide6.QtCore import Qt

from kvscope_app.views.page_map.color_modes import AGE


def test_color_mode_filters_and_column_widths_are_restored_in_the_next_window(session, make_window, qtbot):
    first = make_window(session, with_views=("requests", "throughput", "events"), size=(1500, 900))
    first.actions_by_name["color_age"].trigger()
    first.actions_by_name["flash"].trigger()
    requests, throughput, events = (first.views[name] for name in ("requests", "throughput", "events"))
    requests.filter.setCurrentText("Running")
    requests.filter.textActivated.emit("Running")
    requests.table.setColumnWidth(3, 177)
    throughput.charts.bar.range_chosen.emit(math.inf)
    for kind in ("preempted", "refused"):
        events.kind_actions[kind].trigger()
    first.close()
    second = make_window(session, with_views=("requests", "throughput", "events"), size=(1500, 900))
    requests, throughput, events = (second.views[name] for name in ("requests", "throughput", "events"))
    assert second.page_map.mode is AGE
    assert second.actions_by_name["color_age"].isChecked()
    assert not second.page_map.scene.is_flashing
    assert not second.actions_by_name["flash"].isChecked()
    assert requests.filter.currentText() == "Running"
    assert requests.table.columnWidth(3) == 177
    assert throughput.charts.range_s == math.inf
    assert events.kinds.text().startswith(("preempted, refused", "refused, preempted"))
    second.close()
    assert set(second.themes.settings.values.request_columns) == {
        requests.model.headerData(3, Qt.Orientation.Horizontal)
    }


def test_setting_of_a_newer_version_is_ignored_but_kept(session, make_window, themes):
    themes.settings.change(request_filter="Sleeping", event_kinds=("teleported",))
    window = make_window(session, with_views=("requests", "throughput", "events"))
    assert window.views["requests"].filter.currentText() == "All"
    assert window.views["events"].kinds.text().startswith("All kinds")
    window.close()
    assert themes.settings.values.event_kinds == ("teleported",)
