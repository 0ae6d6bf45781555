"""Command `bench kernels --tune`: searches tile sizes for each shape, and writes the table that engines read."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from kvscope_engine.text_table import table
from kvscope_telemetry.errors import BadInput

if TYPE_CHECKING:
    from kvscope_engine.bench.kernels.tile_search import TileSearchResult

HEADER = ("shape", "default us", "best us", "gain", "tile", "warps", "stages", "tried", "refused")


_MIN_DONE_FOR_ESTIMATE: Final = 0.2
"""Share of the first shape's search after which the remaining time is estimated."""


def tune(
    device: str,
    args: argparse.Namespace,
    show_progress: Callable[[str], None],
    clock: Callable[[], float] = time.monotonic,
) -> int:
    """Run the search on this GPU, write the table after each shape, and print the results. Returns the exit code."""
    if device != "cuda":
        raise BadInput("--tune needs a CUDA device: the tiles are those of the GPU's kernels")
    import torch

    from kvscope_engine.bench.kernels.calls import pools_of
    from kvscope_engine.bench.kernels.samplers import sampler_on
    from kvscope_engine.bench.kernels.tile_search import CASES, kernel_of, search
    from kvscope_kernels import ops_for
    from kvscope_kernels.tuning.tile_table import user_table_path, write_table

    name = torch.cuda.get_device_properties(0).name
    path = Path(args.table) if args.table is not None else user_table_path()
    kernel_names = {"decode": "paged_decode", "prefill": "paged_prefill"}
    kernels = {kernel_names[each] for each in args.only or kernel_names if each in kernel_names}
    if not kernels:
        raise BadInput(f"--tune tunes {' and '.join(kernel_names)}, none of which --only names")
    works = [work for work in CASES if kernel_of(work) in kernels]
    results: list[TileSearchResult] = []
    start = clock()
    for number, work in enumerate(works):
        shape_text = f"shape {number + 1} of {len(works)}, {kernel_of(work)} {work.name}"
        pools = pools_of(work, device)
        result = search(
            work,
            pools,
            ops_for(device),
            partial(sampler_on, device),
            lambda tried, total, done=number, shape_text=shape_text: show_progress(  # type: ignore[misc]
                f"{shape_text}, tile {tried + 1} of {total}"
                f"{_remaining_time_text(clock() - start, done + tried / total, len(works))}"
            ),
        )
        results.append(result)
        try:  # after each shape, so that an interrupted search keeps its results
            write_table(path, name, {result.key: result.entry() if result.is_worth_it else None})
        except OSError as error:
            raise BadInput(f"the table {str(path)!r} cannot be written: {error.strerror}") from None
    entries = {result.key: result.entry() for result in results if result.is_worth_it}
    report = {"gpu": name, "table": str(path), "kept": entries, "seconds": round(clock() - start, 1)}
    print(json.dumps(report) if args.json else text(report, results, is_own=args.table is None))
    return 0


def _remaining_time_text(elapsed_s: float, num_done: float, num_shapes: int) -> str:
    """Return text with the estimated remaining time, or "" while too little is done for an estimate."""
    return (
        f", about {max(1, round(elapsed_s / num_done * (num_shapes - num_done) / 60))} min left"
        if num_done >= _MIN_DONE_FOR_ESTIMATE
        else ""
    )


def text(report: dict[str, Any], results: list[TileSearchResult], *, is_own: bool = True) -> str:
    rows = [
        [
            result.key,
            f"{result.default_us:.1f}",
            f"{result.best_us:.1f}",
            f"{result.default_us / result.best_us:.2f} x" if result.is_worth_it else "unchanged",
            f"{result.best.tile_m} x {result.best.tile_n}{', query in registers' * result.best.query_in_registers}",
            str(result.best.num_warps),
            str(result.best.num_stages),
            str(result.num_tried),
            str(result.num_refused),
        ]
        for result in results
    ]
    gain_text = f"{len(report['kept'])} of {len(results)} shapes gained more than 3 %"
    minutes = f"{report['seconds'] / 60:.0f} min"
    if not is_own:
        location_text = f"Their tiles are in {report['table']}; engines read it as {own_table_path()}."
    elif report["kept"]:
        location_text = (
            f"Their tiles are in {report['table']}, which engines read at their start. To undo it, delete that file."
        )
    else:
        location_text = "Engines continue to use the same tile sizes."
    return "\n".join([report["gpu"], "", table(HEADER, rows), "", f"{gain_text}, in {minutes}. {location_text}"])


def own_table_path() -> str:
    """Return the path from which engines read the tile table."""
    from kvscope_kernels.tuning.tile_table import user_table_path

    return str(user_table_path())
