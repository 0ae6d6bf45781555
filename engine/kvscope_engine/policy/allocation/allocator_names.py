"""Names of the allocation policies that the simulator offers. Imports no torch, for `--help`."""

from typing import Final

from kvscope_telemetry.engine_config import ENGINE_ALLOCATORS

ALLOCATORS: Final[tuple[str, ...]] = (*ENGINE_ALLOCATORS, "oracle")
"""Names of all policies. `oracle` needs the output lengths in advance, which only a simulation has."""
