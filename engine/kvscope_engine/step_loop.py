"""Runs steps, and with async scheduling launches the next step before the tokens of the current one are known.

Without overlap, the device waits between two steps while tokens are committed, recorded and published and the next step
is scheduled. With overlap at most one further step is in flight:

    host    schedule n+1, launch | wait for n | commit n, record n, publish | schedule n+2, launch | wait for n+1 ...
    device  ---- n ------------------------->|---- n+1 --------------------------------------------->| ...

- Step n+1 is launched completely and waits for nothing from the host. Tokens sampled by step n stay on the device and
  are inputs of step n+1 there (`ModelRunner.launch`); the host reads them in one copy.
- Step n+1 is scheduled without knowing these tokens (`Scheduler.schedule_ahead`). Drafts, forks, a lack of blocks and
  reserving allocators prevent that (`overlap_blocker`). The scheduler knows which requests reach their maximum length
  in step n, and does not schedule them.
- A step that could not be launched ahead is launched when the previous one is committed, before the previous one is
  recorded and published (`launch_next`), so that the device waits only for commit and scheduling. Exceptions: reserving
  allocators, and requests whose grammar is still computing its next mask.
- A step in which a grammar or penalties depend on the tokens of step n is launched up to its logits. Its sampling is
  launched once step n is committed (`Launched.sample`), while the device computes the forward pass. A request whose
  mask is not ready by then is removed from the step as if it had not run.
- If a request ends in step n by its sampled token (end of sequence, stop string) or is aborted, its batch row in step
  n+1 is dropped before the commit. A step without other rows is void: its result is not awaited.
- Blocks of an ended request may be reallocated immediately. All steps, copies on write and tier transfers run on one
  stream in launch order, so the dropped row's writes precede the new owner's. Memory is unmapped only by allocators
  that never overlap.
- Between two calls one step may be in flight. Callers that change running requests call `finish_in_flight` first.

A step that runs out of memory, or in which a library fails, is retried, then retried without CUDA graphs, then in
halves down to one token. Rerunning a plan is safe: it writes the same keys and values, and the runner makes a plan's
copies once. With recurrent layers, whose state each token changes, a step is tried once; its requests are recomputed in
smaller steps. Tokens that were not computed are not committed, so their blocks never enter the prefix cache. The engine
fails on errors that no library raised, on a device that no longer computes (`StepRunner.is_device_usable`), and after
`MAX_CONSECUTIVE_FAILED_STEPS` consecutive steps in which nothing ran.

Owns the step in flight. Commits nothing and knows no tensors.

See docs/internals/decisions/0016-the-next-step-begins-before-the-record.md.
"""

from __future__ import annotations

import contextlib
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Final, NamedTuple, Protocol, TypeVar

from kvscope_engine.model.device_memory.out_of_memory import clear_traceback, is_library_error, is_out_of_memory
from kvscope_engine.policy.request import Request
from kvscope_engine.policy.scheduling.planned_progress import RESERVING_ALLOCATOR
from kvscope_engine.policy.scheduling.scheduler import MAX_RESTARTS_WITHOUT_PROGRESS, Scheduler
from kvscope_engine.policy.step_plan import Scheduled, StepPlan, StepResult, to_run_again, without_ended
from kvscope_telemetry.errors import KvscopeError
from kvscope_telemetry.messages.commands import TokenLogprobs
from kvscope_telemetry.plural import counted

Explain = Callable[[StepPlan], str]
"""Function that describes why a plan does not fit in memory and what would help; returns "" if unknown."""

MAX_CONSECUTIVE_FAILED_STEPS: Final = 8
"""Number of consecutive steps in which library errors kept all requests from running, after which the error is raised.

So many failures cannot be due to single requests. Multiplied by `MAX_RESTARTS_WITHOUT_PROGRESS + 1` for recurrent
models, whose requests are recomputed.
"""


@dataclass(frozen=True, slots=True)
class CompletedStep:
    """A completed step that has not been committed yet."""

    plan: StepPlan
    result: StepResult
    failed: tuple[Request, ...]
    """Requests that were scheduled but did not run."""
    reasons: tuple[str, ...]
    """For each of the `failed` requests, the reason why it did not run, in the same order."""
    schedule_ns: int
    """Nanoseconds spent on scheduling this or the next step, in the `StepLoop` call that completed this step."""
    run_ns: int
    """Nanoseconds of the `StepLoop` call that completed this step, without scheduling: launching steps and
    waiting for this step.
    """
    ended_ns: int
    fitting_tokens: int | None = None
    """Number of tokens per step that fit, if memory was short in this step; otherwise None. Defined by
    `StepOutcome.fitting_tokens`.
    """
    failure: str = ""
    """First line of the last library error in this step; empty if there was no error."""


