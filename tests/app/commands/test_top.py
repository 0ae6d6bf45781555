"""Tests of `kvscope top` with simulated engines over real sockets: one reading, and an interactive terminal."""

from __future__ import annotations

import json
import os
import select
import signal
import struct
import subprocess
import sys
import time
import unicodedata
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import msgspec
import pytest
from tests.telemetry.conftest import make_endpoint, serve

from kvscope_app.commands.top_engine import DeviceReading, EngineStatus, RequestReading, WatchedEngine
from kvscope_app.commands.top_lines import engine_lines, in_encoding, plain_text, request_lines, short_line
from kvscope_app.main import main
from kvscope_telemetry.addresses import Address
from kvscope_telemetry.source import SourceState
from kvscope_telemetry.termination import END_SIGNALS

WAIT_S = 120.0
HEAVY = ("PySide6", "pyqtgraph", "torch", "triton", "transformers", "kvscope_engine")
__all__ = ["make_endpoint", "serve"]

READING = EngineStatus(
    address="vllm://gpu-box:8000",
    state=SourceState.LIVE,
    engine="vllm",
    model="a\x1b]0;evil\x07-model",
    num_blocks=1000,
    held_blocks=620,
    cached_blocks=1,
    free_blocks=379,
    usage=0.62,
    num_running=4,
    num_waiting=12_345,
    decode_tokens_per_s=123.4,
    first_token_p50_s=0.08,
    is_first_token_bound=True,
    num_requests=3,
    requests=tuple(
        RequestReading(
            number=n, request_id="名前" * 20, state="running", num_tokens=1000 * n, num_blocks=60 * n, age_s=n
        )
        for n in (3, 2, 1)
    ),
)


def test_top_prints_one_reading_as_json_without_qt_and_torch(serve: Callable, make_endpoint: Callable) -> None:  # type: ignore[type-arg]
    endpoint = make_endpoint()
    serve(endpoint, rate=60.0)
    program = (
        "import sys\nfrom kvscope_app.main import main\n"
        f"code = main(['top', '--json', '--wait', '100', {endpoint!r}])\n"
        f"print(sorted(set({HEAVY!r}) & set(sys.modules)), code, file=sys.stderr)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=WAIT_S)
    assert done.stderr == "[] 0\n"
    (reading,) = json.loads(done.stdout)["engines"]
    assert reading["state"] == "live"
    assert reading["held_blocks"] + reading["cached_blocks"] + reading["free_blocks"] == reading["num_blocks"] == 2000
    assert reading["usage"] == pytest.approx(reading["held_blocks"] / 2000)
    assert reading["decode_tokens_per_s"] > 0
    assert 0 <= reading["hit_rate"] <= 1
    assert reading["device"]["is_engines_share"], "on a CPU, the utilization is the engine's share"
    assert reading["device"]["power_watts"] is None, "power of a CPU is unknown"
    assert reading["num_requests"] == len(reading["requests"]) > 0
    blocks = [request["num_blocks"] for request in reading["requests"]]
    assert blocks == sorted(blocks, reverse=True)


def test_watched_engine_reports_the_counters_and_requests_of_the_engine(
    serve: Callable, make_endpoint: Callable
) -> None:  # type: ignore[type-arg]
    endpoint = make_endpoint()
    server = serve(endpoint, rate=60.0)
    engine = WatchedEngine(Address(endpoint))
    try:
        read_until(engine, lambda reading: reading.num_running is not None and engine.is_ready)
        server.hold()
        counters = server.engine.snapshot().counters
        wanted = (counters.num_running, counters.num_waiting)
        levels = (*wanted, sum(wanted))
        read_until(engine, lambda reading: (reading.num_running, reading.num_waiting, reading.num_requests) == levels)
        by_number = engine.read("number", limit=2).requests
        assert len(by_number) == 2
        assert by_number[0].number > by_number[1].number
        by_age = [request.age_s for request in engine.read("age").requests]
        assert by_age == sorted(by_age, reverse=True)
        server.close()
        gone = read_until(engine, lambda reading: reading.state is SourceState.ENDED)
        assert gone.usage is gone.num_running is None, "old values must not be shown as current"
    finally:
        engine.close()


def read_until(engine: WatchedEngine, condition: Callable[[EngineStatus], bool]) -> EngineStatus:
    deadline = time.monotonic() + WAIT_S
    while not condition(reading := engine.read()):
        assert time.monotonic() < deadline, reading
        time.sleep(0.05)
    return reading


def test_top_prints_the_reason_for_an_address_without_an_engine(
    serve: Callable,
    make_endpoint: Callable,
    capsys: pytest.CaptureFixture[str],  # type: ignore[type-arg]
) -> None:
    endpoint, nowhere = make_endpoint(), make_endpoint()
    serve(endpoint, rate=60.0)
    assert main(["top", endpoint, nowhere, "--wait", "4"]) == 1, "without a terminal, top works as with --once"
    printed = capsys.readouterr().out
    assert f"{endpoint}  Live" in printed
    assert f"{nowhere}  Connecting" in printed
    assert "no socket file" in printed
    assert "\x1b" not in printed


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["http://box:8000"], "address 'http://box:8000' is not accepted"),
        (["--wait", "never"], "'never' is not accepted"),
        (["tcp://10.0.0.9:7000"], "without a key file"),
        ([f"ipc:///tmp/kvscope-{n}" for n in range(65)], "65 addresses are not accepted"),
    ],
)
def test_top_reports_bad_arguments_in_one_line(
    words: list[str], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["top", *words]) == 2
    printed = capsys.readouterr().err
    assert named in printed
    assert printed.count("\n") == 1


