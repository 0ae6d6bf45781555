"""Scraping servers that refuse, are slow, answer with nonsense or misuse TLS: one-sentence errors and retries."""

from __future__ import annotations

import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
from tests.telemetry.collectors.certificates import CERTIFICATE, PRIVATE_KEY
from tests.telemetry.collectors.conftest import WAIT_S, FakeServer
from tests.telemetry.collectors.pages import VllmPage, sglang_page

from kvscope_telemetry.collectors.external_address import ExternalAddress
from kvscope_telemetry.collectors.http_client import HttpClient
from kvscope_telemetry.collectors.scrape import Scraped, Scraper
from kvscope_telemetry.collectors.server_facts import ServerFacts
from kvscope_telemetry.errors import BadInput

LONG_S = 600.0


@pytest.fixture
def scrape() -> Iterator[Callable[..., Scraper]]:
    made: list[Scraper] = []

    def start(text: str, *, timeout_s: float = LONG_S, **options: str) -> Scraper:
        address = ExternalAddress.parse(text, **options)
        http = HttpClient(address, timeout_s=timeout_s, max_bytes=1 << 20)
        made.append(Scraper(address, every_s=0.01, pauses_s=(0.01, 0.02), http=http))
        return made[-1]

    yield start
    for each in made:
        each.close()


def failure_reason(scraper: Scraper, num_failures: int = 2) -> str:
    """Return the reason after `num_failures` failures, so that the scraper has retried."""
    wait_for(lambda: scraper.num_failures >= num_failures, scraper)
    assert "\n" not in scraper.why
    assert len(scraper.why) < 400
    return scraper.why


def wait_for(condition: Callable[[], object], scraper: Scraper) -> None:
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline, scraper.why
        time.sleep(0.005)


class Raw:
    """A listening port that sends `answer` to each connection and closes it unless `held`."""

    def __init__(self, answer: bytes, *, held: bool = False, tls: ssl.SSLContext | None = None) -> None:
        self._answer, self._held, self._tls = answer, held, tls
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self._open: list[socket.socket] = []
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            try:
                if self._tls is not None:
                    connection = self._tls.wrap_socket(connection, server_side=True)
                connection.recv(65536)
                connection.sendall(self._answer)
            except OSError:
                connection.close()
                continue
            if self._held:
                self._open.append(connection)
            else:
                connection.close()

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join()
        for each in self._open:
            each.close()


@pytest.fixture
def raw() -> Iterator[Callable[..., Raw]]:
    made: list[Raw] = []

    def start(answer: bytes, *, held: bool = False, tls: ssl.SSLContext | None = None) -> Raw:
        made.append(Raw(answer, held=held, tls=tls))
        return made[-1]

    yield start
    for each in made:
        each.close()


