"""Steps one after another, and the next one on the device before the last one's tokens are known.

Without overlap a step is scheduled, run and returned, and the device waits while its tokens are committed, recorded
and published and the next step is scheduled. With overlap at most one step more is under way:

    host    schedule n+1, launch | wait for n | commit n, record n, publish | schedule n+2, launch | wait for n+1 ...
    device  ---- n ------------------------->|---- n+1 --------------------------------------------->| ...

- What is launched is a whole step: it waits for nothing that the host has yet to say. Tokens that step n samples stay
  on the device and are step n+1's inputs there (`ModelRunner.launch`); the host reads them in one copy.
- Step n+1 is scheduled without knowing them (`Scheduler.schedule_beside`). Drafts, forks, a lack of blocks and
  allocators that reserve make a step wait for the one before (`why_not_beside`). Ends by length are known; nothing is
  scheduled past them.
- A step that waited is launched as soon as the one before is committed, and before that is recorded and published, and
  clients are told (`begin`): of what the host does between two steps the device waits for committing and scheduling
  alone. Not where an allocator reserves, nor while a form is waited for.
- A step in which a form or penalties depend on what step n sampled is launched like any other, up to its logits; what
  it samples is handed over behind them once step n is committed (`Launched.sample`), so that the device has the whole
  forward pass to work on meanwhile. A request whose form does not say yet what may come is taken out of it then, as if
  it had not run.
- A request that ends in step n by what was sampled (end of sequence, stop strings), or is aborted, has a row in step
  n+1 that nobody wants: it is dropped when that step comes back, before anything is committed. A step that has no
  other rows is void: its result is not waited for.
- Blocks of such a request may belong to another at once. All steps, copies on write and the tiers' gathers and
  scatters run on one stream in the order they were launched, so the unwanted row's writes are over before the new
  owner's first. Memory is unmapped only by allocators that never overlap.
- Between two calls one step may be in flight. Whoever wants to change running requests settles first (`settle`).

A step for which the device's memory did not suffice, or in which a library failed, is tried again, then without CUDA
graphs, then in halves, down to one token, before anyone gives up: a plan may be run again, for writing the same keys
and values comes to the same, and the runner makes a plan's copies once. Not so where layers keep a state that each
token changes: such a step is tried once, and its requests are to be computed again, in smaller steps. What was not run
is not committed, so that blocks of requests that end are found by nobody. The engine itself ends of what no library
raises, of a device that computes no more (`StepRunner.is_well`), and where nothing could be run for some steps in a
row.

Owns what is in flight. Commits nothing, and knows no tensors.

See docs/internals/decisions/0016-the-next-step-begins-before-the-record.md.
"""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Final, NamedTuple, Protocol, TypeVar

from kvscope_engine.model.device_memory.out_of_memory import is_no_memory, is_of_library, let_go_of_frames
from kvscope_engine.policy.plan import Scheduled, StepPlan, StepResult, to_run_again, without_ended
from kvscope_engine.policy.request import Request
from kvscope_engine.policy.scheduling.ahead import RESERVED
from kvscope_engine.policy.scheduling.scheduler import MOST_RESTARTS, Scheduler
from kvscope_telemetry.errors import KvscopeError
from kvscope_telemetry.messages.commands import TokenLogprobs
from kvscope_telemetry.plural import counted

Explain = Callable[[StepPlan], str]
"""Why there is no memory for a plan, and what would help; empty where nobody knows."""

MOST_BARREN: Final = 8
"""Steps in a row of which a library let nothing be run: more of them are no fault of single requests. Where requests
are computed again, as often for each."""


@dataclass(frozen=True, slots=True)
class CompletedStep:
    """A completed step that has not been committed yet."""

    plan: StepPlan
    result: StepResult
    failed: tuple[Request, ...]
    """Planned and not run."""
    reasons: tuple[str, ...]
    """Why, of each of them."""
    schedule_ns: int
    """Spent on scheduling in this call, for this step or for the next."""
    run_ns: int
    """The rest of the call: handing steps over, and waiting for this one."""
    ended_ns: int
    room_tokens: int | None = None
    """As in `StepOutcome`."""
    failure: str = ""
    """The same."""


