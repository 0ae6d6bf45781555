"""Engine that a benchmark steps itself, with random prompts that are in no cache. Uses the engine's own counters."""

from __future__ import annotations

import random
import time
from types import TracebackType
from typing import Final, Self

from kvscope_engine.engine import Engine
from kvscope_telemetry.engine_config import EngineConfig
from kvscope_telemetry.errors import KvscopeError
from kvscope_telemetry.messages.commands import Finished, Submit
from kvscope_telemetry.messages.sampling_params import SamplingParams
from kvscope_telemetry.messages.telemetry import Frame, TelemetryMessage

FIRST_ID: Final = 3
"""First usable token id; smaller ids are special tokens in most models."""


class Probe:
    """Engine with a count of computed prompt tokens. Use it as a context manager, which closes the engine."""

    def __init__(self, config: EngineConfig) -> None:
        self._num_computed = 0
        self.engine = Engine(config, publish=self._count)
        self._random = random.Random(0)
        self._num_submitted = 0

    def ids(self, count: int) -> list[int]:
        return self._random.choices(range(FIRST_ID, self.engine.hello.model.vocab_size), k=count)

    def first_token_s(self, ids: list[int], num_computed: int | None = None) -> float:
        """Return the seconds from the submission of a prompt to its first token, after which the request ends.

        Raises KvscopeError if the request fails, or if the number of prompt tokens computed is not `num_computed`,
        because the time would then be that of another case. None accepts any number.
        """
        before, start_s = self._num_computed, time.perf_counter()
        self._num_submitted += 1
        sampling = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
        request_id = str(self._num_submitted)
        self.engine.submit(Submit(request_id=request_id, prompt_token_ids=tuple(ids), sampling=sampling))
        while self.engine.has_unfinished:
            for message in self.engine.step():
                if isinstance(message, Finished) and message.error:
                    raise KvscopeError(message.error)
        seconds, computed = time.perf_counter() - start_s, self._num_computed - before
        if num_computed not in (None, computed):
            raise KvscopeError(f"{computed} of {len(ids)} prompt tokens were computed; {num_computed} were expected")
        return seconds

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.engine.close()

    def _count(self, message: TelemetryMessage) -> None:
        if isinstance(message, Frame):
            counters = message.counters
            self._num_computed = counters.prompt_tokens + counters.recomputed_tokens