def test_compressed_answer_is_named(raw: Callable[..., Raw], scrape: Callable[..., Scraper]) -> None:
    server = raw(b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nContent-Length: 2\r\n\r\n\x1f\x8b")
    assert "answers compressed (gzip)" in failure_reason(scrape(f"vllm://127.0.0.1:{server.port}"))


@pytest.mark.parametrize(
    ("status", "kind", "body", "words"),
    [
        (200, "text/html", b"<html></html>", "web page"),
        (200, "text/plain", b"<html></html>", "web page"),
        (200, "text/plain", b"go_goroutines 5\n", "another program"),
        (200, "text/plain", b"", "another program"),
        (200, "text/plain", sglang_page(), "attach sglang://"),
        (200, "text/plain", b"vllm:x{a=\n", "cannot be read as metrics"),
        (200, "text/plain", b"x" * (1 << 21), "more than 1 MB"),
        (301, "text/plain", b"", "not followed"),
        (401, "text/plain", b"", "needs an API key"),
        (403, "text/plain", b"", "needs an API key"),
        (404, "text/plain", b"", "HTTP 404"),
        (500, "text/plain", b"", "HTTP 500"),
    ],
)
def test_bad_metrics_response_is_explained_in_one_sentence_and_retried(
    server: FakeServer, scrape: Callable[..., Scraper], status: int, kind: str, body: bytes, words: str
) -> None:
    server.set_answer("/metrics", body, kind, status)
    scraper = scrape(f"vllm://127.0.0.1:{server.port}")
    assert words in failure_reason(scraper)
    assert scraper.is_refused == (status in (401, 403))
    server.set_answer("/metrics", VllmPage().text())
    wait_for(lambda: not scraper.why, scraper)
    assert scraper.poll_result() is not None


def test_api_key_is_sent_and_never_shown_when_refused(server: FakeServer, scrape: Callable[..., Scraper]) -> None:
    server.set_answer("/metrics", b"", status=401)
    scraper = scrape(f"vllm://127.0.0.1:{server.port}", api_key="sk-secret")
    reason = failure_reason(scraper)
    assert "does not accept the API key" in reason
    assert "secret" not in reason
    assert server.asked[0] == ("/metrics", "Bearer sk-secret")


def test_refused_connection_is_reported(scrape: Callable[..., Scraper]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    assert "nobody listens" in failure_reason(scrape(f"vllm://127.0.0.1:{port}"))


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (b"", "closed the connection"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\nvllm:x 1\n", "closed the connection"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n400\r\nvllm:x 1\n", "closed the connection"),
        (b"SSH-2.0-OpenSSH_9.6\r\n", "without an answer in HTTP: is it another port?"),
        (b"\xff\x00\x00\x00\x00\x00\x00\x00\x01\x7f", "without an answer in HTTP: is it another port?"),
        (b"HTTP/1.1 200 OK\r\n" + b"X: " + b"y" * 200_000 + b"\r\n\r\n", "does not answer in HTTP"),
    ],
)
def test_dropped_connection_or_other_protocol_is_reported(
    raw: Callable[..., Raw], scrape: Callable[..., Scraper], answer: bytes, words: str
) -> None:
    assert words in failure_reason(scrape(f"vllm://127.0.0.1:{raw(answer).port}"))


