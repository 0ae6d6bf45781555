"""Measures the time to first token of one request, for several numbers of new tokens after several numbers of cached
tokens.

The cached tokens are computed once by an earlier request, whose blocks stay in the prefix cache. Each measurement has a
different suffix, and the engine's counters verify that only the suffix is computed. Warm-up runs compile kernels and
capture graphs first.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from typing import Any, Final

from kvscope_engine.bench.on_gpu.probe import Probe
from kvscope_engine.bench.on_gpu.setting import BLOCK_SIZE, Setting, free_unused_memory
from kvscope_engine.text_table import table

CACHED: Final = (0, 4096, 32768)
NEW: Final = (16, 256, 2000)
LONGEST: Final = CACHED[-1] + NEW[-1] + BLOCK_SIZE
"""Value of `max_model_len` that all measurements need."""
WARM_UPS: Final = 2
REPEATS: Final = 5


def ttft(
    setting: Setting,
    engines: Mapping[str, dict[str, Any]],
    read_gb_per_s: float | None,
    show_progress: Callable[[str], None],
) -> dict[str, Any]:
    """Measure each engine. Returns the table rows, and the lengths that do not fit the model or the cache."""
    rows: list[dict[str, Any]] = []
    skipped: list[str] = []
    for kind, options in engines.items():
        show_progress(f"{kind}: starts")
        config = setting.engine_config(**options | {"max_num_seqs": 1, "enable_prefix_caching": True})
        with Probe(config) as probe:
            cache = probe.engine.hello.cache
            limit = min(probe.engine.components.limits.max_model_len, cache.num_blocks * BLOCK_SIZE)
            for cached in CACHED:
                fitting = [new for new in NEW if cached + new < limit]
                if fitting != list(NEW):
                    missing = ", ".join(f"{new:,}" for new in NEW if new not in fitting)
                    skipped.append(
                        f"{kind}: {missing} new tokens after {cached:,} cached ones were not measured: the engine has "
                        f"memory for {limit:,} tokens"
                    )
                for row in _measure_after_prefix(probe, cached, fitting, show_progress):
                    if read_gb_per_s is not None:
                        num_bytes = (cached + row["new"]) * cache.block_bytes // BLOCK_SIZE
                        row["kv_read_ms"] = num_bytes / read_gb_per_s / 1e6
                    rows.append({"kind": kind, **row})
        del probe
        free_unused_memory()
    return {"repeats": REPEATS, "rows": rows, "left_out": skipped}


def ttft_text(report: dict[str, Any]) -> str:
    rows = [
        [
            row["kind"],
            f"{row['cached']:,}",
            f"{row['new']:,}",
            f"{row['ttft_ms']:.2f}",
            f"{row['slowest_ms']:.2f}",
            *(
                (f"{row['kv_read_ms']:.2f}", f"{row['kv_read_ms'] / row['ttft_ms']:.0%}")
                if "kv_read_ms" in row
                else ("", "")
            ),
        ]
        for row in report["rows"]
    ]
    header = ("", "cached", "new", "first token ms", "slowest", "keys and values read once, ms", "of it")
    heading = f"time to the first token of one request, median of {report['repeats']}, greedy"
    return "\n".join([heading, table(header, rows), *report["left_out"]])


def _measure_after_prefix(
    probe: Probe, cached: int, lengths: list[int], show_progress: Callable[[str], None]
) -> list[dict[str, Any]]:
    if not lengths:
        return []
    show_progress(f"first token: {cached:,} tokens are cached")
    prefix = probe.ids(cached)
    if prefix:
        probe.first_token_s(prefix + probe.ids(1))
    return [_measure_cell(probe, prefix, new, show_progress) for new in lengths]


def _measure_cell(probe: Probe, prefix: list[int], new: int, show_progress: Callable[[str], None]) -> dict[str, Any]:
    show_progress(f"first token: {new:,} new behind {len(prefix):,} cached")
    times_ms = []
    for _ in range(WARM_UPS + REPEATS):
        times_ms.append(probe.first_token_s(prefix + probe.ids(new), num_computed=new) * 1e3)
    measured_ms = times_ms[WARM_UPS:]
    return {
        "cached": len(prefix),
        "new": new,
        "ttft_ms": statistics.median(measured_ms),
        "slowest_ms": max(measured_ms),
        "each_ms": measured_ms,
    }
