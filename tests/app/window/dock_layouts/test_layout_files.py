"""Tests of layout files: writing, reading in windows of other sizes, errors, and undo."""

from __future__ import annotations

import json

import pytest
from PySide6.QtCore import Qt
from PySide6.QtWidgets import QTabBar

from kvscope_app.settings.layout_value import read_layout
from kvscope_app.views.page_map.color_modes import OWNER, STATE
from kvscope_app.window.dock_layouts.arrangement import KNOWN_NAMES, layout_of
from kvscope_telemetry.errors import BadInput

WITH = ("requests", "throughput", "memory", "events")
WAIT_MS = 20_000


@pytest.fixture
def window(session, make_window):
    made = make_window(session, with_views=WITH, size=(1600, 1000))
    made.reset_layout()  # with the default layout of the current width
    return made


@pytest.fixture
def write_layout_file(tmp_path):
    def write(**said):
        path = tmp_path / "written.json"
        path.write_text(json.dumps({"kvscope_layout": 1} | said))
        return path

    return write


def arrange_docks(window):
    """Arrange the docks differently from the default layout."""
    docks = window.docks
    docks["console"].close()
    window.addDockWidget(Qt.DockWidgetArea.LeftDockWidgetArea, docks["memory"])
    window.splitDockWidget(docks["memory"], docks["events"], Qt.Orientation.Vertical)
    window.tabifyDockWidget(docks["events"], docks["timeline"])
    docks["timeline"].raise_()
    window.resizeDocks([docks["memory"]], [500], Qt.Orientation.Horizontal)
    window.resizeDocks([docks["memory"], docks["events"]], [300, 500], Qt.Orientation.Vertical)


def size_shares(window):
    docks = window.docks
    return (
        docks["memory"].width() / window.width(),
        docks["memory"].height() / window.height(),
        docks["throughput"].width() / window.width(),
        window.page_map.height() / window.height(),
    )


def open_docks(window):
    return {name for name, dock in window.docks.items() if not dock.isHidden()}


def test_layout_file_restores_docks_sizes_and_color_mode(window, tmp_path, qtbot):
    arrange_docks(window)
    window.page_map.set_mode(OWNER)
    qtbot.waitUntil(lambda: abs(window.docks["memory"].width() - 500) < 10, timeout=WAIT_MS)
    before, open_before, rects = layout_of(window), open_docks(window), size_shares(window)
    path = tmp_path / "mine.json"
    window.layouts.write(str(path))
    window.actions_by_name["reset_layout"].trigger()
    window.page_map.set_mode(STATE)
    assert open_docks(window) != open_before
    window.layouts.read(str(path))
    assert window.banner.accessibleName().strip() == ""
    qtbot.waitUntil(lambda: size_shares(window) == pytest.approx(rects, abs=0.02), timeout=WAIT_MS)
    assert open_docks(window) == open_before
    assert window.page_map.mode is OWNER
    after = layout_of(window)
    assert [leaf.tabs for leaf in after.left.leaves()] == [("memory",), ("events", "timeline")]
    assert [list(leaf.tabs) for part in after.areas.values() for leaf in part.leaves()] == [
        list(leaf.tabs) for part in before.areas.values() for leaf in part.leaves()
    ]
    assert list(after.left.leaves())[1].front == "timeline"


def test_tab_bar_left_over_by_qt_does_not_change_the_saved_layout(window, qtbot):
    arrange_docks(window)
    qtbot.waitUntil(lambda: abs(window.docks["memory"].width() - 500) < 10, timeout=WAIT_MS)
    left_over = QTabBar(window)  # Qt keeps one for a while, with the tab that was current before `raise_`
    for title in ("Events", "Timeline"):
        left_over.addTab(title)
    left_over.show()
    left_over.lower()
    left = layout_of(window).left
    assert [(leaf.tabs, leaf.front) for leaf in left.leaves()] == [
        (("memory",), ""),
        (("events", "timeline"), "timeline"),
    ]
    assert left.share == pytest.approx(500 / 1600, abs=0.01)


