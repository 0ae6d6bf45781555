"""What sources of other engines have in common: updates that are made here, and prompts through an OpenAI API.

Owns the queue of updates and the end; what is told, and the thread that finds it out, are the source's.
"""

from __future__ import annotations

import threading

from kvscope_telemetry.external.address import ExternalAddress
from kvscope_telemetry.external.prompting.prompter import Prompter
from kvscope_telemetry.external.update_queue import UpdateQueue
from kvscope_telemetry.messages.commands import Command, Reply
from kvscope_telemetry.source import Update
from kvscope_telemetry.sources.mirrored_source import MirroredSource
from kvscope_telemetry.sources.sink import Sink


class PromptedSource(MirroredSource):
    """Of the engine at `address`; its thread is started by whoever inherits, as `_thread`."""

    def __init__(self, address: ExternalAddress, sink: Sink | None) -> None:
        super().__init__(threading.Condition())
        self._address = address
        self._hand_over = UpdateQueue(sink)
        self._resync_wanted = False
        self._end = threading.Event()
        self._prompter = Prompter(address)
        self._thread: threading.Thread

    def take_update(self) -> Update | None:
        """What came since the last call, None when nothing did."""
        return self._hand_over.take_update()

    def resync(self) -> None:
        """For a taker that could not apply an update: drop what waits, begin anew with the whole state."""
        self._hand_over.discard()
        self._resync_wanted = True

    def set_sink(self, sink: Sink | None) -> None:
        """From now on give what is told to `sink`, or to nobody. It begins with the whole state."""
        self._hand_over.set_sink(sink)

    def send(self, command: Command) -> None:
        """Send a prompt through its OpenAI API, or hang up on one. From any thread; never waits.

        All else is refused. Raises BadInput for one that is too large, EngineDead after `close`.
        """
        self._prompter.send(command)

    def take_replies(self) -> list[Reply]:
        """Answers to what was sent since the last call, oldest first."""
        return self._prompter.take_replies()

    def close(self) -> None:
        """End the threads and free the sockets. Idempotent."""
        self._end.set()
        self._prompter.close()
        self._thread.join()
