"""Questions about the requests seen so far: which settings of the engine can be changed, and to which values.

Each change is a list of options of `kvscope-engine simulate`. Imports no Qt.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from kvscope_app.ui.number_text import count, num_bytes
from kvscope_app.views.capability_messages import engine_name, why_no_requests
from kvscope_telemetry.messages.telemetry import CacheInfo, Hello

_BLOCK_FACTORS: Final = (2.0, 1.5, 3.0, 4.0, 8.0, 0.75, 0.5)
_LIMIT_FACTORS: Final = (2.0, 4.0, 8.0, 0.5, 0.25)
_HOST_FACTORS: Final = (1, 2, 4, 8)
_BLOCK_SIZES: Final = (8, 16, 32, 64, 128)
_FACTOR_NAMES: Final = {
    2.0: "twice as many",
    1.5: "one and a half times as many",
    0.75: "three quarters as many",
    0.5: "half as many",
    0.25: "a quarter as many",
}
_ALLOCATORS: Final = ("paged", "contiguous", "buddy", "virtual")


@dataclass(frozen=True, slots=True)
class ChangeValue:
    label: str
    """Text in the list of values; "" if the change has only one value."""
    title: str
    """Heading of an answer, such as "128 instead of 64 blocks"."""
    options: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class SettingChange:
    label: str
    values: tuple[ChangeValue, ...] = ()
    reason: str = ""
    """Why the question cannot be answered; "" if it can."""


def why_no_questions(hello: Hello | None, *, has_recording: bool) -> str:
    """Return why no question about past requests can be answered, or ""."""
    if hello is None:
        return "Waiting for the engine's first report"
    if reason := why_no_requests(hello.capabilities):
        return reason
    if not hello.cache.num_blocks:
        return f"{engine_name(hello.capabilities)} does not report its blocks"
    if not hello.capabilities.latencies:
        return f"{engine_name(hello.capabilities)} does not report when requests arrived"
    return "" if has_recording else "Earlier requests are not known, because recent history is off"


def setting_changes(hello: Hello) -> list[SettingChange]:
    """Return the changes in the order of the list, the one that is selected at first in front."""
    cache = hello.cache
    return [
        _more_blocks(cache),
        _host_memory(cache),
        _limit("max_num_seqs", cache.max_num_seqs),
        _limit("max_num_batched_tokens", cache.max_num_batched_tokens),
        _prefix_caching(cache),
        SettingChange("another block size", tuple(_block_sizes(cache))),
        SettingChange("another allocator", tuple(_allocators(cache))),
    ]


def _more_blocks(cache: CacheInfo) -> SettingChange:
    number = cache.num_physical_blocks or cache.num_blocks
    values = [
        ChangeValue(
            f"{_factor_name(factor)}: {count(round(number * factor))} instead of {count(number)}",
            f"{count(round(number * factor))} instead of {count(number)} blocks",
            ("--blocks-times", f"{factor:g}"),
        )
        for factor in _BLOCK_FACTORS
    ]
    return SettingChange("more blocks", tuple(values))


def _host_memory(cache: CacheInfo) -> SettingChange:
    label = "host memory for swapping"
    if cache.allocator != "paged":
        return SettingChange(label, reason=f"the allocator {cache.allocator} cannot swap")
    pool_bytes = (cache.num_physical_blocks or cache.num_blocks) * cache.block_bytes
    if not pool_bytes:
        return SettingChange(label, reason="the size of a block is not reported")
    now = num_bytes(cache.host_tier_bytes) if cache.host_tier_bytes else "none"
    values = [
        ChangeValue(
            f"{num_bytes(pool_bytes * factor)}, {'as large as' if factor == 1 else f'{factor} times'} the pool"
            f" (now: {now})",
            f"{num_bytes(pool_bytes * factor)} of host memory (now: {now})",
            ("--kv-host-memory", str(pool_bytes * factor)),
        )
        for factor in _HOST_FACTORS
    ]
    if cache.host_tier_bytes:
        options = ("--kv-host-memory", "0", "--kv-disk", "0")
        values.append(ChangeValue(f"none (now: {now})", f"no host memory (now: {now})", options))
    return SettingChange(label, tuple(values))


def _limit(name: str, current: int) -> SettingChange:
    if not current:
        return SettingChange(f"another {name}", reason="the present limit is not reported")
    values = dict.fromkeys(max(1, round(current * factor)) for factor in _LIMIT_FACTORS)
    return SettingChange(
        f"another {name}",
        tuple(
            ChangeValue(
                f"{count(value)} instead of {count(current)}",
                f"{name} {count(value)} instead of {count(current)}",
                (f"--{name.replace('_', '-')}", str(value)),
            )
            for value in values
            if value != current
        ),
    )


def _prefix_caching(cache: CacheInfo) -> SettingChange:
    if not cache.prefix_caching:
        reason = "it is off, and without it the beginnings that prompts share are not recorded"
        return SettingChange("no prefix caching", reason=reason)
    return SettingChange("no prefix caching", (ChangeValue("", "no prefix caching", ("--no-enable-prefix-caching",)),))


def _block_sizes(cache: CacheInfo) -> Iterator[ChangeValue]:
    current = cache.block_size
    for size in _BLOCK_SIZES:
        if size != current:
            text = f"{size} tokens instead of {current}"
            yield ChangeValue(text, f"blocks of {text}", ("--block-size", str(size)))


def _allocators(cache: CacheInfo) -> Iterator[ChangeValue]:
    for name in _ALLOCATORS:
        if name != cache.allocator:
            tiers = ("--kv-host-memory", "0", "--kv-disk", "0") if name != "paged" else ()
            text = f"{name} instead of {cache.allocator}"
            yield ChangeValue(text, f"allocator {text}", ("--allocator", name, *tiers))


def _factor_name(factor: float) -> str:
    return _FACTOR_NAMES.get(factor, f"{factor:g} times as many")
