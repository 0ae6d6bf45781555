"""An engine driven step by step, with its counters and events at hand; and prompts that no cache knows.

Knows neither what is measured nor why.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from types import TracebackType
from typing import Final, Self

from kvscope_engine.bench.reuse_cases.spent import Spent, Stopwatch
from kvscope_engine.engine import Engine
from kvscope_telemetry.engine_config import EngineConfig
from kvscope_telemetry.errors import KvscopeError
from kvscope_telemetry.messages.commands import Finished, Submit, Tokens
from kvscope_telemetry.messages.sampling_params import SamplingParams
from kvscope_telemetry.messages.telemetry import Counters, Frame, TelemetryMessage

FIRST_ID: Final = 3
"""Ids below are special tokens of most models."""
MAX_STEPS: Final = 10_000


class Probe:
    """Owns its engine."""

    def __init__(self, config: EngineConfig) -> None:
        self.counters = Counters()
        self.events: list[str] = []
        """What happened in the last step."""
        self.engine = Engine(config, publish=self._take)
        self._random = random.Random(0)
        self._num_submitted = 0

    def ids(self, count: int) -> list[int]:
        """A text of `count` tokens like no other."""
        return self._random.choices(range(FIRST_ID, self.engine.hello.model.vocab_size), k=count)

    def submit(self, ids: list[int], max_tokens: int, *, priority: int = 0, n: int = 1) -> str:
        """A request in the queue; returns its id. It never ends before `max_tokens`."""
        self._num_submitted += 1
        name = str(self._num_submitted)
        sampling = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, n=n)
        self.engine.submit(Submit(request_id=name, prompt_token_ids=tuple(ids), sampling=sampling, priority=priority))
        return name

    def abort(self, name: str) -> None:
        """The request ends with the next step."""
        self.engine.abort(name)

    def first_token(self, ids: list[int]) -> Spent:
        """From the submission of a prompt to its first token, the only one."""
        watch = Stopwatch()
        self.submit(ids, 1)
        self.until(lambda: not self.engine.has_unfinished)
        return watch.spent

    def token_of(self, name: str) -> None:
        """Step until the request says a token."""
        while (name, 0) not in self.step():
            pass

    def step(self) -> set[tuple[str, int]]:
        """One step; which completions (request, index) got a token in it."""
        if not self.engine.has_unfinished:
            raise KvscopeError("the benchmark waits for a token that nobody will say")
        self.events = []
        said = set()
        for message in self.engine.step():
            if isinstance(message, Tokens) and message.token_ids:
                said.add((message.request_id, message.index))
            elif isinstance(message, Finished) and message.error:
                raise KvscopeError(message.error)
        return said

    def until(self, is_so: Callable[[], bool]) -> None:
        """Step until something is so."""
        for _ in range(MAX_STEPS):
            if is_so():
                return
            self.step()
        raise KvscopeError(f"what the benchmark waits for did not happen in {MAX_STEPS} steps")

    def stop_all(self, *names: str) -> None:
        """Abort these, and step until nothing is unfinished."""
        for name in names:
            self.abort(name)
        self.until(lambda: not self.engine.has_unfinished)

    @property
    def num_risen(self) -> int:
        """Blocks read from disk since the start."""
        stats = self.engine.tier_stats
        return 0 if stats is None else stats.risen_bytes // self.engine.hello.cache.block_bytes

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.engine.close()

    def _take(self, message: TelemetryMessage) -> None:
        if isinstance(message, Frame):
            self.counters = message.counters
            self.events += [event.kind for event in message.events]


class Took:
    """What an engine's counters say of a stretch: what was computed, found, read back. Raises KvscopeError unless so.

    A benchmark that measured another thing than it says is worse than none.
    """

    def __init__(self, probe: Probe) -> None:
        self._probe = probe
        self._before, self._risen_before = probe.counters, probe.num_risen

    @property
    def computed(self) -> int:
        """Tokens of prompts, and those that a preemption had lost."""
        now, before = self._probe.counters, self._before
        return now.prompt_tokens + now.recomputed_tokens - before.prompt_tokens - before.recomputed_tokens

    def expect(self, what: str, *, computed: int, loaded: int = 0, risen: int = 0, with_output: bool = False) -> None:
        """Prompt tokens computed, blocks loaded from lower tiers, of them from disk. `with_output`: what a preemption
        had lost of an answer is computed as well, however much that was."""
        now = self._probe.counters
        found = (
            min(self.computed, computed) if with_output else self.computed,
            now.loaded_blocks - self._before.loaded_blocks,
            self._probe.num_risen - self._risen_before,
        )
        if found != (computed, loaded, risen):
            raise KvscopeError(
                f"{what}: {found[0]} prompt tokens were computed and {found[1]} blocks loaded, {found[2]} of them from"
                f" disk, where {computed}, {loaded} and {risen} were to be (the engine loads what is cheaper to load,"
                " as it measures)"
            )
