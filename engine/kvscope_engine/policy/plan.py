"""What the scheduler decided for one step, and what the runner made of it. Values, no behaviour."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvscope_engine.policy.request import Request
from kvscope_telemetry.messages.commands import TokenLogprobs


class Scheduled(NamedTuple):
    """A request and how many of its tokens run in this step. (A tuple: a frozen dataclass takes 4 times as long.)

    The tokens are positions `start` to `start + num_tokens`; blocks for them are in the request's table.
    """

    request: Request
    start: int
    num_tokens: int
    samples: bool
    """Whether the last of them is the last known token, so that a new one is sampled after it."""


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step: single-token (decode) requests first, then prefill chunks."""

    scheduled: tuple[Scheduled, ...]
    num_single_token: int
    """How many of `scheduled`, from the first, compute exactly one token."""
    copies: tuple[tuple[int, int], ...] = ()
    """Blocks to copy, (from, to), before anything is written: copy on write."""

    @property
    def num_tokens(self) -> int:
        """Tokens computed in the step."""
        return sum(item.num_tokens for item in self.scheduled)


@dataclass(frozen=True, slots=True)
class StepResult:
    """What came out, one entry for each of `StepPlan.scheduled`."""

    token_ids: tuple[int | None, ...]
    """The sampled token; None where the prefill goes on."""
    logprobs: tuple[TokenLogprobs | None, ...] = ()
    """Empty when no request asked for any."""
    forward_ns: int = 0
    block_shares: NDArray[np.float32] | None = None
    """(num_single_token, blocks): the share of each decode's attention that fell on each of its blocks; None where it
    was not measured."""
