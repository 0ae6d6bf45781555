"""Tests of the zoom: texts, icons and lengths follow it, in open and new windows, and return to their sizes."""

from __future__ import annotations

import re

import pytest
from PySide6.QtCore import Qt
from PySide6.QtWidgets import (
    QAbstractButton,
    QApplication,
    QFileDialog,
    QListView,
    QMessageBox,
    QStyleOptionViewItem,
    QTableWidget,
    QToolButton,
    QWidget,
)
from tests.app import window_driver as driver

from kvscope_app.settings.settings_store import read_settings
from kvscope_app.ui.sheet import Sheet
from kvscope_app.ui.theme import DARK
from kvscope_app.ui.theming.stylesheet import stylesheet
from kvscope_app.ui.theming.theme_manager import ThemeManager
from kvscope_app.ui.widget_factories import label
from kvscope_app.ui.zoom import scaled, zoom_of
from kvscope_app.views.memory.stacked_bar import Swatch
from kvscope_app.views.page_map import legend_items
from kvscope_app.views.throughput.throughput_view import ThroughputView
from kvscope_app.window.status_bar import StateDot


@pytest.fixture(autouse=True)
def _reset_zoom(qapp, themes):
    yield
    themes.settings.change(zoom_percent=100)


def sizes(window):
    """Return sizes of texts and of what depends on them, by name."""
    view = window.views
    return {
        "label": driver.status_label(window, "model").font().pointSizeF(),
        "own font": window.welcome.title.font().pointSizeF(),
        "icon": window.findChild(QToolButton).iconSize().width(),
        "row": view["requests"].table.verticalHeader().defaultSectionSize(),
        "column": view["requests"].table.columnWidth(0),
        "event row": view["events"].table.verticalHeader().defaultSectionSize(),
        "axis": view["throughput"].charts.panels["decode"].plot.axes[0].width(),
        "tick": view["throughput"].charts.panels["decode"].plot.axes[0].style["tickFont"].pointSizeF(),
        "lane": next(height for _, _, height in view["timeline"].canvas.lane_layout.boxes()),
        "gutter": window.page_map.canvas.gutter,
    }


def test_window_sizes_double_at_200_percent_zoom_and_return_at_usual_size(
    engine, session, make_window, poll, settings, qtbot
):
    engine.write_blocks([1, 2])
    poll(session)
    window = make_window(session, with_views=("requests", "events", "throughput", "timeline"), size=(1500, 900))
    before = sizes(window)
    for _ in range(5):
        window.actions_by_name["larger"].trigger()
    assert read_settings(settings).zoom_percent == 200
    QApplication.processEvents()
    grown = sizes(window)
    ratios = {name: grown[name] / before[name] for name in before}
    assert {name: r for name, r in ratios.items() if not 1.6 < r < 2.4} == {}
    window.grab()
    window.actions_by_name["usual_size"].trigger()

    def others() -> dict[str, tuple[float, float]]:
        back = sizes(window)
        return {n: (before[n], back[n]) for n in before if abs(back[n] - before[n]) > 0.06 * before[n] + 1}

    qtbot.waitUntil(lambda: others() == {}, timeout=60_000)


def test_zoom_is_saved_and_bounded(qapp, settings, themes):
    for _ in range(30):
        themes.zoom(1)
    assert zoom_of(qapp) == 300
    assert scaled(10) == 30
    again = ThemeManager(qapp, settings)
    assert again.settings.values.zoom_percent == 300
    for _ in range(30):
        again.zoom(-1)
    assert zoom_of(qapp) == 50
    again.deleteLater()
    themes.settings.reload()


def test_zoom_shortcuts_change_the_zoom(session, make_window, qtbot, qapp):
    window = make_window(session)
    qtbot.waitUntil(window.isActiveWindow)
    canvas, control = window.page_map.canvas, Qt.KeyboardModifier.ControlModifier
    canvas.setFocus()
    for key, percent in ((Qt.Key.Key_Equal, 110), (Qt.Key.Key_Plus, 125), (Qt.Key.Key_Minus, 110), (Qt.Key.Key_0, 100)):
        qtbot.keyClick(canvas, key, control)
        assert zoom_of(qapp) == percent