@dataclass(slots=True)
class OverlapCounts:
    """How often steps overlapped since the start."""

    steps: int = 0
    overlapped: int = 0
    """While these ran, the next one was launched."""
    begun: int = 0
    """Of those that did not, after these the next one was launched before they were recorded."""
    void: int = 0
    """Launched for requests that had all ended, or had no mask of their form in time."""
    beside_ns: int = 0
    """Of the host, while the device had a step to run: scheduling, launching, committing and recording others."""
    why_not: Counter[str] = field(default_factory=Counter)
    """Reasons, of steps that did not though they might."""

    def summary(self) -> str:
        """On one line."""
        others = "".join(f"; {count} not: {reason}" for reason, count in self.why_not.most_common())
        begun = f", {self.begun} times it was begun before their record" if self.begun else ""
        shared = f", the host worked {self.beside_ns / 1e6 / max(1, self.steps):.2f} ms a step beside the device"
        return f"while {self.overlapped} of {self.steps} steps ran the next was begun{begun}{shared}{others}"


@dataclass(frozen=True, slots=True)
class _Flight:
    plan: StepPlan
    launched: Launched | None
    """None: it could not be launched; it is to be run once the step before is over."""
    error: Exception | None = None
    """Of a library, that kept it from being launched."""

    @property
    def is_void(self) -> bool:
        return all(item.request.is_finished for item in self.plan.scheduled)


