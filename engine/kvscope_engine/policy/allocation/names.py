"""The allocation policies by name: what the simulator chooses from. Imports no torch, for `--help`."""

from typing import Final

from kvscope_telemetry.engine_config import ENGINE_ALLOCATORS

ALLOCATORS: Final[tuple[str, ...]] = (*ENGINE_ALLOCATORS, "oracle")
"""All of them. `oracle` knows how long answers will be: only a simulation does."""
