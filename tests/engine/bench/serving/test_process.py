"""Servers end with the bench, however it ends, with all that they started; one that does not come up is said."""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import sys

import pytest
from tests.telemetry.foreign.prompting.conftest import FakeOpenAI

from kvscope_engine.bench.serving.process import free_port, process, wait_ready
from kvscope_engine.bench.serving.target import address_of
from kvscope_telemetry.errors import KvscopeError

SLEEPS = "import time; print('up', flush=True); time.sleep(600)"
STUBBORN = f"import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); {SLEEPS}"
OWNER = f"""
import sys
from kvscope_engine.bench.serving.process import process
with process([sys.executable, "-S", "-c", {SLEEPS!r}]) as server:
    print(server.pid, flush=True)
    sys.stdin.read()
"""


def python(program: str) -> list[str]:
    return [sys.executable, "-S", "-c", program]


def ended(descriptor: int) -> bool:
    """Whether the process ends; closes its descriptor."""
    try:
        return bool(select.select([descriptor], [], [], 60.0)[0])
    finally:
        os.close(descriptor)


def test_it_ends_with_the_context_and_leads_a_group() -> None:
    with process(python(SLEEPS)) as server:
        assert os.getpgid(server.pid) == server.pid
        assert os.getsid(server.pid) == os.getsid(0)
        descriptor = os.pidfd_open(server.pid)
    assert ended(descriptor)


def test_it_ends_with_ctrl_c_in_the_bench() -> None:
    descriptors: list[int] = []

    def bench() -> None:
        with process(python(SLEEPS)) as server:
            descriptors.append(os.pidfd_open(server.pid))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        bench()
    assert ended(descriptors[0])


def test_what_ignores_sigterm_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvscope_engine.bench.serving.process.GRACE_S", 0.01)
    with process(python(STUBBORN)) as server:
        descriptor = os.pidfd_open(server.pid)
    assert ended(descriptor)


def test_it_ends_with_a_bench_that_is_killed() -> None:
    owner = subprocess.Popen([sys.executable, "-c", OWNER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    descriptor = os.pidfd_open(int(owner.stdout.readline()))
    owner.send_signal(signal.SIGKILL)
    owner.communicate()
    assert ended(descriptor)


def test_one_that_ends_is_said_with_its_last_words() -> None:
    address = address_of("http://127.0.0.1:1")
    with (
        process(python("print('reading'); raise SystemExit('no such model')")) as server,
        pytest.raises(KvscopeError, match=r"^it ended with 1 before it served: no such model$"),
    ):
        wait_ready(server, "it", address, 60.0)


def test_one_that_does_not_serve_is_given_up() -> None:
    with (
        process(python(SLEEPS)) as server,
        pytest.raises(KvscopeError, match=r"it does not serve after 0.01 s: nobody listens at http://127.0.0.1:1"),
    ):
        wait_ready(server, "it", address_of("http://127.0.0.1:1"), 0.01)


def test_a_free_port_can_be_bound() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", port := free_port()))
        assert 15_000 <= port < 32_000


def test_one_that_serves_is_ready(fake: FakeOpenAI) -> None:
    with process(python(SLEEPS)) as server:
        wait_ready(server, "it", address_of(fake.url), 60.0)
        server.check("it", "now")
