"""Commands that wait for the engine's thread: a queue a client, served in turn, bounded in number and bytes.

Whoever sends thousands of commands waits for them itself: every other client's next one is served after one of
its. The order of each client's own is kept. A client that asks for several others, as the HTTP API does, says for whom
(`Whose`): those take turns within its own, and are bounded each. Any thread puts, one thread takes.
"""

from __future__ import annotations

import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import chain
from queue import SimpleQueue
from typing import Final, Generic, NamedTuple, TypeVar

from kvscope_engine.server.limits import Allowance, ServiceLimits
from kvscope_engine.server.turns import Turns

_Task = TypeVar("_Task")


class Whose(NamedTuple):
    """For whom a command is sent, and what it belongs to; both empty: the client's own."""

    client: str = ""
    batch: str = ""


OWN: Final = Whose()


@dataclass(slots=True)
class _Waiting(Generic[_Task]):
    """What waits of one client, each with for whom it is, and its bytes. Its own comes before what is for others."""

    own: deque[tuple[_Task, str, int]] = field(default_factory=deque)
    others: Turns[tuple[_Task, str, int]] = field(default_factory=Turns)

    def __bool__(self) -> bool:
        return bool(self.own) or bool(self.others)

    def all(self) -> Iterable[tuple[_Task, str, int]]:
        return chain(self.own, self.others)

    def pop(self) -> tuple[_Task, str, int]:
        if self.own:
            return self.own.popleft()
        found = self.others.pop()
        assert found is not None, "a client of whom nothing waits is forgotten"
        return found[1]


class CommandQueue(Generic[_Task]):
    """Work by client. `stop` ends every wait, now and later."""

    def __init__(self, limits: ServiceLimits) -> None:
        self.is_stopped = False
        self._allowance = Allowance("commands wait", limits.client_commands, limits.all_commands)
        self._clients: OrderedDict[bytes, _Waiting[_Task]] = OrderedDict()
        self._lock = threading.Lock()
        self._bell: SimpleQueue[None] = SimpleQueue()
        """Rung when there is something to look for; unlike a condition, also by a signal handler of whoever waits."""

    def put(self, client: bytes, task: _Task, num_bytes: int = 0, whose: Whose = OWN) -> str:
        """Append to the client's queue; the reason when that is too much. With 0 bytes it is always taken."""
        with self._lock:
            reason = self._allowance.take((client, whose.client), num_bytes) if num_bytes else ""
            if reason:
                return reason
            was_empty = not self._clients
            waiting = self._clients.setdefault(client, _Waiting())
            entry = (task, whose.client, num_bytes)
            if whose == OWN:
                waiting.own.append(entry)
            else:
                waiting.others.put(whose.client, whose.batch, entry)
        if was_empty:
            self._bell.put(None)
        return ""

    def put_first(self, client: bytes, task: _Task) -> None:
        """Before all else of that client; always taken. From any thread."""
        with self._lock:
            was_empty = not self._clients
            self._clients.setdefault(client, _Waiting()).own.appendleft((task, "", 0))
        if was_empty:
            self._bell.put(None)

    def put_back(self, client: bytes, task: _Task) -> None:
        """What is left of a task goes on when the client's turn comes again, before all else of that client."""
        with self._lock:
            self._clients.setdefault(client, _Waiting()).own.appendleft((task, "", 0))

    def next(self, *, wait: bool) -> tuple[bytes, _Task] | None:
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

    def of(self, client: bytes) -> list[_Task]:
        """What waits of one client, the oldest of each of its lines first."""
        with self._lock:
            waiting = self._clients.get(client)
            return [] if waiting is None else [task for task, _, _ in waiting.all()]

    def take_if(self, client: bytes, is_wanted: Callable[[_Task], bool]) -> list[_Task]:
        """Take out what is wanted of one client, in the order of `of`; the rest keeps its place."""
        with self._lock:
            waiting = self._clients.get(client)
            if waiting is None:
                return []
            taken = [entry for entry in waiting.own if is_wanted(entry[0])]
            waiting.own = deque(entry for entry in waiting.own if not is_wanted(entry[0]))
            taken += waiting.others.take_if(lambda entry: is_wanted(entry[0]))
            for _, whose, num_bytes in taken:
                self._give(client, whose, num_bytes)
            if not waiting:
                del self._clients[client]
            return [task for task, _, _ in taken]

    def move(self, before: bytes, client: bytes) -> None:
        """Everything of `before` is `client`'s from now on, and comes before what that has."""
        with self._lock:
            earlier = self._clients.pop(before, None)
            if earlier is None:
                return
            for whose in ("", *earlier.others.clients):
                self._allowance.move((before, whose), (client, whose))
            later = self._clients.pop(client, None)
            if later is not None:
                earlier.own += later.own
                earlier.others.join(later.others)
            self._clients[client] = earlier

    def stop(self) -> None:
        """Nobody waits any more."""
        self.is_stopped = True
        self._bell.put(None)

    def _pop_first(self) -> tuple[bytes, _Task]:
        client, waiting = self._clients.popitem(last=False)
        task, whose, num_bytes = waiting.pop()
        if waiting:
            self._clients[client] = waiting  # at the end: the others come first
        self._give(client, whose, num_bytes)
        return client, task

    def _give(self, client: bytes, whose: str, num_bytes: int) -> None:
        if num_bytes:
            self._allowance.give((client, whose), num_bytes)