def test_charts_move_to_one_column_at_a_large_zoom(engine, session, poll, themes, qtbot):
    engine.write_blocks([1])
    poll(session)
    view = ThroughputView(session)
    qtbot.addWidget(view)
    view.resize(700, 600)
    view.show()
    view.refresh()
    QApplication.processEvents()
    assert view.charts.num_columns == 2
    before = view.charts.panels["decode"].plot.minimumHeight()
    themes.settings.change(zoom_percent=200)
    assert view.charts.num_columns == 1
    assert view.charts.panels["decode"].plot.minimumHeight() == 2 * before


@pytest.mark.parametrize("percent", [50, 75, 90, 110, 125, 150, 175, 200, 300])
def test_slider_handle_is_round_at_every_zoom(percent):
    rule = next(
        line for line in stylesheet(DARK, percent).splitlines() if line.startswith("QSlider::handle:horizontal {")
    )
    side, radius = (int(re.search(rf"{name}: (\d+)px", rule)[1]) for name in ("width", "radius"))
    assert 0 < radius <= side / 2


def test_last_table_column_fills_the_width_at_every_zoom(qapp, themes, qtbot):
    table = QTableWidget(3, 3)
    table.horizontalHeader().setStretchLastSection(True)
    table.horizontalHeader().hide()  # as in the events table, which shows cards
    table.resize(600, 200)
    qtbot.addWidget(table)
    table.show()
    for percent in (175, 100):
        themes.settings.change(zoom_percent=percent)
        QApplication.processEvents()
        assert sum(table.columnWidth(column) for column in range(3)) == table.viewport().width()


def test_hidden_widgets_return_to_the_default_font_size(qapp, session, make_window, themes):
    window = make_window(session, with_views=True)
    themes.finish()
    usual = qapp.font().pointSizeF()
    parts = [part for part in window.findChildren(QWidget) if part.font().pointSizeF() == usual]
    for percent in (110, 125, 150, 125, 110, 100):
        themes.settings.change(zoom_percent=percent)
        themes.finish()
    assert {part.font().pointSizeF() for part in parts} == {usual}


