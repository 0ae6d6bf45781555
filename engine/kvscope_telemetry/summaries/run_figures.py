"""Definitions of all figures of a run: name, unit, meaning, and how to compute each from counters or an overview.

The report, `kvscope info`, comparisons, fleets, tables, `/metrics` and the window's charts use these definitions.
Therefore, a figure has the same value everywhere for the same time range. To add a figure, add an entry to `FIGURES`. A
`Figure` is measured over a time range. A `Share` is a ratio that applies to any data with the names of
`messages.telemetry.Counters`: differences of counters, one second, or the bins of a chart. Must not depend on files or
windows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Final, Protocol

import numpy as np

from kvscope_telemetry.latencies import FIRST_TOKEN, INTER_TOKEN, QUEUED, LatencyKind
from kvscope_telemetry.summaries import latency_buckets
from kvscope_telemetry.summaries.session_overview import OVERVIEW_COLUMNS, FloatArray, IntArray, SessionOverview
from kvscope_telemetry.summaries.summary import SECOND_NS


class Range(Protocol):
    """Time range on the overview's clock, both ends inclusive."""

    @property
    def from_ns(self) -> int: ...
    @property
    def until_ns(self) -> int: ...


Measure = Callable[[SessionOverview, slice, Range], float | None]
"""Function that computes a figure. Its arguments are an overview, the slice of the overview's seconds in a time
range, and this range. Returns None if the figure is unknown.
"""


@dataclass(frozen=True, slots=True)
class Share:
    """Ratio of two sums of named values."""

    part: tuple[str, ...]
    whole: tuple[str, ...]

    def of(self, values: Mapping[str, float]) -> float | None:
        """Return the ratio for single numbers; None if the denominator is 0."""
        share = float(self.over({name: np.array(value, np.float64) for name, value in values.items()}))
        return None if np.isnan(share) else share

    def over(self, columns: Mapping[str, FloatArray]) -> FloatArray:
        """Return the ratio for columns, element by element; NaN where the denominator is 0 or unknown."""
        part, whole = (sum((columns[name] for name in names), np.zeros(())) for names in (self.part, self.whole))
        return np.where(whole > 0, part / np.where(whole > 0, whole, 1.0), np.nan)

    def names(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys((*self.part, *self.whole)))


PROMPTS: Final = ("prompt_tokens", "cached_tokens")
"""Columns that add up to the prompt tokens of requests that ran for the first time. `prompt_tokens` counts
computed tokens only, `cached_tokens` those found in the prefix cache.
"""
HIT_RATE: Final = Share(("cached_tokens",), PROMPTS)
USAGE: Final = Share(("active",), ("pool",))
"""Share of the pool's blocks that requests hold."""
ACCEPTED: Final = Share(("accepted_tokens",), ("draft_tokens",))
WASTE: Final = Share(("wasted_slots",), ("held_slots",))
"""Unused share of the slots that requests hold, as counted by `mirror.pool_use`."""
_ALL: Final = slice(None)


def rows_in(overview: SessionOverview, span: Range) -> slice:
    first = int(np.searchsorted(overview.time_ns, span.from_ns - SECOND_NS, "right"))
    return slice(first, int(np.searchsorted(overview.time_ns, span.until_ns, "right")))


def ends_of(overview: SessionOverview, rows: slice, span: Range) -> IntArray:
    """Return the time at which the values of each second are shown, shape (n,). This is the end of the second, or of
    `span` if that is earlier.

    Levels are values at that time. Counts cover the second before that time. Tables, reports and charts all follow this
    rule.
    """
    ends: IntArray = np.minimum(overview.time_ns[rows] + SECOND_NS, span.until_ns)
    return ends


def pool_of(overview: SessionOverview, rows: slice = _ALL) -> FloatArray:
    parts = [overview.column(f"{name}_blocks")[rows] for name in ("active", "cached", "free")]
    num_blocks = overview.column("pool_blocks")[rows]
    return np.where(np.isfinite(num_blocks), num_blocks, parts[0] + parts[1] + parts[2])


def usage_of(overview: SessionOverview, rows: slice = _ALL) -> FloatArray:
    """Return the share of the pool that requests held, shape (n,); NaN for seconds without a pool."""
    return USAGE.over({"active": overview.column("active_blocks")[rows], "pool": pool_of(overview, rows)})


def peak_usage_of(overview: SessionOverview, rows: slice = _ALL) -> FloatArray:
    """Return the largest share of the pool that requests held within each second, shape (n,); NaN for seconds
    without a pool.
    """
    return USAGE.over({"active": overview.column("peak_active_blocks")[rows], "pool": pool_of(overview, rows)})