def test_top_prints_no_error_when_its_output_pipe_is_closed(serve: Callable, make_endpoint: Callable) -> None:  # type: ignore[type-arg]
    endpoint = make_endpoint()
    serve(endpoint, rate=60.0)
    command = f"{sys.executable} -m kvscope_app.main top --once {endpoint} | true"
    done = subprocess.run(["/bin/sh", "-c", command], capture_output=True, text=True, timeout=WAIT_S)
    assert done.stderr == ""


@pytest.mark.parametrize("width", [1, 2, 7, 20, 33, 80, 200])
def test_top_lines_fit_the_width_and_contain_no_control_characters(width: int) -> None:
    reason = msgspec.structs.replace(READING, state=SourceState.STUCK, reason="no step\x1b[2J for 3 s")
    for reading in (READING, reason, EngineStatus(address="x" * 300)):
        lines = [*engine_lines(reading, width, is_selected=True), short_line(reading, width)]
        lines += request_lines(reading, width, 3, "blocks")
        for text in in_encoding(plain_text(lines), "utf-8").split("\n"):
            assert sum(2 if unicodedata.east_asian_width(letter) in "WF" else 1 for letter in text) <= width
            assert text.isprintable()


def test_top_lines_show_known_values_and_dashes_for_unknown_ones() -> None:
    text = plain_text([*engine_lines(READING, 100), *request_lines(READING, 100, 3, "blocks")]).replace("\u202f", " ")
    for words in ("62 %", "620 held", "1 cached", "12 345 waiting", "decode 123.4 tok/s", "p50 ≤ 80.0 ms", "#3"):
        assert words in text
    assert "hit rate –" in text
    assert "prefill – tok/s" in text
    assert "and 2 more requests" in text
    assert "▒" in text, "each non-empty part has at least one cell"
    assert "This engine does not report" in plain_text(
        request_lines(msgspec.structs.replace(READING, reports_requests=False), 100, 9, "blocks")
    )
    assert in_encoding(text, "utf-8") == text
    assert in_encoding(text, "ascii").isascii()


@pytest.mark.parametrize(("is_engines_share", "words"), [(True, "engine uses 12 % of the CPUs"), (False, "busy 12 %")])
def test_top_states_whether_utilization_is_that_of_the_engine(is_engines_share: bool, words: str) -> None:
    device = DeviceReading(name="a CPU", utilization=0.12, is_engines_share=is_engines_share)
    text = plain_text(engine_lines(msgspec.structs.replace(READING, device=device), 100)).replace("\u202f", " ")
    assert words in text.replace("\u00a0", " ")


