"""Determines which fields of a second's summary are unknown for an engine that does not report everything.

Such fields are -1 in the summary and NaN in an overview. Defines which capability each field requires, independently
of the engine's name.
"""

from __future__ import annotations

from typing import Final

from kvscope_telemetry.messages.capabilities import OWN_ENGINE, Capabilities

_NEEDED_FOR: Final[dict[str, tuple[str, ...]]] = {
    "free_rows": (
        "active_blocks",
        "peak_active_blocks",
        "peak_active_ns",
        "free_blocks",
        "longest_free_run",
        "num_free_runs",
    ),
    "physical_rows": ("longest_free_run", "num_free_runs"),
    "ref_counts": ("shared_blocks", "copied_blocks", "swapped_blocks", "offloaded_blocks", "loaded_blocks"),
    "filled": ("used_slots", "held_slots", "wasted_slots"),
    "requests": ("restored_tokens", "recomputed_tokens", "admitted", "refused", "longest_wait_s", "stalled_s"),
    "counters": (
        "prefill_tokens",
        "decode_tokens",
        "prompt_tokens",
        "cached_tokens",
        "preemptions",
        "finished",
        "aborted",
        "draft_tokens",
        "accepted_tokens",
    ),
    "steps": (
        "num_steps",
        "schedule_ns",
        "run_ns",
        "forward_ns",
        "commit_ns",
        "record_ns",
        "stalled_s",
        "flops",
        "moved_bytes",
    ),
}


def unknown_fields(capabilities: Capabilities) -> frozenset[str]:
    if capabilities == OWN_ENGINE:
        return frozenset()
    missing = [fields for name, fields in _NEEDED_FOR.items() if not getattr(capabilities, name)]
    return frozenset(field for fields in missing for field in fields)