def peak_usage_time_ns(overview: SessionOverview, rows: slice = _ALL) -> int | None:
    """Return the time at which requests held the largest share of the pool; None if it is unknown."""
    usage = peak_usage_of(overview, rows)
    if not np.isfinite(usage).any():
        return None
    at = int(np.nanargmax(usage))
    after_ns = overview.column("peak_active_ns")[rows][at]
    return int(overview.time_ns[rows][at]) + (SECOND_NS if np.isnan(after_ns) else int(after_ns))


def waste_of(overview: SessionOverview, rows: slice = _ALL) -> FloatArray:
    """Return the internal fragmentation, shape (n,): the unused share of the slots that requests held, or NaN
    if they held none.
    """
    return WASTE.over({name: overview.column(name)[rows] for name in WASTE.names()})


def fragmentation_of(overview: SessionOverview, rows: slice = _ALL) -> FloatArray:
    """Return the share of the free blocks outside the longest free run, shape (n,); NaN for seconds without a
    free block.
    """
    free, longest = overview.column("free_blocks")[rows], overview.column("longest_free_run")[rows]
    shares = 1 - np.minimum(longest / np.maximum(free, 1), 1)
    return np.where((free > 0) & (longest > 0), shares, np.nan)


def covered_s(overview: SessionOverview, rows: slice, span: Range) -> float:
    """Return the seconds of the range that were recorded while the engine was not stopped. Gaps in the
    recording are excluded, and the first and last second may be partial.
    """
    begins = np.maximum(overview.time_ns[rows], span.from_ns)
    ends = np.minimum(overview.time_ns[rows] + SECOND_NS, span.until_ns)
    return float(overview.stops.running_between(begins, ends).sum()) / 1e9


def _stopped_s(overview: SessionOverview, rows: slice, span: Range) -> float | None:
    return overview.stops.stopped_ns(span.from_ns, span.until_ns) / 1e9


def silences_s(overview: SessionOverview, rows: slice) -> FloatArray:
    """Return the length in seconds of each gap between consecutive seconds of the overview."""
    gaps = (np.diff(overview.time_ns[rows]) - SECOND_NS) / 1e9
    found: FloatArray = gaps[gaps > 0]
    return found


def total_of(column: FloatArray) -> float | None:
    return None if np.isnan(column).any() else float(column.sum())


_QUANTILE_WEIGHTS: Final = {"p50_s": 0.725, "p95_s": 0.245, "p99_s": 0.03}
"""Weight of each stored quantile of a second: the share of the second's latencies that are nearest to this quantile."""


def quantile_of(overview: SessionOverview, latency: str, share: float, rows: slice) -> float | None:
    """Return a latency quantile over the time range, accurate to half a percent, from the latency buckets of the
    range's seconds.

    For seconds without buckets, each stored quantile stands for the latencies nearest to it (`_QUANTILE_WEIGHTS`).
    Returns None if there are no latencies or the quantile has no upper bound.
    """
    counts = overview.column(f"{latency}_count")[rows]
    has_values = counts > 0
    if not has_values.any():
        return None
    indices = np.arange(len(overview))[rows][has_values]
    packed = [overview.latency_buckets(latency, place) for place in indices.tolist()]
    values, weights = latency_buckets.unpack(b"".join(packed))
    without_buckets = indices[[not buckets for buckets in packed]]
    columns = [overview.column(f"{latency}_{part}")[without_buckets] for part in _QUANTILE_WEIGHTS]
    values = np.concatenate([values, *(np.where(np.isnan(column), np.inf, column) for column in columns)])
    counts_without_buckets = overview.column(f"{latency}_count")[without_buckets]
    weights = np.concatenate([weights, *(counts_without_buckets * part for part in _QUANTILE_WEIGHTS.values())])
    order = np.argsort(values, kind="stable")
    reached = np.cumsum(weights[order]) / weights.sum()
    quantile = float(values[order][min(int(np.searchsorted(reached, share)), len(values) - 1)])
    return quantile if np.isfinite(quantile) else None


def largest_of(overview: SessionOverview, latency: str, rows: slice) -> float | None:
    """Return the largest latency of the range, accurate to half a percent; None if there are no latencies or a
    second has no buckets.
    """
    indices = np.arange(len(overview))[rows][overview.column(f"{latency}_count")[rows] > 0]
    packed = [overview.latency_buckets(latency, place) for place in indices.tolist()]
    return float(latency_buckets.unpack(b"".join(packed))[0].max()) if packed and all(packed) else None