def test_layout_file_scales_sizes_to_the_window(window, session, make_window, tmp_path, qtbot):
    arrange_docks(window)
    qtbot.waitUntil(lambda: abs(window.docks["memory"].width() - 500) < 10, timeout=WAIT_MS)
    path = tmp_path / "mine.json"
    window.layouts.write(str(path))
    other = make_window(session, with_views=WITH, size=(1300, 820))
    other.layouts.read(str(path))
    qtbot.waitUntil(lambda: size_shares(other) == pytest.approx(size_shares(window), abs=0.06), timeout=WAIT_MS)
    assert (other.width(), other.height()) == (1300, 820)
    assert open_docks(other) == open_docks(window)


def test_layout_file_restores_floating_docks(window, tmp_path, qtbot):
    window.docks["events"].setFloating(True)
    path = tmp_path / "mine.json"
    window.layouts.write(str(path))
    window.actions_by_name["reset_layout"].trigger()
    assert not window.docks["events"].isFloating()
    window.layouts.read(str(path))
    assert window.banner.accessibleName().strip() == ""
    assert window.docks["events"].isFloating()
    assert window.docks["events"].isVisible()


def test_opening_a_layout_file_can_be_undone(window, write_layout_file, qtbot):
    was, mode = open_docks(window), window.page_map.mode
    path = write_layout_file(right={"share": 0.3, "tabs": ["memory"]}, choices={"color_mode": "owner"})
    window.layouts.read(str(path))
    assert window.banner.accessibleName().strip() == ""
    assert open_docks(window) == {"memory"}
    assert window.page_map.mode is OWNER
    qtbot.waitUntil(lambda: window.undo.undoText() == "opening the layout written.json")
    window.undo.undo()
    assert open_docks(window) == was
    assert window.page_map.mode is mode
    window.undo.redo()
    assert open_docks(window) == {"memory"}


def test_dock_closed_by_a_layout_file_can_be_opened_again(window, write_layout_file):
    window.layouts.read(str(write_layout_file(left={"share": 0.3, "tabs": ["memory"]})))
    window.actions_by_name["toggle_requests"].trigger()
    assert window.docks["requests"].isVisible()
    assert window.dockWidgetArea(window.docks["requests"]) == Qt.DockWidgetArea.BottomDockWidgetArea


REFUSED = (
    ({"kvscope_layout": 2}, "version 2"),
    ({"left": {"tabs": ["nosuch"]}}, "'nosuch'"),
    ({"left": {"tabs": ["memory", "memory"]}}, "twice"),
    ({"left": {"share": 0.2}}, "tabs, across and down"),
    ({"left": {"tabs": ["memory"], "front": "events"}}, "'events'"),
    ({"left": {"tabs": ["memory"], "share": 7}}, "left.share"),
    ({"lefft": {"tabs": ["memory"]}}, "lefft"),
    ({"choices": {"color_mode": "pink"}}, "pink"),
)


def test_invalid_layout_file_is_refused_in_one_line_and_changes_nothing(window, write_layout_file):
    was = window.saveState()
    for said, words in REFUSED:
        window.layouts.read(str(write_layout_file(**said)))
        message = window.banner.accessibleName()
        assert "The layout cannot be opened" in message
        assert words in message
        assert "\n" not in message
        assert window.saveState() == was, said


@pytest.mark.parametrize(
    "data", [b"", b"{", b"[1]", b'{"left": {}}', b'{"kvscope_layout": "x"}', b"\xff" * 40, b"[" * 9999]
)
def test_file_that_is_no_layout_is_refused(tmp_path, data):
    path = tmp_path / "x.json"
    path.write_bytes(data)
    with pytest.raises(BadInput, match="is not a layout of kvscope"):
        read_layout(path, KNOWN_NAMES)
    with pytest.raises(BadInput, match="No such file"):
        read_layout(tmp_path / "none.json", KNOWN_NAMES)


def test_failure_to_write_a_layout_file_is_reported(window, tmp_path):
    window.layouts.write(str(tmp_path / "nowhere" / "x.json"))
    assert "could not be saved" in window.banner.accessibleName()
    assert list(tmp_path.glob("**/*.part")) == []
