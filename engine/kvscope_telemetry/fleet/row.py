"""The figures that a fleet shows of one engine at one moment. None means unknown, never 0."""

from __future__ import annotations

from dataclasses import dataclass

from kvscope_telemetry.fleet.entries import FleetEntry
from kvscope_telemetry.fleet.pool_bins import PoolBins
from kvscope_telemetry.source import SourceState


@dataclass(frozen=True, slots=True)
class FleetRow:
    """An engine, or a rank of one. Rates and shares are of the last minute."""

    entry: FleetEntry
    state: SourceState = SourceState.CONNECTING
    reason: str = ""
    engine: str = ""
    """As in `Capabilities.engine`; empty before it has said so."""
    version: str = ""
    model: str = ""
    usage: float | None = None
    """Of the pool's blocks, those that requests hold, 0 to 1."""
    num_running: int | None = None
    num_waiting: int | None = None
    first_token_s: float | None = None
    """Median; where only histograms are told the bound that it is at most, see `is_first_token_bound`."""
    is_first_token_bound: bool = False
    hit_rate: float | None = None
    """As in `summaries.figures`, 0 to 1."""
    preemptions_per_s: float | None = None
    num_blocks: int | None = None
    bins: PoolBins | None = None

    @property
    def name(self) -> str:
        """What a person calls it."""
        return self.entry.name or self.entry.address.text