@dataclass(frozen=True, slots=True)
class Card:
    position: int
    """Position of the card in the header, from 1."""
    detail: str = ""
    """Secondary text. `{key}` is replaced by the value of the figure with that key."""
    title: str = ""
    value: str = "{}"


@dataclass(frozen=True, slots=True)
class FigureUses:
    """Where a figure is shown. In addition, `kvscope info --json` shows all figures, and comparisons show those
    with `Figure.is_compared`.
    """

    card: Card | None = None
    alarms: str = ""
    """Group under which the alarm editor offers the figure, as a value per second; "" if no alarm can use the
    figure. Requires a `column` or a `share`.
    """
    in_range: bool = False
    """Whether the timeline shows the figure for a time range that the user selected."""


NO_USES: Final = FigureUses()


@dataclass(frozen=True, slots=True)
class Figure:
    """Definition of a number that can be computed for any time range."""

    key: str
    """Identifier including the unit. Never changes, because scripts depend on it."""
    name: str
    unit: str
    """Unit such as "s", "share" (0 to 1), "tokens", "tokens/s", "requests" or "1/min"."""
    measure: Measure
    counts: str = ""
    """Description of the counted quantity; "" if the figure's name is sufficient."""
    is_compared: bool = False
    """Whether a comparison of two runs lists the figure."""
    has_spread: bool = True
    """Whether the figure's values in parts of a run estimate its value for the whole run. False for lengths,
    counts and peaks.
    """
    column: str = ""
    """Overview column that is summed; "" if the figure is not a sum."""
    share: Share | None = None
    """Formula of a ratio; None if the figure is not a ratio."""
    uses: FigureUses = NO_USES

    def of(self, overview: SessionOverview, span: Range) -> float | None:
        return self.measure(overview, rows_in(overview, span), span)


def _length(overview: SessionOverview, rows: slice, span: Range) -> float | None:
    return (span.until_ns - span.from_ns) / 1e9


def _known_sum(overview: SessionOverview, names: tuple[str, ...], rows: slice) -> float | None:
    sums = [total_of(overview.column(name)[rows]) for name in names]
    return None if any(each is None for each in sums) else float(sum(each or 0 for each in sums))


def _total(names: tuple[str, ...], overview: SessionOverview, rows: slice, span: Range) -> float | None:
    """Return the sum of `names`, columns of the overview, over the range. The tokens of a step that ran over
    several seconds are divided among these seconds, so that a rate equals the total divided by the time.
    """
    total = _known_sum(overview, tuple(map(_rate_column, names)), rows) if len(overview.time_ns[rows]) else None
    return None if total is None else float(round(total))


def _rate_column(column: str) -> str:
    """Return the per-second variant of a column, in which the tokens of long steps are divided among seconds,
    or `column` if there is no such variant.
    """
    rate = f"{column}_per_s"
    return rate if rate in OVERVIEW_COLUMNS else column


def _rate(name: str, per_s: float, overview: SessionOverview, rows: slice, span: Range) -> float | None:
    recorded_s, total = covered_s(overview, rows, span), _known_sum(overview, (name,), rows)
    return total / recorded_s * per_s if total is not None and recorded_s > 0 else None


def _share(share: Share, overview: SessionOverview, rows: slice, span: Range) -> float | None:
    sums = {name: total_of(overview.column(name)[rows]) for name in share.names()}
    known = {name: float(value) for name, value in sums.items() if value is not None}
    return share.of(known) if len(known) == len(sums) else None


Reduce = Callable[[FloatArray], float]


def _level(
    reduce: Reduce, values_of: Callable[[SessionOverview], FloatArray], overview: SessionOverview, rows: slice, _: Range
) -> float | None:
    values = values_of(overview)[rows]
    values = values[np.isfinite(values)]
    return float(reduce(values)) if values.size else None


def _column(name: str) -> Callable[[SessionOverview], FloatArray]:
    return lambda overview: overview.column(name)


def _latency(key: str, share: float, overview: SessionOverview, rows: slice, span: Range) -> float | None:
    return quantile_of(overview, key, share, rows)


def _silences(reduce: Reduce, overview: SessionOverview, rows: slice, span: Range) -> float | None:
    return float(reduce(silences_s(overview, rows)))


def _counted(
    column: str, name: str, unit: str, counts: str = "", *, is_compared: bool = False, uses: FigureUses = NO_USES
) -> Figure:
    return Figure(
        column,
        name,
        unit,
        partial(_total, (column,)),
        counts,
        is_compared=is_compared,
        has_spread=False,
        column=column,
        uses=uses,
    )


