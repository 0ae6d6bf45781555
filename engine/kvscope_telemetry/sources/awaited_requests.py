"""Requests of this client that have not ended, and what was heard of each: what it tells after a reconnection.

Knows no sockets. Belongs to the reading thread.
"""

from __future__ import annotations

from kvscope_telemetry.messages.commands import (
    MAX_AWAITED,
    Accepted,
    Awaited,
    Command,
    Finished,
    Refused,
    Reply,
    Submit,
    Tokens,
)

ENDED = -1


class AwaitedRequests:
    """Fed with every command that left and every reply that came."""

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
