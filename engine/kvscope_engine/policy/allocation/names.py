"""The allocation policies by name: what `--allocator` and the simulator choose from. Imports nothing, for `--help`."""

from typing import Final

ALLOCATORS: Final[tuple[str, ...]] = ("paged", "contiguous", "buddy", "oracle", "virtual")
"""All of them."""
ENGINE_ALLOCATORS: Final = tuple(name for name in ALLOCATORS if name != "oracle")
"""Without the one that knows how long answers will be: only a simulation does."""