@dataclass(slots=True)
class OverlapCounts:
    steps: int = 0
    overlapped: int = 0
    """Number of steps during which the next step was launched."""
    launched_early: int = 0
    """Number of times that the next step was launched after a step was committed and before it was recorded
    (`StepLoop.launch_next`).
    """
    void: int = 0
    """Number of launched steps that were dropped, because all their requests had ended or no grammar mask was
    ready in time.
    """
    overlap_ns: int = 0
    """Nanoseconds of host work (schedule, launch, commit, record) while the device had a step to run."""
    blockers: Counter[str] = field(default_factory=Counter)
    """Number of steps that could not overlap, by reason."""

    def summary(self) -> str:
        others = "".join(f"; {count} not: {reason}" for reason, count in self.blockers.most_common())
        early = (
            f", {self.launched_early} delayed steps were launched before the previous one was recorded"
            if self.launched_early
            else ""
        )
        shared = (
            f", per step the host worked {self.overlap_ns / 1e6 / max(1, self.steps):.2f} ms while the device was busy"
        )
        return f"while {self.overlapped} of {self.steps} steps ran, the next was launched{early}{shared}{others}"


@dataclass(frozen=True, slots=True)
class _InFlight:
    plan: StepPlan
    launched: Launched | None
    """The launched step. None if launching it failed; its plan is then run again once the previous step is complete."""
    error: Exception | None = None

    @property
    def is_void(self) -> bool:
        return all(item.request.is_finished for item in self.plan.scheduled)


