"""The API for an engine on TCP with keys: with the operator's key, and with insufficient ones."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.engine.http.served import Served, wait_for

from kvscope_engine.cli.main import main
from kvscope_engine.http.http_child import HttpChild, local_endpoint
from kvscope_telemetry.credentials.key_ring import LOCAL_KEY, KeyRing
from kvscope_telemetry.messages.roles import Role
from kvscope_telemetry.transport.connections import NO_KEY

COMPLETIONS = "/v1/completions"


@pytest.fixture(autouse=True)
def _own_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))


@pytest.fixture
def ring(tmp_path: Path) -> KeyRing:
    return KeyRing(tmp_path / "keys")


def test_api_process_with_the_operator_key_serves(
    serving: Callable[..., Served], ring: KeyRing, tmp_path: Path
) -> None:
    operator = tmp_path / "keys" / LOCAL_KEY
    served = serving(keys=ring, key=operator)
    served.wait_ready()
    child = HttpChild("127.0.0.1:0", api_key="secret", options=[], report=pytest.fail)
    with child.running(local_endpoint(served.service.telemetry_endpoint), operator):
        request = urllib.request.Request(f"{child.url}{COMPLETIONS}", json.dumps({"prompt": "x"}).encode())
        request.add_header("Content-Type", "application/json")
        request.add_header("Authorization", "Bearer secret")

        def text() -> str:
            try:
                with urllib.request.urlopen(request, timeout=60) as answer:
                    return str(json.load(answer)["choices"][0]["text"])
            except OSError:  # still starting, or not connected to the engine yet
                return ""

        wait_for(text, "an answer")
    assert served.ask(COMPLETIONS, {"prompt": "x", "max_tokens": 2})[0] == 200


def test_api_with_a_viewer_key_refuses_prompts(serving: Callable[..., Served], ring: KeyRing, tmp_path: Path) -> None:
    ring.new("guest", Role.VIEWER, tmp_path / "guest.key")
    served = serving(keys=ring, key=tmp_path / "guest.key")
    served.wait_ready()
    assert served.ask("/v1/models")[0] == 200
    status, answer = served.ask(COMPLETIONS, {"prompt": "x"})
    assert status == 503
    assert "key may not submit" in answer["error"]["message"]


def test_refused_key_is_reported_by_health(serving: Callable[..., Served], ring: KeyRing, tmp_path: Path) -> None:
    ring.new("gone", Role.OPERATOR, tmp_path / "gone.key")
    ring.remove("gone")
    served = serving(keys=ring, key=tmp_path / "gone.key")
    wait_for(lambda: served.api.engine_client.refusal, "a refusal")
    status, answer = served.ask("/health")
    assert status == 503
    assert answer["error"]["message"] == served.api.engine_client.refusal


@pytest.mark.parametrize("key", ["none", "missing.key"])
def test_missing_key_beyond_loopback_is_refused(key: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = NO_KEY if key == "none" else tmp_path / key
    assert main(["http", "tcp://192.0.2.1:7710", "--listen", "127.0.0.1:0", "--key", str(path)]) == 2
    assert "key" in capsys.readouterr().err
