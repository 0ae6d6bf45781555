"""Endpoints as users write them."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvscope_telemetry.errors import BadInput
from kvscope_telemetry.operating_system import shared_folder
from kvscope_telemetry.transport.bind_address import (
    IpcAddress,
    TcpAddress,
    folder_for_sockets,
    parse_bind_address,
    runtime_folder,
)


@pytest.mark.parametrize("endpoint", ["ipc:///run/kv", "ipc:///run/kv/", "ipc:///run/kv/telemetry"])
def test_ipc_directory_with_or_without_socket_name_is_the_same(endpoint: str) -> None:
    address = parse_bind_address(endpoint)
    assert address == IpcAddress(Path("/run/kv"))
    assert isinstance(address, IpcAddress)
    assert (address.telemetry, address.command) == ("ipc:///run/kv/telemetry", "ipc:///run/kv/command")


@pytest.mark.parametrize(
    ("endpoint", "is_loopback"),
    [
        ("tcp://127.0.0.1:5000", True),
        ("tcp://127.9.9.9:5000", True),
        ("tcp://localhost:5000", True),
        ("tcp://[::1]:5000", True),
        ("tcp://0.0.0.0:5000", False),
        ("tcp://*:5000", False),
        ("tcp://eth0:5000", False),
        ("tcp://127.0.0.1.example.org:5000", False),
    ],
)
def test_loopback_is_recognized_by_its_address(endpoint: str, is_loopback: bool) -> None:
    address = parse_bind_address(endpoint)
    assert isinstance(address, TcpAddress)
    assert address.is_loopback is is_loopback


@pytest.mark.parametrize(
    "endpoint",
    [
        "",
        "/run/kv",
        "ipc://relative/path",
        "ipc://",
        "http://localhost:80",
        "tcp://localhost",
        "tcp://:5000",
        "tcp://localhost:-1",
        "tcp://localhost:65535",
        "tcp://localhost:99999",
        "tcp://localhost:5x",
        "tcp://localhost:٣",
        "ipc:///a\0b",
        "ipc:///",
        "ipc:////",
        "ipc:///telemetry",
        "ipc:///run/../kv",
    ],
)
def test_invalid_endpoint_is_refused_by_name(endpoint: str) -> None:
    with pytest.raises(BadInput) as caught:
        parse_bind_address(endpoint)
    assert repr(endpoint) in str(caught.value)


def test_socket_path_that_is_too_long_is_refused_with_its_length() -> None:
    longest = "ipc:///" + "d" * (107 - len("//telemetry"))
    parse_bind_address(longest)
    with pytest.raises(BadInput, match="108 bytes, at most 107"):
        parse_bind_address(longest + "d")


@pytest.fixture
def temporary(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The temporary folder, with a path short enough for sockets."""
    with tempfile.TemporaryDirectory(prefix="kv", dir="/tmp") as name:
        monkeypatch.setattr(tempfile, "tempdir", name)
        yield Path(name)


def test_runtime_folder_is_preferred_for_sockets(temporary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = temporary / "run"
    runtime.mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(runtime))
    assert folder_for_sockets("kvscope-") == runtime
    assert runtime_folder() == runtime / "kvscope"


@pytest.mark.parametrize("what", ["", "relative", "file", "missing", "x" * 100])
def test_unsuitable_runtime_folder_is_skipped(temporary: Path, monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    (temporary / "file").touch()
    (temporary / ("x" * 100)).mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", what if what in ("", "relative") else str(temporary / what))
    assert folder_for_sockets("kvscope-") == temporary
    assert runtime_folder() == shared_folder()


def test_long_temporary_folder_is_skipped(temporary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    long = temporary / ("x" * 100)
    long.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    assert folder_for_sockets("kvscope-") == Path("/tmp")
