"""Ambiguous heads and bodies over raw sockets are refused, and the connection is closed."""

from __future__ import annotations

import asyncio
import json
import re
from typing import Any

import pytest
from tests.engine.http.served import Served, answer_on, read_all
from uvicorn import Config
from uvicorn.server import ServerState

from kvscope_engine.http.http_connection import FREE_CHUNKS, MIN_CHUNK_BYTES, SLICE_BYTES, HttpConnection

HIDDEN = b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\n\r\n"
BODY = b'{"prompt": "x", "max_tokens": 1}'
POST = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
CHUNKED = POST + b"Transfer-Encoding: chunked\r\n\r\n"


def answer(served: Served, data: bytes) -> tuple[int, str]:
    """Return status and message of the only answer before the connection is closed."""
    connection = served.connect()
    connection.sendall(data)
    heard = read_all(connection)
    assert len(re.findall(rb"HTTP/1\.1 \d", heard)) == 1, "what was hidden is answered too"
    head, _, body = heard.partition(b"\r\n\r\n")
    return int(head.split()[1]), json.loads(body)["error"]["message"]


@pytest.mark.parametrize(
    ("lines", "status", "words"),
    [
        (b"Content-Length: 32\r\nTransfer-Encoding: chunked\r\n\r\n", 400, "together with Content-Length"),
        (b"Transfer-Encoding: chunked\r\nContent-Length: 32\r\n\r\n", 400, "together with Content-Length"),
        (b"Content-Length: 32\r\nContent-Length: 32\r\n\r\n", 400, "Content-Length is not accepted"),
        (b"Content-Length: 32\r\ncontent-length: 0\r\n\r\n", 400, "Content-Length is not accepted"),
        (b"Content-Length: 32, 32\r\n\r\n", 400, "Content-Length is not accepted"),
        (b"Content-Length: +32\r\n\r\n", 400, "Content-Length is not accepted"),
        (b"Content-Length: 0x20\r\n\r\n", 400, "Content-Length is not accepted"),
        (b"Content-Length: -1\r\n\r\n", 400, "Content-Length is not accepted"),
        (b"Content-Length:\r\n\r\n", 400, "Content-Length is not accepted"),
        (b"Content-Length : 32\r\n\r\n", 400, "not an HTTP/1.1 request"),
        (b"X: y\r\n Content-Length: 32\r\n\r\n", 400, "folded headers"),
        (b"Content-Length: 32\r\n\tTransfer-Encoding: chunked\r\n\r\n", 400, "folded headers"),
        (b"Content-Length: 32\nTransfer-Encoding: chunked\r\n\r\n", 400, "CR LF"),
        (b"X: y\rContent-Length: 32\r\n\r\n", 400, "CR LF"),
        (b"Content-Length: 32\n\n", 400, "CR LF"),
        (b"Transfer-Encoding: chunked\r\nTransfer-Encoding: identity\r\n\r\n", 501, "only chunked"),
        (b"Transfer-Encoding: gzip, chunked\r\n\r\n", 501, "only chunked"),
        (b"Transfer-Encoding: xchunked\r\n\r\n", 501, "only chunked"),
        (b"Host: other\r\nContent-Length: 32\r\n\r\n", 400, "not an HTTP/1.1 request"),
        (b"X\x00: y\r\nContent-Length: 32\r\n\r\n", 400, "not an HTTP/1.1 request"),
    ],
)
def test_http_request_with_ambiguous_length_headers_is_refused(
    served: Served, lines: bytes, status: int, words: str
) -> None:
    got, message = answer(served, POST + lines + BODY + HIDDEN)
    assert got == status
    assert words in message


@pytest.mark.parametrize("version", ["2.0", "1.2", "0.9", "3.0", "2", "11.1"])
def test_unknown_http_version_is_refused(served: Served, version: str) -> None:
    got, message = answer(served, f"GET /health HTTP/{version}\r\nHost: localhost\r\n\r\n".encode())
    assert (got, f"HTTP/{version} is not accepted" in message) == (505, True)


