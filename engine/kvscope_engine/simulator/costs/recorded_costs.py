"""Derives the cost model of a recorded engine from the duration and the work of its steps.

The bytes of keys and values per token are an argument, because the recording states the engine's block size in bytes
(`recorded_token_bytes`). The other parameters are fitted to the durations, for a device that overlaps memory accesses
and computation (`cost_fit`) and for one that does not (`additive_fit`); the better fit is scaled so that all steps
together take as long as measured. If the frames do not contain the work of a step (`Work`), it
is computed from the tokens of the step's requests, as if all layers had full attention.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from kvscope_engine.simulator.costs.additive_fit import fit_additive, weighted_error
from kvscope_engine.simulator.costs.cost_fit import FREE_RATE, MIN_SAMPLES, ModelSizes, Sample, fit_costs
from kvscope_engine.simulator.costs.cost_model import CostModel
from kvscope_telemetry.messages.telemetry import Frame, ModelInfo, Snapshot

MAX_SAMPLES: Final = 2000
"""Maximum number of steps used for the fit. They are spread evenly over the recorded steps."""
_ANY_SIZE: Final = 1e9
"""Size of weights and FLOPs of a model whose dimensions are not recorded. Only the fitted rates depend on it, not the
predicted times.
"""


@dataclass(frozen=True, slots=True)
class RecordedCosts:
    cost: CostModel
    """Fitted costs, with default bandwidths of the host memory and the disk."""
    variation: tuple[float, ...]
    """Measured time of each sampled step, divided by the time that `cost` predicts. The mean, weighted by the predicted
    time, is 1.
    """


class StepSampler:
    """Collects the duration and work of recorded steps.

    `kv_bytes_per_token`: bytes of keys and values per token, over all layers; 0 if unknown.
    """

    def __init__(self, model: ModelInfo, kv_bytes_per_token: float) -> None:
        self._token_bytes = kv_bytes_per_token
        # 2 bytes per weight are assumed. With another size, only the fitted bandwidth differs, not the predicted times.
        self._sizes = ModelSizes(
            weight_bytes=2.0 * model.num_parameters or _ANY_SIZE,
            kv_bytes_per_token=kv_bytes_per_token,
            flops_per_token=2.0 * model.num_parameters or _ANY_SIZE,
            attention_flops_per_pair=4.0 * model.num_layers * model.num_query_heads * model.head_dim or 1.0,
        )
        self._has_attention_flops = bool(model.num_layers * model.num_query_heads * model.head_dim)
        self._samples: list[Sample] = []
        self._stride = 1
        self._num_steps = 0
        self._previous: Frame | None = None

    def observe(self, message: Frame | Snapshot) -> None:
        """Add the step of a frame. Must be called with all frames in order."""
        if not isinstance(message, Frame):
            self._previous = None
            return
        previous, self._previous = self._previous, message
        if not message.timings.run_ns or not message.batch.num_tokens or not self._token_bytes:
            return
        if self._num_steps % self._stride == 0:
            self._samples.append(self._sample(message, _duration_ns(message, previous)))
        self._num_steps += 1
        if len(self._samples) > MAX_SAMPLES:
            del self._samples[1::2]
            self._stride *= 2

    def costs(self) -> RecordedCosts | None:
        """Return the fitted costs; None if there are too few steps, or the size of a token is unknown."""
        samples = self._samples
        if len(samples) < MIN_SAMPLES or not self._token_bytes:
            return None
        additive, roofline = fit_additive(samples, self._token_bytes), fit_costs(samples, self._sizes)
        is_additive = weighted_error(additive.predicted_s, samples) < weighted_error(roofline.predicted_s, samples)
        fit = additive if is_additive else roofline
        measured_s = np.array([sample.seconds for sample in samples])
        # The fits weight steps by their time, and thereby underestimate the sum if some steps took much longer.
        factor = float(measured_s.sum() / sum(fit.predicted_s))
        cost = fit.cost if is_additive else _rescaled_to_kv(fit.cost, self._token_bytes)
        variation = measured_s / (np.array(fit.predicted_s) * factor)
        return RecordedCosts(_slowed(cost, factor), tuple(variation.tolist()))

    def _sample(self, frame: Frame, duration_ns: int) -> Sample:
        work, sizes, num_tokens = (
            frame.work,
            self._sizes,
            frame.batch.num_prefill_tokens + frame.batch.num_decode_tokens,
        )
        if work.flops and self._has_attention_flops:
            context = round(work.kv_read_bytes / sizes.kv_bytes_per_token)
            pairs = round(work.attention_flops / sizes.attention_flops_per_pair)
        else:
            context, pairs = _attended(frame)
        return Sample(
            num_tokens=num_tokens,
            context=context,
            pairs=pairs,
            seconds=duration_ns / 1e9,
            num_requests=len(frame.batch.number) // 4,
        )


def _duration_ns(frame: Frame, previous: Frame | None) -> int:
    """Return how long a step took: the time since the previous frame if the engine had work all the time, otherwise the
    sum of its parts.
    """
    timings = frame.timings
    parts_ns = timings.schedule_ns + timings.run_ns + timings.commit_ns + timings.record_ns
    if previous is None or previous.epoch != frame.epoch or previous.seq + 1 != frame.seq:
        return parts_ns
    had_work = previous.counters.num_running > 0 and previous.batch.num_tokens
    gap_ns = frame.time_ns - previous.time_ns
    # The engine may have been stopped in a much longer gap. With async scheduling, the parts overlap and the gap is
    # shorter than their sum.
    return gap_ns if had_work and 0 < gap_ns < 2 * parts_ns else parts_ns


def _attended(frame: Frame) -> tuple[int, int]:
    """Return the number of positions attended to, summed over the requests of a step, and of (token, attended position)
    pairs. The tokens of a request that ended with this step and is not in the frame attend to no others.
    """
    rows = frame.requests
    ends = dict(
        zip(
            np.frombuffer(rows.number, "<u4").tolist(),
            np.frombuffer(rows.num_computed_tokens, "<u4").tolist(),
            strict=True,
        )
    )
    context = pairs = 0
    numbers, counts = np.frombuffer(frame.batch.number, "<u4"), np.frombuffer(frame.batch.num_tokens, "<u4")
    for number, count in zip(numbers.tolist(), counts.tolist(), strict=True):
        end = max(count, ends.get(number, 0))
        context += end
        pairs += count * end - count * (count - 1) // 2
    return context, pairs


def _slowed(cost: CostModel, factor: float) -> CostModel:
    """Return a model whose steps take `factor` times as long."""
    return replace(
        cost,
        memory_bandwidth=max(1.0, cost.memory_bandwidth / factor),
        flops_per_second=max(1.0, cost.flops_per_second / factor),
        step_overhead_s=cost.step_overhead_s * factor,
        request_overhead_s=cost.request_overhead_s * factor,
        token_overhead_s=cost.token_overhead_s * factor,
        context_overhead_s=cost.context_overhead_s * factor,
    )


def _rescaled_to_kv(cost: CostModel, token_bytes: float) -> CostModel:
    """Return a model that predicts the same times with a KV size of `token_bytes`, by scaling weights and bandwidth.

    The time of memory accesses is (weights + KV) / bandwidth, so that a common factor of all three does not change it.
    If KV has no measurable cost (0 bytes), the factor makes the bandwidth `FREE_RATE`, at which `token_bytes` cost
    practically nothing either.
    """
    scale = token_bytes / cost.kv_bytes_per_token if cost.kv_bytes_per_token else FREE_RATE / cost.memory_bandwidth
    return replace(
        cost,
        weight_bytes=cost.weight_bytes * scale,
        kv_bytes_per_token=token_bytes,
        memory_bandwidth=cost.memory_bandwidth * scale,
    )
