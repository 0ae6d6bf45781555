"""Figures that a fleet shows for one engine at one moment. None means unknown, never 0."""

from __future__ import annotations

from dataclasses import dataclass

from kvscope_telemetry.fleet.fleet_list import FleetEntry
from kvscope_telemetry.fleet.pool_bins import PoolBins
from kvscope_telemetry.source import SourceState


@dataclass(frozen=True, slots=True)
class FleetRow:
    """Figures of an engine, or of one of its ranks. Rates and shares cover the last minute."""

    entry: FleetEntry
    state: SourceState = SourceState.CONNECTING
    reason: str = ""
    engine: str = ""
    """Name of the engine's software (`Capabilities.engine`); "" before the engine has reported it."""
    version: str = ""
    model: str = ""
    usage: float | None = None
    num_running: int | None = None
    num_waiting: int | None = None
    first_token_s: float | None = None
    """Median time to first token. If only histograms are known, its upper bound; see `is_first_token_bound`."""
    is_first_token_bound: bool = False
    hit_rate: float | None = None
    """Prefix cache hit rate as in `summaries.run_figures`, 0 to 1."""
    preemptions_per_s: float | None = None
    num_blocks: int | None = None
    bins: PoolBins | None = None

    @property
    def name(self) -> str:
        return self.entry.name or self.entry.address.text
