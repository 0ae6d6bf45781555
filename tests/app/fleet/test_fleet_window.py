"""Tests of the fleet window with scripted rows: sorting, search, keyboard, adding engines and reading lists."""

from __future__ import annotations

import threading

import pytest
from PySide6.QtCore import QSettings, Qt
from PySide6.QtWidgets import QApplication, QLabel, QPushButton
from tests.app import window_driver as driver

from kvscope_app.fleet.fleet_columns import COLUMNS, ENGINE, HIT_RATE, MAP, NAME, RUNNING, STATE, USAGE
from kvscope_app.fleet.fleet_manager import WatchedList
from kvscope_app.fleet.fleet_window import NOTHING_FOUND, NOTHING_LISTED, FleetWindow, list_text
from kvscope_app.fleet.map_picture import SIZE, cells, map_pixmap
from kvscope_app.ui.number_text import NOTHING
from kvscope_app.ui.theme import DARK
from kvscope_app.ui.theming.theme_manager import ThemeManager
from kvscope_app.window.dialogs.attach_dialog import AttachDialog
from kvscope_telemetry.addresses import Address
from kvscope_telemetry.errors import BadInput
from kvscope_telemetry.fleet.fleet_list import FleetEntry
from kvscope_telemetry.fleet.fleet_row import FleetRow
from kvscope_telemetry.fleet.list_reader import ListReading
from kvscope_telemetry.fleet.pool_bins import PoolBins
from kvscope_telemetry.source import SourceState
from kvscope_telemetry.transport.connections import read_connections


class FakeFleet:
    failure = ""

    def __init__(self):
        self.rows = ()
        self.watched = ()

    def watch(self, entries):
        self.watched = tuple(entries)


class FakeReader:
    name = "list.txt"

    def __init__(self):
        self.listed = ListReading()
        self.num_asked = 0

    def read_now(self):
        self.num_asked += 1


def fleet_row(name, state=SourceState.LIVE, **figures):
    return FleetRow(FleetEntry(Address(f"tcp://10.0.0.1:77{len(name)}{ord(name[0])}"), name), state, **figures)


ROWS = (
    fleet_row("b", usage=0.5, num_running=3, num_waiting=0, first_token_s=0.2, engine="kvscope", version="1.0"),
    fleet_row("a", SourceState.CONNECTING),
    fleet_row("c", usage=0.9, num_running=12, num_waiting=4, hit_rate=0.25, preemptions_per_s=1.5, engine="vllm"),
    fleet_row("d", SourceState.REFUSED, reason="the key is not known"),
)


@pytest.fixture
def opened_addresses():
    return []


@pytest.fixture
def make_fleet(qtbot, tmp_path):
    """Return a function that creates a fleet window with four engines; `attach` is called to open an engine."""
    settings = QSettings(str(tmp_path / "s.ini"), QSettings.Format.IniFormat)
    themes = ThemeManager(QApplication.instance(), settings, "dark")
    windows = []

    def make(attach):
        fleet = FakeFleet()
        made = FleetWindow(fleet, themes, attach, FakeReader(), WatchedList(fleet.watch).add)
        qtbot.addWidget(made)
        made.show()
        show_rows(made, ROWS)
        windows.append(made)
        return made

    yield make
    for each in windows:
        each.close()
    themes.deleteLater()


@pytest.fixture
def window(make_fleet, opened_addresses):
    return make_fleet(opened_addresses.append)


def show_rows(window, rows):
    window.fleet.rows = rows
    window._last_sort_s = 0.0
    window.refresh()


def shown_texts(window, column=NAME):
    proxy = window.table.proxy
    return [proxy.index(place, column).data() for place in range(proxy.rowCount())]


def test_fleet_window_fits_the_screen(window):
    assert (
        window.screen().availableGeometry().size().expandedTo(window.size())
        == window.screen().availableGeometry().size()
    )


def test_unknown_values_are_dashes_and_sorted_last_in_both_orders(window):
    assert shown_texts(window, USAGE) == [NOTHING, "50 %", "90 %", NOTHING]
    for column, up in ((USAGE, ["b", "c"]), (RUNNING, ["b", "c"]), (HIT_RATE, ["c"])):
        window.table.sortByColumn(column, Qt.SortOrder.AscendingOrder)
        assert shown_texts(window)[: len(up)] == up
        window.table.sortByColumn(column, Qt.SortOrder.DescendingOrder)
        assert shown_texts(window)[: len(up)] == up[::-1]


def test_every_fleet_table_column_has_a_title_and_text_in_every_row(window):
    for column in range(len(COLUMNS)):
        assert COLUMNS[column].title
        if column != MAP:
            assert all(shown_texts(window, column))
    assert shown_texts(window, STATE)[3] == "Access denied: the key is not known"
    assert shown_texts(window, ENGINE) == [NOTHING, "kvscope", "vLLM", NOTHING]


