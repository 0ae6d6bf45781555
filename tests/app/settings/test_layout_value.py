"""Tests of layout files."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.processes import make_named_pipe

from kvscope_app.settings.layout_value import LayoutPart, WindowLayout, read_layout, write_layout
from kvscope_app.window.dock_layouts.arrangement import KNOWN_NAMES
from kvscope_telemetry.errors import BadInput


def test_layout_replaces_a_file_but_not_a_named_pipe(tmp_path: Path) -> None:
    path, pipe, layout = tmp_path / "x.json", tmp_path / "pipe", WindowLayout(left=LayoutPart(tabs=("events",)))
    make_named_pipe(pipe)
    write_layout(path, WindowLayout())
    write_layout(path, layout)
    assert read_layout(path, KNOWN_NAMES) == layout
    with pytest.raises(BadInput, match="it is a named pipe, not a file"):
        write_layout(pipe, layout)
    assert pipe.is_fifo()