def _per_second(column: str, name: str, counts: str = "", uses: FigureUses = NO_USES) -> Figure:
    """Return a figure in tokens per second. Tokens of a step that ran over several seconds are divided among them."""
    measure = partial(_rate, _rate_column(column), 1.0)
    return Figure(f"{column}_per_s", name, "tokens/s", measure, counts, is_compared=True, uses=uses)


def _per_minute(column: str, name: str) -> Figure:
    return Figure(f"{column}_per_min", name, "1/min", partial(_rate, column, 60.0), is_compared=True)


def _mean(
    key: str,
    name: str,
    unit: str,
    values_of: Callable[[SessionOverview], FloatArray],
    counts: str = "",
    uses: FigureUses = NO_USES,
) -> Figure:
    return Figure(key, name, unit, partial(_level, np.mean, values_of), counts, is_compared=True, uses=uses)


def _ratio(key: str, name: str, share: Share, counts: str, *, is_compared: bool, uses: FigureUses) -> Figure:
    measure = partial(_share, share)
    return Figure(key, name, "share", measure, counts, is_compared=is_compared, share=share, uses=uses)


def _percentile(
    latency: LatencyKind, percent: int, name: str, *, is_compared: bool = True, card: Card | None = None
) -> Figure:
    measure = partial(_latency, latency.key, percent / 100)
    key, title, uses = f"{latency.key}_p{percent}_s", f"{name}, p{percent}", FigureUses(card)
    return Figure(key, title, "s", measure, latency.counts, is_compared=is_compared, uses=uses)


REQUESTS, TOKENS, CACHE = "Requests", "Tokens", "Cache"
"""Groups under which the alarm editor lists figures (`FigureUses.alarms`)."""


