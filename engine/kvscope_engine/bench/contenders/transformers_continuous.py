"""Continuous batching of transformers as a contender: what `generate_batch` runs, each request with an end of its own.

A thread of its own steps over a paged cache; who joins when is its own affair, so requests are given all at once.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

from kvscope_engine.bench.workloads import BenchWorkload

BATCH_TOKENS: Final = 512
PAGE_SIZE: Final = 16
_POLL_SECONDS: Final = 1.0


@dataclass(frozen=True, slots=True)
class Generated:
    """New tokens of each request, and the seconds from the first that was given to the last that was done."""

    tokens: list[list[int]]
    seconds: float
    is_whole: bool
    """Not where the time was up before all were done."""

    @property
    def num_tokens(self) -> int:
        """Of all requests."""
        return sum(len(each) for each in self.tokens)


class TransformersContinuous:
    """A model of transformers, greedy.

    `batching`: what to give its `ContinuousBatchingConfig`, where {} is its own defaults: pages, tokens of a batch and
    as many blocks as the memory has room for. Without it small pages and batches, and blocks for all requests.
    """

    name = "transformers, continuous"

    def __init__(self, module: Any, batching: Mapping[str, Any] | None = None) -> None:
        self._module = module
        self._batching = batching

    def run(self, workload: BenchWorkload) -> None:
        """As many tokens of each as are asked for."""
        self.generate(workload)

    def generate(self, workload: BenchWorkload) -> list[list[int]]:
        """Each request's new tokens. Raises RuntimeError where transformers gives up."""
        with self.session(workload) as session:
            return session.generate(workload).tokens

    @contextmanager
    def session(self, workload: BenchWorkload) -> Iterator[BatchingSession]:
        """Warm, with its cache made for requests like those of `workload`; what still runs at the end is stopped."""
        from transformers import GenerationConfig
        from transformers.generation.configuration_utils import ContinuousBatchingConfig
        from transformers.generation.continuous_batching.utils import WorkloadHints

        batching = ContinuousBatchingConfig(**(_fitting(workload) if self._batching is None else self._batching))
        greedy = GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0)  # type: ignore[no-untyped-call]
        longest = max(len(prompt) for prompt in workload.prompts)
        hints = WorkloadHints(longest, max(workload.output_tokens), workload.num_requests)
        manager = self._module.init_continuous_batching(
            generation_config=greedy, continuous_batching_config=batching, workload_hints=hints
        )
        manager.warmup()
        manager.start()
        session = BatchingSession(manager)
        try:
            yield session
        finally:
            session.stop()
            manager.destroy()


class BatchingSession:
    """Runs workloads one after the other, until it is stopped."""

    def __init__(self, manager: Any) -> None:
        self._manager = manager
        self._is_stopped = False
        config = manager.continuous_batching_config
        self.settings = {
            "attention": str(manager.model.config._attn_implementation),
            "max_batch_tokens": config.max_batch_tokens,
            "num_blocks": config.num_blocks,
        }
        """What transformers made of what it was given."""

    def generate(self, workload: BenchWorkload, limit_s: float = math.inf) -> Generated:
        """What `workload` asks for, or as much of it as there is after `limit_s`: then the session is over.

        Raises RuntimeError where transformers gives up.
        """
        begin = time.perf_counter()
        ids = [f"{workload.name}, {index}" for index in range(workload.num_requests)]
        for request_id, prompt, count in zip(ids, workload.prompts, workload.output_tokens, strict=True):
            self._manager.add_request(list(prompt), request_id, max_new_tokens=count)
        found = self._results(len(ids), begin + limit_s)
        seconds, is_whole = time.perf_counter() - begin, len(found) == len(ids)
        if not is_whole:
            self.stop()
            found |= self._unfinished()
        return Generated([found.get(request_id, []) for request_id in ids], seconds, is_whole)

    def stop(self) -> None:
        """After the step that is running. Idempotent."""
        if not self._is_stopped:
            self._is_stopped = True
            self._manager.stop(hard_stop=True)

    def _results(self, count: int, until: float) -> dict[str, list[int]]:
        found: dict[str, list[int]] = {}
        while len(found) < count and (left_s := until - time.perf_counter()) > 0.0:
            result = self._manager.get_result(timeout=min(_POLL_SECONDS, left_s))
            if result is not None and result.error is not None:
                raise RuntimeError(f"request {result.request_id}: {result.error}")
            if result is not None and result.is_finished():
                found[result.request_id] = list(result.generated_tokens)
            elif result is None and not self._manager.is_running():
                raise RuntimeError("it ended before its requests")
        return found

    def _unfinished(self) -> dict[str, list[int]]:
        """Stopping fails what is left, with the tokens that it has so far."""
        found: dict[str, list[int]] = {}
        while (result := self._manager.get_result(timeout=0.0)) is not None:
            found[result.request_id] = list(result.generated_tokens)
        return found


def _fitting(workload: BenchWorkload) -> dict[str, int]:
    asked = zip(workload.prompts, workload.output_tokens, strict=True)
    num_blocks = sum(len(prompt) // PAGE_SIZE + count // PAGE_SIZE + 2 for prompt, count in asked)
    return {"page_size": PAGE_SIZE, "num_blocks": num_blocks, "max_batch_tokens": BATCH_TOKENS}
