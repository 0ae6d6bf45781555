"""Derives the cost model of a recorded engine from the duration and the work of its steps.

The bytes of keys and values per token are an argument, because the recording states the engine's block size in bytes
(`recorded_token_bytes`). The other parameters of the cost model are fitted to the durations (`cost_fit`). Only
recordings whose frames contain the work of a step (`Work`) can be used.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from kvscope_engine.simulator.costs.cost_fit import FREE_RATE, MIN_SAMPLES, ModelSizes, Sample, fit_costs
from kvscope_engine.simulator.costs.cost_model import CostModel
from kvscope_telemetry.messages.telemetry import Frame
from kvscope_telemetry.recordings.reader import Recording

MAX_SAMPLES: Final = 2000
"""Maximum number of steps used for the fit. They are spread evenly over the recorded steps."""


def recorded_costs(recording: Recording, kv_bytes_per_token: float) -> CostModel | None:
    """Return the fitted cost model, with default bandwidths of the host memory and the disk; None if the
    recording has too little information.

    `kv_bytes_per_token`: bytes of keys and values per token, over all layers.
    """
    model = recording.info.hello.model
    # 2 bytes per weight are assumed. With another size, only the fitted bandwidth differs, not the predicted times.
    sizes = ModelSizes(
        weight_bytes=2.0 * model.num_parameters,
        kv_bytes_per_token=kv_bytes_per_token,
        flops_per_token=2.0 * model.num_parameters,
        attention_flops_per_pair=4.0 * model.num_layers * model.num_query_heads * model.head_dim,
    )
    if not (sizes.weight_bytes and kv_bytes_per_token and sizes.attention_flops_per_pair):
        return None
    samples = _samples(recording, sizes)
    return _rescaled_to_kv(fit_costs(samples, sizes).cost, kv_bytes_per_token) if len(samples) >= MIN_SAMPLES else None


def _samples(recording: Recording, sizes: ModelSizes) -> list[Sample]:
    samples, stride = list[Sample](), 1
    usable_frames = (frame for frame in recording.frames() if frame.work.flops and frame.timings.run_ns)
    for index, frame in enumerate(usable_frames):
        if index % stride == 0:
            samples.append(_sample(frame, sizes))
        if len(samples) > MAX_SAMPLES:
            del samples[1::2]
            stride *= 2
    return samples


def _sample(frame: Frame, sizes: ModelSizes) -> Sample:
    work, timings = frame.work, frame.timings
    return Sample(
        num_tokens=frame.batch.num_prefill_tokens + frame.batch.num_decode_tokens,
        context=round(work.kv_read_bytes / sizes.kv_bytes_per_token),
        pairs=round(work.attention_flops / sizes.attention_flops_per_pair),
        seconds=(timings.schedule_ns + timings.run_ns + timings.commit_ns + timings.record_ns) / 1e9,
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
