"""The metrics page in its own process next to an engine that is not ours."""

from __future__ import annotations

import socket
import subprocess
import sys
import urllib.error
import urllib.request

import pytest
from tests.inside.conftest import hello_of
from tests.telemetry.metrics.scripted import wait_for

from kvscope_inside import CacheState, Publisher
from kvscope_inside.metrics_process import METRICS, MetricsProcess
from kvscope_telemetry.errors import BadInput
from kvscope_telemetry.ledger import BlockState
from kvscope_telemetry.messages.telemetry import Timings
from kvscope_telemetry.metrics.serve import MetricsServer


def page_at(port: int) -> str:
    """Return the page, or an empty string while nothing listens."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60) as answer:
            return str(answer.read().decode())
    except OSError:
        return ""


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def test_metrics_process_reports_only_what_vllm_does_not(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    port, said = free_port(), list[str]()
    monkeypatch.setenv(METRICS, f"127.0.0.1:{port - 1}")
    state = CacheState(hello_of(num_groups=2, num_reserved=1))
    with Publisher(endpoint, state) as publisher:
        metrics = MetricsProcess(endpoint, 1, said.append)
        try:
            wait_for(lambda: "kvscope_up 1.0" in page_at(port), "a page")
            with publisher.updating():
                state.set_blocks([3, 4], state=BlockState.ACTIVE, ref_count=1, group=1)
                publisher.publish(state.frame(1, 5, timings=Timings(10, 20, 0, 30, 2_000_000_000)))
            labels = 'engine="0",model_name="theirs"'
            group = 'kvscope_num_used_blocks_of_group{engine="0",group="1",kind="window",model_name="theirs"} 2.0'
            wait_for(lambda: group in page_at(port), "blocks of a group")
            page = page_at(port)
            assert f'kvscope_step_seconds_total{{{labels},part="record"}} 2.0' in page
            assert "vllm:" not in page, "vLLM's own page has these"
        finally:
            metrics.close()
    assert said == []
    assert page_at(port) == ""


def test_metrics_process_is_not_started_unless_configured(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(METRICS, raising=False)
    monkeypatch.setattr(subprocess, "Popen", None)
    said: list[str] = []
    MetricsProcess(endpoint, 0, said.append).close()
    assert said == [], "a process was started"


def test_invalid_metrics_address_is_reported_in_one_line(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setenv(METRICS, "nowhere")
    metrics = MetricsProcess(endpoint, 0, said.append)
    wait_for(lambda: said, "a line")
    metrics.close()
    assert said == ["no metrics are served: 'nowhere' is not accepted: HOST:PORT, such as 127.0.0.1:9400"]


def test_metrics_process_ends_with_the_engine(endpoint: str) -> None:
    port = free_port()
    command = [sys.executable, "-m", "kvscope_telemetry.metrics.serve", endpoint, f"127.0.0.1:{port}"]
    with subprocess.Popen(command, stdin=subprocess.PIPE) as process:
        wait_for(lambda: "kvscope_up 0.0" in page_at(port), "a page")
        with pytest.raises(urllib.error.HTTPError):
            urllib.request.urlopen(f"http://127.0.0.1:{port}/other", timeout=60)
        assert process.stdin is not None
        process.stdin.close()
        assert process.wait(60) == 0


def test_metrics_port_in_use_is_refused(endpoint: str) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(BadInput, match=r"cannot listen at 127\.0\.0\.1"):
            MetricsServer(endpoint, f"127.0.0.1:{taken.getsockname()[1]}")
