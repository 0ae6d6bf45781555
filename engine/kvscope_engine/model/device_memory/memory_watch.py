"""Decides how much steps may take while other programs hold memory that was planned for them. Plain arithmetic.

Owns the levels, from all that was planned down to what is never given up, and when it goes from one to another: down at
once, up after a while. Reads no device and frees nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Final, NamedTuple

from kvscope_engine.model.device_memory.memory_plan import MemoryPlan

UP_AFTER_S: Final = 30.0
"""How long there must be room for more: a game that loads its next level gives memory back and takes it again."""


class Level(NamedTuple):
    """What steps may take."""

    max_tokens: int
    has_piecewise_graphs: bool = True
    has_graphs: bool = True


@dataclass(frozen=True, kw_only=True)
class StepCosts:
    """Bytes of the largest step and of CUDA graphs, as planned. With `min_tokens` all requests can still decode, and
    prompts go on beside them."""

    max_tokens: int
    min_tokens: int
    activations: int
    """Of a step of `max_tokens`: they grow with its tokens."""
    fixed: int
    """What its sampling takes, and partial results of attention: by its requests, not by its tokens."""
    graphs: int
    piecewise_graphs: int

    @cached_property
    def levels(self) -> tuple[Level, ...]:
        """Highest first: tokens of a step go before graphs, graphs of steps with prefills before those of decodes."""
        sizes = [self.max_tokens]
        while sizes[-1] // 2 >= self.min_tokens:
            sizes.append(sizes[-1] // 2)
        last = sizes[-1]
        levels = [Level(size) for size in sizes]
        levels += [Level(last, has_piecewise_graphs=False)] if self.piecewise_graphs else []
        levels += [Level(last, has_piecewise_graphs=False, has_graphs=False)] if self.graphs else []
        return tuple(levels)

    def needed(self, level: Level) -> int:
        """Bytes that steps take at a level, with the graphs that it keeps."""
        step = self.activations * level.max_tokens // self.max_tokens + self.fixed
        return step + level.has_piecewise_graphs * self.piecewise_graphs + level.has_graphs * self.graphs


def step_costs(plan: MemoryPlan | None, max_tokens: int, max_num_seqs: int, *, has_graphs: bool) -> StepCosts:
    """Of a plan for steps of up to so many tokens and requests; without one there is nothing to give up."""
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
    """`for_others`: bytes that other programs can hold before steps lack any."""

    def __init__(self, costs: StepCosts, for_others: int) -> None:
        self._costs = costs
        self._for_others = for_others
        self._at = 0
        self._room_since_s: float | None = None

    @property
    def level(self) -> Level:
        """What steps may take now."""
        return self._costs.levels[self._at]

    @property
    def is_lowered(self) -> bool:
        """Whether that is less than was planned."""
        return self._at > 0

    def missing(self, others: int) -> int:
        """Of what was planned for steps, bytes that others hold."""
        return max(0, others - self._for_others)

    def look(self, others: int, now_s: float) -> bool:
        """Other programs hold so many bytes: whether the level has changed."""
        levels, costs = self._costs.levels, self._costs
        room = costs.needed(levels[0]) - self.missing(others)
        fitting = (number for number, level in enumerate(levels) if costs.needed(level) <= room)
        wanted = next(fitting, len(levels) - 1)
        if wanted >= self._at:
            self._room_since_s = None
        elif self._room_since_s is None:
            self._room_since_s = now_s
        has_waited = self._room_since_s is not None and now_s - self._room_since_s >= UP_AFTER_S
        if wanted == self._at or (wanted < self._at and not has_waited):
            return False
        self._at, self._room_since_s = wanted, None
        return True