class StepLoop:
    """Drives the scheduler and the runner, with at most one step in flight between calls.

    `overlaps`: whether a step may be launched before the previous one is complete.
    """

    def __init__(self, scheduler: Scheduler, runner: StepRunner, explain: Explain, *, overlaps: bool) -> None:
        self._scheduler = scheduler
        self._runner = runner
        self._explain = explain
        self._overlaps = overlaps
        self._flight: _InFlight | None = None
        self._launched_ns = 0
        self._may_launch_next = False
        self._num_failed_steps = 0
        self.counts = OverlapCounts()

    def launch_next(self, step: int) -> tuple[int, int]:
        """Launch the next step, if it could not be launched ahead. Call it when the step that `next` returned last,
        number `step`, is committed.

        The scheduler's changes to requests count as changes of `step`, so the telemetry frame of `step` contains them.
        Returns the nanoseconds spent on scheduling and on launching.
        """
        if not self._may_launch_next or any(
            request.awaits_grammar_mask for request in self._scheduler.requests.values()
        ):
            return 0, 0
        started_ns = time.monotonic_ns()
        plan = self._scheduler.schedule(step, started_ns)
        scheduled_ns = time.monotonic_ns()
        if plan.scheduled:
            self._flight = self._launch_or_defer(plan)
            self.counts.launched_early += 1
        self._launched_ns = time.monotonic_ns()
        return scheduled_ns - started_ns, self._launched_ns - scheduled_ns

    def step_recorded(self, ended_ns: int) -> None:
        if self._flight is not None and self._flight.launched is not None:
            self.counts.overlap_ns += time.monotonic_ns() - max(ended_ns, self._launched_ns)

    def next(self, step: int, *, ahead: bool) -> CompletedStep | None:
        """Run step number `step` until it is complete. Returns None if there is nothing to run.

        With `ahead`, the following step may be in flight on return.
        """
        clock = _Clock()
        overlaps, self._may_launch_next = self._overlaps and ahead, False
        flight = self._pop_in_flight()
        if flight is None:
            plan = self._scheduler.schedule(step, clock.started_ns)
            clock.record_scheduling()
            if not plan.scheduled:
                return None
            flight = self._launch_or_defer(plan) if overlaps else _InFlight(plan, None)
        if overlaps and flight.launched is not None:
            self._flight = self._launch_ahead(flight.plan, flight.launched, clock)
        return self._finish(flight, clock)

    def finish_in_flight(self) -> CompletedStep | None:
        """Wait for the step in flight and return it, or return None if there is none. No step is in flight
        afterwards.
        """
        flight, self._may_launch_next = self._pop_in_flight(), False
        return None if flight is None else self._finish(flight, _Clock())

    def close(self) -> None:
        """Wait for the step in flight, so that its memory can be freed."""
        flight, self._flight = self._flight, None
        if flight is not None and flight.launched is not None:
            with contextlib.suppress(Exception):  # errors were reported before, or no longer matter
                flight.launched.result()

    def _pop_in_flight(self) -> _InFlight | None:
        flight, self._flight = self._flight, None
        if flight is None:
            return None
        if flight.launched is not None and not flight.is_void:
            flight = self._launch_sampling(flight.plan, flight.launched)
        if flight.launched is None:
            flight = replace(flight, plan=to_run_again(flight.plan))
        if not flight.is_void:
            return flight
        self.counts.void += 1
        return None

    def _launch_ahead(self, running: StepPlan, launched: Launched, clock: _Clock) -> _InFlight | None:
        started_ns = time.monotonic_ns()
        blocker = self._scheduler.overlap_blocker(running)
        if blocker:
            self.counts.blockers[blocker] += 1
            self._may_launch_next = blocker != RESERVING_ALLOCATOR  # which may unmap memory while a step runs
            return None
        plan = self._scheduler.schedule_ahead(running, started_ns)
        clock.record_scheduling(since_ns=started_ns)
        if not plan.scheduled:
            return None
        flight = self._launch_or_defer(plan, launched)
        self.counts.overlap_ns += time.monotonic_ns() - started_ns
        self.counts.overlapped += 1
        return flight

    def _launch_or_defer(self, plan: StepPlan, after: Launched | None = None) -> _InFlight:
        try:
            return _InFlight(plan, self._runner.launch(plan, after))
        except Exception as error:
            return self._defer(plan, error)

    def _launch_sampling(self, plan: StepPlan, launched: Launched) -> _InFlight:
        """Launch the sampling of a step that was launched up to its logits. If that fails, the whole step is
        run again later.
        """
        try:
            return _InFlight(launched.sample(), launched)
        except Exception as error:
            return self._defer(plan, error)

    def _defer(self, plan: StepPlan, error: Exception) -> _InFlight:
        if not is_recoverable(self._runner, error):
            raise error
        clear_traceback(error)
        return _InFlight(plan, None, None if is_out_of_memory(error) else error)

    def _finish(self, flight: _InFlight, clock: _Clock) -> CompletedStep:
        self.counts.steps += 1
        failure = flight.error
        if flight.launched is not None:
            try:
                plan, result = without_ended(flight.plan, flight.launched.result())
                self._num_failed_steps = 0
                return clock.completed(plan, result)
            except Exception as error:
                if flight.plan.changes_states or not is_recoverable(self._runner, error):
                    raise
                failure = None if is_out_of_memory(error) else error
                clear_traceback(error)
            self._runner.recover()
            if self._flight is not None:  # its inputs were tokens of the failed step
                self._flight = replace(self._flight, launched=None)
        plan = to_run_again(flight.plan)
        outcome = run_with_retries(self._runner, plan, self._explain)
        if outcome.plan.scheduled:
            self._num_failed_steps = 0
        elif outcome.error is not None:
            self._num_failed_steps += 1
        max_failed_steps = MAX_CONSECUTIVE_FAILED_STEPS * (
            MAX_RESTARTS_WITHOUT_PROGRESS + 1 if plan.changes_states else 1
        )
        if outcome.error is not None and self._num_failed_steps >= max_failed_steps:
            raise outcome.error
        return clock.completed(outcome.plan, outcome.result, replace(outcome, error=outcome.error or failure))


class _Clock:
    """Measures the time that one call spends on scheduling and on all other work."""

    def __init__(self) -> None:
        self.started_ns = time.monotonic_ns()
        self.schedule_ns = 0

    def record_scheduling(self, since_ns: int | None = None) -> None:
        self.schedule_ns += time.monotonic_ns() - (self.started_ns if since_ns is None else since_ns)

    def completed(self, plan: StepPlan, result: StepResult, outcome: StepOutcome | None = None) -> CompletedStep:
        now_ns = time.monotonic_ns()
        times = self.schedule_ns, now_ns - self.started_ns - self.schedule_ns, now_ns
        if outcome is None:
            return CompletedStep(plan, result, (), (), *times)
        failure = "" if outcome.error is None else _first_line(outcome.error)
        return CompletedStep(plan, result, outcome.failed, outcome.reasons, *times, outcome.fitting_tokens, failure)


class Launched(Protocol):
    def sample(self) -> StepPlan:
        """Launch the part of the step that needed the previous step's commit. Call it once, before the next step is
        launched.

        Returns the plan without the requests that were removed because their grammar mask is late; `result` corresponds
        to that plan.
        """

    def result(self) -> StepResult: ...


