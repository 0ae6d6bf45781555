"""What the engine said of one HTTP request's prompts and nobody took yet: bounded, in order, for one task.

Belongs to the event loop. Knows neither sockets nor HTTP.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Final, TypeAlias

from kvscope_telemetry.messages.commands import Accepted, Finished, Refused, Tokens

Said: TypeAlias = Accepted | Refused | Tokens | Finished

MAX_STREAM_BYTES: Final = 4 << 20
"""That wait for a client who reads too slowly; then its request ends."""
MAX_WHOLE_BYTES: Final = 64 << 20
"""Of an answer that is told at its end."""
OVERHEAD_BYTES: Final = 200


class Inbox:
    """Of one request. `is_stream`: wakes who waits for every token, otherwise at beginnings and ends alone."""

    def __init__(self, *, is_stream: bool) -> None:
        self.overflowed = False
        """More came than may wait: nothing is taken any more."""
        self._wakes_on_tokens = is_stream
        self._max_bytes = MAX_STREAM_BYTES if is_stream else MAX_WHOLE_BYTES
        self._said: deque[tuple[int, Said]] = deque()
        self._num_bytes = 0
        self._waiter: asyncio.Future[None] | None = None

    def put(self, prompt: int, said: Said, num_bytes: int) -> None:
        """Append what was said of the prompt of this number."""
        if self.overflowed:
            return
        self._num_bytes += num_bytes + OVERHEAD_BYTES
        self._said.append((prompt, said))
        if self._num_bytes > self._max_bytes:
            self.overflowed = True
            self._said.clear()
        if self.overflowed or self._wakes_on_tokens or not isinstance(said, Tokens):
            self._wake()

    async def take(self) -> list[tuple[int, Said]]:
        """Everything that waits, oldest first, once there is something worth waking for."""
        while not self._said and not self.overflowed:
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        said = list(self._said)
        self._said.clear()
        if self._wakes_on_tokens:
            self._num_bytes = 0  # what is kept of a whole answer goes on to count
        return said

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
