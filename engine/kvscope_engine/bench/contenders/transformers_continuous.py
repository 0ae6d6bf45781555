"""Continuous batching of transformers as a contender: what `generate_batch` runs, each request with an end of its own.

A thread of its own steps over a paged cache; who joins when is its own affair, so requests are given all at once.
"""

from __future__ import annotations

from typing import Any, Final

from kvscope_engine.bench.workloads import Workload

BATCH_TOKENS: Final = 512
PAGE_SIZE: Final = 16
_POLL_SECONDS: Final = 1.0


class TransformersContinuous:
    """A model of transformers, greedy, over a cache that has room for all."""

    name = "transformers, continuous"

    def __init__(self, module: Any) -> None:
        self._module = module

    def run(self, workload: Workload) -> None:
        """As many tokens of each as are asked for."""
        self.generate(workload)

    def generate(self, workload: Workload) -> list[list[int]]:
        """Each request's new tokens. Raises RuntimeError where transformers gives up."""
        from transformers import GenerationConfig
        from transformers.generation.configuration_utils import ContinuousBatchingConfig

        pages = sum(len(p) // PAGE_SIZE + n // PAGE_SIZE + 2 for p, n in self._asked(workload))
        batching = ContinuousBatchingConfig(page_size=PAGE_SIZE, num_blocks=pages, max_batch_tokens=BATCH_TOKENS)
        greedy = GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0)  # type: ignore[no-untyped-call]
        given = {"generation_config": greedy, "continuous_batching_config": batching}
        with self._module.continuous_batching_context_manager(**given) as manager:
            for index, (prompt, count) in enumerate(self._asked(workload)):
                manager.add_request(list(prompt), str(index), max_new_tokens=count)
            found = _results(manager, workload.num_requests)
        return [found[str(index)] for index in range(workload.num_requests)]

    def _asked(self, workload: Workload) -> list[tuple[tuple[int, ...], int]]:
        return list(zip(workload.prompts, workload.output_tokens, strict=True))


def _results(manager: Any, count: int) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    while len(found) < count:
        result = manager.get_result(timeout=_POLL_SECONDS)
        if result is not None and result.error is not None:
            raise RuntimeError(f"request {result.request_id}: {result.error}")
        if result is not None and result.is_finished():
            found[result.request_id] = list(result.generated_tokens)
        elif result is None and not manager.is_running():
            raise RuntimeError("it ended before its requests")
    return found
