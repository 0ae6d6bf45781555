"""A step that was handed to the device: its tokens there, for the next one, and its results once they have come down.

Knows no policy. Nothing here waits but `result`.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from itertools import islice, takewhile
from typing import Final, NamedTuple

import torch

from kvscope_engine.model.running.attention_scores import AttentionScores
from kvscope_engine.model.running.read_back import Landing
from kvscope_engine.model.sampling.sampler import Sampled
from kvscope_engine.model.sparse.skips import BlockSkips
from kvscope_engine.policy.plan import Scheduled, StepPlan, StepResult
from kvscope_telemetry.messages.commands import TokenLogprobs


class Measures(NamedTuple):
    """What is measured in a step; None of it: that is not."""

    shares: AttentionScores | None = None
    skips: BlockSkips | None = None


NOTHING: Final = Measures()


class InFlight:
    """Made by `ModelRunner.launch`. `sampled` and `landing` are None where nothing is sampled."""

    def __init__(
        self,
        plan: StepPlan,
        timer: StepTimer,
        sampled: Sampled | None = None,
        landing: Landing | None = None,
        measures: Measures = NOTHING,
        *,
        graph_size: int = 0,
        launches: int = 0,
        graph_tokens: int = 0,
    ) -> None:
        self._plan = plan
        self._timer = timer
        self._sampled = sampled
        self._landing = landing
        self._measures = measures
        self._graph_size = graph_size
        self._launches = launches
        self._graph_tokens = graph_tokens

    @property
    def tokens(self) -> torch.Tensor:
        """(rows that sample,) int64, on the device."""
        assert self._sampled is not None, "this step samples nothing that could be waited for"
        return self._sampled.tokens

    def rows(self) -> dict[int, int]:
        """Of `tokens`, by the number of the request."""
        sampling = (item.request.number for item in self._plan.scheduled if item.samples)
        return {number: row for row, number in enumerate(sampling)}

    def result(self) -> StepResult:
        """What came out; waits until it is here."""
        scheduled, asked_ns = self._plan.scheduled, time.monotonic_ns()
        shares, skips = self._measures
        told = shares.rows() if shares is not None else None
        skipped = skips.rows() if skips is not None else None
        if self._sampled is None or self._landing is None:
            forward_ns = self._timer.elapsed_ns()
            wait_ns = time.monotonic_ns() - asked_ns
            return StepResult(
                token_ids=((),) * len(scheduled),
                forward_ns=forward_ns,
                block_shares=told,
                graph_tokens=self._graph_tokens,
                wait_ns=wait_ns,
                block_skips=skipped,
                launches=self._launches,
            )
        numbers = self._landing.numbers()
        wait_ns = time.monotonic_ns() - asked_ns
        token_ids, logprobs = self._sampled.read(numbers)
        return StepResult(
            token_ids=(said := _spread(scheduled, token_ids)),
            logprobs=_spread_logprobs(scheduled, said, logprobs),
            forward_ns=self._timer.elapsed_ns(),
            block_shares=told,
            graph_size=self._graph_size,
            graph_tokens=self._graph_tokens,
            wait_ns=wait_ns,
            block_skips=skipped,
            launches=self._launches,
        )


class StepTimer:
    """Time of the forward pass: by the host's clock, on a GPU by events, which do not wait."""

    def __init__(self, device: torch.device) -> None:
        self._events: tuple[torch.cuda.Event, torch.cuda.Event] | None = None
        if device.type == "cuda":
            self._events = (_timing_event(), _timing_event())
            self._events[0].record()
        self._started_ns = self._stopped_ns = time.monotonic_ns()

    def stop(self) -> None:
        """The forward pass has been handed to the device."""
        if self._events is not None:
            self._events[1].record()
        self._stopped_ns = time.monotonic_ns()

    def elapsed_ns(self) -> int:
        """Nanoseconds of the pass; waits for it."""
        if self._events is None:
            return self._stopped_ns - self._started_ns
        self._events[1].synchronize()
        return int(self._events[0].elapsed_time(self._events[1]) * 1e6)


def _timing_event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def _spread(scheduled: Sequence[Scheduled], token_ids: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    tokens = iter(token_ids)
    return tuple(_said(item.drafts, tokens) if item.samples else () for item in scheduled)


def _said(drafts: tuple[int, ...], tokens: Iterator[int]) -> tuple[int, ...]:
    """Of an item's sampled tokens those up to the first that its draft did not guess: what follows it was computed
    from something else. Each is what it would be had nothing been guessed: a position has its own random number."""
    sampled = tuple(islice(tokens, 1 + len(drafts)))
    num_right = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(drafts, sampled, strict=False)))
    return sampled[: num_right + 1]


def _spread_logprobs(
    scheduled: Sequence[Scheduled], said: Sequence[tuple[int, ...]], logprobs: Sequence[TokenLogprobs | None]
) -> tuple[tuple[TokenLogprobs, ...], ...]:
    """Empty stays empty: nobody asked."""
    if not logprobs:
        return ()
    sampled = iter(logprobs)
    entries = (islice(sampled, 1 + len(item.drafts)) if item.samples else () for item in scheduled)
    found = (tuple(of_item)[: len(tokens)] for of_item, tokens in zip(entries, said, strict=True))
    return tuple(tuple(entry for entry in of_item if entry is not None) for of_item in found)
