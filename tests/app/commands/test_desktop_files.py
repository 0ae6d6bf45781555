"""Tests of `kvscope install-desktop-files`: the installed files follow the freedesktop specifications."""

from __future__ import annotations

import configparser
import os
import re
import shutil
import subprocess
import sys
import xml.etree.ElementTree
from pathlib import Path

import pytest

from kvscope_app.commands import desktop_files
from kvscope_app.main import main
from kvscope_telemetry.recordings.sample import sample_recording

_ASK_QT = (
    "import sys; from PySide6.QtCore import QMimeDatabase; print(QMimeDatabase().mimeTypeForFile(sys.argv[1]).name())"
)
TYPE = "application/x-kvscope-recording"


@pytest.fixture
def data_folder(tmp_path, monkeypatch):
    """XDG data directory of this test."""
    made = tmp_path / "share"
    monkeypatch.setenv("XDG_DATA_HOME", str(made))
    return made


def entry(path):
    parser = configparser.ConfigParser(interpolation=None, delimiters=("=",))
    parser.optionxform = str
    parser.read(path, encoding="utf-8")
    return parser["Desktop Entry"]


def files(data_folder):
    return sorted(str(path.relative_to(data_folder)) for path in data_folder.rglob("*") if path.is_file())


def test_menu_entry_icon_and_mime_type_are_installed_and_removed(data_folder, capsys):
    assert main(["install-desktop-files"]) == 0
    assert f"installed in {data_folder}" in capsys.readouterr().out
    assert {
        "applications/kvscope.desktop",
        "applications/kvscope-open.desktop",
        "mime/packages/kvscope-recording.xml",
        "icons/hicolor/scalable/apps/kvscope.svg",
        "icons/hicolor/scalable/mimetypes/application-x-kvscope-recording.svg",
    } <= set(files(data_folder))
    assert main(["install-desktop-files"]) == 0
    assert main(["install-desktop-files", "--remove"]) == 0
    assert not [name for name in files(data_folder) if "kvscope" in name]


@pytest.mark.parametrize("path", ["/opt/my tools/kvscope", '/opt/q"uo$te`s\\/100%/kvscope', "/usr/bin/kvscope"])
def test_desktop_entry_quotes_the_path_of_the_program(data_folder, monkeypatch, path):
    monkeypatch.setattr(desktop_files, "program_path", lambda: path)
    assert main(["install-desktop-files"]) == 0
    found = entry(data_folder / "applications/kvscope-open.desktop")
    line = found["Exec"].replace("\\\\", "\\").replace("%%", "%")
    quoted, rest = re.fullmatch(r'"((?:[^"\\]|\\.)*)" (.*)', line).groups()
    assert (re.sub(r"\\(.)", r"\1", quoted), rest) == (path, "--open %f")
    assert found["MimeType"] == f"{TYPE};"
    assert "%" not in entry(data_folder / "applications/kvscope.desktop")["Exec"].replace("%%", "")


def test_mime_type_matches_recordings_by_content_not_by_file_name(data_folder):
    main(["install-desktop-files"])
    root = xml.etree.ElementTree.parse(data_folder / "mime/packages/kvscope-recording.xml").getroot()
    space = {"m": "http://www.freedesktop.org/standards/shared-mime-info"}
    assert root.find("m:mime-type", space).get("type") == TYPE
    assert root.find(".//m:glob", space) is None
    data = sample_recording().read_bytes()[:64]
    for match in root.iterfind(".//m:match", space):
        value = match.get("value").encode().decode("unicode_escape").encode("latin-1")
        assert data[int(match.get("offset")) :].startswith(value)


@pytest.mark.skipif(shutil.which("update-mime-database") is None, reason="shared-mime-info is not installed")
def test_qt_distinguishes_recordings_from_other_mcap_files(data_folder, tmp_path):
    main(["install-desktop-files"])
    ours, other = tmp_path / "a.mcap", tmp_path / "robot.mcap"
    ours.write_bytes(sample_recording().read_bytes()[:200])
    other.write_bytes(sample_recording().read_bytes()[:200].replace(b"kvscope", b"ros2\0\0\0"))
    types = [
        subprocess.run([sys.executable, "-c", _ASK_QT, str(path)], capture_output=True, text=True, check=True).stdout
        for path in (ours, other)
    ]
    assert [name.strip() == TYPE for name in types] == [True, False]


@pytest.mark.skipif(shutil.which("desktop-file-validate") is None, reason="desktop-file-utils is not installed")
def test_desktop_entries_pass_desktop_file_validate(data_folder):
    main(["install-desktop-files"])
    for path in data_folder.glob("applications/*.desktop"):
        done = subprocess.run(["desktop-file-validate", str(path)], capture_output=True, text=True)
        assert (done.returncode, done.stdout) == (0, "")


@pytest.mark.skipif(
    shutil.which("gio") is None or shutil.which("update-mime-database") is None,
    reason="glib's tools or shared-mime-info are not installed",
)
def test_gio_recognizes_a_recording(data_folder):
    """Uses `gio`, because `xdg-mime` without a desktop asks `file`, which ignores the user's MIME types."""
    main(["install-desktop-files"])
    words = ["gio", "info", "-a", "standard::content-type", str(sample_recording())]
    done = subprocess.run(words, capture_output=True, text=True, check=True, env=os.environ)
    assert f"standard::content-type: {TYPE}" in done.stdout


def test_unwritable_data_folder_is_reported_in_one_line(data_folder, capsys):
    data_folder.write_text("a file where the folder should be")
    assert main(["install-desktop-files"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "cannot be written" in line


def test_program_path_is_found_next_to_the_interpreter(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["pytest"])
    assert Path(desktop_files.program_path()).name == "kvscope"
