"""What was seen of one request: when it was sent, when each piece of its answer was there, and how it ended. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise


@dataclass(slots=True)
class Timeline:
    """Times are seconds of one clock. With an `error` it counts as failed, and its times mean nothing."""

    start_s: float
    num_prompt_tokens: int = 0
    times_s: list[float] = field(default_factory=list)
    """Of each piece that says something."""
    end_s: float = 0.0
    """When the answer was known to be whole: its last tokens may say nothing."""
    num_output_tokens: int = 0
    told_prompt_tokens: int = 0
    """By the server's usage; 0 where it tells none."""
    error: str = ""
    """One sentence; empty for an answer that is whole."""
    pieces: list[str] = field(default_factory=list)

    @property
    def ttft_s(self) -> float:
        """From being sent to the first piece."""
        return (self.times_s[0] if self.times_s else self.end_s) - self.start_s

    @property
    def e2el_s(self) -> float:
        """From being sent to the end."""
        return self.end_s - self.start_s

    @property
    def tpot_s(self) -> float | None:
        """Of each token behind the first; None for an answer of one."""
        if self.num_output_tokens < 2:
            return None
        return (self.e2el_s - self.ttft_s) / (self.num_output_tokens - 1)

    @property
    def itls_s(self) -> list[float]:
        """Between pieces."""
        return [after - before for before, after in pairwise(self.times_s)]