@pytest.mark.parametrize("percent", [100, 175, 300])
def test_dialog_fits_its_text_but_is_not_larger_than_the_screen(qapp, themes, qtbot, percent):
    themes.settings.change(zoom_percent=percent)
    parent = QWidget()
    qtbot.addWidget(parent)
    dialog = Sheet("A sheet", parent)
    words = label("These are many words about what the fields below are good for. " * 3, "muted", wraps=True)
    dialog.column.addWidget(words)
    dialog.resize_comfortably(460, 120)
    dialog.show()
    QApplication.processEvents()
    screen = dialog.screen().availableGeometry()
    assert dialog.width() <= screen.width()
    assert dialog.height() <= screen.height()
    assert words.height() >= min(words.heightForWidth(words.width()), screen.height() // 2)


def lengths(window):
    """Return (description, width) of icons and fixed-size widgets, in creation order."""
    found = []
    for part in window.findChildren(QWidget):
        if isinstance(part, QAbstractButton) and not part.icon().isNull():
            found.append((described(part), part.iconSize().width()))
        if isinstance(part, StateDot | Swatch):
            found.append((described(part), part.width()))
    legend = window.page_map.legend
    return [*found, ("legend", legend.swatch_width(legend_items.LegendSwatch("#ffffff", "word")))]


def described(part):
    return f"{type(part.parentWidget()).__name__} > {type(part).__name__} {part.accessibleName()}"


@pytest.mark.storm({"there": (110, 125)})  # the beginning of the longer sequence
@pytest.mark.parametrize("there", [(110, 125), (110, 125, 150, 175, 200, 250, 300), (90, 75, 50)])
def test_widget_sizes_at_100_percent_zoom_are_equal_before_and_after_other_zooms(there, session, make_window, themes):
    window = make_window(session, with_views=True)
    themes.finish()
    before = lengths(window)
    for back in ((), reversed(there[:-1])):  # in one step, and step by step
        for percent in (*there, *back, 100):
            themes.settings.change(zoom_percent=percent)
            themes.finish()
        assert lengths(window) == before


def test_window_opened_at_a_saved_zoom_has_the_same_sizes_as_one_zoomed_while_open(session, make_window, themes):
    views = ("memory", "throughput", "devices", "prefixes", "inspector")
    window = make_window(session, with_views=views)
    themes.settings.change(zoom_percent=200)
    themes.finish()
    changed = lengths(window)
    window.close()
    restored = lengths(make_window(session, with_views=views))
    assert [(name, size) for name, size in restored if (name, size) not in changed] == []
    assert len(restored) == len(changed) > 30


@pytest.mark.parametrize("percent", [100, 300])
def test_window_fits_its_screen_at_every_zoom(percent, session, make_window, themes, qtbot):
    themes.settings.change(zoom_percent=percent)
    window = make_window(session, with_views=("throughput", "requests", "timeline"), size=(700, 600))
    room = window.screen().availableGeometry().size()  # 800 × 800
    asks_for_more = window.minimumSizeHint().boundedTo(room) != window.minimumSizeHint()
    assert asks_for_more is (percent == 300)
    qtbot.waitUntil(lambda: window.width() <= room.width() and window.height() <= room.height())


def test_default_layout_of_a_zoomed_window_puts_docks_behind_tabs(session, make_window, themes):
    themes.settings.change(zoom_percent=300)
    window = make_window(session, size=(1600, 1000))
    window.reset_layout()
    assert window.docks["requests"] in window.tabifiedDockWidgets(window.docks["throughput"])


def icon_sizes(window):
    """Return the icon sizes of tables, of a message box and of a file dialog."""
    question = QMessageBox(QMessageBox.Icon.Question, "Recordings", "With text?", parent=window)
    files = QFileDialog(window)
    files.setOption(QFileDialog.Option.DontUseNativeDialog)
    files.show()
    question.show()
    listed = QStyleOptionViewItem()
    files.findChild(QListView, "listView").initViewItemOption(listed)
    found = {
        "requests": window.views["requests"].table.iconSize().width(),
        "prefixes": window.views["prefixes"].table.iconSize().width(),
        "question": question.iconPixmap().deviceIndependentSize().width(),
        "files": listed.decorationSize.width(),
        "folder up": files.findChild(QToolButton, "toParentButton").iconSize().width(),
    }
    for dialog in (question, files):
        dialog.close()
        dialog.deleteLater()
    return found


def test_icons_of_tables_and_dialogs_follow_a_changed_and_a_restored_zoom(session, make_window, themes):
    views = ("requests", "prefixes")
    window = make_window(session, with_views=views)
    before = icon_sizes(window)
    themes.settings.change(zoom_percent=200)
    themes.finish()
    grown = {name: 2 * size for name, size in before.items()}
    assert icon_sizes(window) == grown
    window.close()
    assert icon_sizes(make_window(session, with_views=views)) == grown


@pytest.mark.parametrize("theme", ["dark", "light"])
def test_table_headings_are_not_truncated_at_the_largest_zoom(session, make_window, themes, theme):
    themes.choose(theme)
    themes.settings.change(zoom_percent=300)
    window = make_window(session, with_views=("requests", "prefixes"))
    for name in ("requests", "prefixes"):
        header = window.views[name].table.horizontalHeader()
        shown = [column for column in range(header.count()) if not header.isSectionHidden(column)]
        titles = {str(header.model().headerData(column, Qt.Orientation.Horizontal)): column for column in shown}
        padding = 2 * scaled(8)
        wide = {title: header.fontMetrics().horizontalAdvance(title) + padding for title in titles}
        assert [title for title, column in titles.items() if header.sectionSize(column) < wide[title]] == []