def test_table_can_be_sorted_by_keyboard(window, qtbot):
    window.order.column.setFocus()
    qtbot.keyClicks(window.order.column, "KV")
    window.order.column.activated.emit(window.order.column.currentIndex())
    assert shown_texts(window)[:2] == ["b", "c"]
    window.order.direction.click()
    assert shown_texts(window)[:2] == ["c", "b"]
    assert window.table.horizontalHeader().sortIndicatorOrder() is Qt.SortOrder.DescendingOrder


def test_rows_are_reordered_by_new_values_and_selection_stays(window):
    window.table.sortByColumn(RUNNING, Qt.SortOrder.DescendingOrder)
    window.table.selectRow(1)
    assert [chosen.name for chosen in window.table.selected] == ["b"]
    more = (fleet_row("b", num_running=100), *ROWS[1:])
    show_rows(window, more)
    assert shown_texts(window)[:2] == ["b", "c"]
    assert [chosen.name for chosen in window.table.selected] == ["b"]
    show_rows(window, more[::-1])  # the list in another order
    assert [chosen.name for chosen in window.table.selected] == ["b"]


def test_search_filters_rows_and_escape_clears_it(window, qtbot):
    qtbot.keyClicks(window.search, "denied")
    assert shown_texts(window) == ["d"]
    assert "1 shown" in window.counts.text()
    window.search.setText("nowhere")
    assert shown_texts(window) == []
    assert NOTHING_FOUND in driver.visible_texts(window)
    qtbot.keyClick(window.search, Qt.Key.Key_Escape)
    assert len(shown_texts(window)) == 4
    assert window.counts.text() == "2 of 4 engines online · 15 running, 4 waiting"


def test_enter_double_click_and_button_open_the_selected_engine(window, opened_addresses, qtbot):
    window.table.selectRow(1)
    qtbot.keyClick(window.table, Qt.Key.Key_Return)
    window.table.doubleClicked.emit(window.table.proxy.index(1, 0))
    window.open_button.click()
    assert opened_addresses == [ROWS[0].entry.address] * 3


def test_failure_to_open_an_engine_is_shown_in_the_status_label(make_fleet):
    def refuse(_address):
        raise BadInput("no such key")

    window = make_fleet(refuse)
    window.table.selectRow(0)
    window.open_selected()
    assert "no such key" in window.status_label.text()


def test_fleet_window_shows_whether_its_engine_list_is_being_read_failed_or_is_empty(window):
    assert "Reading list.txt" in window.status_label.text()
    window.list_reader.listed = ListReading(trouble="'ls' failed (exit code 1)", is_old=True, read_ns=1, num_tries=2)
    window.refresh()
    assert "'ls' failed" in window.status_label.text()
    window.reload_button.click()
    assert window.list_reader.num_asked == 1
    show_rows(window, ())
    assert NOTHING_LISTED in driver.visible_texts(window)


def test_fleet_list_text_shows_the_age_of_the_list_and_the_read_error():
    second = 1_000_000_000
    assert list_text("x", ListReading(read_ns=1, num_tries=1), 5 * second) == "List: x, read 4 s ago"
    assert list_text("x", ListReading(trouble="gone", num_tries=1), 0) == "The list could not be read: gone"
    old = ListReading(trouble="gone", is_old=True, read_ns=1, num_tries=3)
    assert list_text("x", old, 120 * second) == "The list is 1:59 min old: gone"


def test_small_maps_have_the_colors_of_block_states(qapp):
    bins = PoolBins(active=bytes([255, 0, 0] * 300), cached=bytes([0, 255, 0] * 300))
    drawn = cells(bins, DARK)
    colors = [0xFF000000 | int(name[1:], 16) for name in (DARK.block_active, DARK.block_cached, DARK.block_free)]
    assert drawn.flat[:3].tolist() == colors
    assert (drawn.flat[900:] == 0).all()
    assert map_pixmap(bins, DARK, 2.0).deviceIndependentSize().toTuple() == SIZE
    for number in (1, 2, 5, 63, 1024):
        assert cells(PoolBins(bytes(number), bytes(number)), DARK).size >= number


def test_fleet_threads_end_when_the_window_closes(qtbot, tmp_path):
    from kvscope_app.command_line import FleetOptions, Options
    from kvscope_app.desktop import Desktop
    from kvscope_telemetry.fleet.list_texts import CommandText

    settings = QSettings(str(tmp_path / "s.ini"), QSettings.Format.IniFormat)
    desktop = Desktop(QApplication.instance(), Options(theme="dark"), settings)
    options = FleetOptions(CommandText(f"echo ipc://{tmp_path}/nobody/telemetry one"), 60.0)
    window = desktop.fleets.open_list(options.text, options.every_s)
    qtbot.waitUntil(lambda: shown_texts(window) == ["one"], timeout=120_000)
    window.close()
    desktop.close()
    names = [thread.name for thread in threading.enumerate()]
    assert not [name for name in names if name.startswith("kvscope-fleet")]
    desktop.deleteLater()


