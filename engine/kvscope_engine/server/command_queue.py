"""Commands that wait for the engine's thread: a queue a client, served in turn, bounded in number and bytes.

Whoever sends thousands of commands waits for them itself: every other client's next one is served after one of
its. The order of each client's own is kept. Any thread puts, one thread takes.
"""

from __future__ import annotations

import threading
from collections import OrderedDict, deque
from collections.abc import Callable
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

    def put_first(self, client: bytes, work: _Work) -> None:
        """Before all else of that client; always taken. From any thread."""
        with self._lock:
            was_empty = not self._clients
            self._clients.setdefault(client, deque()).appendleft((work, 0))
        if was_empty:
            self._bell.put(None)

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

    def has(self, client: bytes) -> bool:
        """Whether anything of the client waits."""
        with self._lock:
            return client in self._clients

    def of(self, client: bytes) -> list[_Work]:
        """What waits of one client, oldest first."""
        with self._lock:
            return [work for work, _ in self._clients.get(client, ())]

    def take_if(self, client: bytes, is_wanted: Callable[[_Work], bool]) -> list[_Work]:
        """Take out what is wanted of one client, oldest first; the rest keeps its place."""
        with self._lock:
            taken: list[_Work] = []
            rest: deque[tuple[_Work, int]] = deque()
            for work, num_bytes in self._clients.get(client, ()):
                if is_wanted(work):
                    taken.append(work)
                    self._give(client, num_bytes)
                else:
                    rest.append((work, num_bytes))
            if rest:
                self._clients[client] = rest
            else:
                self._clients.pop(client, None)
            return taken

    def move(self, before: bytes, client: bytes) -> None:
        """Everything of `before` is `client`'s from now on, and comes before what that has."""
        with self._lock:
            waiting = self._clients.pop(before, None)
            self._allowance.move(before, client)
            if waiting:
                self._clients[client] = waiting + self._clients.pop(client, deque())

    def stop(self) -> None:
        """Nobody waits any more."""
        self.is_stopped = True
        self._bell.put(None)

    def _pop_first(self) -> tuple[bytes, _Work]:
        client, waiting = self._clients.popitem(last=False)
        work, num_bytes = waiting.popleft()
        if waiting:
            self._clients[client] = waiting  # at the end: the others come first
        self._give(client, num_bytes)
        return client, work

    def _give(self, client: bytes, num_bytes: int) -> None:
        if num_bytes:
            self._allowance.give(client, num_bytes)
