"""The lower tiers of reports as tables for a terminal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from kvscope_engine.bench.table import table
from kvscope_engine.simulator.report import Report
from kvscope_engine.simulator.tier_use import TierUse


def tier_lines(reports: Sequence[Report]) -> Iterator[str]:
    """Two tables, and who has no lower tiers; nothing where nobody has."""
    uses = [(one.allocator, one.tiers) for one in reports if one.tiers is not None]
    if not uses:
        return
    yield "Lower tiers, blocks\n" + _blocks(uses)
    yield "Lower tiers, % of prompt tokens found in each, and s that the run stood still\n" + _times(uses)
    without = [one.allocator for one in reports if one.tiers is None]
    if without:
        yield f"{', '.join(without)}: ran without lower tiers, which only paged has"


def _blocks(uses: Sequence[tuple[str, TierUse]]) -> str:
    header = ["policy", "host", "disk", "swapped out", "sunk to host", "to disk", "loaded", "of them from disk"]
    rows = [
        (
            use.num_host_blocks,
            use.num_disk_blocks,
            use.swapped_blocks,
            use.sunk_blocks,
            use.disk_blocks,
            use.loaded_blocks,
            use.loaded_from_disk_blocks,
        )
        for _, use in uses
    ]
    return table(header, [[name, *map(str, row)] for (name, _), row in zip(uses, rows, strict=True)])


def _times(uses: Sequence[tuple[str, TierUse]]) -> str:
    header = ["policy", "pool %", "host %", "disk %", "loading, s", "reading disk", "saving", "writing disk"]
    return table(header, [[name, *_hits(use), *_seconds(use)] for name, use in uses])


def _hits(use: TierUse) -> list[str]:
    rates = (use.pool_hit_rate, use.host_hit_rate, use.disk_hit_rate)
    return ["–" if rate is None else f"{100 * rate:.1f}" for rate in rates]


def _seconds(use: TierUse) -> list[str]:
    return [f"{seconds:.3f}" for seconds in (use.load_s, use.disk_read_s, use.save_s, use.disk_write_s)]