def test_engines_listed_in_a_file_are_watched_and_one_can_be_opened(qtbot, tmp_path, monkeypatch):
    """Uses real sockets; `open_window` is replaced."""
    from tests.simulated_engine.engine import SimulatedEngine
    from tests.simulated_engine.server import SimulatedServer

    from kvscope_app.command_line import Options, parse
    from kvscope_app.desktop import Desktop
    from kvscope_app.main import COMMANDS

    where = [f"ipc://{tmp_path}/{number}/telemetry" for number in range(3)]
    (tmp_path / "list").write_text("".join(f"{at} engine {number}\n" for number, at in enumerate(where)))
    options = parse(["fleet", "--file", str(tmp_path / "list"), "--every", "60"], COMMANDS)().fleet
    engines = [SimulatedEngine(num_blocks=200, num_running=4, epoch=number + 1) for number in range(3)]
    servers = [SimulatedServer(engine, at, rate=10.0) for engine, at in zip(engines, where, strict=True)]
    settings = QSettings(str(tmp_path / "s.ini"), QSettings.Format.IniFormat)
    desktop = Desktop(QApplication.instance(), Options(theme="dark"), settings)
    opened_addresses = []
    monkeypatch.setattr(desktop, "open_window", opened_addresses.append)
    try:
        window = desktop.fleets.open_list(options.text, options.every_s, options.api_key)
        qtbot.waitUntil(lambda: shown_texts(window, STATE) == ["Live"] * 3, timeout=120_000)
        assert shown_texts(window) == ["engine 0", "engine 1", "engine 2"]
        assert window.table.fleet.data(window.table.fleet.index(0, MAP), Qt.ItemDataRole.DecorationRole)
        window.table.selectRow(2)
        qtbot.keyClick(window.table, Qt.Key.Key_Return)
        assert [address.text for address in opened_addresses] == [where[2]]
    finally:
        desktop.close()
        for server in servers:
            server.close()
        desktop.deleteLater()


def test_invalid_fleet_arguments_are_refused(tmp_path):
    from kvscope_app.command_line import parse
    from kvscope_app.main import COMMANDS

    (tmp_path / "page").write_text("<html>\n")
    for arguments, word in (
        (["--file", str(tmp_path / "none")], "--file: .*No such file"),
        (["--file", str(tmp_path / "page")], "--file: there is no address in it"),
        (["--command", "'"], "No closing quotation"),
        (["--command", "ls", "--every", "0"], "seconds, more than 0"),
        ([], "one of the arguments ADDRESS --file --command is required"),
    ):
        with pytest.raises(BadInput, match=word):
            parse(["fleet", *arguments], COMMANDS)()


def open_attach_sheet(window):
    """Press *Add engine…* and return the dialog."""
    window.add_button.click()
    return window.findChildren(AttachDialog)[-1]


def press_button(dialog, text):
    next(button for button in dialog.findChildren(QPushButton) if button.text() == text).click()


def test_added_engine_is_validated_watched_and_saved(window, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    dialog = open_attach_sheet(window)
    dialog.fields.address_line.setText("no such thing")
    press_button(dialog, "Add")
    assert dialog.isVisible(), "the dialog stays open and shows the error"
    assert window.fleet.watched == ()
    dialog.fields.address_line.setText("ipc:///run/kvscope/telemetry")
    dialog.fields.name.setText("ours")
    press_button(dialog, "Add")
    assert [(entry.address.text, entry.name) for entry in window.fleet.watched] == [
        ("ipc:///run/kvscope/telemetry", "ours")
    ]
    assert [(kept.endpoint, kept.label) for kept in read_connections()] == [("ipc:///run/kvscope/telemetry", "ours")]
    again = open_attach_sheet(window)
    again.fields.address_line.setText("ipc:///run/kvscope/telemetry")
    press_button(again, "Add")
    assert any("is already on the list" in each.text() for each in again.findChildren(QLabel))
    again.close()


def test_added_engine_is_still_watched_after_the_list_is_reread():
    fleet = FakeFleet()
    watched = WatchedList(fleet.watch)
    one, two = FleetEntry(Address("tcp://10.0.0.1:1"), "one"), FleetEntry(Address("tcp://10.0.0.2:1"), "two")
    watched.show_list((one,))
    watched.add(two)
    assert fleet.watched == (one, two)
    watched.show_list(())
    assert fleet.watched == (two,)
    watched.show_list((two, one))
    assert fleet.watched == (two, one), "an added engine that is also listed is watched once"
