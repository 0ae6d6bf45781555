"""A step for which a device's memory did not suffice: tried again, then without its prefills, before anyone gives up.

Owns what is tried, and who ends. A plan may be run again: writing the same keys and values, and copying to a block
that was free, come to the same twice.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from kvscope_engine.policy.plan import StepPlan, StepResult, without_drafts
from kvscope_engine.policy.request import Request


class Launched(Protocol):
    """A step that was handed to the device."""

    def result(self) -> StepResult:
        """What came out; waits for it."""


class StepRunner(Protocol):
    """Runs steps; see `model.runner.ModelRunner`. `launch` takes what it gave before."""

    def run(self, plan: StepPlan) -> StepResult:
        """One step."""

    def launch(self, plan: StepPlan, after: Any = None) -> Launched:
        """Hand over one step, after the last one launched."""

    def recover(self) -> None:
        """After a step that ran out of memory."""


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """What was run in the end."""

    plan: StepPlan
    result: StepResult
    failed: tuple[Request, ...] = ()
    """Planned and not run: each ends with the `reason`."""
    reason: str = ""


Explain = Callable[[StepPlan], str]
"""Why there is no memory for a plan, and what would help; empty where nobody knows."""


def run_with_shortages(runner: StepRunner, plan: StepPlan, explain: Explain = lambda plan: "") -> StepOutcome:
    """Run a plan, or as much of it as there is memory for. Other failures are raised: nobody knows what they left.

    `explain` is asked before anything is given back.
    """
    reason = ""
    for part in (plan, plan, _decodes_of(plan)):
        if not part.scheduled:
            continue
        try:
            result = runner.run(part)
        except (RuntimeError, MemoryError) as error:
            if not is_shortage(error):
                raise
            reason = f"no memory for a step of {part.num_tokens} tokens ({_first_line(error)})"
            reason += _explained(explain, part)
            runner.recover()
        else:
            left = plan.scheduled[len(part.scheduled) :]
            return StepOutcome(part, result, tuple(item.request for item in left), reason if left else "")
    failed = tuple(item.request for item in plan.scheduled)
    return StepOutcome(StepPlan((), 0), StepResult(()), failed, reason)


def launch_or_none(runner: StepRunner, plan: StepPlan, after: Launched | None) -> Launched | None:
    """Launch a plan; None when there is no memory for it, while what was launched before may still run."""
    try:
        return runner.launch(plan, after)
    except (RuntimeError, MemoryError) as error:
        if not is_shortage(error):
            raise
        return None


def is_shortage(error: BaseException) -> bool:
    """Whether memory ran out. A CPU's allocator says so in words alone."""
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or "can't allocate memory" in str(error)


def _explained(explain: Explain, plan: StepPlan) -> str:
    """A report that fails is none: the shortage itself must be told."""
    try:
        why = explain(plan)
    except Exception:
        return ""
    return f"; {why}" if why else ""


def _decodes_of(plan: StepPlan) -> StepPlan:
    """Without prefills, which take by far the most, and drafts; empty when that is the whole plan."""
    if plan.num_single_token == len(plan.scheduled):
        return StepPlan((), 0)
    return without_drafts(plan)


def _first_line(error: BaseException) -> str:
    return f"{(str(error).splitlines() or [type(error).__name__])[0]:.160}"