class StepLoop:
    """`overlaps`: whether a step may be launched before the last one came back."""

    def __init__(self, scheduler: Scheduler, runner: StepRunner, explain: Explain, *, overlaps: bool) -> None:
        self._scheduler = scheduler
        self._runner = runner
        self._explain = explain
        self._overlaps = overlaps
        self._flight: _Flight | None = None
        self._begun_ns = 0
        self._may_begin = False
        self._num_barren = 0
        self.counts = OverlapCounts()

    def begin(self, step: int) -> tuple[int, int]:
        """What was returned last, step number `step`, is committed: launch the next one where that waited for it.

        What is taken for it is dated as of that step, whose frame will tell of it. Returns the nanoseconds that
        scheduling took, and handing over.
        """
        if not self._may_begin or any(request.awaits_its_form for request in self._scheduler.requests.values()):
            return 0, 0
        started_ns = time.monotonic_ns()
        plan = self._scheduler.schedule(step, started_ns)
        scheduled_ns = time.monotonic_ns()
        if plan.scheduled:
            self._flight = self._launched(plan)
            self.counts.begun += 1
        self._begun_ns = time.monotonic_ns()
        return scheduled_ns - started_ns, self._begun_ns - scheduled_ns

    def wrote_down(self, ended_ns: int) -> None:
        """What was returned last was committed and recorded; it had ended at `ended_ns`."""
        if self._flight is not None and self._flight.launched is not None:
            self.counts.beside_ns += time.monotonic_ns() - max(ended_ns, self._begun_ns)

    def next(self, step: int, *, ahead: bool) -> CompletedStep | None:
        """The next step, number `step`, whole; None: there is nothing to run.

        With `ahead` the one after it may have been launched when this returns.
        """
        clock = _Clock()
        overlaps, self._may_begin = self._overlaps and ahead, False
        flight = self._take_flight()
        if flight is None:
            plan = self._scheduler.schedule(step, clock.started_ns)
            clock.scheduled()
            if not plan.scheduled:
                return None
            flight = self._launched(plan) if overlaps else _Flight(plan, None)
        if overlaps and flight.launched is not None:
            self._flight = self._launch_beside(flight.plan, flight.launched, clock)
        return self._finish(flight, clock)

    def settle(self) -> CompletedStep | None:
        """The step in flight, once it is over; None without one. Nothing is in flight afterwards."""
        flight, self._may_begin = self._take_flight(), False
        return None if flight is None else self._finish(flight, _Clock())

    def close(self) -> None:
        """The device is done with what is about to be given back."""
        flight, self._flight = self._flight, None
        if flight is not None and flight.launched is not None:
            with contextlib.suppress(Exception):  # whatever it died of has been told, or is of no interest any more
                flight.launched.result()

    def _take_flight(self) -> _Flight | None:
        flight, self._flight = self._flight, None
        if flight is None:
            return None
        if flight.launched is not None and not flight.is_void:
            flight = self._sampled(flight.plan, flight.launched)
        if flight.launched is None:
            flight = replace(flight, plan=to_run_again(flight.plan))
        if not flight.is_void:
            return flight
        self.counts.void += 1
        return None

    def _launch_beside(self, running: StepPlan, launched: Launched, clock: _Clock) -> _Flight | None:
        """The step after the one that runs, where it can be scheduled and has anything to do."""
        started_ns = time.monotonic_ns()
        why_not = self._scheduler.why_not_beside(running)
        if why_not:
            self.counts.why_not[why_not] += 1
            self._may_begin = why_not != RESERVED  # whose memory may be taken away while a step runs
            return None
        plan = self._scheduler.schedule_beside(running, started_ns)
        clock.scheduled(since_ns=started_ns)
        if not plan.scheduled:
            return None
        flight = self._launched(plan, launched)
        self.counts.beside_ns += time.monotonic_ns() - started_ns
        self.counts.overlapped += 1
        return flight

    def _launched(self, plan: StepPlan, after: Launched | None = None) -> _Flight:
        """A plan on its way, or to be run later where that failed: what was launched before may still run."""
        try:
            return _Flight(plan, self._runner.launch(plan, after))
        except Exception as error:
            return self._put_off(plan, error)

    def _sampled(self, plan: StepPlan, launched: Launched) -> _Flight:
        """What is left of a step once all of it is handed over, or the step, to be run again where that failed."""
        try:
            return _Flight(launched.sample(), launched)
        except Exception as error:
            return self._put_off(plan, error)

    def _put_off(self, plan: StepPlan, error: Exception) -> _Flight:
        if not is_survived(self._runner, error):
            raise error
        let_go_of_frames(error)
        return _Flight(plan, None, None if is_no_memory(error) else error)

    def _finish(self, flight: _Flight, clock: _Clock) -> CompletedStep:
        self.counts.steps += 1
        failure = flight.error
        if flight.launched is not None:
            try:
                plan, result = without_ended(flight.plan, flight.launched.result())
                self._num_barren = 0
                return clock.ran(plan, result)
            except Exception as error:
                if flight.plan.changes_states or not is_survived(self._runner, error):
                    raise
                failure = None if is_no_memory(error) else error
                let_go_of_frames(error)
            self._runner.recover()
            if self._flight is not None:  # it computed with tokens that never came
                self._flight = replace(self._flight, launched=None)
        plan = to_run_again(flight.plan)
        outcome = run_with_shortages(self._runner, plan, self._explain)
        if outcome.plan.scheduled:
            self._num_barren = 0
        elif outcome.error is not None:
            self._num_barren += 1
        most_barren = MOST_BARREN * (MOST_RESTARTS + 1 if plan.changes_states else 1)
        if outcome.error is not None and self._num_barren >= most_barren:
            raise outcome.error
        return clock.ran(outcome.plan, outcome.result, replace(outcome, error=outcome.error or failure))


class _Clock:
    """Where the time of one call goes."""

    def __init__(self) -> None:
        self.started_ns = time.monotonic_ns()
        self.schedule_ns = 0

    def scheduled(self, since_ns: int | None = None) -> None:
        self.schedule_ns += time.monotonic_ns() - (self.started_ns if since_ns is None else since_ns)

    def ran(self, plan: StepPlan, result: StepResult, outcome: StepOutcome | None = None) -> CompletedStep:
        """`outcome`: of a step that was not over when the device came back."""
        now_ns = time.monotonic_ns()
        took = self.schedule_ns, now_ns - self.started_ns - self.schedule_ns, now_ns
        if outcome is None:
            return CompletedStep(plan, result, (), (), *took)
        failure = "" if outcome.error is None else _first_line(outcome.error)
        return CompletedStep(plan, result, outcome.failed, outcome.reasons, *took, outcome.room_tokens, failure)


