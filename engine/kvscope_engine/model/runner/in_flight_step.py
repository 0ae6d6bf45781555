"""Results of a step that was enqueued on the device: its sampled tokens, measurements and times.

Waits for the device and converts a step's numbers into a `StepResult`. Must not depend on how the step was enqueued
(`model_runner`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice, takewhile
from typing import NamedTuple

import torch

from kvscope_engine.model.device_memory.read_back import PendingVector, Rows, Wait
from kvscope_engine.model.layers.sampling.sampler import SamplerOutput
from kvscope_engine.model.runner.prompt_scoring import PendingScores
from kvscope_engine.policy.step_plan import Scheduled, StepPlan, StepResult, keep_items
from kvscope_telemetry.messages.commands import TokenLogprobs


class PendingMeasurements(NamedTuple):
    """Measurements being copied to the host. A field is None if its quantity was not measured or no layer
    recorded it.
    """

    shares: Rows | None = None
    skips: Rows | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StepExecution:
    """How the device runs a step (launches, CUDA graphs), and the step's measurements."""

    timer: StepTimer
    measurements: PendingMeasurements
    launches: int = 0
    """Number of kernels launched; 0 on a CPU."""
    graph_size: int = 0
    """Maximum number of requests of the CUDA graph that runs the step; 0 if no decode graph runs it."""
    graph_tokens: int = 0
    """Number of tokens of the piecewise CUDA graphs that run the step; 0 if none do."""
    logit_sums: Sequence[int] = ()
    """Checksum of each sampled row's logits; empty if fingerprints are not recorded."""
    scores: PendingScores | None = None
    """Log-probabilities of prompt tokens; None if no request asked for them."""


class InFlightStep:
    """A step enqueued on the device, with its sampled tokens on the device, and later its results on the host.

    Created by `ModelRunner.launch`. Of all methods, only `result` waits for the device. `samples` is None if nothing is
    sampled, or if the tokens can be sampled only by `sample_later`, once the previous step has been committed.
    """

    def __init__(
        self,
        plan: StepPlan,
        execution: StepExecution,
        samples: PendingSamples | None = None,
        sample_later: Callable[[], PendingSamples] | None = None,
    ) -> None:
        self._plan = plan
        self._execution = execution
        self._samples = samples
        self._sample_later = sample_later
        self._remains: list[bool] = []

    @property
    def tokens(self) -> torch.Tensor:
        """Sampled tokens on the device, (sampled rows,) int64."""
        assert self._samples is not None, "this step samples nothing yet that could be waited for"
        return self._samples.output.tokens

    def rows(self) -> dict[int, int]:
        """Return the row of each sampled request in `tokens`, by request number."""
        sampling = (item.request.number for item in self._plan.scheduled if item.samples)
        return {number: row for row, number in enumerate(sampling)}

    def sample(self) -> StepPlan:
        """Enqueue the sampling that `launch` deferred, and return the plan without the requests to be dropped. The
        previous step must have been committed.

        Finished requests, and requests whose grammar mask is not ready, are removed from the plan. Their tokens are
        sampled with the others and then discarded.
        """
        if self._sample_later is not None:
            sample_later, self._sample_later = self._sample_later, None
            requests = [item.request for item in self._plan.scheduled if item.samples]
            remains = {request: not (request.awaits_grammar_mask or request.is_finished) for request in requests}
            self._remains = [remains.get(item.request, True) for item in self._plan.scheduled]
            self._samples = sample_later()
        return keep_items(self._plan, _empty_result(self._plan), self._remains)[0] if self._remains else self._plan

    def result(self) -> StepResult:
        """Wait for the step and return the results of the requests that `sample` left in the plan."""
        self.sample()
        result = self._result()
        return keep_items(self._plan, result, self._remains)[1] if self._remains else result

    def _result(self) -> StepResult:
        scheduled, execution, started_ns = self._plan.scheduled, self._execution, time.monotonic_ns()
        numbers = self._samples.transfer.wait() if self._samples is not None else []
        # These were copied before the tokens, or concurrently.
        shares, skips = execution.measurements
        result = StepResult(
            token_ids=((),) * len(scheduled),
            block_shares=shares() if shares is not None else None,
            block_skips=skips() if skips is not None else None,
            graph_tokens=execution.graph_tokens,
            launches=execution.launches,
            prompt_logprobs=execution.scores.read(len(scheduled)) if execution.scores is not None else (),
        )
        if self._samples is None:
            forward_ns = execution.timer.elapsed_ns()
            return replace(result, forward_ns=forward_ns, wait_ns=time.monotonic_ns() - started_ns)
        wait_ns = time.monotonic_ns() - started_ns
        sampled, logprobs = self._samples.output.read(numbers)
        token_ids = _accepted_tokens(scheduled, sampled)
        return replace(
            result,
            token_ids=token_ids,
            logprobs=_accepted_logprobs(scheduled, token_ids, logprobs),
            logit_sums=_accepted_logit_sums(scheduled, token_ids, execution.logit_sums),
            forward_ns=execution.timer.elapsed_ns(),
            wait_ns=wait_ns,
            graph_size=execution.graph_size,
        )


