"""A client that follows an engine frame by frame, with snapshots after lost frames."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator
from pathlib import Path

import zmq

from kvscope_telemetry.messages.commands import Command, GetSnapshot, Reply
from kvscope_telemetry.messages.telemetry import Frame, Goodbye, Snapshot
from kvscope_telemetry.messages.wire import decode_reply, decode_telemetry, encode
from kvscope_telemetry.mirror.coalesce import coalesce
from kvscope_telemetry.mirror.mirror import Mirror
from kvscope_telemetry.transport.bind_address import parse_bind_address


class FrameByFrame:
    """Follows the engine at an ipc:// endpoint. `lose` makes it drop the next frames, like a bad network."""

    def __init__(self, endpoint: str) -> None:
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
        assert self._frames.poll(10_000), "nothing was heard in 10 s"
        self.mirror.apply(coalesce([], snapshot=self.snapshot()))
        self._must_ask = False

    def close(self) -> None:
        self._context.destroy(linger=0)

    def frames(self, seconds: float) -> Iterator[Frame]:
        """Yield each frame once the mirror has it, until none came for that long."""
        came_s = time.monotonic()
        while time.monotonic() < came_s + seconds:
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
        assert self._commands.poll(10_000), "no answer came in 10 s"
        return decode_reply(self._commands.recv())


def wait_for(path: Path, seconds: float = 60.0) -> None:
    """Wait until the file exists."""
    end = time.monotonic() + seconds
    while not path.exists():
        assert time.monotonic() < end, f"{path} did not come"
        time.sleep(0.05)
