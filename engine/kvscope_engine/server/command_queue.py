"""Commands that wait for the engine's thread: a queue a client, served in turn, bounded in number and bytes.

Whoever sends thousands of commands waits for them itself: every other client's next one is served after one of
its. The order of each client's own is kept. Any thread puts, one thread takes.
"""

from __future__ import annotations

import threading
from collections import OrderedDict, deque
from queue import SimpleQueue
from typing import Generic, TypeVar

from kvscope_engine.server.allowance import Allowance
from kvscope_engine.server.limits import ServiceLimits

_Work = TypeVar("_Work")


class CommandQueue(Generic[_Work]):
    """Work by client. `stop` ends every wait, now and later."""

    def __init__(self, limits: ServiceLimits) -> None:
        self.is_stopped = False
        self._allowance = Allowance("commands wait", limits.client_commands, limits.all_commands)
        self._clients: OrderedDict[bytes, deque[tuple[_Work, int]]] = OrderedDict()
        self._lock = threading.Lock()
        self._bell: SimpleQueue[None] = SimpleQueue()
        """Rung when there is something to look for; unlike a condition, also by a signal handler of whoever waits."""

    def put(self, client: bytes, work: _Work, num_bytes: int = 0) -> str:
        """Append to the client's queue; the reason when that is too much. With 0 bytes it is always taken."""
        with self._lock:
            reason = self._allowance.take(client, num_bytes) if num_bytes else ""
            if reason:
                return reason
            was_empty = not self._clients
            self._clients.setdefault(client, deque()).append((work, num_bytes))
        if was_empty:
            self._bell.put(None)
        return ""

    def put_back(self, client: bytes, work: _Work) -> None:
        """What is left of an errand goes on when the client's turn comes again, before all else of that client."""
        with self._lock:
            self._clients.setdefault(client, deque()).appendleft((work, 0))

    def next(self, *, wait: bool) -> tuple[bytes, _Work] | None:
        """The next client's oldest; with `wait`, sleeps until there is one, or it is time to stop."""
        while True:
            while not self._bell.empty():
                self._bell.get()
            with self._lock:
                if self._clients:
                    return self._pop_first()
            if not wait or self.is_stopped:
                return None
            self._bell.get()

    def take_all(self, client: bytes) -> list[_Work]:
        """Everything of one client, oldest first; nothing of it waits afterwards."""
        with self._lock:
            waiting = self._clients.pop(client, ())
            self._release(client, waiting)
            return [work for work, _ in waiting]

    def stop(self) -> None:
        """Nobody waits any more."""
        self.is_stopped = True
        self._bell.put(None)

    def _pop_first(self) -> tuple[bytes, _Work]:
        client, waiting = self._clients.popitem(last=False)
        work, num_bytes = waiting.popleft()
        if waiting:
            self._clients[client] = waiting  # at the end: the others come first
        if num_bytes:
            self._allowance.give(client, num_bytes)
        return client, work

    def _release(self, client: bytes, waiting: deque[tuple[_Work, int]] | tuple[()]) -> None:
        for _, num_bytes in waiting:
            if num_bytes:
                self._allowance.give(client, num_bytes)
