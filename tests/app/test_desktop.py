"""Tests of the desktop: its own simulated engine over real sockets, several windows, recordings, and settings."""

from __future__ import annotations

import os
import shlex
import signal
import sys

import pytest
from PySide6.QtCore import QSettings
from PySide6.QtGui import QGuiApplication
from tests.app.conftest import FakeSource
from tests.app.window_driver import has_no_running_timer, load_only_views, visible_text
from tests.processes import needs_unix
from tests.simulated_engine.command import COMMAND

from kvscope_app import desktop as desktop_module
from kvscope_app.command_line import Options, parse
from kvscope_app.desktop import Desktop, run_desktop
from kvscope_app.engine_launcher.engine_process import EngineProcess
from kvscope_app.recording import crashed_histories
from kvscope_telemetry.addresses import Address
from kvscope_telemetry.recordings.reader import Recording
from kvscope_telemetry.recordings.sample import sample_recording
from kvscope_telemetry.source import SourceState

SIMULATED = [*COMMAND, "--endpoint", "{endpoint}", "--blocks", "600"]


@pytest.fixture
def desktop(qapp, tmp_path):
    made = Desktop(qapp, Options(theme="dark"), QSettings(str(tmp_path / "s.ini"), QSettings.Format.IniFormat))
    yield made
    for window in list(made.windows):
        window.close()
        window.deleteLater()
    made.close()
    made.deleteLater()


@pytest.fixture
def own_engine():
    process = EngineProcess(command=SIMULATED)
    process.start()
    yield process
    process.close()
    assert not process.folder.exists()


@needs_unix
def test_killed_engine_is_reported_and_its_restart_is_followed(desktop, own_engine, qtbot):
    window = desktop.open_window(own_engine.endpoint, own_engine)
    load_only_views(window)
    session = window.session
    qtbot.waitUntil(lambda: session.mirror.num_active > 0, timeout=120_000)
    epoch, num_blocks = session.mirror.epoch, session.mirror.num_blocks
    os.kill(own_engine.pid, signal.SIGKILL)
    qtbot.waitUntil(lambda: "killed by SIGKILL" in window.banner.text, timeout=120_000)
    assert session.mirror.num_blocks == num_blocks == 600
    window.notices.restart()
    assert "Restarting" in window.banner.text
    qtbot.waitUntil(lambda: session.mirror.epoch != epoch, timeout=120_000)
    qtbot.waitUntil(lambda: session.status.state is SourceState.LIVE, timeout=120_000)
    assert window.banner.text == ""


def test_engine_that_fails_to_start_is_reported_with_its_message(desktop, qtbot):
    command = [sys.executable, "-c", "import sys; sys.exit('kvscope-engine: no such model: /nowhere')"]
    process = EngineProcess(command=command)
    process.start()
    try:
        window = desktop.open_window(process.endpoint, process)
        load_only_views(window)
        qtbot.waitUntil(lambda: "no such model: /nowhere" in window.banner.accessibleName(), timeout=120_000)
        assert "no such model" in visible_text(window.welcome)
        window.notices.show_log()
    finally:
        process.close()


def test_each_attached_engine_has_its_own_window(desktop, own_engine, qtbot):
    for _ in range(2):
        window = desktop.open_window(own_engine.endpoint)
        load_only_views(window)
    sessions = list(desktop.sessions)
    qtbot.waitUntil(lambda: all(s.mirror.num_blocks == 600 for s in sessions), timeout=120_000)
    first = desktop.windows[0]
    first.close()
    assert len(desktop.windows) == 1
    qtbot.waitUntil(lambda: desktop.sessions[0].status.frames_received > 0, timeout=120_000)


def test_each_open_window_restores_its_own_geometry(desktop, own_engine):
    def open_one():
        window = desktop.open_window(own_engine.endpoint)
        load_only_views(window)
        return window

    first, second = open_one(), open_one()
    assert (first.slot, second.slot) == (1, 2)
    assert first.pos() != second.pos()
    first.setGeometry(5, 60, 785, 600)
    second.setGeometry(10, 90, 780, 500)
    wanted = [window.geometry() for window in (first, second)]
    second.close()
    first.close()
    again = [open_one(), open_one()]
    assert [window.geometry() for window in again] == wanted


def test_windows_do_not_cover_each_other_exactly(desktop, own_engine):
    places = set()
    for _ in range(3):
        window = desktop.open_window(own_engine.endpoint)
        load_only_views(window)
        places.add((window.pos().x(), window.pos().y()))
    assert len(places) == 3


def test_key_option_applies_to_every_attached_engine(qapp, tmp_path, monkeypatch):
    opened = []
    monkeypatch.setattr(desktop_module, "make_application", lambda: qapp)
    monkeypatch.setattr(desktop_module, "probe_startup", lambda app, window: None)
    monkeypatch.setattr(Address, "open", lambda self, **_: opened.append(self) or FakeSource())
    monkeypatch.setattr(Desktop, "watch", lambda self, source, supervisor: self.windows.append(source))
    monkeypatch.setattr(qapp, "exec", lambda: 0)
    key = tmp_path / "mine.key"
    addresses = tuple(Address(f"tcp://10.0.0.{number}:5600", key) for number in (1, 2))
    organization = qapp.organizationName()
    qapp.setOrganizationName("kvscope")  # without an organization name, QSettings writes no file
    try:
        assert run_desktop(Options(theme="dark", attach=addresses), None) == 0
    finally:
        qapp.setOrganizationName(organization)
    assert opened == list(addresses)


