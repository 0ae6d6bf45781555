"""What is in a recording, or a range of it, in a few figures: for a person at a glance, and for scripts.

Owns which figures and their units, which are in their names. Made of the course alone: it costs no replaying.
"""

from __future__ import annotations

from typing import Final

import msgspec
import numpy as np

from kvscope_telemetry.exports.span import Exported, Span
from kvscope_telemetry.messages.model_words import short_name
from kvscope_telemetry.summaries.course import Course, FloatArray
from kvscope_telemetry.summaries.summary import SECOND_NS

_TOTALS: Final = (
    "admitted",
    "finished",
    "aborted",
    "refused",
    "preemptions",
    "prefill_tokens",
    "decode_tokens",
    "cached_tokens",
    "evicted_blocks",
    "copied_blocks",
    "swapped_blocks",
    "sunk_blocks",
    "loaded_blocks",
    "draft_tokens",
    "accepted_tokens",
)
_PARTS: Final = {"p50_s": 0.725, "p95_s": 0.245, "p99_s": 0.03}
"""What share of a second's values each of its quantiles is nearest to."""


class Pool(msgspec.Struct, frozen=True, kw_only=True):
    """The block pool."""

    num_blocks: int
    block_size_tokens: int
    block_bytes: int
    dtype: str
    allocator: str
    prefix_caching: bool
    num_host_blocks: int
    num_disk_blocks: int


class Digest(msgspec.Struct, frozen=True, kw_only=True):
    """Of the range; shares are 0 to 1, and None where nothing tells."""

    model: str
    device: str
    engine_version: str
    pool: Pool
    epochs: tuple[int, ...]
    """Engine starts in the whole recording."""
    start_ns: int
    """Of the range: nanoseconds since 1970."""
    end_ns: int
    length_s: float
    num_steps: int | None
    """None: the engine does not tell its steps."""
    peak_usage: float | None
    """Share of the pool that requests held, at the end of the second when it was the most."""
    peak_usage_s: float | None
    """When that was, in seconds of the recording."""
    mean_usage: float | None
    peak_waiting: int
    num_lost_frames: int
    num_silences: int
    """Stretches of more than a second of which nothing was recorded."""
    silent_s: float
    totals: dict[str, int | None]
    """None: the engine does not tell."""
    first_token_p50_s: float | None
    first_token_p95_s: float | None
    inter_token_p50_s: float | None
    inter_token_p95_s: float | None
    queued_p95_s: float | None
    latencies_are_bounds: bool = False
    """The engine tells histograms: a percentile is at most what stands here."""


def digest(recording: Exported, course: Course, span: Span) -> Digest:
    """The figures of `span`; `course` is that of `recording`."""
    hello, rows = recording.info.hello, rows_in(course, span)
    usage = usage_of(course)[rows]
    peak = int(np.nanargmax(usage)) if np.isfinite(usage).any() else None
    silences = np.diff(course.time_ns[rows]) - SECOND_NS
    silences = silences[silences > 0]
    totals = {name: total_of(course.column(name)[rows]) for name in _TOTALS}
    return Digest(
        model=short_name(hello.model.name),
        device=" ".join(filter(None, (hello.device.kind, hello.device.name))),
        engine_version=hello.engine_version,
        pool=_pool(recording),
        epochs=recording.info.epochs,
        start_ns=span.from_ns,
        end_ns=span.until_ns,
        length_s=span.length_s,
        num_steps=total_of(course.column("num_steps")[rows]),
        peak_usage=None if peak is None else float(usage[peak]),
        peak_usage_s=None if peak is None else max(0.0, span.seconds(int(course.time_ns[rows][peak]))),
        mean_usage=None if peak is None else float(np.nanmean(usage)),
        peak_waiting=int(course.column("num_waiting")[rows].max(initial=0)),
        num_lost_frames=int(course.column("num_lost_frames")[rows].sum()),
        num_silences=len(silences),
        silent_s=float(silences.sum()) / 1e9,
        totals=totals,
        first_token_p50_s=quantile_of(course, "first_token", 0.50, rows),
        first_token_p95_s=quantile_of(course, "first_token", 0.95, rows),
        inter_token_p50_s=quantile_of(course, "inter_token", 0.50, rows),
        inter_token_p95_s=quantile_of(course, "inter_token", 0.95, rows),
        queued_p95_s=quantile_of(course, "queued", 0.95, rows),
        latencies_are_bounds=not hello.capabilities.latencies,
    )


def rows_in(course: Course, span: Span) -> slice:
    """The seconds of the course that `span` touches."""
    first = int(np.searchsorted(course.time_ns, span.from_ns - SECOND_NS, "right"))
    return slice(first, int(np.searchsorted(course.time_ns, span.until_ns, "right")))


def usage_of(course: Course) -> FloatArray:
    """Share of the pool that requests held, shape (n,); NaN where there is no pool."""
    active = course.column("active_blocks")
    total = pool_of(course)
    share: FloatArray = np.divide(active, total, out=np.full(len(active), np.nan), where=total > 0)
    return share


def pool_of(course: Course) -> FloatArray:
    """Blocks of the pool, shape (n,); NaN where they are not known."""
    parts = [course.column(f"{name}_blocks") for name in ("active", "cached", "free")]
    told = course.column("pool_blocks")
    return np.where(np.isfinite(told), told, parts[0] + parts[1] + parts[2])


def total_of(column: FloatArray) -> int | None:
    """The sum of what is known; None where nothing is."""
    return None if column.size and np.isnan(column).all() else int(np.nansum(column))


def fragmentation_of(course: Course) -> FloatArray:
    """Share of the free blocks that the longest free run has not, shape (n,); NaN where no block is free."""
    free, longest = course.column("free_blocks"), course.column("longest_free_run")
    shares = 1 - np.minimum(longest / np.maximum(free, 1), 1)
    return np.where((free > 0) & (longest > 0), shares, np.nan)


def quantile_of(course: Course, latency: str, share: float, rows: slice) -> float | None:
    """Of the range, as far as the quantiles of its seconds tell: each stands for the part of its second next to it."""
    counts = course.column(f"{latency}_count")[rows]
    known = counts > 0
    if not known.any():
        return None
    columns = [course.column(f"{latency}_{part}")[rows][known] for part in _PARTS]
    values = np.concatenate([np.where(np.isnan(column), np.inf, column) for column in columns])
    weights = np.concatenate([counts[known] * part for part in _PARTS.values()])
    order = np.argsort(values, kind="stable")
    reached = np.cumsum(weights[order]) / weights.sum()
    found = float(values[order][min(int(np.searchsorted(reached, share)), len(values) - 1)])
    return found if np.isfinite(found) else None


def _pool(recording: Exported) -> Pool:
    cache = recording.info.hello.cache
    return Pool(
        num_blocks=cache.num_blocks,
        block_size_tokens=cache.block_size,
        block_bytes=cache.block_bytes,
        dtype=cache.dtype,
        allocator=cache.allocator,
        prefix_caching=cache.prefix_caching,
        num_host_blocks=cache.num_host_blocks,
        num_disk_blocks=cache.num_disk_blocks,
    )
