"""The KV events of an attached engine: the stream, wherever the server says that they are now.

Owns the stream and when it is opened anew. Belongs to one thread, but for `status`.
"""

from __future__ import annotations

import time
from typing import Final

from kvscope_telemetry.errors import KvscopeError
from kvscope_telemetry.foreign.address import ForeignAddress, waits_for_publisher
from kvscope_telemetry.foreign.server_facts import ServerFacts
from kvscope_telemetry.kv_events.stream import KvEventStream
from kvscope_telemetry.kv_events.stream_items import Reset, StreamItem, StreamState, StreamStatus

RETRY_S: Final = 5.0
"""For an endpoint that could not be had."""
_Where = tuple[str, str, str]


class EventPart:
    """Of the rank at `address`: from the endpoint in it, or else from where the server says."""

    def __init__(self, address: ForeignAddress) -> None:
        self.failure = ""
        """Why the endpoint cannot be used, empty while it can."""
        self._address = address
        self._stream: KvEventStream | None = None
        self._where: _Where = ("", "", "")
        self._retry_s = 0.0
        self._moved: list[StreamItem] = []
        if address.kv_events:
            self._open(address.kv_events, address.replay, address.topic)

    @property
    def status(self) -> StreamStatus | None:
        """How the stream is; None where there is none."""
        return None if self._stream is None else self._stream.status

    @property
    def is_live(self) -> bool:
        """Whether what was given is what is."""
        return self._stream is not None and self._stream.status.state is StreamState.LIVE

    def learn(self, facts: ServerFacts) -> None:
        """What the server says; a server that no longer says it leaves the stream as it is."""
        if not self._address.kv_events and facts.kv_events:
            self._open(facts.kv_events, facts.replay, self._address.topic or facts.topic)

    def take(self) -> list[StreamItem]:
        """What came since the last call, in order."""
        if self.failure and time.monotonic() >= self._retry_s:
            self._open(*self._where)
        moved, self._moved = self._moved, []
        return moved if self._stream is None else [*moved, *self._stream.take()]

    def close(self) -> None:
        """Stop reading. Idempotent."""
        stream, self._stream = self._stream, None
        if stream is not None:
            stream.close()

    def _open(self, endpoint: str, replay: str, topic: str) -> None:
        where = (endpoint, replay, topic)
        if self._stream is not None:
            if where == self._where:
                return
            self.close()
            self._moved.append(Reset(f"KV events are at {endpoint} now"))
        self._where, self.failure = where, ""
        address = self._address
        try:
            self._stream = KvEventStream(
                address.endpoint(endpoint),
                address.endpoint(replay) if replay else None,
                topic=topic,
                bind=waits_for_publisher(endpoint),
            )
        except KvscopeError as error:
            self.failure, self._retry_s = str(error), time.monotonic() + RETRY_S