class StepRunner(Protocol):
    """Interface of `model.runner.model_runner.ModelRunner` that `StepLoop` uses to run steps."""

    def run(self, plan: StepPlan) -> StepResult: ...

    def launch(self, plan: StepPlan, after: Any = None) -> Launched:
        """Launch a step, which runs on the device after the step launched last. `after` is that previous step
        if its sampled tokens are inputs of the new one.
        """

    def is_device_usable(self) -> bool:
        """Compute a test result on the device, and return whether the device still computes after an error
        other than a lack of memory.
        """

    def recover(self) -> None:
        """Clean up after a step that ran out of memory or in which a library failed."""

    def release_graphs(self) -> bool:
        """Free CUDA graphs and their memory. Returns whether there were any."""


@dataclass(frozen=True, slots=True)
class StepOutcome:
    plan: StepPlan
    result: StepResult
    failed: tuple[Request, ...] = ()
    reasons: tuple[str, ...] = ()
    fitting_tokens: int | None = None
    """Number of tokens per step that fit, if memory was short and smaller steps help; otherwise None.

    This is the size of the largest part of the plan that ran. For plans that cannot be run in parts, it is half of the
    plan's tokens after any failure, so that a request that makes a library fail finally runs alone. It is also None if
    not even one token fitted.
    """
    error: Exception | None = None
    """Last error that a library raised; None if there was no error."""


def run_with_retries(runner: StepRunner, plan: StepPlan, explain: Explain = lambda plan: "") -> StepOutcome:
    """Run a plan, or as many of its tokens as memory and libraries permit. Errors that are not recoverable are raised.

    `explain` is called before any memory is freed.
    """
    if not plan.scheduled:
        return StepOutcome(plan, StepResult(()))
    attempts = _Attempts(runner, explain)
    result = attempts.run(plan)
    if result is None and not plan.changes_states:
        result = attempts.run(plan)
        if result is None and runner.release_graphs():
            result = attempts.run(plan)
    elif result is None and plan.num_tokens == 1:  # a retry cannot be smaller
        runner.release_graphs()
    if result is not None:
        return StepOutcome(plan, result, error=attempts.error)
    completed = {} if plan.changes_states else attempts.run_in_halves(plan)
    indices = [number for number in range(len(plan.scheduled)) if number in completed]
    failed = {
        item.request: attempts.failed_items.get(number, attempts.reason)
        for number, item in enumerate(plan.scheduled)
        if number not in completed
    }
    num_single_token = sum(completed[number].item.num_tokens == 1 for number in indices)
    indices.sort(key=lambda number: (completed[number].item.num_tokens > 1, number))
    requests = {completed[number].item.request for number in indices}
    ran_plan = replace(
        plan,
        scheduled=tuple(completed[number].item for number in indices),
        num_single_token=num_single_token,
        state_saves=tuple(save for save in plan.state_saves if save.request in requests),
    )
    merged = StepResult(
        token_ids=tuple(completed[number].token_ids for number in indices),
        logprobs=_tuple_or_empty([completed[number].logprobs for number in indices]),
        forward_ns=attempts.forward_ns,
        logit_sums=_tuple_or_empty([completed[number].logit_sums for number in indices]),
        prompt_logprobs=_tuple_or_empty([completed[number].prompt_logprobs for number in indices]),
    )
    fitting_tokens = plan.num_tokens // 2 if plan.changes_states else attempts.max_completed_tokens
    is_limited = (attempts.ran_out_of_memory or plan.changes_states) and 0 < fitting_tokens < plan.num_tokens
    fitting_limit = fitting_tokens if is_limited else None
    return StepOutcome(ran_plan, merged, tuple(failed), tuple(failed.values()), fitting_limit, attempts.error)


class _CompletedItem(NamedTuple):
    item: Scheduled
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...]
    logit_sums: tuple[int, ...]
    prompt_logprobs: tuple[TokenLogprobs, ...]


T = TypeVar("T")


def _tuple_or_empty(items: list[tuple[T, ...]]) -> tuple[tuple[T, ...], ...]:
    return tuple(items) if any(items) else ()


