"""Tests of the checks for a display and a working Qt before Qt is started."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys

import pytest

from kvscope_app.window.display_server import missing_library, require_display, require_qt, require_sound_qt
from kvscope_telemetry.errors import KvscopeError


def test_missing_display_is_reported_in_one_line_with_a_workaround():
    with pytest.raises(KvscopeError, match="xvfb-run") as raised:
        require_display({})
    assert "\n" not in str(raised.value)
    assert raised.value.exit_code == 1


def test_unreachable_x_server_is_named():
    with pytest.raises(KvscopeError, match=":4711"):
        require_display({"DISPLAY": ":4711"})


def test_xcb_platform_without_display_is_refused():
    with pytest.raises(KvscopeError, match="no display"):
        require_display({"QT_QPA_PLATFORM": "xcb", "WAYLAND_DISPLAY": "wayland-0"})


@pytest.mark.parametrize("platform", ["offscreen", "wayland-egl", "vnc:size=640x480", "minimal;xcb"])
def test_platforms_without_a_display_are_accepted(platform):
    assert require_display({"QT_QPA_PLATFORM": platform}) is None, "nothing was raised"


def test_unknown_platform_is_refused_with_the_installed_ones():
    with pytest.raises(
        KvscopeError, match=r"QT_QPA_PLATFORM='foo' is not accepted: must be one of .*offscreen.*xcb"
    ) as raised:
        require_display({"QT_QPA_PLATFORM": "foo", "DISPLAY": ":4711"})
    assert "\n" not in str(raised.value)
    require_display({"QT_QPA_PLATFORM": "foo", "QT_PLUGIN_PATH": "/elsewhere"})


def test_dead_wayland_compositor_is_named(tmp_path):
    environment = {"WAYLAND_DISPLAY": "wayland-77", "XDG_RUNTIME_DIR": str(tmp_path)}
    with pytest.raises(KvscopeError, match="WAYLAND_DISPLAY='wayland-77' does not answer"):
        require_display(environment)
    with socket.socket(socket.AF_UNIX) as compositor:
        compositor.bind(str(tmp_path / "wayland-77"))
        compositor.listen()
        require_display(environment)
        require_display(environment | {"DISPLAY": ":4711"})


@pytest.mark.skipif(shutil.which("Xvfb") is None, reason="Xvfb, an X server without a screen, is not installed")
def test_x_server_with_8_bits_per_pixel_is_refused(tmp_path):
    read_end, write_end = os.pipe()
    command = ["Xvfb", "-displayfd", str(write_end), "-screen", "0", "320x200x8", "-nolisten", "tcp"]
    with (
        open(read_end) as numbers,
        subprocess.Popen(command, pass_fds=[write_end], stderr=subprocess.DEVNULL) as server,
    ):
        os.close(write_end)
        try:
            display = f":{numbers.readline().strip()}"
            with pytest.raises(KvscopeError, match="has 8 bits per pixel; 15 or more are needed"):
                require_display({"DISPLAY": display})
        finally:
            server.terminate()


def test_missing_library_is_named_with_its_package():
    message = missing_library("libEGL.so.1: cannot open shared object file: No such file or directory")
    assert "apt-get install libegl1" in message
    assert "libfoo.so.3" in missing_library("libfoo.so.3: cannot open shared object file: No such file")
    assert "cannot be loaded" in missing_library("something else")


def test_missing_pyside_is_reported_with_the_extra_that_contains_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "PySide6", None)
    with pytest.raises(KvscopeError, match=r"PySide6, which is not installed: pip install 'kvscope\[app\]'"):
        require_qt()


def test_installed_qt_is_accepted():
    assert require_qt() is None, "nothing was raised"
    assert require_sound_qt() is None


def test_pyside_version_that_corrupts_memory_is_refused(monkeypatch):
    import PySide6

    monkeypatch.setattr(PySide6, "__version_info__", (6, 12, 0, "", ""))
    monkeypatch.setattr("sys.version_info", (3, 11, 7, "final", 0))
    with pytest.raises(KvscopeError, match=r"6\.11,<6\.12"):
        require_sound_qt()
