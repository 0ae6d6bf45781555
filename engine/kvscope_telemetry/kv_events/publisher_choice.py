"""Chooses one publisher by topic if several publish KV events to one endpoint, such as all engines of a cluster to the
endpoint that kvscope binds.

Each publisher has its own sequence numbers and blocks, so their batches must not be mixed. Uses no sockets.
"""

from __future__ import annotations

from enum import Enum
from typing import Final

MAX_OTHER_TOPICS: Final = 16
"""Maximum number of topics that are remembered besides the chosen one."""
MAX_TOPIC_BYTES: Final = 256
"""Maximum number of bytes of a topic that are remembered for the report of other topics."""


class Choice(Enum):
    """How a batch is treated that one of several publishers at the endpoint sent."""

    USE = 1
    IGNORE = 2
    SWITCH = 3
    """The batch's publisher is now the chosen one; everything received from another one is invalid."""


class PublisherChoice:
    """The topic whose batches are used: the first one received, unless a better one follows.

    Better is a topic that contains `host` between two `@`, as in llm-d's `kv@HOST@MODEL` or `kv@HOST:PORT@MODEL`; best
    is exactly `topic`, which the user gave. `topic` may also be the beginning of a topic, as in ZeroMQ subscriptions.
    """

    def __init__(self, topic: bytes, host: bytes) -> None:
        self.chosen: bytes | None = None
        self._topic, self._host = topic, host
        self._previous: bytes | None = None
        self._others: dict[bytes, None] = {}

    @property
    def has_several(self) -> bool:
        return bool(self._others)

    @property
    def ambiguous_topics(self) -> tuple[str, ...]:
        """All topics received, the chosen one first; empty if there is only one, or if the chosen one is better than
        the others.
        """
        if self.chosen is None or not self._others or self._rank(self.chosen):
            return ()
        return tuple(topic.decode("utf-8", "replace") for topic in (self.chosen, *sorted(self._others)))

    def choose(self, topic: bytes) -> Choice:
        if topic == self.chosen:
            return Choice.USE
        if self.chosen is None:
            self.chosen = topic
            return Choice.USE if self._previous in (None, topic) else Choice.SWITCH
        if self._rank(topic) > self._rank(self.chosen):
            self._remember(self.chosen)
            self._others.pop(topic, None)
            self.chosen = topic
            return Choice.SWITCH
        self._remember(topic)
        return Choice.IGNORE

    def forget(self) -> None:
        """Forget all topics, because no publisher is connected: the next one may be a restarted engine with another
        topic.
        """
        if self.chosen is not None:
            self._previous, self.chosen = self.chosen, None
        self._others.clear()

    def _remember(self, topic: bytes) -> None:
        if len(self._others) < MAX_OTHER_TOPICS:
            self._others[topic[:MAX_TOPIC_BYTES]] = None

    def _rank(self, topic: bytes) -> int:
        if self._topic and topic == self._topic:
            return 2
        fields = topic.split(b"@")
        return int(bool(self._host) and any(f == self._host or f.startswith(self._host + b":") for f in fields))
