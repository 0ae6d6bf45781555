"""Tests that commands do not print control characters from an engine or a file to the terminal."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from msgspec.structs import replace
from tests.inside.conftest import hello_of
from tests.telemetry.conftest import record
from tests.telemetry.exports.conftest import story

from kvscope_app.main import main
from kvscope_inside import CacheState, Publisher
from kvscope_telemetry.messages.commands import Abort, Control, Evict, Preempt
from kvscope_telemetry.messages.telemetry import DeviceInfo, Hello, ModelInfo, TelemetryMessage

ESCAPE = "\x1b]0;pwned\x07\x1b[2J\x9b2J\u202e\r"
__all__ = ["record"]


def with_hostile_names(hello: Hello, suffix: str = "") -> Hello:
    model = ModelInfo(name=f"model{ESCAPE}{suffix}")
    return replace(hello, model=model, device=DeviceInfo(kind="cpu", name=f"device{ESCAPE}\nfile  complete{suffix}"))


def hostile_story(suffix: str = "") -> list[TelemetryMessage]:
    hello, snapshot, *frames = story(f"id{ESCAPE}{suffix}")
    assert isinstance(hello, Hello)
    hello = with_hostile_names(hello, suffix)
    return [hello, replace(snapshot, hello=hello), *frames]  # type: ignore[call-arg]


def assert_harmless(text: str) -> None:
    controls = [letter for letter in text if letter not in "\n\t" and not letter.isprintable() and letter != "\u2009"]
    assert controls == []


@pytest.mark.parametrize(
    "words", ["info A", "info A --json", "info A --goodput ttft:1", "compare A B --table", "compare A B --json"]
)
def test_hostile_recording_prints_no_control_characters(
    record: Callable, capsys: pytest.CaptureFixture[str], words: str
) -> None:
    files = {name: str(record(hostile_story(name), f"{name}.mcap").path) for name in "AB"}
    assert main([files.get(word, word) for word in words.split()]) == 0
    out, err = capsys.readouterr()
    assert "pwned" in out + err or "goodput" in words
    assert_harmless(out + err)
    assert "\nfile  complete" not in out, "a name must not contain a line break"


class PausedByHostileName:
    paused_by = f"somebody{ESCAPE}"

    def record_activity(self, client: bytes) -> None:
        pass

    def submit(self, client: bytes, command: Abort | Control | Preempt | Evict, by: str, answer: object) -> None:
        pass


@pytest.mark.parametrize("words", ["record ENGINE --out FILE --seconds 1.2", "top ENGINE --once"])
def test_hostile_engine_prints_no_control_characters(
    words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    endpoint = f"ipc://{tmp_path}/e"
    names = {"ENGINE": endpoint, "FILE": str(tmp_path / "x.mcap")}
    state = CacheState(with_hostile_names(hello_of()))
    with Publisher(endpoint, state, actions=PausedByHostileName()):
        assert main([names.get(word, word) for word in words.split()]) == 0
    out, err = capsys.readouterr()
    assert "pwned" in out + err
    assert_harmless(out + err)


def test_error_message_prints_no_control_characters(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["info", f"/nowhere/{ESCAPE}.mcap"]) == 2
    assert_harmless(capsys.readouterr().err)