def test_unfinished_answer_times_out(raw: Callable[..., Raw], scrape: Callable[..., Scraper]) -> None:
    slow = raw(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\nvllm", held=True)
    assert "did not answer within 0.05 s" in failure_reason(scrape(f"vllm://127.0.0.1:{slow.port}", timeout_s=0.05))


def test_closing_the_scraper_interrupts_a_pending_http_request(raw: Callable[..., Raw]) -> None:
    silent = raw(b"", held=True)
    address = ExternalAddress.parse(f"vllm://127.0.0.1:{silent.port}")
    scraper = Scraper(address, http=HttpClient(address, timeout_s=LONG_S))
    scraper.close()
    wait_for(lambda: not scraper.is_running, scraper)


def test_proxy_of_the_environment_is_used_and_named_in_errors(
    server: FakeServer, scrape: Callable[..., Scraper], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HTTP_PROXY", f"http://127.0.0.1:{server.port}")
    server.set_answer("http://gpu-box.invalid:8000/metrics", VllmPage().text())
    scraper = scrape("vllm://gpu-box.invalid:8000")
    wait_for(scraper.poll_result, scraper)
    server.close()
    reason = f"nobody listens at the proxy 127.0.0.1:{server.port}, which is in the way to http://gpu-box.invalid:8000"
    assert reason in failure_reason(scraper)
    monkeypatch.setenv("NO_PROXY", "gpu-box.invalid")
    assert "unknown host" in failure_reason(scrape("vllm://gpu-box.invalid:8000"))


def test_proxy_is_not_used_for_this_machine(
    server: FakeServer, scrape: Callable[..., Scraper], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    server.set_answer("/metrics", VllmPage().text())
    for host in ("127.0.0.1", "localhost"):
        scraper = scrape(f"vllm://{host}:{server.port}")
        wait_for(scraper.poll_result, scraper)


@pytest.mark.filterwarnings(
    "ignore:unclosed <ssl.SSLSocket:ResourceWarning"
)  # raised by Python if the client closed the connection before the handshake
def test_tls_certificate_is_trusted_only_if_its_authority_is_given(
    raw: Callable[..., Raw], scrape: Callable[..., Scraper], tmp_path: Path
) -> None:
    certificate, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    certificate.write_text(CERTIFICATE)
    key.write_text(PRIVATE_KEY)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    body = VllmPage().text()
    answer = b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)
    port = raw(answer, tls=context).port
    assert "certificate is not trusted" in failure_reason(scrape(f"vllm://localhost:{port}/?tls=1"))
    assert failure_reason(scrape(f"vllm://localhost:{port}")).startswith(f"http://localhost:{port}/metrics")
    trusting = scrape(f"vllm://localhost:{port}/?ca={certificate}")
    wait_for(lambda: not trusting.why, trusting)
    wrong_name = scrape(f"vllm://127.0.0.1:{port}/?ca={certificate}")
    assert "certificate is not trusted" in failure_reason(wrong_name)
    with pytest.raises(BadInput, match="PEM"):
        scrape(f"vllm://localhost:{port}/?ca={tmp_path / 'none.pem'}")


def test_tls_to_a_plain_port_fails_with_a_reason(raw: Callable[..., Raw], scrape: Callable[..., Scraper]) -> None:
    plain = raw(b"HTTP/1.1 400 Bad Request\r\n\r\n")
    assert "TLS failed" in failure_reason(scrape(f"vllm://127.0.0.1:{plain.port}/?tls=1"))


def facts(scraper: Scraper) -> ServerFacts:
    found: list[Scraped] = []

    def has_taken() -> bool:
        found.extend(filter(None, [scraper.poll_result()]))
        return bool(found)

    wait_for(has_taken, scraper)
    return found[0].facts


def test_event_endpoints_are_read_from_the_vllm_configuration(
    server: FakeServer, scrape: Callable[..., Scraper]
) -> None:
    events = {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": "tcp://*:5557", "topic": "kv"}
    config = {"kv_events_config": {**events, "replay_endpoint": "tcp://*:5558"}}
    server.set_answer("/metrics", VllmPage().text())
    server.set_answer("/version", b'{"version": "0.33.0"}')
    server.set_answer("/server_info?config_format=json", msgspec.json.encode({"vllm_config": config}))
    server_facts = facts(scrape(f"vllm://127.0.0.1:{server.port}"))
    assert (server_facts.version, server_facts.topic) == ("0.33.0", "kv")
    assert (server_facts.kv_events, server_facts.replay) == ("tcp://127.0.0.1:5557", "tcp://127.0.0.1:5558")


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"no json",
        b"[]",
        b"null",
        b"[" * 5000,
        {"kv_events": 5},
        {"kv_events": {"endpoint_host": 1}},
        {"kv_events": {"endpoint_host": "*", "endpoint_port_base": "x"}},
        {"kv_events": {"endpoint_host": "a b", "endpoint_port_base": 5}},
        {"version": 5, "page_size": "x"},
        {"version": "\x1b[31m", "page_size": -1},
    ],
)
def test_invalid_server_facts_are_unknown(server: FakeServer, scrape: Callable[..., Scraper], answer: object) -> None:
    body = answer if isinstance(answer, bytes) else msgspec.json.encode(answer)
    server.set_answer("/metrics", sglang_page())
    server.set_answer("/server_info", body)
    server.set_answer("/v1/models", body)
    server_facts = facts(scrape(f"sglang://127.0.0.1:{server.port}"))
    assert not any(getattr(server_facts, name) for name in ("version", "model", "block_size", "kv_events", "replay"))
