"""Tests of views in narrow docks, and of the devices dock."""

from __future__ import annotations

import pytest
from msgspec.structs import replace
from PySide6.QtWidgets import QScrollArea

from kvscope_app.views.console.load_view import LoadView
from kvscope_app.views.memory.memory_view import MemoryView
from kvscope_telemetry.messages.capabilities import OWN_ENGINE

NARROW = 277


@pytest.mark.parametrize("kind", [LoadView, MemoryView])
def test_view_content_fits_a_narrow_dock(session, themes, qtbot, kind):
    view = kind(session)
    qtbot.addWidget(view)
    view.apply_theme(themes.theme)
    view.resize(NARROW, 600)
    view.show()
    view.refresh()
    area = view.findChild(QScrollArea)
    assert area.widget().minimumSizeHint().width() <= NARROW
    assert area.horizontalScrollBar().maximum() == 0
    view.close()


@pytest.mark.parametrize("blocks", [True, False])
def test_devices_dock_is_shown_if_the_engine_reports_no_blocks(make_engine, make_session, make_window, blocks):
    window = make_window(make_session(make_engine(capabilities=replace(OWN_ENGINE, blocks=blocks))))
    assert window.docks["devices"].isHidden() == blocks
