"""Tests of settings: saving, invalid values, and concurrent writers."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from PySide6.QtCore import QSettings

from kvscope_app.settings.layout_value import LayoutPart, WindowLayout
from kvscope_app.settings.settings import Settings
from kvscope_app.settings.settings_store import SettingsFile, SettingsStore
from kvscope_telemetry.alarms.rules import DEFAULT_RULES, Rule


@pytest.fixture
def settings_file(tmp_path):
    return SettingsFile(tmp_path / "settings.json")


def test_changed_settings_are_restored_at_the_next_start(settings):
    store = SettingsStore(settings)
    store.change(
        theme="light",
        zoom_percent=125,
        layouts={"two maps": WindowLayout(left=LayoutPart(share=0.3, tabs=("memory",)))},
    )
    again = SettingsStore(settings).values
    assert (again.theme, again.zoom_percent, again.layouts["two maps"].left.tabs) == ("light", 125, ("memory",))


def test_missing_settings_file_is_read_as_defaults(settings_file):
    assert settings_file.read() == Settings()
    assert not settings_file.exists


@pytest.mark.parametrize(
    "data", [b"", b"{", b"[1]", b'"x"', b"\xff\xfe", b'{"theme": "light", "theme"', b"null", b"{}" + b" " * (5 << 20)]
)
def test_damaged_settings_file_is_read_as_defaults(settings_file, data):
    settings_file.path.write_bytes(data)
    assert settings_file.read() == Settings()
    settings_file.change(lambda _: {"theme": "dark"})
    assert settings_file.read() == Settings(theme="dark")


def test_invalid_value_is_replaced_by_its_default_only(settings_file):
    layout = {"left": {"share": 0.3, "tabs": ["memory"]}}
    said = {
        "theme": "solarized",
        "zoom_percent": 1e9,
        "timeline_minutes": 7,
        "flashes": "yes",
        "shortcuts": {"play": ["P"], "back": 5, "quit": []},
        "layouts": {"good": layout, "bad": {"left": 1}, "newer": {**layout, "screens": 2}},
        "of_a_later_version": {"any": [1, None]},
    }
    settings_file.path.write_text(json.dumps(said))
    found = settings_file.read()
    assert (found.theme, found.zoom_percent, found.timeline_minutes, found.flashes) == ("auto", 100, 7, True)
    assert found.shortcuts == {"play": ("P",), "quit": ()}
    assert set(found.layouts) == {"good"}
    settings_file.change(lambda _: {"flashes": False})
    kept = json.loads(settings_file.path.read_text())
    assert kept == {**said, "flashes": False}, "values that are not understood stay in the file until they are changed"


def test_invalid_value_is_not_written(settings_file):
    with pytest.raises(ValueError, match="300"):
        settings_file.change(lambda _: {"zoom_percent": 301})
    assert not settings_file.exists


def test_changes_of_two_settings_keepers_are_merged(settings, tmp_path):
    first = SettingsStore(settings)
    second = SettingsStore(QSettings(settings.fileName(), QSettings.Format.IniFormat))
    first.change(theme="light")
    second.change(zoom_percent=150)
    second.change_by(lambda now: {"shortcuts": {**now.shortcuts, "play": ("P",)}})
    first.change_by(lambda now: {"shortcuts": {**now.shortcuts, "back": ("B",)}})
    received = []
    second.changed.connect(received.append)
    second.reload()
    second.reload()
    assert len(received) == 1
    assert first.values == second.values
    assert first.values.shortcuts == {"play": ("P",), "back": ("B",)}
    assert (first.values.theme, first.values.zoom_percent) == ("light", 150)


def test_concurrent_processes_do_not_lose_changes(settings_file):
    code = (
        "import sys; from pathlib import Path; from kvscope_app.settings.settings_store import SettingsFile\n"
        "file = SettingsFile(Path(sys.argv[1]))\n"
        "for i in range(20):\n"
        "    name = f'{sys.argv[2]}{i}'\n"
        "    file.change(lambda now: {'shortcuts': {**now.shortcuts, name: ('X',)}})\n"
    )
    running = [subprocess.Popen([sys.executable, "-c", code, str(settings_file.path), letter]) for letter in "abc"]
    assert [process.wait(240) for process in running] == [0, 0, 0]
    assert len(settings_file.read().shortcuts) == 60


def test_failure_to_save_keeps_the_changed_value_in_memory(settings, monkeypatch):
    store = SettingsStore(settings)
    reasons = []
    store.write_failed.connect(reasons.append)

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(SettingsFile, "_write", full)
    store.change(theme="light")
    assert store.values.theme == "light"
    assert reasons == ["No space left on device"]


def test_alarm_rules_are_saved_and_restored(settings):
    mine = (Rule(name="Slow", expression="ttft_p99_ms > 500", seconds=10.0, is_on=False),)
    assert SettingsStore(settings).values.alarm_rules == DEFAULT_RULES
    SettingsStore(settings).change(alarm_rules=mine, alarm_webhook="https://host/x")
    kept = SettingsStore(settings).values
    assert (kept.alarm_rules, kept.alarm_webhook) == (mine, "https://host/x")


def test_unreadable_alarm_rules_are_replaced_by_defaults(settings_file):
    settings_file.path.write_text('{"alarm_rules": [{"name": 3}], "theme": "light"}')
    assert (settings_file.read().alarm_rules, settings_file.read().theme) == (DEFAULT_RULES, "light")
