"""Computes how long a step takes on a device that is described by a few rates. Uses step plans, no tensors.

A step reads all weights once and, for each request, the KV of its context. It computes the dense layers for each token,
and attention for each pair of a token and a position that it attends to. The slower of memory and compute decides:
`max(bytes / bandwidth, flops / rate) + overhead` (the roofline model). Costs per request, token and position that are
always added describe devices on which memory accesses and computation do not overlap.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Final

from kvscope_engine.policy.step_plan import StepPlan
from kvscope_engine.simulator.kv_layout import KVLayout
from kvscope_telemetry.devices.data_sheets import DATA_SHEET_GB_PER_S
from kvscope_telemetry.errors import BadInput

MAX_VALUE: Final = 1e21


@dataclass(frozen=True, slots=True, kw_only=True)
class CostModel:
    """Costs of a model on a device. Raises BadInput for a value out of range."""

    weight_bytes: float
    kv_bytes_per_token: float
    """Bytes of keys and values per token, over all layers."""
    flops_per_token: float
    """FLOPs of the dense layers per token: twice the number of parameters."""
    attention_flops_per_pair: float
    """FLOPs over all layers for one pair of a token and a position that it attends to: 4 x layers x (heads x
    head size).
    """
    memory_bandwidth: float
    """Bandwidth of device memory in bytes/s."""
    flops_per_second: float
    step_overhead_s: float
    """Seconds added to each step: launches, sampling, scheduling."""
    host_bandwidth: float = 25e9
    """Bandwidth between device and host memory in bytes/s. Default: PCIe 4.0 x16 as measured (nominally 32 GB/s)."""
    disk_bandwidth: float = 3e9
    """Read bandwidth of the disk in bytes/s. Default: an NVMe drive."""
    disk_write_bandwidth: float = 1.5e9
    request_overhead_s: float = 0.0
    """Seconds added for each request of a step."""
    token_overhead_s: float = 0.0
    """Seconds added for each token of a step."""
    context_overhead_s: float = 0.0
    """Seconds added for each position that is attended to, summed over the requests of a step."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            low = 1.0 if field.name.endswith(("bandwidth", "per_second")) else 0.0
            if not low <= value <= MAX_VALUE:  # NaN is in no range
                raise BadInput(
                    f"{field.name}={value:g} is not accepted: must be a number from {low:g} to {MAX_VALUE:g}"
                )

    def step_ns(self, plan: StepPlan, layout: KVLayout | None = None) -> int:
        """Return the time of the step in ns, at least 1.

        With a `layout`, the windows of its KV groups limit which part of the context is read.
        """
        if layout is not None:
            kv_bytes, pairs = layout.read_bytes(plan.scheduled), layout.mean_pairs(plan.scheduled)
            return self._step_ns(len(plan.scheduled), plan.num_tokens, kv_bytes, pairs)
        num_tokens = context = num_pairs = 0
        for item in plan.scheduled:
            start, count = item.start, item.num_tokens
            num_tokens += count
            context += start + count
            num_pairs += count * start + count * (count + 1) // 2
        return self._step_ns(len(plan.scheduled), num_tokens, self.kv_bytes_per_token * context, num_pairs)

    def decode_step_ns(self, num_requests: int, context: int) -> int:
        """Return the time of a step that computes one token for each request, in ns. All layers have full attention.

        `context`: number of tokens that the requests have after the step, in total.
        """
        return self._step_ns(num_requests, num_requests, self.kv_bytes_per_token * context, context)

    def _step_ns(self, num_requests: int, num_tokens: int, kv_bytes: float, pairs: float) -> int:
        num_bytes = self.weight_bytes + kv_bytes
        flops = self.flops_per_token * num_tokens + self.attention_flops_per_pair * pairs
        seconds = max(num_bytes / self.memory_bandwidth, flops / self.flops_per_second) + self.step_overhead_s
        seconds += self.request_overhead_s * num_requests + self.token_overhead_s * num_tokens
        if self.context_overhead_s:
            seconds += self.context_overhead_s * kv_bytes / max(1.0, self.kv_bytes_per_token)
        return max(1, round(seconds * 1e9))


@dataclass(frozen=True, slots=True)
class Preset:
    cost: CostModel
    num_slots: int
    """KV token slots that fit in device memory next to the weights."""
    max_model_len: int
    num_layers: int


def _preset(
    params: float,
    layers: int,
    width: int,
    kv_width: int,
    bandwidth: float,
    flops: float,
    num_slots: int,
    max_model_len: int,
    host_bandwidth: float,
) -> Preset:
    """Return a preset with 16-bit weights and KV and an overhead of 5 ms per step.

    `width` is heads x head size, `kv_width` KV heads x head size.
    """
    cost = CostModel(
        weight_bytes=2 * params,
        kv_bytes_per_token=2 * 2 * layers * kv_width,
        flops_per_token=2 * params,
        attention_flops_per_pair=4 * layers * width,
        memory_bandwidth=bandwidth,
        flops_per_second=flops,
        step_overhead_s=0.005,
        host_bandwidth=host_bandwidth,
    )
    return Preset(cost, num_slots, max_model_len, layers)


_A100_40: Final = 1e9 * DATA_SHEET_GB_PER_S["NVIDIA A100-SXM4-40GB"]
_A100_80: Final = 1e9 * DATA_SHEET_GB_PER_S["NVIDIA A100-SXM4-80GB"]
_H100: Final = 1e9 * DATA_SHEET_GB_PER_S["NVIDIA H100 80GB HBM3"]
PRESETS: Final = {
    # PagedAttention, table 1: models, GPUs and KV slots. Rates: NVIDIA's data sheets, dense bf16, all GPUs together.
    # The link to the host is what copies of pinned memory reach: 25 GB/s by PCIe 4.0 x16, 55 GB/s by 5.0, for each GPU.
    "opt-13b": _preset(12.85e9, 40, 5120, 5120, _A100_40, 312e12, 15_700, 2048, 25e9),  # 1 x A100 40 GB
    "opt-66b": _preset(65.7e9, 64, 9216, 9216, 4 * _A100_40, 4 * 312e12, 9_700, 2048, 4 * 25e9),  # 4 x A100 40 GB
    "opt-175b": _preset(174.6e9, 96, 12288, 12288, 8 * _A100_80, 8 * 312e12, 60_100, 2048, 8 * 25e9),  # 8 x A100 80 GB
    # 0.9 x 80 GB less the weights, over 131,072 bytes a token.
    "llama-3.1-8b": _preset(8.03e9, 32, 4096, 1024, _H100, 989e12, 426_000, 131_072, 55e9),  # 1 x H100 80 GB
}
