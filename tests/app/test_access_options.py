"""Tests that an API key is sent only to the server for which it was given."""

from __future__ import annotations

import argparse
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from msgspec.structs import replace
from tests.inside.conftest import hello_of
from tests.telemetry.collectors.prompting.conftest import replies_until_end, wait_for

from kvscope_app.access_options import add_access_options, parse_addresses
from kvscope_inside import CacheState, Publisher
from kvscope_telemetry.addresses import API_KEY_VARIABLE, Address
from kvscope_telemetry.collectors.external_address import ExternalAddress
from kvscope_telemetry.collectors.http_client import HttpClient, NoAnswer
from kvscope_telemetry.errors import BadInput
from kvscope_telemetry.messages.commands import GetStatus, Submit
from kvscope_telemetry.mirror.sync import FIRST_TAG

KEY = "sk-users-secret"


class ByteServer:
    """Server that records the bytes it receives and sends `answer` on each connection."""

    def __init__(
        self, host: str = "127.0.0.1", answer: bytes = b"HTTP/1.1 401 No\r\nContent-Length: 0\r\n\r\n"
    ) -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, 0), family=family)
        self.port: int = self._listener.getsockname()[1]
        self.received: list[bytes] = []
        self._answer = answer
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            with connection:
                self.received.append(connection.recv(1 << 16))
                connection.sendall(self._answer)


@pytest.fixture
def hostile_server() -> Iterator[ByteServer]:
    server = ByteServer("0.0.0.0")
    yield server
    server.close()


def addresses_from(*words: str) -> tuple[Address, ...]:
    """Parse a command line of addresses and access options."""
    parser = argparse.ArgumentParser()
    parser.add_argument("endpoints", nargs="*")
    add_access_options(parser, "ADDRESS")
    args = parser.parse_args(words)
    return parse_addresses(args, args.endpoints, "ADDRESS")


@pytest.mark.parametrize(
    "announced",
    [
        "vllm://127.0.0.1:{port}",
        "vllm://localhost:{port}",
        "vllm://0.0.0.0:{port}/?rank=1",
        "vllm://127.0.0.2:{port}",
        "vllm://[::ffff:127.0.0.1]:{port}",
        "vllm://[::1]:{port}",
        "vllm://127.0.0.1:{port}/?tls=1",
        "vllm://127.0.0.1:{port}/?api_key_over_http=1",
        "vllm://users.own.server:8000@127.0.0.1:{port}",
        "vllm://%31%32%37.0.0.1:{port}",
        "vllm://127.0.0.1:{port}/users.own.server:8000",
        "sglang://127.1:{port}",
        "llama://2130706433:{port}",
    ],
)
def test_address_announced_by_a_watched_engine_never_receives_the_api_key(
    announced: str, hostile_server: ByteServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(API_KEY_VARIABLE, KEY)
    endpoint = f"ipc://{tmp_path}/e"
    state = CacheState(replace(hello_of(), api=announced.format(port=hostile_server.port)))
    (address,) = addresses_from(endpoint)
    with Publisher(endpoint, state), address.open() as source:

        def has_state() -> bool:
            source.update_mirror()
            return source.mirror.hello is not None

        wait_for(has_state)
        source.send(GetStatus(tag=FIRST_TAG))
        source.send(Submit(request_id="mine", prompt="hello"))
        replies_until_end(source)
    if announced.startswith(("vllm://127.0.0.1:{port}", "vllm://localhost")):
        assert hostile_server.received, "the prompt was sent there, without the key"
    assert KEY.encode() not in b"".join(hostile_server.received)
    assert b"authorization" not in b"".join(hostile_server.received).lower()


def test_api_key_does_not_follow_a_redirect(hostile_server: ByteServer) -> None:
    target = f"http://127.0.0.1:{hostile_server.port}/v1/models".encode()
    trusted = ByteServer(answer=b"HTTP/1.1 307 Moved\r\nLocation: " + target + b"\r\nContent-Length: 0\r\n\r\n")
    client = HttpClient(ExternalAddress.parse(f"vllm://127.0.0.1:{trusted.port}", api_key=KEY))
    with pytest.raises(NoAnswer, match="redirects"):
        client.get("/v1/models")
    trusted.close()
    assert KEY.encode() in b"".join(trusted.received)
    assert hostile_server.received == []


def test_api_key_for_another_address_of_this_machine_is_not_sent_through_a_proxy(
    hostile_server: ByteServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("http_proxy", f"http://127.0.0.1:{hostile_server.port}")
    trusted = ByteServer("127.0.0.2")
    client = HttpClient(ExternalAddress.parse(f"vllm://127.0.0.2:{trusted.port}", api_key=KEY))
    with pytest.raises(NoAnswer, match="does not accept the API key"):
        client.get("/v1/models")
    trusted.close()
    assert hostile_server.received == []


def test_api_key_in_the_environment_is_given_to_external_addresses_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(API_KEY_VARIABLE, KEY)
    own, other = addresses_from(f"ipc://{tmp_path}/e", "vllm://127.0.0.1:8000")
    assert (own.api_key, other.api_key) == ("", KEY)
    with pytest.raises(BadInput, match="--api-key-over-http"):
        addresses_from("vllm://gpu-box:8000")
    assert addresses_from("vllm://gpu-box:8000", "--api-key-over-http")[0].api_key == KEY
    assert addresses_from("vllm://gpu-box:8000", "--tls")[0].api_key == KEY


def test_api_key_file_for_an_engine_of_kvscope_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_text(KEY)
    with pytest.raises(BadInput, match="--api-key-file is for vllm://"):
        addresses_from(f"ipc://{tmp_path}/e", "--api-key-file", str(file))
