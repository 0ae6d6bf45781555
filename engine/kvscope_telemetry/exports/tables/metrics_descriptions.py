"""Descriptions of the columns of the metrics table that come from a session's overview."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from kvscope_telemetry.latencies import LATENCIES


def _latency_descriptions() -> Iterator[tuple[str, str]]:
    for latency in LATENCIES:
        name = latency.name.lower()
        yield f"{latency.key}_count", f"{name}: number of values in the second"
        for percentile in (50, 95, 99):
            column = f"{latency.key}_p{percentile}"
            yield f"{column}_s", f"{name}: {percentile}th percentile"
            yield f"{column}_above_s", f"{name}: lower bound of the percentile, for an engine that reports a histogram"


DESCRIPTIONS: Final = {
    "step": "number of the last step",
    "num_steps": "steps that ended",
    "num_lost_frames": "frames of telemetry that were lost",
    "num_running": "running at the end of the second",
    "num_waiting": "waiting at the end of the second",
    "active_blocks": "held by requests at the end of the second",
    "cached_blocks": "cached and held by no request",
    "free_blocks": "can be allocated without evicting cached ones",
    "shared_blocks": "held by several requests",
    "host_blocks": "in use in host memory",
    "disk_blocks": "in use on disk",
    "used_slots": "token slots of active blocks that hold a token",
    "longest_free_run": "length of the longest run of free blocks",
    "num_free_runs": "runs of adjacent free blocks",
    "prefill_tokens": "prompt tokens computed",
    "decode_tokens": "tokens of decodes",
    "cached_tokens": "prompt tokens found in the prefix cache",
    "admitted": "started for the first time",
    "finished": "finished",
    "aborted": "aborted",
    "refused": "refused",
    "preemptions": "preemptions",
    "evicted_blocks": "lost their cached prefix",
    "copied_blocks": "copied before a write (copy-on-write)",
    "swapped_blocks": "of preempted requests, swapped to a lower tier",
    "offloaded_blocks": "cached blocks moved to a lower tier",
    "loaded_blocks": "loaded from a lower tier",
    "schedule_ns": "choosing requests and blocks, all steps",
    "run_ns": "running the model, all steps",
    "forward_ns": "forward passes on the device, part of run_ns",
    "commit_ns": "storing the sampled tokens, all steps",
    "record_ns": "recording telemetry, all steps",
    "utilization": "of the GPU, or the engine's share of all CPUs",
    "power_watts": "power of the device",
    "temperature_celsius": "temperature of the device",
    "process_bytes": "memory of the engine's process",
    "memory_used_bytes": "memory of the device used by all processes",
    "num_rows": "rows of the block ledger, all tiers",
    "longest_wait_s": "longest time that a request has waited to start, at the end of the second",
    "stalled_s": "time since the last step while requests were unfinished",
    "pool_blocks": "size of the pool, if the engine does not report all its parts",
    "draft_tokens": "speculative tokens that were verified",
    "accepted_tokens": "speculative tokens that were accepted",
    "flops": "operations of the forward passes",
    "moved_bytes": "read from and written to device memory by the forward passes",
    "prompt_tokens": "prompt tokens of new requests that had to be computed",
    "generation_tokens": "generated tokens",
    "restored_tokens": "tokens of resumed requests that were still stored",
    "recomputed_tokens": "tokens of resumed requests that were computed again",
    "peak_active_blocks": "largest number held by requests",
    "peak_active_ns": "when that number was first reached, from the start of the second",
    "peak_running": "largest number running",
    "peak_running_ns": "when that number was first reached, from the start of the second",
    "peak_waiting": "largest number waiting",
    "peak_waiting_ns": "when that number was first reached, from the start of the second",
    "held_slots": "token slots that requests hold",
    "wasted_slots": "of these, slots without a token",
    "prefill_tokens_per_s": "prompt tokens, with the tokens of long steps distributed over the seconds",
    "decode_tokens_per_s": "tokens of decodes, with the tokens of long steps distributed over the seconds",
    **dict(_latency_descriptions()),
}
"""Description by column name. Counts are of the second, levels those at its end, maxima those within it."""
