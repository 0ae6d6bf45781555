"""Tiles that were measured on a GPU of this name: from the table that comes with kvscope, and above it the user's own.

The one place where a launch asks. A GPU, or a shape, that no table has gets what `launch` reckons. A table that cannot
be read, or an entry that no kernel could take, is as if it were not there: tiles decide how fast, never what.
"""

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, Final

import torch

from kvscope_kernels.launch import DotTiles

DECODE: Final = "paged_decode"
PREFILL: Final = "paged_prefill"
COMMITTED: Final = Path(__file__).with_name("tables.json")
_SIZES: Final = (16, 32, 64, 128, 256)
_WARPS: Final = (1, 2, 4, 8, 16)
_MAX_STAGES: Final = 8
_MAX_BYTES: Final = 1 << 20

_forced: dict[str, DotTiles] = {}


def tuned(
    kernel: str,
    given: DotTiles,
    group: int,
    element_bytes: int,
    device: torch.device,
    *,
    is_quantized: bool,
    is_cut: bool = False,
) -> DotTiles:
    """The measured tiles for this kernel and shape on this GPU; `given`, which `launch` reckoned, where none are."""
    if _forced and kernel in _forced:
        return _forced[kernel]
    if device.type != "cuda":
        return given
    return _of(kernel, given, group, element_bytes, is_quantized, is_cut, _gpu_name(device))


def table_key(
    kernel: str, given: DotTiles, group: int, element_bytes: int, *, is_quantized: bool, is_cut: bool = False
) -> str:
    """A shape as tables name it; `rows` tell short runs of queries from long ones, `split` those whose keys are split
    among programs."""
    cache_words = ", 8-bit cache" if is_quantized else ""
    return (
        f"{kernel} {given.tile_d}/{given.tile_v}, {group} heads a KV head, {element_bytes} bytes{cache_words}, "
        f"{given.tile_m} rows{', split' * is_cut}"
    )


@contextmanager
def forcing(kernel: str, tiles: DotTiles) -> Iterator[None]:
    """Inside, every launch of the kernel takes these tiles: for trying them. Not for several threads."""
    _forced[kernel] = tiles
    try:
        yield
    finally:
        del _forced[kernel]


def own_table() -> Path:
    """Where the user's own is."""
    own = os.environ.get("KVSCOPE_CACHE")
    folder = Path(own) if own else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kvscope"
    return folder / "tiles.json"


def read_table(path: Path, gpu: str) -> dict[str, Any]:
    """Entries of one GPU by shape; none where there is no table, or something else in its place."""
    try:
        if path.stat().st_size > _MAX_BYTES:
            return {}
        entries = json.loads(path.read_text("utf-8")).get(gpu, {})
    except (OSError, ValueError, AttributeError, RecursionError):
        return {}
    return entries if isinstance(entries, dict) else {}


def write_table(path: Path, gpu: str, entries: Mapping[str, Mapping[str, Any]]) -> None:
    """Put entries of one GPU into a table beside what is there already. Raises OSError."""
    try:
        table = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError, RecursionError):
        table = {}
    table = table if isinstance(table, dict) else {}
    table[gpu] = read_table(path, gpu) | dict(entries)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.{os.getpid()}")
    partial.write_text(json.dumps(table, indent=1, sort_keys=True) + "\n", "utf-8")
    partial.replace(path)
    _of.cache_clear()


def as_entry(tiles: DotTiles) -> dict[str, int | None]:
    """What of tiles is chosen by measurement; the rest follows from the shape."""
    return {
        "tile_m": tiles.tile_m,
        "tile_n": tiles.tile_n,
        "num_warps": tiles.num_warps,
        "num_stages": tiles.num_stages,
        "max_registers": tiles.max_registers,
    }


def from_entry(entry: Any, given: DotTiles, group: int) -> DotTiles | None:
    """Tiles of an entry for the shape of `given`; None where no kernel could take them."""
    if not isinstance(entry, dict):
        return None
    found: dict[str, Any] = {name: entry.get(name) for name in as_entry(given)}
    registers = found.pop("max_registers")
    is_right = (
        all(type(number) is int for number in found.values())
        and (registers is None or (type(registers) is int and 32 <= registers <= 255))
        and found["tile_m"] in _SIZES
        and found["tile_n"] in _SIZES
        and found["tile_m"] >= group
        and found["num_warps"] in _WARPS
        and 1 <= found["num_stages"] <= _MAX_STAGES
    )
    return given._replace(**found, max_registers=registers) if is_right else None


@cache
def _of(
    kernel: str, given: DotTiles, group: int, element_bytes: int, is_quantized: bool, is_cut: bool, gpu: str
) -> DotTiles:
    key = table_key(kernel, given, group, element_bytes, is_quantized=is_quantized, is_cut=is_cut)
    for path in (own_table(), COMMITTED):
        found = from_entry(read_table(path, gpu).get(key), given, group)
        if found is not None:
            return found
    return given


@cache
def _gpu_name(device: torch.device) -> str:
    return str(torch.cuda.get_device_properties(device).name)
