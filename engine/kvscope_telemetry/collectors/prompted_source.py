"""Base class of the sources of external engines: locally created updates, and prompts through an OpenAI API.

Owns the update queue and shutdown. The derived source owns the polling thread and creates the messages.
"""

from __future__ import annotations

import threading

from kvscope_telemetry.collectors.external_address import ExternalAddress
from kvscope_telemetry.collectors.prompting.prompter import Prompter
from kvscope_telemetry.collectors.update_queue import UpdateQueue
from kvscope_telemetry.messages.commands import Command, Reply
from kvscope_telemetry.source import Update
from kvscope_telemetry.sources.mirrored_source import MirroredSource
from kvscope_telemetry.sources.sink import Sink


class PromptedSource(MirroredSource):
    """Source for the external engine at `address`. A derived class must start its thread as `_thread`."""

    def __init__(self, address: ExternalAddress, sink: Sink | None) -> None:
        super().__init__(threading.Condition())
        self._address = address
        self._updates = UpdateQueue(sink)
        self._resync_wanted = False
        self._end = threading.Event()
        self._prompter = Prompter(address)
        self._thread: threading.Thread

    def poll_update(self) -> Update | None:
        return self._updates.poll_update()

    def resync(self) -> None:
        """Discard pending updates and send a snapshot, because a reader could not apply an update."""
        self._updates.discard()
        self._resync_wanted = True

    def set_sink(self, sink: Sink | None) -> None:
        """Pass subsequent messages, beginning with a snapshot, to `sink`, or to no sink if None."""
        self._updates.set_sink(sink)

    def send(self, command: Command) -> None:
        """Send a prompt through the engine's OpenAI API, or abort or estimate one. Thread-safe and non-blocking.

        Other commands are refused. Raises BadInput for a command that is too large, EngineDead after `close`.
        """
        self._prompter.send(command)

    def poll_replies(self) -> list[Reply]:
        return self._prompter.poll_replies()

    def close(self) -> None:
        self._end.set()
        self._prompter.close()
        self._thread.join()
