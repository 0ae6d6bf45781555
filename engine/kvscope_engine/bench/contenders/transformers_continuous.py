"""Continuous batching of transformers (`generate_batch`) as a contender; each request has its own output length.

transformers steps over a paged cache in its own thread and schedules requests itself, so all requests are submitted
together.
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
    """New token ids of each request, and the seconds from the first submission to the last completion."""

    tokens: list[list[int]]
    seconds: float
    is_whole: bool
    """Whether all requests finished within the time limit."""

    @property
    def num_tokens(self) -> int:
        return sum(len(each) for each in self.tokens)


class TransformersContinuous:
    """Runs a transformers model with continuous batching and greedy sampling.

    `batching` are arguments of `ContinuousBatchingConfig`; {} means transformers' defaults for page size, batch tokens
    and number of blocks (as many as fit the memory). None means small pages and batches, and enough blocks for all
    requests.
    """

    name = "transformers, continuous"

    def __init__(self, module: Any, batching: Mapping[str, Any] | None = None) -> None:
        self._module = module
        self._batching = batching

    def run(self, workload: BenchWorkload) -> None:
        self.generate(workload)

    def generate(self, workload: BenchWorkload) -> list[list[int]]:
        """Return the new token ids of each request. Raises RuntimeError if transformers fails."""
        with self.session(workload) as session:
            return session.generate(workload).tokens

    @contextmanager
    def session(self, workload: BenchWorkload) -> Iterator[BatchingSession]:
        """Yield a warmed-up session whose cache is sized for requests like those of `workload`.

        Requests that still run when the context exits are stopped.
        """
        from transformers import GenerationConfig
        from transformers.generation.configuration_utils import ContinuousBatchingConfig
        from transformers.generation.continuous_batching.utils import WorkloadHints

        batching = ContinuousBatchingConfig(**(_fitting_config(workload) if self._batching is None else self._batching))
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
    """Running continuous batching session, which runs workloads one after another until stopped."""

    def __init__(self, manager: Any) -> None:
        self._manager = manager
        self._is_stopped = False
        config = manager.continuous_batching_config
        self.settings = {
            "attention": str(manager.model.config._attn_implementation),
            "max_batch_tokens": config.max_batch_tokens,
            "num_blocks": config.num_blocks,
        }
        """Settings that transformers derived from `ContinuousBatchingConfig`."""

    def generate(self, workload: BenchWorkload, limit_s: float = math.inf) -> Generated:
        """Run `workload`. After `limit_s` seconds, stop the session and return the tokens generated so far.

        Raises RuntimeError if transformers fails.
        """
        start_s = time.perf_counter()
        ids = [f"{workload.name}, {index}" for index in range(workload.num_requests)]
        for request_id, prompt, count in zip(ids, workload.prompts, workload.output_tokens, strict=True):
            self._manager.add_request(list(prompt), request_id, max_new_tokens=count)
        tokens_of_request = self._results(len(ids), start_s + limit_s)
        seconds, is_whole = time.perf_counter() - start_s, len(tokens_of_request) == len(ids)
        if not is_whole:
            self.stop()
            tokens_of_request |= self._unfinished()
        return Generated([tokens_of_request.get(request_id, []) for request_id in ids], seconds, is_whole)

    def stop(self) -> None:
        """Stop after the step that is running. Idempotent."""
        if not self._is_stopped:
            self._is_stopped = True
            self._manager.stop(hard_stop=True)

    def _results(self, count: int, deadline_s: float) -> dict[str, list[int]]:
        finished: dict[str, list[int]] = {}
        while len(finished) < count and (left_s := deadline_s - time.perf_counter()) > 0.0:
            result = self._manager.get_result(timeout=min(_POLL_SECONDS, left_s))
            if result is not None and result.error is not None:
                raise RuntimeError(f"request {result.request_id}: {result.error}")
            if result is not None and result.is_finished():
                finished[result.request_id] = list(result.generated_tokens)
            elif result is None and not self._manager.is_running():
                raise RuntimeError("transformers' continuous batching stopped before its requests finished")
        return finished

    def _unfinished(self) -> dict[str, list[int]]:
        """Return the token ids that unfinished requests have after a stop, by request id.

        transformers reports these requests as failed, but returns the tokens generated so far.
        """
        unfinished: dict[str, list[int]] = {}
        while (result := self._manager.get_result(timeout=0.0)) is not None:
            unfinished[result.request_id] = list(result.generated_tokens)
        return unfinished


def _fitting_config(workload: BenchWorkload) -> dict[str, int]:
    requested = zip(workload.prompts, workload.output_tokens, strict=True)
    num_blocks = sum(len(prompt) // PAGE_SIZE + count // PAGE_SIZE + 2 for prompt, count in requested)
    return {"page_size": PAGE_SIZE, "num_blocks": num_blocks, "max_batch_tokens": BATCH_TOKENS}
