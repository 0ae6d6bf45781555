"""Endpoints: which are accepted, where the command socket is, and when keys are required."""

from __future__ import annotations

import pytest

from kvscope_telemetry.errors import BadInput
from kvscope_telemetry.transport.endpoints import Endpoints, endpoints, is_ipv6, is_loopback, require_curve


@pytest.mark.parametrize("endpoint", ["ipc:///run/kv", "ipc:///run/kv/telemetry", "ipc:///run/kv/"])
def test_command_socket_is_next_to_the_telemetry_socket(endpoint: str) -> None:
    assert endpoints(endpoint) == Endpoints("ipc:///run/kv/telemetry", "ipc:///run/kv/command")


def test_command_socket_is_on_the_next_port() -> None:
    assert endpoints("tcp://box:5600") == Endpoints("tcp://box:5600", "tcp://box:5601")
    assert endpoints("tcp://[::1]:5600").command == "tcp://[::1]:5601"


@pytest.mark.parametrize(
    "endpoint",
    [
        "",
        "run/kv",
        "ipc://run/kv",
        "ipc://",
        "ipc:///" + 120 * "x",
        "http://box:1",
        "tcp://box",
        "tcp://box:port",
        "tcp://box:0",
        "tcp://box:65535",
        "tcp://:5600",
        "tcp://*:5600",
        "tcp://0.0.0.0:5600",
        "udp://box:5600",
        "ipc:///run/\0kv",
    ],
)
def test_invalid_engine_endpoint_is_refused_with_its_value_in_one_line(endpoint: str) -> None:
    with pytest.raises(BadInput) as error:
        endpoints(endpoint)
    assert repr(endpoint) in str(error.value) or endpoint in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("endpoint", "is_local"),
    [
        ("ipc:///run/kv", True),
        ("tcp://127.0.0.1:1", True),
        ("tcp://127.8.8.8:1", True),
        ("tcp://localhost:1", True),
        ("tcp://[::1]:1", True),
        ("tcp://10.0.0.1:1", False),
        ("tcp://localhost.example.org:1", False),
        ("tcp://[fe80::1]:1", False),
    ],
)
def test_keys_are_required_beyond_this_machine(endpoint: str, is_local: bool) -> None:
    assert is_loopback(endpoint) is is_local
    require_curve(endpoint, has_keys=True)
    if is_local:
        require_curve(endpoint, has_keys=False)
    else:
        with pytest.raises(BadInput, match="without a key file"):
            require_curve(endpoint, has_keys=False)


def test_ipv6_is_recognized() -> None:
    assert is_ipv6("tcp://[::1]:1")
    assert not is_ipv6("tcp://127.0.0.1:1")
    assert not is_ipv6("ipc:///run/a:b")