def test_chunked_body_in_http_1_0_is_refused(served: Served) -> None:
    old = CHUNKED.replace(b"HTTP/1.1", b"HTTP/1.0") + b"20\r\n" + BODY + b"\r\n0\r\n\r\n" + HIDDEN
    assert answer(served, old)[0] == 400


@pytest.mark.parametrize(
    "chunks",
    [
        b"0x20\r\n",
        b"-1\r\n",
        b"\r\n",
        b"20;\nx\r\n",
        b"G\r\n",
        b"1" * 21 + b"\r\n",
        b"2\r\n{}xx0\r\n\r\n",
        b"2\r\n{}\n0\r\n",
    ],
)
def test_invalid_chunk_size_is_refused(served: Served, chunks: bytes) -> None:
    got, message = answer(served, CHUNKED + chunks + HIDDEN)
    assert (got, "not an HTTP/1.1 request" in message) == (400, True)


def test_rest_of_an_overlong_body_is_not_run_as_a_request(served: Served) -> None:
    connection = served.connect()
    connection.sendall(POST + b"Content-Length: 32\r\n\r\n" + BODY + b"more of it\r\n\r\n" + HIDDEN)
    heard = read_all(connection)
    assert re.findall(rb"HTTP/1\.1 (\d+) ", heard) == [b"200", b"400"]


def test_truncated_body_runs_nothing(served: Served) -> None:
    connection = served.connect()
    connection.sendall(POST + b"Content-Length: 33\r\n\r\n" + BODY)
    connection.shutdown(1)
    assert b" 200 " not in read_all(connection)


def test_valid_chunked_and_pipelined_requests_are_answered(served: Served) -> None:
    whole = CHUNKED.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n")
    connection = served.connect()
    connection.sendall(whole + b"10\r\n" + BODY[:16] + b"\r\n10\r\n" + BODY[16:] + b"\r\n0\r\n\r\n")
    assert answer_on(connection)[0] == 200
    two = served.connect()
    two.sendall(HIDDEN + HIDDEN.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n"))
    assert read_all(two).count(b"HTTP/1.1 200") == 2


def test_body_of_many_tiny_chunks_is_refused(served: Served) -> None:
    got, message = answer(served, CHUNKED + b"1\r\n \r\n" * (2 * FREE_CHUNKS))
    assert (got, "send larger chunks" in message) == (400, True)


def test_body_of_many_chunks_of_usual_size_is_answered(served: Served) -> None:
    chunk = b"%x\r\n%b\r\n" % (MIN_CHUNK_BYTES, b" " * MIN_CHUNK_BYTES)
    whole = CHUNKED.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n")
    connection = served.connect()
    connection.sendall(whole + chunk * (FREE_CHUNKS + 100) + b"20\r\n" + BODY + b"\r\n0\r\n\r\n")
    assert answer_on(connection)[0] == 200


def test_other_requests_are_served_while_a_large_chunked_body_is_parsed() -> None:
    """Every turn of the event loop parses at most one slice, so that any other connection has its turn in between."""
    received: list[int] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        while (message := await receive())["type"] == "http.request" and message["more_body"]:
            received.append(len(message["body"]))

    async def count_turns() -> int:
        config = Config(app, lifespan="off", log_config=None)
        config.load()
        connection = HttpConnection(config=config, server_state=ServerState(), app_state={})
        connection.connection_made(FakeTransport())
        connection.data_received(CHUNKED + b"1\r\n \r\n" * FREE_CHUNKS)
        turns = 0
        while sum(received) < FREE_CHUNKS and turns < 1000:
            turns += 1
            await asyncio.sleep(0)
        connection.connection_lost(None)
        await asyncio.sleep(0)
        return turns

    turns = asyncio.run(count_turns())
    num_slices = len(b"1\r\n \r\n" * FREE_CHUNKS) // SLICE_BYTES
    assert num_slices <= turns < 10 * num_slices
    assert max(received) <= SLICE_BYTES


class FakeTransport(asyncio.Transport):
    """Transport of a connection that discards what is written."""

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return default

    def is_closing(self) -> bool:
        return False

    def write(self, data: bytes | bytearray | memoryview) -> None:
        pass

    def pause_reading(self) -> None:
        pass

    def resume_reading(self) -> None:
        pass

    def close(self) -> None:
        pass
