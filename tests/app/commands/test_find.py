"""Tests of `kvscope find`: its table, JSON, address list and exit codes."""

from __future__ import annotations

import json

import pytest

from kvscope_app.main import main
from kvscope_telemetry.discovery import local_search
from kvscope_telemetry.discovery.found_engine import FoundEngine

ENGINES = (
    FoundEngine("ipc:///tmp/a/telemetry", "kvscope", "SmolLM2", "0.9"),
    FoundEngine("vllm://127.0.0.1:8000", "vLLM", note="needs an \x1b[31mAPI key"),
    FoundEngine("http://127.0.0.1:11434", "Ollama", "llama3:8b", note="cannot be watched", can_attach=False),
)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, list[int]]]:
    """Hosts and further ports of the searches, which find `ENGINES` on every host but "empty"."""
    searches: list[tuple[str, list[int]]] = []

    def find(host: str, ports: list[int]) -> tuple[FoundEngine, ...]:
        searches.append((host, ports))
        return () if host == "empty" else ENGINES

    monkeypatch.setattr(local_search, "find_engines", find)
    return searches


def test_found_engines_are_printed_as_a_table_without_control_characters(
    asked: list[tuple[str, list[int]]], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["find", "--port", "9000"]) == 0
    assert asked == [("", [9000])]
    titles, own, vllm, _ = capsys.readouterr().out.splitlines()
    assert titles.split() == ["ADDRESS", "ENGINE", "MODEL", "NOTE"]
    assert own.split() == ["ipc:///tmp/a/telemetry", "kvscope", "0.9", "SmolLM2"]
    assert vllm.split(maxsplit=3) == ["vllm://127.0.0.1:8000", "vLLM", "–", "needs an ?[31mAPI key"]


def test_found_engines_are_printed_as_json(
    asked: list[tuple[str, list[int]]], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["find", "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert [each["can_attach"] for each in printed] == [True, True, False]
    assert set(printed[0]) == {"address", "engine", "model", "version", "note", "can_attach"}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            "prometheus://h:9090 --port 9000",
            "--port is for the ports of a machine, and does not go with prometheus://h:9090",
        ),
        ("gpu-box --api-key-file key", "--api-key-file is for a PLACE such as prometheus://: no key is sent to ports"),
    ],
)
def test_option_that_would_be_ignored_is_refused(
    asked: list[tuple[str, list[int]]], capsys: pytest.CaptureFixture[str], words: str, message: str
) -> None:
    assert main(["find", *words.split()]) == 2
    assert capsys.readouterr().err.startswith(f"kvscope: {message}")
    assert asked == []


def test_addresses_for_the_fleet_are_those_that_can_be_attached(
    asked: list[tuple[str, list[int]]], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["find", "--addresses"]) == 0
    assert capsys.readouterr().out.splitlines() == ["ipc:///tmp/a/telemetry", "vllm://127.0.0.1:8000"]


def test_exit_code_is_1_and_the_ports_are_named_if_nothing_is_found(
    asked: list[tuple[str, list[int]]], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["find", "empty"]) == 1
    assert "No engine found on empty. Asked: ports 8000, 8001," in capsys.readouterr().out


@pytest.mark.parametrize("port", ["0", "65536", "x", "١"])
def test_invalid_port_is_refused(port: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["find", "--port", port]) == 2
    assert f"{port!r} is not accepted: a port from 1 to 65535" in capsys.readouterr().err