class Terminal:
    """`kvscope top` in a pseudo-terminal."""

    def __init__(self, words: list[str], size: tuple[int, int], **environment: str) -> None:
        self._fcntl, self._termios = pytest.importorskip("fcntl"), pytest.importorskip("termios")
        self._master, self.slave = pytest.importorskip("pty").openpty()
        self.resize(size)
        self.modes = self.current_modes()
        environ = {**os.environ, "TERM": "xterm-256color", "LC_ALL": "C.UTF-8", **environment}
        command = [sys.executable, "-m", "kvscope_app.main", "top", *words]
        self.process = subprocess.Popen(
            command, stdin=self.slave, stdout=self.slave, stderr=self.slave, env=environ, start_new_session=True
        )
        self.output = b""

    def resize(self, size: tuple[int, int]) -> None:
        self._fcntl.ioctl(self._master, self._termios.TIOCSWINSZ, struct.pack("HHHH", *size, 0, 0))

    def current_modes(self) -> object:
        return self._termios.tcgetattr(self.slave)

    def press(self, keys: str) -> None:
        """Press keys, and forget the output so far."""
        self.output = b""
        os.write(self._master, keys.encode())

    def forget(self) -> None:
        self.output = b""

    def await_text(self, text: str) -> None:
        deadline = time.monotonic() + WAIT_S
        while text.encode() not in self.output:
            assert time.monotonic() < deadline, self.output[-2000:]
            self._read()

    def end(self) -> int:
        """Read the remaining output and return the exit code."""
        deadline = time.monotonic() + WAIT_S
        while self.process.poll() is None:
            assert time.monotonic() < deadline
            self._read()
        self._read()
        return self.process.returncode

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._master)
        os.close(self.slave)

    def _read(self) -> None:
        if select.select([self._master], [], [], 0.1)[0]:
            self.output += os.read(self._master, 65536)


@contextmanager
def terminal(words: list[str], size: tuple[int, int] = (30, 100), **environment: str) -> Iterator[Terminal]:
    shown = Terminal(words, size, **environment)
    try:
        yield shown
    finally:
        shown.close()


def test_top_handles_keys_resizing_and_a_stopped_engine(serve: Callable, make_endpoint: Callable) -> None:  # type: ignore[type-arg]
    first, second = make_endpoint(), make_endpoint()
    server = serve(first, rate=60.0)
    with terminal([first, second]) as shown:
        shown.await_text("running")
        shown.await_text("▾blocks")
        shown.press("s")
        shown.await_text("▾")  # the marker of the sort column moves
        shown.press("j")
        shown.await_text("▸")
        shown.press("\x1bOA")  # arrow up
        shown.await_text("▸")
        for size in ((3, 9), (1, 1), (24, 60)):
            shown.resize(size)
            os.kill(shown.process.pid, signal.SIGWINCH)
            time.sleep(0.3)
        shown.forget()
        server.close()
        shown.await_text("Stopped")
        shown.press("q")
        assert shown.end() == 0
        assert shown.current_modes() == shown.modes


@pytest.mark.parametrize(("number", "code"), [(number, 128 + number) for number in END_SIGNALS])
def test_signal_restores_the_terminal_modes(make_endpoint: Callable, number: signal.Signals, code: int) -> None:  # type: ignore[type-arg]
    with terminal([make_endpoint()], (24, 80), TERM="vt100", LC_ALL="C") as shown:
        shown.await_text("Connecting")
        os.kill(shown.process.pid, number)
        assert shown.end() == code
        assert shown.current_modes() == shown.modes
        assert b"Traceback" not in shown.output


@pytest.mark.parametrize("name", ["dumb", "no-such-terminal"])
def test_unusable_terminal_type_is_reported(make_endpoint: Callable, name: str) -> None:  # type: ignore[type-arg]
    with terminal([make_endpoint()], TERM=name) as shown:
        shown.await_text(f"kvscope: TERM='{name}' is not accepted")
        assert shown.end() == 2
