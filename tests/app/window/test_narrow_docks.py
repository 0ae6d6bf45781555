"""What stands in a narrow dock is whole, with the looks of the window; devices come up where there is nothing else."""

from __future__ import annotations

import pytest
from msgspec.structs import replace
from PySide6.QtWidgets import QScrollArea

from kvscope_app.views.console.load_view import LoadView
from kvscope_app.views.memory.memory_view import MemoryView
from kvscope_telemetry.messages.capabilities import OWN_ENGINE

NARROW = 277


@pytest.mark.parametrize("kind", [LoadView, MemoryView])
def test_nothing_is_wider_than_a_narrow_dock(session, themes, qtbot, kind):
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
def test_devices_come_up_where_nothing_else_is_told(make_engine, make_session, make_window, blocks):
    window = make_window(make_session(make_engine(capabilities=replace(OWN_ENGINE, blocks=blocks))))
    assert window.docks["devices"].isHidden() == blocks
