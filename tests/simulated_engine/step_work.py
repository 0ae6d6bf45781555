"""What a step of a model would have to do, and how long a device would take: a small model on a large GPU.

Steps reach shares of the device's limits that differ, as those of a real engine do.
"""

from __future__ import annotations

from tests.simulated_engine.hello import BLOCK_BYTES, BLOCK_TOKENS, FLOPS_PER_S, READ_BYTES_PER_S

from kvscope_engine.policy.step_plan import StepPlan
from kvscope_telemetry.messages.telemetry import Work

_TOKEN_BYTES = BLOCK_BYTES // BLOCK_TOKENS
_NUM_WEIGHTS = 135_000_000
_WEIGHT_BYTES = 4
_ATTENTION_FLOPS = 4 * 30 * 576
"""Of a token and one that it attends to."""
_OTHER_BYTES = 30 * 576 * 4 * 16
_LOWEST_SHARE = 0.35
_SHARES = 0.5
_SCATTER = 0.618_034


def work_of(plan: StepPlan) -> Work:
    """Return the work of a step; none for an empty plan."""
    num_tokens = num_read = num_attended = 0
    for item in plan.scheduled:
        count, start = item.num_tokens, item.start
        num_tokens += count
        num_read += start + count
        num_attended += count * start + count * (count + 1) // 2
    return step_work(num_tokens, num_read, num_attended) if num_tokens else Work()


def step_work(num_tokens: int, num_read: int, num_attended: int) -> Work:
    """Return the work of `num_tokens` tokens whose requests have `num_read` tokens in the cache, and which attend to
    `num_attended` tokens, all summed up.
    """
    attention = _ATTENTION_FLOPS * num_attended
    return Work(
        flops=2 * _NUM_WEIGHTS * num_tokens + attention,
        attention_flops=attention,
        weights_bytes=_NUM_WEIGHTS * _WEIGHT_BYTES,
        kv_read_bytes=_TOKEN_BYTES * num_read,
        kv_written_bytes=_TOKEN_BYTES * num_tokens,
        other_bytes=_OTHER_BYTES * num_tokens,
    )


def forward_ns(work: Work, step: int) -> int:
    """Return how long the forward pass of `step` takes on the device."""
    least_s = max(work.num_bytes / READ_BYTES_PER_S, work.flops / FLOPS_PER_S)
    return round(least_s / (_LOWEST_SHARE + _SHARES * (step * _SCATTER % 1.0)) * 1e9)
