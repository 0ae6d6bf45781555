"""`bench kernels --tune`: a search for each shape, what came of it, and the table that it is kept in."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvscope_engine.bench.table import table
from kvscope_telemetry.errors import BadInput

if TYPE_CHECKING:
    from kvscope_kernels.tuning.search import Found

HEADER = ("shape", "reckoned us", "best us", "gain", "tile", "warps", "stages", "tried", "refused")


def tune(device: str, args: argparse.Namespace, tell: Callable[[str], None]) -> int:
    """Search on this GPU, print, and write the table; 0 when all ran."""
    if device != "cuda":
        raise BadInput("--tune needs a CUDA device: the tiles are those of the GPU's kernels")
    import torch

    from kvscope_kernels import ops_for
    from kvscope_kernels.benchmark.calls import pools_of
    from kvscope_kernels.benchmark.side_by_side.samplers import sampler_on
    from kvscope_kernels.tuning.search import CASES, kernel_of, search
    from kvscope_kernels.tuning.tile_table import own_table, write_table

    name = torch.cuda.get_device_properties(0).name
    path = Path(args.table) if args.table is not None else own_table()
    wanted = {"decode": "paged_decode", "prefill": "paged_prefill"}
    kernels = {wanted[each] for each in args.only or wanted if each in wanted}
    if not kernels:
        raise BadInput(f"--tune tunes {' and '.join(wanted)}, none of which --only names")
    results = []
    for work in CASES:
        if kernel_of(work) in kernels:
            pools = pools_of(work, device)
            results.append(search(work, pools, ops_for(device), partial(sampler_on, device), tell))
    entries = {found.key: found.entry() for found in results if found.is_worth_it}
    try:
        write_table(path, name, entries)
    except OSError as error:
        raise BadInput(f"the table {str(path)!r} cannot be written: {error.strerror}") from None
    report = {"gpu": name, "table": str(path), "kept": entries}
    print(json.dumps(report) if args.json else text(report, results))
    return 0


def text(report: dict[str, Any], results: list[Found]) -> str:
    """The table of a search for people."""
    rows = [
        [
            found.key,
            f"{found.given_us:.1f}",
            f"{found.best_us:.1f}",
            f"{found.given_us / found.best_us:.2f} x" if found.is_worth_it else "as it was",
            f"{found.best.tile_m} x {found.best.tile_n}",
            str(found.best.num_warps),
            str(found.best.num_stages),
            str(found.num_tried),
            str(found.num_refused),
        ]
        for found in results
    ]
    kept = (
        f"{len(report['kept'])} of {len(results)} shapes are in {report['table']}, which the engine reads at its start"
    )
    return "\n".join([report["gpu"], "", table(HEADER, rows), "", kept])
