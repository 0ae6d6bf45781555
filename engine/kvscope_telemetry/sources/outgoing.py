"""Commands on their way to the engine, and requests of this client that have not ended. Knows no sockets.

Any thread puts commands, the reading thread sends them and hears the answers. A command that finds no engine for
`MAX_WAIT_NS` is answered here, so that nothing is lost without a word and no engine started later gets it.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Final

from kvscope_telemetry.errors import BadInput, EngineDead
from kvscope_telemetry.messages.commands import (
    MAX_AWAITED,
    MAX_COMMAND_BYTES,
    Accepted,
    Awaited,
    Command,
    Finished,
    Refused,
    Reply,
    Submit,
    Tokens,
    refuse,
)
from kvscope_telemetry.messages.wire import encode

MAX_WAITING: Final = 10_000
MAX_WAITING_BYTES: Final = 64 << 20
MAX_WAIT_NS: Final = 5_000_000_000
NO_ENGINE: Final = "the engine does not answer"
ENDED: Final = -1


class Outgoing:
    """A queue of commands, bounded in number and bytes."""

    def __init__(self) -> None:
        self._commands: deque[tuple[int, Command, bytes]] = deque()
        self._bytes_put = 0  # by threads that put, under the lock; the next by the one that sends
        self._bytes_gone = 0
        self._lock = threading.Lock()

    @property
    def is_empty(self) -> bool:
        """Whether none waits."""
        return not self._commands

    def put(self, command: Command) -> None:
        """Append. Raises BadInput for a command above the size limit, EngineDead when too many wait."""
        data = encode(command)
        if len(data) > MAX_COMMAND_BYTES:
            raise BadInput(f"a command of {len(data)} bytes is not accepted: at most {MAX_COMMAND_BYTES}")
        with self._lock:
            num_bytes = self._bytes_put - self._bytes_gone
            if len(self._commands) >= MAX_WAITING or (num_bytes and num_bytes + len(data) > MAX_WAITING_BYTES):
                raise EngineDead(
                    f"{NO_ENGINE}: {len(self._commands)} commands with {num_bytes} bytes are queued already"
                )
            self._bytes_put += len(data)
            self._commands.append((time.monotonic_ns(), command, data))

    def send_all(self, send: Callable[[bytes], bool], sent: Callable[[Command], None] = lambda command: None) -> None:
        """Hand over from the oldest until `send` says that it takes no more; `sent` is told of each that left."""
        while self._commands and send(self._commands[0][2]):
            sent(self._pop())

    def expired(self, now_ns: int) -> list[Reply]:
        """Answers to the commands that waited too long; they are gone."""
        replies: list[Reply] = []
        while self._commands and now_ns - self._commands[0][0] > MAX_WAIT_NS:
            replies.append(refuse(self._pop(), NO_ENGINE))
        return replies

    def _pop(self) -> Command:
        _, command, data = self._commands.popleft()
        self._bytes_gone += len(data)
        return command


class AwaitedRequests:
    """Requests that have not ended, and what was heard of each: what a client tells after a reconnection.

    Fed with every command that left and every reply that came. Belongs to the reading thread.
    """

    def __init__(self) -> None:
        self._heard: dict[str, list[int]] = {}

    def sent(self, command: Command) -> None:
        """A command left."""
        if isinstance(command, Submit) and len(self._heard) < MAX_AWAITED:
            self._heard.setdefault(command.request_id, [])

    def heard(self, reply: Reply) -> None:
        """A reply came."""
        if isinstance(reply, Refused):
            if not self._heard.get(reply.request_id):  # else it is the second of two with one id that was refused
                self._heard.pop(reply.request_id, None)
        elif isinstance(reply, Accepted):
            if reply.request_id in self._heard:
                self._heard[reply.request_id] = [0] * len(reply.numbers)
        elif isinstance(reply, Tokens | Finished):
            self._count(reply)

    @property
    def ids(self) -> list[str]:
        """Of all of them."""
        return list(self._heard)

    def all(self) -> tuple[Awaited, ...]:
        """What to tell."""
        return tuple(Awaited(request_id=name, heard=tuple(counts)) for name, counts in self._heard.items())

    def _count(self, reply: Tokens | Finished) -> None:
        counts = self._heard.get(reply.request_id)
        if counts is None or not 0 <= reply.index < max(1, len(counts)):
            return
        if not counts:  # the end of one that the engine never accepted
            del self._heard[reply.request_id]
        elif isinstance(reply, Tokens):
            counts[reply.index] += 1
        else:
            counts[reply.index] = ENDED
            if all(count == ENDED for count in counts):
                del self._heard[reply.request_id]
