"""Fixture: a visible throughput view."""

from __future__ import annotations

import pytest

from kvscope_app.ui.theme import THEMES
from kvscope_app.views.throughput.throughput_view import ThroughputView


@pytest.fixture
def view(session, qtbot):
    view = ThroughputView(session)
    qtbot.addWidget(view)
    view.resize(700, 500)
    view.apply_theme(THEMES["dark"])
    view.show()
    return view
