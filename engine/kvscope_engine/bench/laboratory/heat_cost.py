"""Measures the cost of `--page-heat` during decode, by comparing steps in which attention is measured with the steps
between them.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import replace
from typing import Any, Final

import numpy as np

from kvscope_engine.engine import Engine
from kvscope_telemetry.engine_config import EngineConfig
from kvscope_telemetry.messages.commands import Submit
from kvscope_telemetry.messages.sampling_params import SamplingParams
from kvscope_telemetry.messages.telemetry import Frame, TelemetryMessage
from kvscope_telemetry.messages.wire import encode

_MEASURING_INTERVAL: Final = 2
"""Number of steps from one step in which attention is measured to the next. With 2, each has an unmeasured neighbor to
compare with.
"""
_SPARE_BLOCKS: Final = 2


def heat_cost(config: EngineConfig, ids: list[int], batch: int, num_steps: int, every: int) -> dict[str, Any]:
    """Decode `num_steps` tokens for `batch` requests with the prompt `ids`, and return median step times in ms.

    The times include the encoding of frames. `cost_share` in the result is the share of decode time that measuring
    attention in one step out of `every` costs.
    """
    blocks = batch * (-(-(len(ids) + num_steps) // config.block_size) + _SPARE_BLOCKS)
    config = replace(config, page_heat=_MEASURING_INTERVAL, num_gpu_blocks_override=blocks, enable_prefix_caching=False)
    sampling = SamplingParams(temperature=0.0, max_tokens=num_steps, ignore_eos=True)
    newest = NewestStep()
    with Engine(config, publish=newest.receive) as engine:
        for number in range(batch):
            engine.submit(Submit(request_id=str(number), prompt_token_ids=tuple(ids), sampling=sampling))
        step_times_s: dict[bool, list[float]] = {True: [], False: []}
        while engine.has_unfinished:
            started = time.perf_counter()
            newest.start_step(engine)
            engine.step()
            if newest.num_decodes == batch:
                step_times_s[newest.is_measured].append(time.perf_counter() - started)
    measured, unmeasured = (statistics.median(step_times_s[is_measured]) for is_measured in (True, False))
    return {
        "every": every,
        "num_context_tokens": len(ids),
        "measured_step_ms": measured * 1e3,
        "other_step_ms": unmeasured * 1e3,
        "cost_share": (measured / unmeasured - 1.0) / every,
    }


class NewestStep:
    """Data of the latest frame: the number of decoding requests, and whether attention was measured in its step."""

    def __init__(self) -> None:
        self.num_decodes, self.is_measured, self._step = 0, False, 0

    def start_step(self, engine: Engine) -> None:
        self.num_decodes, self.is_measured = 0, False
        self._step = engine.step_count + 1

    def receive(self, message: TelemetryMessage) -> None:
        """Record a message, and encode it as a publisher does, so that the measured time includes encoding."""
        encode(message)
        if isinstance(message, Frame) and not message.batch.num_prefill_tokens:
            self.num_decodes = message.batch.num_decode_tokens
            self.is_measured = self._step in np.frombuffer(message.blocks.attention_step, "<u4")