def test_closed_desktop_does_not_look_for_history_of_crashed_sessions(desktop, monkeypatch):
    offer = desktop.offer_crashed_histories()
    desktop.close()
    evaluated = []
    monkeypatch.setattr(crashed_histories, "find_orphaned_rings", lambda: evaluated.append(1))
    offer.start()
    assert not evaluated
    assert has_no_running_timer(offer)


def test_recording_opens_paused_at_the_time_of_its_link(desktop, qtbot):
    recording = Recording.open(sample_recording())
    window = desktop.open_recording(recording, 12.5)
    load_only_views(window)
    session = window.session
    moment_ns = recording.start_ns + 12_500_000_000
    qtbot.waitUntil(lambda: session.mirror.num_active > 0, timeout=120_000)
    assert not session.timeline.is_playing
    assert session.timeline.cursor_ns == pytest.approx(moment_ns, abs=1_000_000)
    window.actions_by_name["copy_moment"].trigger()
    link = QGuiApplication.clipboard().text()
    assert link.startswith("kvscope --open sample --at 12.")
    assert parse(shlex.split(link)[1:]).at_s == pytest.approx(12.5, abs=0.002)


def test_link_to_a_time_contains_the_selection(desktop, qtbot):
    first = desktop.open_recording(Recording.open(sample_recording()), 12.5)
    load_only_views(first)
    qtbot.waitUntil(lambda: first.session.mirror.num_active > 0, timeout=120_000)
    number = int(first.session.mirror.requests.number[0])
    first.session.selection.select_request(number)
    first.session.selection.select_block(3)
    first.actions_by_name["copy_moment"].trigger()
    options = parse(shlex.split(QGuiApplication.clipboard().text())[1:])
    again = desktop.open_recording(Recording.open(sample_recording()), options.at_s, options.selects)
    load_only_views(again)
    qtbot.waitUntil(lambda: again.session.selection.request == number, timeout=120_000)
    assert again.session.selection.block == 3
    assert again.session.timeline.cursor_ns == pytest.approx(first.session.timeline.cursor_ns, abs=2_000_000)


def test_selection_of_a_missing_request_is_reported(desktop, qtbot):
    selects = (("request", 99_999), ("block", 5))
    window = desktop.open_recording(Recording.open(sample_recording()), 12.5, selects)
    load_only_views(window)
    qtbot.waitUntil(lambda: window.session.selection.block == 5, timeout=120_000)
    assert window.session.selection.request is None
    assert "no request 99999" in window.banner.accessibleName()


def test_window_uses_default_layout_after_a_start_that_failed(desktop, tmp_path):
    recording = Recording.open(sample_recording())
    window = desktop.open_recording(recording)
    load_only_views(window)
    window.docks["throughput"].hide()
    window.close()
    saved = QSettings(str(tmp_path / "s.ini"), QSettings.Format.IniFormat)
    saved.sync()
    state = saved.value("playback/state")
    (tmp_path / "open-windows" / "playback-1").write_bytes(b"opening\n")  # left behind by a crashed process
    again = desktop.open_recording(Recording.open(sample_recording()))
    load_only_views(again)
    assert not again.docks["throughput"].isHidden()
    assert again.banner.text == "The window uses the default layout"
    copy = tmp_path / "s.ini.before-1"
    assert str(copy) in visible_text(again.banner)
    assert QSettings(str(copy), QSettings.Format.IniFormat).value("playback/state") == state


def test_marker_of_a_failed_start_is_cleared_once_the_window_is_open(desktop, tmp_path, qtbot):
    window = desktop.open_recording(Recording.open(sample_recording()))
    load_only_views(window, ["inspector"])
    place = tmp_path / "open-windows" / "playback-1"
    assert place.read_bytes()
    qtbot.waitUntil(lambda: not place.read_bytes())


def test_opened_recording_is_listed_as_recent_but_the_sample_is_not(desktop, tmp_path):
    copy = tmp_path / "copy.mcap"
    copy.write_bytes(sample_recording().read_bytes())
    for path in (sample_recording(), copy):
        load_only_views(desktop.open_recording(Recording.open(path)))
    assert desktop.themes.settings.values.recent_recordings == (str(copy),)


def test_settings_that_cannot_be_written_are_reported_once(qapp, tmp_path, capsys):
    (tmp_path / "file").write_text("")
    settings = QSettings(str(tmp_path / "file" / "s.ini"), QSettings.Format.IniFormat)
    made = Desktop(qapp, Options(theme="dark"), settings)
    window = made.open_recording(Recording.open(sample_recording()))
    load_only_views(window)
    made.themes.choose("light")
    made.themes.choose("dark")
    assert window.banner.text == "Settings cannot be saved"
    window.close()
    made.close()
    made.deleteLater()
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"kvscope: settings cannot be saved in {tmp_path / 'file'}: ")