class Launched(Protocol):
    """A step that was handed to the device."""

    def sample(self) -> StepPlan:
        """Hand over what waited for the step before, which is committed: once, before the next step is launched. What
        is left of the plan, which is what `result` is of."""

    def result(self) -> StepResult:
        """What came out; waits for it."""


class StepRunner(Protocol):
    """Runs steps; see `model.runner.ModelRunner`. `launch` takes what it gave before."""

    def run(self, plan: StepPlan) -> StepResult:
        """One step."""

    def launch(self, plan: StepPlan, after: Any = None) -> Launched:
        """Hand over one step, after the last one launched."""

    def is_well(self) -> bool:
        """Whether the device computes, after a step raised what is no lack of memory; asks it."""

    def recover(self) -> None:
        """After a step that ran out of memory, or in which a library failed."""

    def release_graphs(self) -> bool:
        """Give back graphs, which steps are only faster with, and their memory; whether there were any."""


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """What was run in the end."""

    plan: StepPlan
    result: StepResult
    failed: tuple[Request, ...] = ()
    """Planned and not run."""
    reasons: tuple[str, ...] = ()
    """Why, of each of them."""
    room_tokens: int | None = None
    """Where memory was missing and smaller steps help, the tokens that there seems to be room for: those of the largest
    part that was run. Half of it where parts cannot be run, whatever was missing: who makes a library fail is alone in
    the end. None: memory was there, or a token alone found none."""
    error: Exception | None = None
    """The last that a library raised in it."""


def run_with_shortages(runner: StepRunner, plan: StepPlan, explain: Explain = lambda plan: "") -> StepOutcome:
    """Run a plan, or as much of it as there is memory for and libraries do. What nobody survives is raised.

    `explain` is asked before anything is given back.
    """
    if not plan.scheduled:
        return StepOutcome(plan, StepResult(()))
    tries = _Tries(runner, explain)
    result = tries.run(plan)
    if result is None and not plan.changes_states:
        result = tries.run(plan)
        if result is None and runner.release_graphs():
            result = tries.run(plan)
    elif result is None and plan.num_tokens == 1:  # the next try cannot be smaller
        runner.release_graphs()
    if result is not None:
        return StepOutcome(plan, result, error=tries.error)
    done = {} if plan.changes_states else tries.run_in_halves(plan)
    ran = [number for number in range(len(plan.scheduled)) if number in done]
    failed = {
        item.request: tries.lost.get(number, tries.reason)
        for number, item in enumerate(plan.scheduled)
        if number not in done
    }
    num_single_token = sum(done[number].item.num_tokens == 1 for number in ran)
    ran.sort(key=lambda number: (done[number].item.num_tokens > 1, number))
    requests = {done[number].item.request for number in ran}
    left = replace(
        plan,
        scheduled=tuple(done[number].item for number in ran),
        num_single_token=num_single_token,
        state_saves=tuple(save for save in plan.state_saves if save.request in requests),
    )
    merged = StepResult(
        token_ids=tuple(done[number].token_ids for number in ran),
        logprobs=_or_nothing([done[number].logprobs for number in ran]),
        forward_ns=tries.forward_ns,
        logit_sums=_or_nothing([done[number].logit_sums for number in ran]),
    )
    room_tokens = plan.num_tokens // 2 if plan.changes_states else tries.most_tokens
    is_cut = (tries.is_short or plan.changes_states) and 0 < room_tokens < plan.num_tokens
    room = room_tokens if is_cut else None
    return StepOutcome(left, merged, tuple(failed), tuple(failed.values()), room, tries.error)


class _Done(NamedTuple):
    """An item as it was run in the end, its tokens and what is told of them."""

    item: Scheduled
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...]
    logit_sums: tuple[int, ...]


T = TypeVar("T")


def _or_nothing(of_items: list[tuple[T, ...]]) -> tuple[tuple[T, ...], ...]:
    """Empty where nobody asked."""
    return tuple(of_items) if any(of_items) else ()