class _Attempts:
    def __init__(self, runner: StepRunner, explain: Explain) -> None:
        self._runner = runner
        self._explain = explain
        self.reason = ""
        self.failed_items: dict[int, str] = {}
        """Items of the plan that could not be run: maps the index in the plan to the reason."""
        self._explanation: str | None = None
        self.forward_ns = 0
        self.max_completed_tokens = 0
        self.ran_out_of_memory = False
        self.error: Exception | None = None

    def run(self, plan: StepPlan) -> StepResult | None:
        """Run a plan. Returns None if memory ran out or a library failed."""
        result: StepResult | None = None
        try:
            result = self._runner.run(plan)
        except Exception as error:
            if not is_recoverable(self._runner, error):
                raise
            if is_out_of_memory(error):
                self.ran_out_of_memory = True
                if self._explanation is None:  # once, because it may query the driver
                    self._explanation = _explanation(self._explain, plan)
                self.reason = f"no memory for a step of {_tokens(plan)} ({_first_line(error)}){self._explanation}"
            else:
                self.error = error
                self.reason = f"a step of {_tokens(plan)} failed ({_first_line(error)})"
            clear_traceback(error)
        if result is None:
            self._runner.recover()
            return None
        self.forward_ns += result.forward_ns
        self.max_completed_tokens = max(self.max_completed_tokens, plan.num_tokens)
        return result

    def run_in_halves(self, plan: StepPlan) -> dict[int, _CompletedItem]:
        """Run a failed plan in parts. Returns the items that ran, by index in the plan.

        Each half is tried once and then halved again. A single token is tried twice, so that a transient failure ends
        no request.
        """
        completed: dict[int, _CompletedItem] = {}
        scores: defaultdict[int, tuple[TokenLogprobs, ...]] = defaultdict(tuple)
        whole_plan = list(enumerate(plan.scheduled))
        parts = _halves(whole_plan) or [whole_plan]
        copies = plan.copies  # made with the first part only: repeating them would overwrite later writes
        while parts:
            part = [(number, item) for number, item in parts.pop(0) if number not in self.failed_items]
            if not part:
                continue
            items = tuple(item for _, item in part)
            num_single_token = sum(item.num_tokens == 1 for item in items)
            step, halves = StepPlan(items, num_single_token, copies), _halves(part)
            result = self.run(step)
            if result is None and not halves:
                result = self.run(step)
            if result is not None:
                copies = ()
                logprobs = result.logprobs or ((),) * len(items)
                sums = result.logit_sums or ((),) * len(items)
                prompt_logprobs = result.prompt_logprobs or ((),) * len(items)
                for (number, item), ids, item_logprobs, item_sums, item_scores in zip(
                    part, result.token_ids, logprobs, sums, prompt_logprobs, strict=True
                ):
                    scores[number] += item_scores
                    whole = plan.scheduled[number]
                    num_tokens = item.num_tokens if item.drafts or whole.drafts else whole.num_tokens
                    if item.start + item.num_tokens == whole.start + num_tokens:
                        completed[number] = _CompletedItem(
                            whole._replace(num_tokens=num_tokens, drafts=item.drafts),
                            ids,
                            item_logprobs,
                            item_sums,
                            scores[number],
                        )
                continue
            if not halves:
                self.failed_items[part[0][0]] = self.reason
            parts[:0] = halves
        return completed


def _halves(part: list[tuple[int, Scheduled]]) -> list[list[tuple[int, Scheduled]]]:
    """Split the indexed items of a plan in two. A single item loses its drafts and is then split by its tokens.

    Returns an empty list for a single token.
    """
    if len(part) > 1:
        return [part[: len(part) // 2], part[len(part) // 2 :]]
    ((number, item),) = part
    if item.drafts:
        return [[(number, item._replace(num_tokens=1, drafts=()))]]
    if item.num_tokens == 1:
        return []
    first = item.num_tokens // 2
    second = item._replace(start=item.start + first, num_tokens=item.num_tokens - first)
    return [[(number, item._replace(num_tokens=first, samples=False))], [(number, second)]]


def is_recoverable(runner: StepRunner, error: Exception) -> bool:
    """Return whether further steps can run after `error`: memory was short, or a library failed and the device still
    computes.

    A KvscopeError is never recoverable, even if its text quotes another rank's lack of memory.
    """
    if isinstance(error, KvscopeError):
        return False
    return is_out_of_memory(error) or (is_library_error(error) and runner.is_device_usable())


def _explanation(explain: Explain, plan: StepPlan) -> str:
    """Return the explanation of a lack of memory; empty if `explain` fails, so that the original error is still
    reported.
    """
    try:
        text = explain(plan)
    except Exception:
        return ""
    return f"; {text}" if text else ""


def _tokens(plan: StepPlan) -> str:
    return counted(plan.num_tokens, "token")


def _first_line(error: BaseException) -> str:
    return f"{(str(error).splitlines() or [type(error).__name__])[0]:.160}"
