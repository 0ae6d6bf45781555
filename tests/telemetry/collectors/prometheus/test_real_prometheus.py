"""Test with a real Prometheus if one is on PATH (`apt-get install prometheus`) or named in KVSCOPE_PROMETHEUS."""

from __future__ import annotations

import bisect
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.telemetry.collectors.conftest import FakeServer, server
from tests.telemetry.collectors.pages import VllmPage

from kvscope_telemetry.collectors.external_engines import find_engine
from kvscope_telemetry.collectors.http_client import NoAnswer
from kvscope_telemetry.collectors.prometheus.prometheus_address import PrometheusAddress
from kvscope_telemetry.collectors.prometheus.prometheus_client import PrometheusClient
from kvscope_telemetry.collectors.readings import EngineReading
from kvscope_telemetry.collectors.scraped_page import Samples, ScrapedPage

__all__ = ["server"]
PROGRAM = os.environ.get("KVSCOPE_PROMETHEUS") or shutil.which("prometheus")
WAIT_S = 60.0
NUM_SCRAPES = 4
pytestmark = pytest.mark.skipif(PROGRAM is None, reason="no prometheus on PATH and no KVSCOPE_PROMETHEUS")


@pytest.fixture
def prometheus(server: FakeServer, tmp_path: Path) -> Iterator[PrometheusClient]:
    """Client of a Prometheus that scrapes `server` every second."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    config = tmp_path / "prometheus.yml"
    config.write_text(
        "scrape_configs: [{job_name: vllm, scrape_interval: 1s, scrape_timeout: 1s, "
        f"static_configs: [{{targets: ['127.0.0.1:{server.port}']}}]}}]\n"
    )
    arguments = [f"--config.file={config}", f"--storage.tsdb.path={tmp_path}", f"--web.listen-address=127.0.0.1:{port}"]
    process = subprocess.Popen([str(PROGRAM), *arguments], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    yield PrometheusClient(PrometheusAddress.parse(f"prometheus://127.0.0.1:{port}?job=vllm"))
    process.terminate()
    process.wait()


def test_scrapes_of_a_real_prometheus_equal_the_pages_that_the_engine_served(
    prometheus: PrometheusClient, server: FakeServer
) -> None:
    vllm = find_engine("vllm")
    assert vllm is not None
    page, served = VllmPage(), list[tuple[float, EngineReading]]()
    deadline_s = time.monotonic() + WAIT_S
    scrapes: list[tuple[int, Samples]] = []
    while len(scrapes) < NUM_SCRAPES:
        assert time.monotonic() < deadline_s
        page.gauge("num_requests_running", len(served) % 7)
        page.count("generation_tokens", 10)
        page.observe("time_to_first_token_seconds", [0.02])
        server.set_answer("/metrics", page.text())
        served.append((time.time(), vllm.read_metrics(ScrapedPage.parse(page.text().decode(), ("vllm:",)))))
        time.sleep(0.05)
        try:
            scrapes = [
                scrape
                for engine, labels in prometheus.find_engines()
                for scrape in prometheus.scrapes(engine, labels, seconds=300, until_ns=prometheus.server_time_ns())
            ]
        except NoAnswer:
            continue
    times = [time_s for time_s, _ in served]
    for time_ns, samples in scrapes:
        reading = vllm.read_metrics(ScrapedPage(samples, rank=("engine", None)))
        # The page changes while Prometheus scrapes it: it may be any of those served around then.
        index = bisect.bisect(times, time_ns / 1e9)
        candidates = [each for _, each in served[max(index - 1, 0) :]]
        assert (reading.num_running, reading.generation_tokens, reading.latencies) in [
            (each.num_running, each.generation_tokens, each.latencies) for each in candidates
        ]