class _Tries:
    """Of one plan, and of parts of it."""

    def __init__(self, runner: StepRunner, explain: Explain) -> None:
        self._runner = runner
        self._explain = explain
        self.reason = ""
        """Why the last one failed."""
        self.lost: dict[int, str] = {}
        """Items of the plan that could not be run, by their places, and why."""
        self._explained: str | None = None
        self.forward_ns = 0
        self.most_tokens = 0
        """Of those that were run."""
        self.is_short = False
        """Whether memory was missing in any."""
        self.error: Exception | None = None
        """The last that a library raised."""

    def run(self, plan: StepPlan) -> StepResult | None:
        """None: there is no memory for it, or a library failed."""
        result: StepResult | None = None
        try:
            result = self._runner.run(plan)
        except Exception as error:
            if not is_survived(self._runner, error):
                raise
            if is_no_memory(error):
                self.is_short = True
                if self._explained is None:  # once: it may ask the driver
                    self._explained = _explained(self._explain, plan)
                self.reason = f"no memory for a step of {_tokens(plan)} ({_first_line(error)}){self._explained}"
            else:
                self.error = error
                self.reason = f"a step of {_tokens(plan)} failed ({_first_line(error)})"
            let_go_of_frames(error)
        if result is None:
            self._runner.recover()
            return None
        self.forward_ns += result.forward_ns
        self.most_tokens = max(self.most_tokens, plan.num_tokens)
        return result

    def run_in_halves(self, plan: StepPlan) -> dict[int, _Done]:
        """What could be run, by its place in the plan. The plan itself failed; each half is tried once, then halved;
        one token is tried twice, so that nobody ends of a failure that passes."""
        done: dict[int, _Done] = {}
        whole_plan = list(enumerate(plan.scheduled))
        parts = _halves(whole_plan) or [whole_plan]
        copies = plan.copies  # are made with the first part: copying again after others wrote would undo it
        while parts:
            part = [(number, item) for number, item in parts.pop(0) if number not in self.lost]
            if not part:
                continue
            items = tuple(item for _, item in part)
            single = sum(item.num_tokens == 1 for item in items)
            step, halves = StepPlan(items, single, copies), _halves(part)
            result = self.run(step)
            if result is None and not halves:
                result = self.run(step)
            if result is not None:
                copies = ()
                logprobs = result.logprobs or ((),) * len(items)
                sums = result.logit_sums or ((),) * len(items)
                for (number, item), ids, told, summed in zip(part, result.token_ids, logprobs, sums, strict=True):
                    whole = plan.scheduled[number]
                    ran = item.num_tokens if item.drafts or whole.drafts else whole.num_tokens
                    if item.start + item.num_tokens == whole.start + ran:
                        done[number] = _Done(whole._replace(num_tokens=ran, drafts=item.drafts), ids, told, summed)
                continue
            if not halves:
                self.lost[part[0][0]] = self.reason
            parts[:0] = halves
        return done


def _halves(part: list[tuple[int, Scheduled]]) -> list[list[tuple[int, Scheduled]]]:
    """The items of a plan by their places, in two; of one item its tokens, drafts left out. Empty: it is one token."""
    if len(part) > 1:
        return [part[: len(part) // 2], part[len(part) // 2 :]]
    ((number, item),) = part
    if item.drafts:
        return [[(number, item._replace(num_tokens=1, drafts=()))]]
    if item.num_tokens == 1:
        return []
    first = item.num_tokens // 2
    rest = item._replace(start=item.start + first, num_tokens=item.num_tokens - first)
    return [[(number, item._replace(num_tokens=first, samples=False))], [(number, rest)]]


def is_survived(runner: StepRunner, error: Exception) -> bool:
    """Whether steps can go on after one that raised `error`: of want of memory, or of a library, on a device that
    computes all the same. Our own words may quote another rank's."""
    if isinstance(error, KvscopeError):
        return False
    return is_no_memory(error) or (is_of_library(error) and runner.is_well())


def _explained(explain: Explain, plan: StepPlan) -> str:
    """A report that fails is none: the shortage itself must be told."""
    try:
        why = explain(plan)
    except Exception:
        return ""
    return f"; {why}" if why else ""


def _tokens(plan: StepPlan) -> str:
    return counted(plan.num_tokens, "token")


def _first_line(error: BaseException) -> str:
    return f"{(str(error).splitlines() or [type(error).__name__])[0]:.160}"
