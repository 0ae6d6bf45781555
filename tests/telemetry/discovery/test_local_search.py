"""Tests of the search for engines: over real sockets, with servers that answer like each engine."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
from tests.processes import needs_unix
from tests.simulated_engine.server import SimulatedServer
from tests.telemetry.collectors.conftest import FakeServer, server
from tests.telemetry.collectors.pages import VllmPage

from kvscope_telemetry import operating_system
from kvscope_telemetry.collectors import external_engines
from kvscope_telemetry.collectors.vllm import VLLM
from kvscope_telemetry.credentials.key_ring import KeyRing
from kvscope_telemetry.discovery import local_search, own_engines, server_probe
from kvscope_telemetry.discovery.found_engine import FoundEngine
from kvscope_telemetry.discovery.local_search import find_engines
from kvscope_telemetry.discovery.own_engines import own_endpoints, probe_endpoint
from kvscope_telemetry.discovery.probed_ports import probed_ports
from kvscope_telemetry.discovery.server_probe import probe_server
from kvscope_telemetry.errors import BadInput

__all__ = ["server"]
MODELS = "/v1/models"


def models(owner: str, name: str = "org/m") -> bytes:
    return json.dumps({"object": "list", "data": [{"id": name, "owned_by": owner}]}).encode()


def probe(server: FakeServer) -> FoundEngine | None:
    return probe_server("127.0.0.1", server.port)


def test_default_ports_of_all_engines_are_asked_and_no_others() -> None:
    assert probed_ports() == (8000, 8001, 30000, 30001, 8080, 8081, 11434)


@pytest.mark.parametrize(
    ("owner", "scheme", "name"),
    [("vllm", "vllm", "vLLM"), ("sglang", "sglang", "SGLang"), ("llamacpp", "llama", "llama.cpp")],
)
def test_engine_is_recognized_by_the_owner_of_its_models(
    server: FakeServer, owner: str, scheme: str, name: str
) -> None:
    server.set_answer(MODELS, models(owner))
    assert probe(server) == FoundEngine(f"{scheme}://127.0.0.1:{server.port}", name, "org/m")
    assert server.asked == [(MODELS, "")]


def test_api_of_kvscopes_own_engine_is_listed_as_not_attachable(server: FakeServer) -> None:
    server.set_answer(MODELS, models("kvscope"))
    found = probe(server)
    assert found is not None
    assert (found.engine, found.can_attach) == ("kvscope", False)


def test_ollama_is_listed_with_its_loaded_models_as_not_attachable(
    server: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_probe, "OLLAMA_PORT", server.port)
    server.set_answer("/api/ps", b'{"models": [{"name": "llama3:8b"}, {"name": "qwen3:4b"}]}')
    found = probe(server)
    assert found is not None
    assert (found.engine, found.model, found.can_attach) == ("Ollama", "llama3:8b, qwen3:4b", False)
    assert [path for path, _ in server.asked] == ["/api/ps"]


def test_server_that_wants_a_key_is_recognized_by_its_metrics_and_gets_no_key(
    server: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVSCOPE_API_KEY", "secret")
    server.set_answer(MODELS, b'{"error": "Unauthorized"}', status=401)
    server.set_answer("/metrics", VllmPage().text())
    assert probe(server) == FoundEngine(f"vllm://127.0.0.1:{server.port}", "vLLM", note="needs an API key")
    assert server.asked == [(MODELS, ""), ("/metrics", "")]


def test_server_that_wants_a_key_for_its_metrics_too_is_assumed_to_be_the_engine_of_its_port(
    server: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.set_answer(MODELS, b"", status=401)
    server.set_answer("/metrics", b"", status=401)
    assert probe(server) is None
    monkeypatch.setattr(external_engines, "ENGINES", (replace(VLLM, port=server.port),))
    found = probe(server)
    assert found is not None
    assert found.note == "needs an API key; assumed to be vLLM, because of its port"


@pytest.mark.parametrize("body", [b"<html>", b"[]", b'{"data": [1]}', models("other"), models(""), b"[" * 9999])
def test_other_servers_are_not_listed(server: FakeServer, body: bytes) -> None:
    server.set_answer(MODELS, body)
    assert probe(server) is None


@pytest.fixture
def silent_port() -> Iterator[int]:
    """Port of a program that accepts connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener.getsockname()[1]


