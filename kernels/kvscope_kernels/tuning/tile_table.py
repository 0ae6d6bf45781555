"""Tile sizes measured on a GPU with this name, from the user's table or else from the table shipped with kvscope.

All launches read tile sizes here. A GPU or shape without an entry gets the tiles computed by `launch`. Unreadable
tables and invalid entries are ignored: tiles affect speed only, never results.
"""

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch

from kvscope_kernels.launch import DotTiles

DECODE: Final = "paged_decode"
PREFILL: Final = "paged_prefill"
VERSION: Final = 1
"""Version of the tables. Increase it when a change of the kernels invalidates older measurements."""
SHIPPED_TABLE: Final = Path(__file__).with_name("tables.json")
_SIZES: Final = (16, 32, 64, 128, 256)
_WARPS: Final = (1, 2, 4, 8, 16)
_MAX_STAGES: Final = 8
_MAX_BYTES: Final = 1 << 20

_forced_tiles: dict[str, DotTiles] = {}


def measured_tiles(
    kernel: str,
    default: DotTiles,
    group: int,
    element_bytes: int,
    device: torch.device,
    *,
    is_quantized: bool,
    is_cut: bool = False,
) -> DotTiles:
    """Return the measured tiles for this kernel and shape on this GPU.

    If there are none, returns `default`, the tiles computed by `launch`.
    """
    if _forced_tiles and kernel in _forced_tiles:
        return _forced_tiles[kernel]
    if device.type != "cuda":
        return default
    return _tiles_of(kernel, default, group, element_bytes, is_quantized, is_cut, _gpu_name(device))


def table_key(
    kernel: str, default: DotTiles, group: int, element_bytes: int, *, is_quantized: bool, is_cut: bool = False
) -> str:
    """Return the key of a shape in tables.

    In the key, the number of rows distinguishes few from many queries per request. The word "split" marks queries whose
    keys are split over several programs.
    """
    cache_text = ", 8-bit cache" if is_quantized else ""
    return (
        f"{kernel} {default.tile_d}/{default.tile_v}, {group} heads a KV head, {element_bytes} bytes{cache_text}, "
        f"{default.tile_m} rows{', split' * is_cut}"
    )


@contextmanager
def forced_tiles(kernel: str, tiles: DotTiles) -> Iterator[None]:
    """Use these tiles for every launch of the kernel inside the context, so that they can be measured. Not
    thread-safe.
    """
    _forced_tiles[kernel] = tiles
    try:
        yield
    finally:
        del _forced_tiles[kernel]


def user_table_path() -> Path:
    own = os.environ.get("KVSCOPE_CACHE")
    folder = Path(own) if own else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kvscope"
    return folder / "tiles.json"


class TileTable(NamedTuple):
    """Tile sizes for one GPU from a table file, or the reason why the file is unusable."""

    entries: dict[str, Any]
    """Entries by shape (`table_key`)."""
    fault: str = ""
    """Reason why the file is unusable; "" if it is valid, does not exist or has no entries for this GPU."""


def read_table(path: Path, gpu: str) -> TileTable:
    """Read the entries of one GPU. If the table is invalid, there are no entries, and `fault` is the reason."""
    try:
        if path.stat().st_size > _MAX_BYTES:
            return TileTable({}, "it is too large for a table of tiles")
        content = json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        return TileTable({})
    except OSError as error:
        return TileTable({}, f"it cannot be read: {error.strerror}")
    except (ValueError, RecursionError):
        return TileTable({}, "it is not JSON")
    version = content.get("version") if isinstance(content, dict) else None
    if version != VERSION:
        return TileTable({}, f"it is of version {version!r}, these kernels read {VERSION}")
    gpus = content.get("gpus")
    entries = gpus.get(gpu, {}) if isinstance(gpus, dict) else None
    if not isinstance(entries, dict):
        return TileTable({}, "its list of tiles is not a JSON object")
    return TileTable(entries)


def describe_user_table(device: torch.device) -> str:
    """Return the line about the user's table that is shown at startup, or "" if the table has nothing for this GPU."""
    if device.type != "cuda":
        return ""
    path = user_table_path()
    table = read_table(path, _gpu_name(device))
    if table.fault:
        return (
            f"ignoring the tuned tiles in {path}: {table.fault}; to write them again, run"
            " `kvscope-engine bench kernels --tune`"
        )
    count = len(table.entries)
    return f"tiles of {count} shape{'s' * (count != 1)} as tuned on this GPU, from {path}" if count else ""


def write_table(path: Path, gpu: str, entries: Mapping[str, Mapping[str, Any] | None]) -> None:
    """Add entries of one GPU to a table; None removes an entry. Raises OSError."""
    gpus: dict[str, Any] = {}
    if not read_table(path, gpu).fault:
        with suppress(FileNotFoundError):
            gpus = json.loads(path.read_text("utf-8"))["gpus"]
    kept = gpus.get(gpu, {}) | dict(entries)
    gpus[gpu] = {key: entry for key, entry in kept.items() if entry is not None}
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.{os.getpid()}")
    partial.write_text(json.dumps({"version": VERSION, "gpus": gpus}, indent=1, sort_keys=True) + "\n", "utf-8")
    partial.replace(path)
    _tiles_of.cache_clear()


def as_entry(tiles: DotTiles) -> dict[str, int | bool | None]:
    """Return the measured parameters of tiles. All other parameters follow from the shape."""
    return {
        "tile_m": tiles.tile_m,
        "tile_n": tiles.tile_n,
        "num_warps": tiles.num_warps,
        "num_stages": tiles.num_stages,
        "max_registers": tiles.max_registers,
        "query_in_registers": tiles.query_in_registers,
    }


def from_entry(entry: Any, default: DotTiles, group: int) -> DotTiles | None:
    """Return the tiles of an entry for the shape of `default`, or None if no kernel supports them."""
    if not isinstance(entry, dict):
        return None
    sizes: dict[str, Any] = {name: entry.get(name) for name in as_entry(default)}
    registers, in_registers = sizes.pop("max_registers"), bool(sizes.pop("query_in_registers"))
    is_valid = (
        all(type(number) is int for number in sizes.values())
        and (registers is None or (type(registers) is int and 32 <= registers <= 255))
        and sizes["tile_m"] in _SIZES
        and sizes["tile_n"] in _SIZES
        and sizes["tile_m"] >= group
        and sizes["num_warps"] in _WARPS
        and 1 <= sizes["num_stages"] <= _MAX_STAGES
    )
    if not is_valid:
        return None
    return default._replace(**sizes, max_registers=registers, query_in_registers=in_registers)


@cache
def _tiles_of(
    kernel: str, default: DotTiles, group: int, element_bytes: int, is_quantized: bool, is_cut: bool, gpu: str
) -> DotTiles:
    key = table_key(kernel, default, group, element_bytes, is_quantized=is_quantized, is_cut=is_cut)
    for path in (user_table_path(), SHIPPED_TABLE):
        tiles = from_entry(read_table(path, gpu).entries.get(key), default, group)
        if tiles is not None:
            return tiles
    return default


@cache
def _gpu_name(device: torch.device) -> str:
    return str(torch.cuda.get_device_properties(device).name)
