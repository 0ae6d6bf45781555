"""Tests of `kvscope record` with a simulated engine over real sockets."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from itertools import count, pairwise
from pathlib import Path
from typing import Any, Self

import msgspec
import pytest
from tests.telemetry.alarms.receiver import open_receiver
from tests.telemetry.collectors.conftest import FakeServer, server
from tests.telemetry.conftest import assert_same_state, make_endpoint, make_messages, serve

from kvscope_app.commands.segmented_writer import SegmentedWriter
from kvscope_app.main import main
from kvscope_telemetry.addresses import Address
from kvscope_telemetry.messages.telemetry import Frame, Heartbeat, Snapshot
from kvscope_telemetry.recordings.reader import Recording
from kvscope_telemetry.source import SourceState, SourceStatus
from kvscope_telemetry.sources.sink import Sink
from kvscope_telemetry.termination import END_SIGNALS

WAIT_S = 240.0
__all__ = ["assert_same_state", "make_endpoint", "make_messages", "serve", "server"]


def assert_unbroken(recording: Recording) -> None:
    """Assert that the recording is complete, begins with a snapshot, and misses no frame."""
    assert recording.info.is_complete
    numbers = [frame.seq for frame in recording.frames()]
    assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))
    mirror = recording.state_at(recording.info.duration_s)
    assert mirror.seq == numbers[-1]


def test_seconds_option_limits_the_length_of_the_recording(
    serve: Callable,
    make_endpoint: Callable,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],  # type: ignore[type-arg]
) -> None:
    endpoint = make_endpoint()
    serve(endpoint, rate=60.0)
    assert main(["record", endpoint, "--out", str(tmp_path / "x.mcap"), "--seconds", "1.5"]) == 0
    recording = Recording.open(tmp_path / "x.mcap")
    assert_unbroken(recording)
    assert 0.1 <= recording.info.duration_s <= 10.0
    assert re.search(rf"^{tmp_path / 'x.mcap'}: \d+\.\d s, ", capsys.readouterr().out)
    assert [path.name for path in tmp_path.glob("x*")] == ["x.mcap"]


class WrongClock:
    """Source whose engine restarts, or whose clock jumps by 100 years, with each message."""

    status = SourceStatus(SourceState.LIVE)

    def __init__(self, sink: Sink, snapshot: Snapshot, *, restarts: bool) -> None:
        self._sink, self._snapshot, self._restarts = sink, snapshot, restarts
        self._numbers = count()

    def poll_update(self) -> None:
        number = next(self._numbers)
        if self._restarts or not number:
            hello = msgspec.structs.replace(self._snapshot.hello, epoch=self._snapshot.hello.epoch + number)
            self._sink.write(msgspec.structs.replace(self._snapshot, hello=hello))
            return
        time_ns = self._snapshot.time_ns + 100 * 365 * 86_400 * 10**9 * (number % 2)
        self._sink.write(Heartbeat(epoch=self._snapshot.hello.epoch, time_ns=time_ns, seq=0, step=0))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass


@pytest.mark.parametrize("restarts", [False, True])
def test_seconds_are_measured_by_the_local_clock_despite_a_wrong_engine_clock(
    make_messages: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, restarts: bool
) -> None:
    snapshot = make_messages(0)[1]
    monkeypatch.setattr(Address, "open", lambda self, sink: WrongClock(sink, snapshot, restarts=restarts))
    begun_s = time.monotonic()
    path = tmp_path / "x.mcap"
    assert main(["record", "ipc:///tmp/none", "--out", str(path), "--seconds", "0.5"]) == 0
    assert time.monotonic() - begun_s >= 0.5
    assert path.exists()


def test_seconds_option_ends_waiting_for_an_engine_that_does_not_answer(
    make_endpoint: Callable[[], str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    endpoint = make_endpoint()
    assert main(["record", endpoint, "--out", str(tmp_path / "x.mcap"), "--seconds", "0.3"]) == 1
    printed = capsys.readouterr().err
    assert f"kvscope: nothing was recorded: no telemetry from {endpoint} for 0.3 s" in printed
    assert "waiting up to 0.3 s" in printed
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("with_texts", [False, True])
def test_recording_contains_texts_only_with_record_text(
    serve: Callable,
    make_endpoint: Callable,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    with_texts: bool,  # type: ignore[type-arg]
) -> None:
    endpoint, path = make_endpoint(), tmp_path / "x.mcap"
    serve(endpoint, rate=60.0, num_blocks=200)
    for seconds in ("2.5", "10", "40"):  # texts arrive asynchronously, which takes long on a slow machine
        path.unlink(missing_ok=True)
        words = ["record", endpoint, "--out", str(path), "--seconds", seconds, *["--record-text"] * with_texts]
        assert main(words) == 0
        recording = Recording.open(path)
        if recording.has_texts == with_texts:
            break
    assert_unbroken(recording)
    assert recording.has_texts == with_texts
    capsys.readouterr()
    assert main(["info", str(path)]) == 0
    description = "contains prompt and answer text" if with_texts else "none"
    assert description in next(line for line in capsys.readouterr().out.splitlines() if line.startswith("texts"))


def test_segments_are_consecutive_and_readable_on_their_own(
    make_messages: Callable,
    tmp_path: Path,
    assert_same_state: Callable,  # type: ignore[type-arg]
) -> None:
    messages = make_messages(500)
    seconds = count()  # the clock advances by a second with each message
    writer = SegmentedWriter(tmp_path / "x.mcap", segment_seconds=len(messages) / 3, clock=lambda: next(seconds))
    for message in messages:
        assert writer.write(message)
    assert writer.close() == ""
    segments = [Recording.open(path) for path in sorted(tmp_path.glob("x-*.mcap"))]
    assert [segment.path.name for segment in segments] == ["x-001.mcap", "x-002.mcap", "x-003.mcap"]
    frames = [frame for segment in segments for frame in segment.frames()]
    assert frames == [message for message in messages if isinstance(message, Frame)]
    for segment, following in pairwise(segments):
        assert_unbroken(segment)
        assert following.start_ns >= segment.end_ns
        assert_same_state(following.state_at(0.0), segment.state_at(segment.info.duration_s))


def test_segment_bytes_starts_a_new_segment(make_messages: Callable, tmp_path: Path) -> None:  # type: ignore[type-arg]
    writer = SegmentedWriter(tmp_path / "x.mcap", segment_bytes=1)
    for message in make_messages(600):
        writer.write(message)
        time.sleep(0.1)  # the file is flushed each second
        if len(list(tmp_path.glob("x-*"))) >= 2:
            break
    assert writer.close() == ""
    assert len(list(tmp_path.glob("x-*.mcap"))) >= 2


@pytest.mark.parametrize("number", END_SIGNALS)
def test_signal_ends_the_recording_with_a_complete_file(
    serve: Callable,
    make_endpoint: Callable,
    tmp_path: Path,
    number: signal.Signals,  # type: ignore[type-arg]
) -> None:
    endpoint, path = make_endpoint(), tmp_path / "x.mcap"
    serve(endpoint)
    command = [sys.executable, "-m", "kvscope_app.main", "record", endpoint, "--out", str(path)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        part = tmp_path / "x.mcap.part"
        deadline = time.monotonic() + WAIT_S
        while not (part.exists() and part.stat().st_size > 20_000):  # flushed each second
            assert time.monotonic() < deadline
            assert process.poll() is None
            time.sleep(0.02)
        process.send_signal(number)
        assert process.stderr is not None
        stderr = process.stderr.read()
        assert process.wait(WAIT_S) == 0, stderr
    assert f"{endpoint}: live" in stderr.splitlines()  # slow connections print other lines first
    assert_unbroken(Recording.open(path))
    assert not part.exists()


def test_recording_ends_with_a_message_when_the_engine_stops(
    serve: Callable,
    make_endpoint: Callable,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],  # type: ignore[type-arg]
) -> None:
    endpoint = make_endpoint()
    server = serve(endpoint)

    def end_the_engine() -> None:
        """Close the server once the file contains some frames."""
        deadline, part = time.monotonic() + WAIT_S, tmp_path / "x.mcap.part"
        while time.monotonic() < deadline and not (part.exists() and part.stat().st_size > 20_000):
            time.sleep(0.02)
        server.close()

    ending = threading.Thread(target=end_the_engine)
    ending.start()
    assert main(["record", endpoint, "--out", str(tmp_path / "x.mcap"), "--wait", "4"]) == 1
    ending.join()
    assert f"the engine at {endpoint} has stopped" in capsys.readouterr().out
    assert_unbroken(Recording.open(tmp_path / "x.mcap"))


def test_without_an_engine_no_file_is_left(
    make_endpoint: Callable,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],  # type: ignore[type-arg]
) -> None:
    endpoint = make_endpoint()
    assert main(["record", endpoint, "--out", str(tmp_path / "x.mcap"), "--wait", "0.3"]) == 1
    assert f"kvscope: nothing was recorded: no telemetry from {endpoint} for 0.3 s" in capsys.readouterr().err


def test_without_an_engine_the_reason_is_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["record", f"ipc://{tmp_path}/nowhere", "--wait", "3", "--out", str(tmp_path / "none.mcap")]
    assert main(command) == 1
    printed = capsys.readouterr().err
    assert printed.count(f"no socket file {tmp_path}/nowhere/telemetry") == 2  # when it starts to wait, and at the end
    assert os.listdir(tmp_path) == []


def test_full_disk_ends_the_recording_with_a_message_and_a_complete_file(
    serve: Callable,
    make_endpoint: Callable,
    tmp_path: Path,  # type: ignore[type-arg]
) -> None:
    endpoint = make_endpoint()
    serve(endpoint)
    program = (
        "import resource, signal, sys\nfrom kvscope_app.main import main\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (150_000, 150_000))\n"
        f"sys.exit(main(['record', {endpoint!r}, '--out', {str(tmp_path / 'x.mcap')!r}]))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=WAIT_S)
    assert done.returncode == 1
    assert "stopped early: File too large; what came before is in x.mcap" in done.stderr.splitlines()[-1]
    info = Recording.open(tmp_path / "x.mcap").info
    assert info.num_frames > 0
    assert info.is_complete


def test_alarm_is_recorded_printed_and_posted_to_the_webhook(
    serve: Callable,
    make_endpoint: Callable,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],  # type: ignore[type-arg]
) -> None:
    endpoint, path = make_endpoint(), tmp_path / "x.mcap"
    serve(endpoint, rate=60.0)
    with open_receiver() as receiver:
        words = ["record", endpoint, "--out", str(path), "--alarm", "Busy: running > 0 for 1 s"]
        for seconds in ("5", "30", "90"):  # on a slow machine the first alarm takes longer
            path.unlink(missing_ok=True)
            assert main([*words, "--seconds", seconds, "--alarm-webhook", receiver.url]) == 0
            if receiver.posts:
                break
        post = receiver.posts[0]
    assert (post["name"], post["state"], post["instance"]) == ("Busy", "firing", endpoint)
    assert post["engine"] == "kvscope"
    mark = next(mark for mark in Recording.open(path).bookmarks() if mark.kind == "Busy")
    assert mark.text.startswith("up to ")
    assert re.search(
        r"^alarm: Busy: running > 0 for 1 s \(up to \d+ requests\)$", capsys.readouterr().err, re.MULTILINE
    )


def test_invalid_alarm_options_are_refused_before_anything_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["record", "ipc:///nobody/telemetry", "--out", str(tmp_path / "x.mcap")]
    assert main([*words, "--alarm", "runing > 3"]) == 2
    error = capsys.readouterr().err
    assert error.startswith(
        "kvscope: --alarm 'runing > 3': 'runing' is not a figure (did you mean running?); accepted: "
    )
    assert error.count("\n") == 1
    assert main([*words, "--alarm", "running > 3", "--alarm-webhook", "file:///x"]) == 2
    assert "webhook 'file:///x' is not accepted: http://HOST/" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


class AlternatingPages(dict[str, tuple[int, str, bytes]]):
    """Answers of two vLLM servers behind one address, alternating."""

    num_asked = 0

    def get(self, path: str, default: Any = None) -> Any:
        if path != "/metrics":
            return default
        self.num_asked += 1
        engine = self.num_asked % 2
        lines = (
            f"process_start_time_seconds {1 + engine}",
            f"vllm:prompt_tokens_total {1_000 + 150_000_000 * engine}",
            f"vllm:generation_tokens_total {500 + 9_000_000 * engine}",
            f"vllm:num_preemptions_total {3 + 302_000 * engine}",
            "vllm:num_requests_running 1",
        )
        return 200, "text/plain", "\n".join((*lines, "")).encode()


def test_several_engines_behind_one_address_are_reported_and_their_counters_unknown(
    server: FakeServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server.answers = AlternatingPages()
    path = tmp_path / "x.mcap"
    assert main(["record", f"vllm://127.0.0.1:{server.port}", "--out", str(path), "--seconds", "4.5"]) == 0
    assert "are several engines behind this address?" in capsys.readouterr().err
    assert main(["info", str(path)]) == 0
    shown = capsys.readouterr().out
    assert re.search(r"^tokens +unknown prefill, unknown decode$", shown, re.MULTILINE), shown
    assert re.search(r"^preemptions +unknown;", shown, re.MULTILINE), shown
