"""How attempts to connect went, and what a person is told of one that is refused.

Fed with the events of a socket monitor; knows no sockets.
"""

from __future__ import annotations

from typing import Final

import zmq

from kvscope_telemetry.keys.key_files import ClientKey

HANDSHAKE_EVENTS: Final = (
    zmq.EVENT_HANDSHAKE_SUCCEEDED
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)
FINAL_EVENTS: Final = (zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL, zmq.EVENT_HANDSHAKE_FAILED_AUTH)
"""After these ZeroMQ does not try again by itself."""
HANG_UPS_TO_TELL: Final = 3
"""A hang-up has many reasons (an engine that just ends, a tunnel with nothing behind it): so many in a row are told."""


class Handshakes:
    """Of one socket. Written by one thread; any may read."""

    def __init__(self, endpoint: str, key: ClientKey | None) -> None:
        self.num_done = 0
        """Connections of this socket that were made so far: a new number is a new connection."""
        self.refusal = ""
        """Why the other end does not let us in, in one sentence; empty when it does, or there is none."""
        self._endpoint = endpoint
        self._key = key
        self._num_hang_ups = 0

    def take(self, event: zmq.Event) -> None:
        """One event of the monitor."""
        if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            self.num_done += 1
            self.refusal, self._num_hang_ups = "", 0
        elif event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
            self.refusal = self._unknown_key()
        elif event == zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL:
            self.refusal = self._other_mechanism()
        else:
            self._num_hang_ups += 1
            if self._num_hang_ups >= HANG_UPS_TO_TELL:
                self.refusal = self.refusal or self._hung_up()

    def _unknown_key(self) -> str:
        name = repr(self._key.name) if self._key is not None else "there is none"
        return f"the engine at {self._endpoint} does not know this key ({name})"

    def _other_mechanism(self) -> str:
        if self._key is None:
            return f"the engine at {self._endpoint} needs a key: use --key FILE"
        return f"the engine at {self._endpoint} uses no keys: connect with --key none"

    def _hung_up(self) -> str:
        if self._key is None:
            return f"{self._endpoint} closes the connection: it may need a key (--key FILE), or not be an engine"
        return (
            f"{self._endpoint} closes the connection for key {self._key.name!r}: another engine's key, an "
            "engine without keys (--key none), or not an engine"
        )
