"""A user without HOME and without a passwd entry, as in containers."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kvscope_telemetry import home_folder
from kvscope_telemetry.errors import BadInput
from kvscope_telemetry.home_folder import ensure_home


@pytest.fixture
def fallback(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder that becomes the home of a user without an entry."""

    pwd = pytest.importorskip("pwd")

    def unknown(uid: int) -> object:
        raise KeyError(f"getpwuid(): uid not found: {uid}")

    folder = tmp_path / "home"
    monkeypatch.setenv("HOME", "")
    monkeypatch.delenv("HOME")
    monkeypatch.setattr(pwd, "getpwuid", unknown)
    monkeypatch.setattr(home_folder, "shared_folder", lambda: folder)
    return folder


def test_user_without_a_home_gets_a_private_one(fallback: Path) -> None:
    ensure_home()
    assert Path.home() == fallback
    assert fallback.stat().st_mode & 0o777 == 0o700


def test_home_that_others_can_read_is_refused(fallback: Path) -> None:
    fallback.mkdir(mode=0o755)
    with pytest.raises(BadInput, match="others can read it"):
        ensure_home()


def test_home_folder_set_in_the_environment_is_not_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/nowhere")
    ensure_home()
    assert os.environ["HOME"] == "/nowhere"