class PendingSamples(NamedTuple):
    output: SamplerOutput
    transfer: PendingVector


def _empty_result(plan: StepPlan) -> StepResult:
    return StepResult(((),) * len(plan.scheduled))


class StepTimer:
    """Measures the time of a forward pass: with the host's clock on a CPU, with non-blocking events on a GPU."""

    def __init__(self, device: torch.device, wait: Wait) -> None:
        self._wait = wait
        self._events: tuple[torch.cuda.Event, torch.cuda.Event] | None = None
        if device.type == "cuda":
            self._events = (_timing_event(), _timing_event())
            self._events[0].record()
        self._started_ns = self._stopped_ns = time.monotonic_ns()

    def stop(self) -> None:
        """Record the end of the forward pass, once it has been enqueued."""
        if self._events is not None:
            self._events[1].record()
        self._stopped_ns = time.monotonic_ns()

    def elapsed_ns(self) -> int:
        """Wait for the pass and return its duration."""
        if self._events is None:
            return self._stopped_ns - self._started_ns
        self._wait(self._events[1])
        return int(self._events[0].elapsed_time(self._events[1]) * 1e6)


def _timing_event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def _accepted_tokens(scheduled: Sequence[Scheduled], token_ids: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    tokens = iter(token_ids)
    return tuple(_accepted_prefix(item.drafts, tokens) if item.samples else () for item in scheduled)


def _accepted_prefix(drafts: tuple[int, ...], tokens: Iterator[int]) -> tuple[int, ...]:
    """Return the sampled tokens of a request up to and including the first that differs from its draft token.

    Later tokens were computed from a rejected draft token. Each accepted token equals the one sampled without drafts,
    since each position has its own random number.
    """
    sampled = tuple(islice(tokens, 1 + len(drafts)))
    num_accepted = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(drafts, sampled, strict=False)))
    return sampled[: num_accepted + 1]


def _accepted_logprobs(
    scheduled: Sequence[Scheduled], token_ids: Sequence[tuple[int, ...]], logprobs: Sequence[TokenLogprobs | None]
) -> tuple[tuple[TokenLogprobs, ...], ...]:
    """Group `logprobs` by scheduled item, without those after a rejected draft token. Empty if none were requested."""
    if not logprobs:
        return ()
    sampled = iter(logprobs)
    entries = (islice(sampled, 1 + len(item.drafts)) if item.samples else () for item in scheduled)
    accepted = (tuple(item_entries)[: len(tokens)] for item_entries, tokens in zip(entries, token_ids, strict=True))
    return tuple(tuple(entry for entry in item_entries if entry is not None) for item_entries in accepted)


def _accepted_logit_sums(
    scheduled: Sequence[Scheduled], token_ids: Sequence[tuple[int, ...]], sums: Sequence[int]
) -> tuple[tuple[int, ...], ...]:
    """Group `sums` by scheduled item, without those after a rejected draft token. Empty if no sums were computed."""
    if not sums:
        return ()
    rows = iter(sums)
    item_sums = (tuple(islice(rows, 1 + len(item.drafts))) if item.samples else () for item in scheduled)
    return tuple(row[: len(tokens)] for row, tokens in zip(item_sums, token_ids, strict=True))
