"""Command `bench kernels --tune`: searches tiles for each shape, and writes the table that engines read."""

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

HEADER = ("shape", "reckoned us", "best us", "gain", "tile", "warps", "stages", "tried", "refused")


_TELLING: Final = 0.2
"""Share of the first shape after which the remaining time is estimated."""


def tune(
    device: str, args: argparse.Namespace, tell: Callable[[str], None], clock: Callable[[], float] = time.monotonic
) -> int:
    """Run the search on this GPU, write the table after each shape, and print the results. Returns the exit code."""
    if device != "cuda":
        raise BadInput("--tune needs a CUDA device: the tiles are those of the GPU's kernels")
    import torch

    from kvscope_engine.bench.kernels.calls import pools_of
    from kvscope_engine.bench.kernels.samplers import sampler_on
    from kvscope_engine.bench.kernels.tile_search import CASES, kernel_of, search
    from kvscope_kernels import ops_for
    from kvscope_kernels.tuning.tile_table import own_table, write_table

    name = torch.cuda.get_device_properties(0).name
    path = Path(args.table) if args.table is not None else own_table()
    wanted = {"decode": "paged_decode", "prefill": "paged_prefill"}
    kernels = {wanted[each] for each in args.only or wanted if each in wanted}
    if not kernels:
        raise BadInput(f"--tune tunes {' and '.join(wanted)}, none of which --only names")
    works = [work for work in CASES if kernel_of(work) in kernels]
    results: list[TileSearchResult] = []
    start = clock()
    for number, work in enumerate(works):
        words = f"shape {number + 1} of {len(works)}, {kernel_of(work)} {work.name}"
        pools = pools_of(work, device)
        found = search(
            work,
            pools,
            ops_for(device),
            partial(sampler_on, device),
            lambda tried, of, done=number, words=words: tell(  # type: ignore[misc]
                f"{words}, tile {tried + 1} of {of}{_left(clock() - start, done + tried / of, len(works))}"
            ),
        )
        results.append(found)
        try:  # after each shape, so that an interrupted search keeps its results
            write_table(path, name, {found.key: found.entry() if found.is_worth_it else None})
        except OSError as error:
            raise BadInput(f"the table {str(path)!r} cannot be written: {error.strerror}") from None
    entries = {found.key: found.entry() for found in results if found.is_worth_it}
    report = {"gpu": name, "table": str(path), "kept": entries, "seconds": round(clock() - start, 1)}
    print(json.dumps(report) if args.json else text(report, results, is_own=args.table is None))
    return 0


def _left(elapsed: float, done: float, of: int) -> str:
    """Return text with the estimated remaining time; empty while too little is done for an estimate."""
    return f", about {max(1, round(elapsed / done * (of - done) / 60))} min left" if done >= _TELLING else ""


def text(report: dict[str, Any], results: list[TileSearchResult], *, is_own: bool = True) -> str:
    rows = [
        [
            found.key,
            f"{found.given_us:.1f}",
            f"{found.best_us:.1f}",
            f"{found.given_us / found.best_us:.2f} x" if found.is_worth_it else "as it was",
            f"{found.best.tile_m} x {found.best.tile_n}{', query in registers' * found.best.query_in_registers}",
            str(found.best.num_warps),
            str(found.best.num_stages),
            str(found.num_tried),
            str(found.num_refused),
        ]
        for found in results
    ]
    changed = f"{len(report['kept'])} of {len(results)} shapes gained more than 3 %"
    minutes = f"{report['seconds'] / 60:.0f} min"
    if not is_own:
        where = f"Their tiles are in {report['table']}; engines read it as {own_name()}."
    elif report["kept"]:
        where = (
            f"Their tiles are in {report['table']}, which engines read at their start. To undo it, delete that file."
        )
    else:
        where = "Engines go on with the tiles that they had."
    return "\n".join([report["gpu"], "", table(HEADER, rows), "", f"{changed}, in {minutes}. {where}"])


def own_name() -> str:
    """Return the path from which engines read the table."""
    from kvscope_kernels.tuning.tile_table import own_table

    return str(own_table())
