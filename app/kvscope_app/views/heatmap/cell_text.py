"""Describes a cell of the heatmap or of the picture of free runs in a sentence. Imports no Qt."""

from __future__ import annotations

import numpy as np

from kvscope_app.session.stop_bands import stop_text_at
from kvscope_app.ui.number_text import count, plural
from kvscope_app.views.block_locations import locate_block
from kvscope_app.views.heatmap.curve_strips import clock_text
from kvscope_app.views.heatmap.measures import size_text
from kvscope_app.views.heatmap.pools import PoolRegistry
from kvscope_telemetry.summaries.address_bins import bin_edges
from kvscope_telemetry.summaries.session_overview import SessionOverview
from kvscope_telemetry.summaries.summary import SECOND_NS


def index_at(overview: SessionOverview, time_ns: int) -> int:
    """Return the index of the second that contains `time_ns`, or -1 if the overview has no data for it."""
    index = overview.index_at(time_ns)
    return index if index >= 0 and time_ns - int(overview.time_ns[index]) < SECOND_NS else -1


def cell_text(overview: SessionOverview, pools: PoolRegistry, time_ns: int, address: int) -> str:
    """Return a text such as `14:03:20  ·  Block 128 to 135  ·  75 % active, 25 % cached  ·  request #12`."""
    index = index_at(overview, time_ns)
    if index < 0:
        return f"{clock_text(time_ns)}  ·  nothing recorded"
    epoch, num_rows = int(overview.epoch[index]), int(overview.column("num_rows")[index])
    if address >= num_rows:
        return f"{clock_text(time_ns)}  ·  outside the cache, which had {plural(num_rows, 'block')} then"
    row = int(np.searchsorted(bin_edges(num_rows), address, "right")) - 1
    first, last = bin_edges(num_rows)[row : row + 2].tolist()
    cache = pools.cache_of(epoch, num_rows)
    name = f"Block {count(first)}" if cache is None else locate_block(cache, first).name
    if last - first > 1:
        end = last - 1 if cache is None else locate_block(cache, last - 1).number
        name += f" to {count(end)}"
    stop_text = stop_text_at(overview, time_ns)
    parts = [*_use_texts(overview, index, row, last - first), *([f"engine {stop_text}"] if stop_text else [])]
    return "  ·  ".join([clock_text(time_ns), name, *parts])


def runs_text(overview: SessionOverview, time_ns: int, exponent: int) -> str:
    """Return a text such as `14:03:20  ·  12 runs of 4 to 7 free blocks, 40 in total  ·  longest 96 blocks`.

    The described runs have 2 ** `exponent` blocks or more, but less than twice as many.
    """
    index = index_at(overview, time_ns)
    if index < 0:
        return f"{clock_text(time_ns)}  ·  nothing recorded"
    runs = overview.free_runs(index)
    number = runs[exponent] if exponent < len(runs) else 0
    noun = "free block" if exponent == 0 else "free blocks"
    longest = int(overview.column("longest_free_run")[index])
    sentence = f"{plural(number, 'run')} of {size_text(exponent)} {noun}, {count(sum(runs))} in total"
    return f"{clock_text(time_ns)}  ·  {sentence}  ·  longest {plural(longest, 'block')}"


def _use_texts(overview: SessionOverview, index: int, row: int, size: int) -> list[str]:
    bins = {name: overview.bins(name, np.array([index])) for name in ("active", "cached", "shared", "filled", "owner")}
    if bins["active"].shape[1] <= row:
        return ["not recorded"]
    cell = {name: int(values[0, row]) for name, values in bins.items()}
    shares = [f"{_percent(cell[n], size)}{n}" for n in ("active", "shared", "cached") if cell[n]]
    parts = [", ".join(shares) if shares else "free"]
    in_use = cell["active"] + cell["cached"]
    if in_use:
        parts.append(f"{min(round(cell['filled'] / in_use * 100), 100)} % of slots used")
    if cell["active"] and cell["owner"] >= 0:
        parts.append(f"request #{cell['owner']}" + (" is the newest owner" if size > 1 else ""))
    return parts


def _percent(share: int, size: int) -> str:
    """Return `share` (0 to 255) as a percentage followed by a space, or "" for a single block, which has only one
    state.
    """
    if size == 1:
        return ""
    return "under 1 % " if share <= 2 else f"{round(share / 255 * 100)} % "
