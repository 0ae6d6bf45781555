"""Whether a window can be opened is known before Qt is asked."""

from __future__ import annotations

import pytest

from kvscope_app.window import display_server
from kvscope_app.window.display_server import missing_library, require_display, require_qt, require_sound_qt
from kvscope_telemetry.errors import KvscopeError


def test_no_display_is_one_line_with_a_way_out():
    with pytest.raises(KvscopeError, match="xvfb-run") as raised:
        require_display({})
    assert "\n" not in str(raised.value)
    assert raised.value.exit_code == 1


def test_an_x_server_that_does_not_answer_is_told():
    with pytest.raises(KvscopeError, match=":4711"):
        require_display({"DISPLAY": ":4711"})


def test_xcb_asked_for_without_display():
    with pytest.raises(KvscopeError, match="no display"):
        require_display({"QT_QPA_PLATFORM": "xcb", "WAYLAND_DISPLAY": "wayland-0"})


@pytest.mark.parametrize("environment", [{"QT_QPA_PLATFORM": "offscreen"}, {"WAYLAND_DISPLAY": "wayland-0"}])
def test_other_platforms_are_trusted(environment, monkeypatch):
    asked = []
    monkeypatch.setattr(display_server, "require_x_server", asked.append)
    require_display(environment)
    assert asked == []
    require_display({"DISPLAY": ":0"})
    assert asked == [":0"]


def test_a_missing_library_is_named_with_its_package():
    message = missing_library("libEGL.so.1: cannot open shared object file: No such file or directory")
    assert "apt-get install libegl1" in message
    assert "libfoo.so.3" in missing_library("libfoo.so.3: cannot open shared object file: No such file")
    assert "cannot be loaded" in missing_library("something else")


def test_qt_here_is_usable():
    assert require_qt() is None, "nothing was raised"
    assert require_sound_qt() is None


def test_the_pyside_that_corrupts_memory_is_refused(monkeypatch):
    import PySide6

    monkeypatch.setattr(PySide6, "__version_info__", (6, 12, 0, "", ""))
    monkeypatch.setattr("sys.version_info", (3, 11, 7, "final", 0))
    with pytest.raises(KvscopeError, match=r"6\.11,<6\.12"):
        require_sound_qt()
