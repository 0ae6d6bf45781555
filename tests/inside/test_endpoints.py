"""The endpoint and the recording of an engine that is watched from inside."""

from __future__ import annotations

import socket
import sys
from pathlib import Path

import pytest

from kvscope_inside.endpoints import API, api_of, endpoint_of_rank, file_of_rank, free_file, hook_api_server


@pytest.mark.parametrize(
    ("endpoint", "rank", "expected"),
    [
        ("ipc:///tmp/v", 0, "ipc:///tmp/v"),
        ("ipc:///tmp/v", 2, "ipc:///tmp/v-2"),
        ("tcp://0.0.0.0:7000", 0, "tcp://0.0.0.0:7000"),
        ("tcp://0.0.0.0:7000", 3, "tcp://0.0.0.0:7006"),
    ],
)
def test_each_rank_publishes_on_its_own_endpoint(endpoint: str, rank: int, expected: str) -> None:
    assert endpoint_of_rank(endpoint, rank) == expected


def test_existing_recording_is_never_overwritten(tmp_path: Path) -> None:
    wanted = tmp_path / "run.mcap"
    assert free_file(wanted) == wanted
    (tmp_path / "run.mcap.part").touch()  # its process was killed
    assert free_file(wanted) == tmp_path / "run.2.mcap"
    (tmp_path / "run.2.mcap").touch()
    assert free_file(wanted) == tmp_path / "run.3.mcap"
    assert file_of_rank(wanted, 1) == tmp_path / "run-1.mcap"


@pytest.fixture
def no_api(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(API, "")  # restores the original value afterwards
    monkeypatch.delenv(API)


@pytest.mark.usefixtures("no_api")
def test_server_port_is_reported_as_api(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as listening, socket.socket() as bound, socket.socket(type=socket.SOCK_DGRAM) as other:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        other.bind(("127.0.0.1", 0))
        hook_api_server()
        assert api_of("vllm") == "", "one that listens may be anybody's"
        bound.bind(("0.0.0.0", 0))
        port = bound.getsockname()[1]
        monkeypatch.setattr(sys, "argv", ["vllm", "serve", "--ssl-keyfile=k"])
        hook_api_server()
    assert api_of("vllm") == f"vllm://0.0.0.0:{port}/?tls=1"
    assert api_of("vllm", 3) == f"vllm://0.0.0.0:{port}/?tls=1&rank=3"


@pytest.mark.usefixtures("no_api")
def test_no_api_address_is_announced_if_the_server_listens_on_two_ports() -> None:
    with socket.socket() as one, socket.socket() as other:
        one.bind(("127.0.0.1", 0))
        other.bind(("127.0.0.1", 0))
        hook_api_server()
    assert api_of("vllm") == ""


def test_api_address_set_in_the_environment_takes_precedence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(API, "http://gateway:80/")
    hook_api_server()
    assert api_of("sglang", engine_address="http://127.0.0.1:30000") == "sglang://gateway:80"
    monkeypatch.setenv(API, "")
    assert api_of("sglang", engine_address="http://[::1]:30000") == "sglang://[::1]:30000"