def test_program_that_does_not_answer_is_given_up(silent_port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_probe, "TIMEOUT_S", 0.05)
    assert probe_server("127.0.0.1", silent_port) is None


def test_answer_that_arrives_byte_by_byte_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_probe, "TIMEOUT_S", 0.1)
    end = threading.Event()

    def trickle(listener: socket.socket) -> None:
        client, _ = listener.accept()
        with client, suppress(OSError):
            client.sendall(b"HTTP/1.0 200 OK\r\n\r\n[")
            while not end.wait(0.01):
                client.sendall(b" ")

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=trickle, args=[listener])
        thread.start()
        assert probe_server("127.0.0.1", listener.getsockname()[1]) is None
        end.set()
        thread.join()


def test_search_ends_although_a_probe_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    end = threading.Event()
    monkeypatch.setattr(local_search, "SEARCH_S", 0.05)
    monkeypatch.setattr(local_search, "probed_ports", lambda: (1,))
    monkeypatch.setattr(local_search, "probe_server", lambda host, port: end.wait(60) and None)
    assert find_engines("gpu-box") == ()
    end.set()


@pytest.mark.parametrize("host", ["a b", "http://a", "a:8000", "::1", "[::1"])
def test_host_with_anything_else_is_refused_by_name(host: str) -> None:
    with pytest.raises(BadInput, match="is not accepted: a name or an address"):
        find_engines(host)


@needs_unix
def test_engine_with_sockets_on_this_machine_is_found_with_its_model(
    serve: Callable[..., SimulatedServer],
    make_endpoint: Callable[..., str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(local_search, "probed_ports", lambda: ())
    monkeypatch.setattr(own_engines, "TIMEOUT_S", 60.0)
    monkeypatch.setattr(own_engines, "MAX_SOCKETS", 10_000)
    monkeypatch.setattr(local_search, "SEARCH_S", 60.0)
    endpoint = make_endpoint()
    served = serve(endpoint, rate=1.0)
    assert endpoint in own_endpoints()
    (found,) = find_engines(sockets=lambda: [endpoint])
    assert (found.address, found.engine, found.can_attach) == (endpoint, "kvscope", True)
    assert found.model == served.engine.hello.model.name


@needs_unix
def test_socket_is_found_by_its_folder_where_the_system_does_not_list_sockets(
    serve: Callable[..., SimulatedServer],
    make_endpoint: Callable[..., str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(operating_system, "_UNIX_SOCKETS", Path("/nowhere"))
    monkeypatch.setattr(own_engines, "MAX_SOCKETS", 10_000)
    endpoint = make_endpoint()
    serve(endpoint, rate=1.0)
    assert endpoint in own_endpoints()


@needs_unix
def test_socket_without_a_listening_program_is_left_out(make_endpoint: Callable[..., str]) -> None:
    endpoint = make_endpoint()
    with socket.socket(socket.AF_UNIX) as left_over:
        left_over.bind(endpoint.removeprefix("ipc://"))
    assert endpoint not in own_endpoints()


def test_engine_that_needs_a_key_is_listed_without_sending_one(
    serve: Callable[..., SimulatedServer],
    make_endpoint: Callable[..., str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(own_engines, "TIMEOUT_S", 60.0)
    endpoint = make_endpoint("tcp")
    serve(endpoint, rate=1.0, keys=KeyRing(tmp_path / "keys"))
    found = probe_endpoint(endpoint)
    assert found is not None
    assert (found.address, found.engine, found.model) == (endpoint, "kvscope", "")
    assert "key" in found.note
