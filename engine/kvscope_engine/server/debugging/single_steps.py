"""Steps that are asked for one by one while somebody holds the engine: who waits for how many more.

Owns the queue of askers. Knows neither the engine nor sockets: it is told when a step ran. Belongs to the engine's
thread.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from kvscope_telemetry.messages.commands import Done, Reply


@dataclass(slots=True)
class _Asked:
    client: bytes
    tag: int
    num_wanted: int
    num_run: int = 0


class SingleSteps:
    """Answers through `reply` when the steps that were asked for ran, or none can follow."""

    def __init__(self, reply: Callable[[bytes, Reply], None]) -> None:
        self._reply = reply
        self._asked: deque[_Asked] = deque()

    @property
    def any(self) -> bool:
        """Whether a step is to be run though somebody holds the engine."""
        return bool(self._asked)

    @property
    def first(self) -> bytes | None:
        """The client whose turn it is."""
        return self._asked[0].client if self._asked else None

    def ask(self, client: bytes, tag: int, num_steps: int) -> None:
        """Run so many, after those that were asked for before."""
        self._asked.append(_Asked(client, tag, num_steps))

    def ran(self, step: int) -> None:
        """Step `step` ran; does nothing when nobody asked for it."""
        if self._asked:
            first = self._asked[0]
            first.num_run += 1
            if first.num_run == first.num_wanted:
                self._asked.popleft()
                self._answer(first, step)

    def end(self, step: int, why: str) -> None:
        """There will be no more of them; `step` was the last."""
        while self._asked:
            self._answer(self._asked.popleft(), step, why)

    def forget(self, client: bytes) -> None:
        """Nobody waits for what it asked for."""
        self._asked = deque(asked for asked in self._asked if asked.client != client)

    def _answer(self, asked: _Asked, step: int, why: str = "") -> None:
        if asked.num_run > 1:
            what = f"steps {step - asked.num_run + 1} to {step} ran"
        else:
            what = f"step {step} ran" if asked.num_run else "no step ran"
        self._reply(asked.client, Done(tag=asked.tag, what=f"{what}: {why}" if why else what))
