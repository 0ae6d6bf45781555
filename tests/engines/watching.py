"""A client that follows an engine frame by frame, with snapshots after lost frames."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import zmq

from kvscope_telemetry.messages.commands import Command, GetSnapshot, Reply
from kvscope_telemetry.messages.telemetry import Frame, Goodbye, Snapshot
from kvscope_telemetry.messages.wire import decode_reply, decode_telemetry, encode
from kvscope_telemetry.mirror.coalesce import coalesce
from kvscope_telemetry.mirror.mirror import Mirror
from kvscope_telemetry.transport.bind_address import parse_bind_address


class FrameByFrame:
    """Follows the engine at an ipc:// endpoint. `lose` makes it drop the next frames, like a bad network. `report` is
    called with each step that the mirror has reached.
    """

    def __init__(self, endpoint: str, report: Callable[[int], None] = lambda step: None) -> None:
        self._report = report
        address = parse_bind_address(endpoint)
        self.mirror = Mirror()
        self.lose = self.num_lost = 0
        self._context = zmq.Context()
        self._frames, self._commands = self._context.socket(zmq.SUB), self._context.socket(zmq.DEALER)
        self._frames.rcvhwm = 0
        self._frames.subscribe(b"")
        self._frames.connect(address.telemetry)
        self._commands.setsockopt(zmq.IDENTITY, secrets.token_bytes(8))
        self._commands.connect(address.command)
        self._must_ask = True

    def begin(self) -> None:
        """Start from the current state, once published frames arrive here."""
        assert self._frames.poll(60_000), "nothing was heard in a minute"
        self.mirror.apply(coalesce([], snapshot=self.snapshot()))
        self._must_ask = False
        self._report(self.mirror.step)

    def close(self) -> None:
        self._context.destroy(linger=0)

    def frames(self, seconds: float, until: int | None = None) -> Iterator[Frame]:
        """Yield each frame once the mirror has it, until none came for that long, or the mirror has step `until`."""
        came_s = time.monotonic()
        while time.monotonic() < came_s + seconds and (until is None or self.mirror.step < until):
            if not self._frames.poll(100):
                continue
            message = decode_telemetry(self._frames.recv())
            if not isinstance(message, Frame):
                continue
            came_s = time.monotonic()
            if self.lose:
                self.lose -= 1
                self.num_lost += 1
                continue
            if self._must_ask or message.seq > self.mirror.seq + 1:
                self.begin()
            if message.seq == self.mirror.seq + 1:
                self.mirror.apply(coalesce([message]))
                self._report(message.step)
                yield message

    def goodbye(self, seconds: float) -> str:
        """Return the reason of the engine's goodbye without numbers, and fail if none comes in time."""
        end_s = time.monotonic() + seconds
        while time.monotonic() < end_s:
            if self._frames.poll(100) and isinstance(message := decode_telemetry(self._frames.recv()), Goodbye):
                return message.reason
        raise AssertionError("no goodbye came")

    def snapshot(self) -> Snapshot:
        reply = self.ask(GetSnapshot())
        assert isinstance(reply, Snapshot)
        return reply

    def ask(self, command: Command) -> Reply:
        """Return the reply to a command."""
        self._commands.send(encode(command))
        assert self._commands.poll(60_000), "no answer came in a minute"
        return decode_reply(self._commands.recv())


def wait_for(path: Path, seconds: float = 180.0) -> None:
    """Wait until the file exists."""
    end = time.monotonic() + seconds
    while not path.exists():
        assert time.monotonic() < end, f"{path} did not come"
        time.sleep(0.05)
