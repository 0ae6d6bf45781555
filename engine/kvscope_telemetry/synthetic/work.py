"""What a step of a model would have to do, and how long a device would take: made up, as of a small model on a big GPU.

Steps lie below the roof at different heights, as those of a real engine do. Knows no engine.
"""

from __future__ import annotations

from typing import Final

from kvscope_telemetry.messages.telemetry import Work
from kvscope_telemetry.synthetic.hello import BLOCK_BYTES, BLOCK_TOKENS, FLOPS_PER_S, READ_BYTES_PER_S

_NUM_WEIGHTS: Final = 135_000_000
_WEIGHT_BYTES: Final = 4
_ATTENTION_FLOPS: Final = 4 * 30 * 576
"""A token of a step and one that it looks back at."""
_OTHER_BYTES: Final = 30 * 576 * 4 * 16
_LOWEST_SHARE: Final = 0.35
_SHARES: Final = 0.5
"""Of what the device can do, a step reaches so much at least, and up to so much more."""
_SCATTER: Final = 0.618_034


def synthetic_work(num_tokens: int, num_context: int, num_attended: int) -> Work:
    """Of a step of `num_tokens` whose requests have `num_context` tokens in the cache together; `num_attended` is that
    sum over tokens rather than requests."""
    token_bytes = BLOCK_BYTES // BLOCK_TOKENS
    attention = _ATTENTION_FLOPS * num_attended
    return Work(
        flops=2 * _NUM_WEIGHTS * num_tokens + attention,
        attention_flops=attention,
        weights_bytes=_NUM_WEIGHTS * _WEIGHT_BYTES,
        kv_read_bytes=token_bytes * num_context,
        kv_written_bytes=token_bytes * num_tokens,
        other_bytes=_OTHER_BYTES * num_tokens,
    )


def synthetic_forward_ns(work: Work, step: int) -> int:
    """How long it takes where the device reaches a share of its limits that differs from step to step."""
    at_least_s = max(work.num_bytes / READ_BYTES_PER_S, work.flops / FLOPS_PER_S)
    return round(at_least_s / (_LOWEST_SHARE + _SHARES * (step * _SCATTER % 1.0)) * 1e9)
