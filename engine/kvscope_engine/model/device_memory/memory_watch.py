"""Decides how much memory steps may use while other programs hold memory that the engine has planned to use. Plain
arithmetic.

Owns the current level, from everything planned down to a minimum. The level falls immediately and rises after a delay.
Reads no device and frees nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Final, NamedTuple

from kvscope_engine.model.device_memory.memory_plan import MemoryPlan

RAISE_AFTER_S: Final = 30.0
"""Seconds for which memory must suffice before the level rises, because other programs may free memory only
briefly. An example is a game that loads a new scene.
"""


class MemoryLevel(NamedTuple):
    """Limit on the tokens of a step, and whether CUDA graphs are kept."""

    max_tokens: int
    has_piecewise_graphs: bool = True
    has_graphs: bool = True


@dataclass(frozen=True, kw_only=True)
class StepCosts:
    """Planned bytes of the largest step and of CUDA graphs.

    With `min_tokens` per step, all requests can still decode, and prompts progress.
    """

    max_tokens: int
    min_tokens: int
    activations: int
    """Bytes of activations of a step of `max_tokens`, proportional to its tokens."""
    fixed: int
    """Bytes in proportion to requests instead of tokens: sampling, and partial results of attention."""
    graphs: int
    piecewise_graphs: int

    @cached_property
    def levels(self) -> tuple[MemoryLevel, ...]:
        """Levels, highest first. From level to level, first the tokens per step are reduced, then the graphs of
        steps with prefills are freed, then all other graphs.
        """
        sizes = [self.max_tokens]
        while sizes[-1] // 2 >= self.min_tokens:
            sizes.append(sizes[-1] // 2)
        last = sizes[-1]
        levels = [MemoryLevel(size) for size in sizes]
        levels += [MemoryLevel(last, has_piecewise_graphs=False)] if self.piecewise_graphs else []
        levels += [MemoryLevel(last, has_piecewise_graphs=False, has_graphs=False)] if self.graphs else []
        return tuple(levels)

    def needed(self, level: MemoryLevel) -> int:
        step = self.activations * level.max_tokens // self.max_tokens + self.fixed
        return step + level.has_piecewise_graphs * self.piecewise_graphs + level.has_graphs * self.graphs


def step_costs(plan: MemoryPlan | None, max_tokens: int, max_num_seqs: int, *, has_graphs: bool) -> StepCosts:
    """Return the costs according to `plan`; without a plan, all costs are 0 and there is a single level."""
    if plan is None:
        costs = {"activations": 0, "fixed": 0, "graphs": 0, "piecewise_graphs": 0}
        return StepCosts(max_tokens=max_tokens, min_tokens=max_tokens, **costs)
    return StepCosts(
        max_tokens=max_tokens,
        min_tokens=min(max_tokens, 2 * max_num_seqs),
        activations=plan.activations,
        fixed=plan.step - plan.activations,
        graphs=plan.reserves.graphs if has_graphs else 0,
        piecewise_graphs=plan.reserves.piecewise_graphs if has_graphs else 0,
    )


class MemoryWatch:
    """Decides the current level of memory use. `max_others`: bytes that other programs can hold before steps lack
    memory.
    """

    def __init__(self, costs: StepCosts, max_others: int) -> None:
        self._costs = costs
        self._max_others = max_others
        self._index = 0
        self._sufficient_since_s: float | None = None

    @property
    def level(self) -> MemoryLevel:
        return self._costs.levels[self._index]

    @property
    def is_lowered(self) -> bool:
        return self._index > 0

    def missing(self, others: int) -> int:
        """Return the bytes planned for steps that other programs have taken, if those programs hold `others` bytes in
        all.
        """
        return max(0, others - self._max_others)

    def update(self, others: int, now_s: float) -> bool:
        """Update the level, given the bytes that other programs hold. Returns whether it changed."""
        levels, costs = self._costs.levels, self._costs
        available = costs.needed(levels[0]) - self.missing(others)
        fitting = (number for number, level in enumerate(levels) if costs.needed(level) <= available)
        target = next(fitting, len(levels) - 1)
        if target >= self._index:
            self._sufficient_since_s = None
        elif self._sufficient_since_s is None:
            self._sufficient_since_s = now_s
        has_waited = self._sufficient_since_s is not None and now_s - self._sufficient_since_s >= RAISE_AFTER_S
        if target == self._index or (target < self._index and not has_waited):
            return False
        self._index, self._sufficient_since_s = target, None
        return True