FIGURES: Final = (
    Figure("length_s", "Length", "s", _length, is_compared=True, has_spread=False),
    Figure(
        "stopped_s",
        "Engine paused",
        "s",
        _stopped_s,
        "Time the engine was paused or suspended; excluded from latencies and rates",
        has_spread=False,
    ),
    _counted("num_steps", "Steps", "steps", "Forward passes"),
    _counted(
        "admitted",
        "Requests admitted",
        "requests",
        "Requests scheduled for the first time",
        uses=FigureUses(alarms=REQUESTS),
    ),
    _counted(
        "finished",
        "Requests finished",
        "requests",
        "Requests finished",
        is_compared=True,
        uses=FigureUses(Card(3, "{admitted} admitted"), REQUESTS, in_range=True),
    ),
    _counted("aborted", "Requests aborted", "requests", uses=FigureUses(alarms=REQUESTS)),
    _counted(
        "refused", "Requests refused", "requests", uses=FigureUses(Card(6, "{aborted} aborted", "Refused"), REQUESTS)
    ),
    _per_minute("finished", "Requests finished per minute"),
    _counted("generation_tokens", "Tokens generated", "tokens", "Output tokens", uses=FigureUses(alarms=TOKENS)),
    _per_second("generation_tokens", "Tokens generated per second", "Output tokens"),
    _counted("decode_tokens", "Decode tokens", "tokens", "Output tokens computed", uses=FigureUses(alarms=TOKENS)),
    _per_second(
        "decode_tokens",
        "Decode tokens per second",
        "Output tokens computed",
        FigureUses(Card(7, "{decode_tokens} tokens", "Decode"), in_range=True),
    ),
    _counted(
        "prefill_tokens",
        "Prefill tokens",
        "tokens",
        "Prompt tokens computed, including recomputation after preemptions",
        uses=FigureUses(alarms=TOKENS),
    ),
    _per_second(
        "prefill_tokens",
        "Prefill tokens per second",
        "Prompt tokens computed, including recomputation after preemptions",
        FigureUses(Card(8, "{prefill_tokens} tokens", "Prefill"), in_range=True),
    ),
    _percentile(FIRST_TOKEN, 50, "First token"),
    _percentile(FIRST_TOKEN, 95, "First token", card=Card(11, "p50 {first_token_p50_s}")),
    _percentile(INTER_TOKEN, 50, "Between tokens"),
    _percentile(INTER_TOKEN, 95, "Between tokens", card=Card(12, "p50 {inter_token_p50_s}")),
    _percentile(QUEUED, 50, "Queued", is_compared=False),
    _percentile(QUEUED, 95, "Queued", card=Card(13, "from arrival to the first run", "Queue, p95")),
    _mean("running_mean", "Running, mean", "requests", _column("num_running")),
    Figure(
        "running_peak",
        "Running, peak",
        "requests",
        partial(_level, np.max, _column("peak_running")),
        "Maximum number of running requests",
        has_spread=False,
    ),
    _mean("waiting_mean", "Waiting, mean", "requests", _column("num_waiting")),
    Figure(
        "waiting_peak",
        "Waiting, peak",
        "requests",
        partial(_level, np.max, _column("peak_waiting")),
        "Maximum number of waiting requests",
        has_spread=False,
        uses=FigureUses(Card(4, "requests in the queue")),
    ),
    _mean(
        "usage_mean",
        "KV usage, mean",
        "share",
        usage_of,
        "Share of the pool held by requests",
        FigureUses(Card(2, "of the pool, held by requests")),
    ),
    Figure(
        "usage_peak",
        "KV usage, peak",
        "share",
        partial(_level, np.max, peak_usage_of),
        "Largest share of the pool held by requests at any time",
        is_compared=True,
        has_spread=False,
        uses=FigureUses(Card(1, "at {peak_usage_s} s"), in_range=True),
    ),
    _mean(
        "external_fragmentation",
        "External fragmentation",
        "share",
        fragmentation_of,
        "Mean share of free blocks outside the longest free run",
    ),
    _counted(
        "preemptions",
        "Preemptions",
        "preemptions",
        is_compared=True,
        uses=FigureUses(Card(5, "{swapped_blocks} blocks swapped out"), REQUESTS, in_range=True),
    ),
    _per_minute("preemptions", "Preemptions per minute"),
    _counted(
        "evicted_blocks",
        "Evicted blocks",
        "blocks",
        "Blocks evicted from the prefix cache",
        uses=FigureUses(Card(14, "{copied_blocks} copied on write", "Blocks evicted"), CACHE, in_range=True),
    ),
    _per_minute("evicted_blocks", "Evicted blocks per minute"),
    _counted("copied_blocks", "Copied blocks", "blocks", "Blocks copied on write", uses=FigureUses(alarms=CACHE)),
    _per_minute("copied_blocks", "Copied blocks per minute"),
    _counted(
        "swapped_blocks",
        "Swapped blocks",
        "blocks",
        "Blocks of preempted requests moved to a lower tier",
        uses=FigureUses(alarms=CACHE),
    ),
    _counted(
        "offloaded_blocks",
        "Offloaded blocks",
        "blocks",
        "Cached blocks moved to a lower tier",
        uses=FigureUses(alarms=CACHE),
    ),
    _counted(
        "loaded_blocks", "Loaded blocks", "blocks", "Blocks loaded from a lower tier", uses=FigureUses(alarms=CACHE)
    ),
    Figure(
        "new_prompt_tokens",
        "Prompt tokens",
        "tokens",
        partial(_total, PROMPTS),
        "Prompt tokens of requests scheduled for the first time",
        has_spread=False,
    ),
    _counted("cached_tokens", "Prompt tokens from the cache", "tokens", "Of these, tokens found in the cache"),
    _ratio(
        "hit_rate",
        "Prefix hit rate",
        HIT_RATE,
        "Prompt tokens of new requests found in the cache, of all their prompt tokens",
        is_compared=True,
        uses=FigureUses(Card(9, "{cached_tokens} of {new_prompt_tokens} tokens"), CACHE),
    ),
    _counted(
        "restored_tokens",
        "Restored tokens",
        "tokens",
        "Tokens that did not have to be recomputed after a preemption",
        is_compared=True,
        uses=FigureUses(Card(10, "tokens after preemptions, {recomputed_tokens} recomputed", "Restored")),
    ),
    _counted(
        "recomputed_tokens",
        "Recomputed tokens",
        "tokens",
        "Tokens lost by preemptions and recomputed",
        is_compared=True,
        uses=FigureUses(alarms=TOKENS),
    ),
    _counted("draft_tokens", "Draft tokens", "tokens", "Draft tokens checked"),
    _counted("accepted_tokens", "Accepted draft tokens", "tokens", "Of these, tokens accepted"),
    _ratio(
        "accepted_share",
        "Drafts accepted",
        ACCEPTED,
        "Of the draft tokens",
        is_compared=False,
        uses=FigureUses(alarms=TOKENS),
    ),
    _counted(
        "num_lost_frames",
        "Frames lost",
        "frames",
        uses=FigureUses(Card(15, "silences: {num_silences}, {silent_s}", "Gaps", "{} frames")),
    ),
    Figure("num_silences", "Silences", "silences", partial(_silences, np.size), has_spread=False),
    Figure("silent_s", "Silent", "s", partial(_silences, np.sum), has_spread=False),
)
BY_KEY: Final = {figure.key: figure for figure in FIGURES}


def measured(overview: SessionOverview, span: Range) -> dict[str, float | None]:
    rows = rows_in(overview, span)
    return {figure.key: figure.measure(overview, rows, span) for figure in FIGURES}
