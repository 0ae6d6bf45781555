"""Time to first token of one request, for several numbers of new tokens after several numbers of cached tokens.

The cached tokens are computed once by an earlier request, whose blocks stay in the prefix cache. Each measurement has a
different suffix, and the engine's counters verify that only the suffix is computed. Warm-up runs compile kernels and
capture graphs first.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from typing import Any, Final

from kvscope_engine.bench.on_gpu.probe import Probe
from kvscope_engine.bench.on_gpu.setting import BLOCK_SIZE, Setting, empty
from kvscope_engine.text_table import table

CACHED: Final = (0, 4096, 32768)
NEW: Final = (16, 256, 2000)
LONGEST: Final = CACHED[-1] + NEW[-1] + BLOCK_SIZE
"""`max_model_len` needed for all measurements."""
WARM_UPS: Final = 2
REPEATS: Final = 5


def ttft(
    setting: Setting, engines: Mapping[str, dict[str, Any]], read_gb_per_s: float | None, tell: Callable[[str], None]
) -> dict[str, Any]:
    """Measure each engine. Returns the rows, and the lengths that do not fit the model or the cache."""
    rows: list[dict[str, Any]] = []
    left_out: list[str] = []
    for kind, options in engines.items():
        tell(f"{kind}: starts")
        config = setting.engine_config(**options | {"max_num_seqs": 1, "enable_prefix_caching": True})
        with Probe(config) as probe:
            cache = probe.engine.hello.cache
            limit = min(probe.engine.components.limits.max_model_len, cache.num_blocks * BLOCK_SIZE)
            for cached in CACHED:
                fitting = [new for new in NEW if cached + new < limit]
                if fitting != list(NEW):
                    missing = ", ".join(f"{new:,}" for new in NEW if new not in fitting)
                    left_out.append(
                        f"{kind}: {missing} new behind {cached:,} cached: there is room for {limit:,} tokens"
                    )
                for row in _behind(probe, cached, fitting, tell):
                    if read_gb_per_s is not None:
                        num_bytes = (cached + row["new"]) * cache.block_bytes // BLOCK_SIZE
                        row["kv_read_ms"] = num_bytes / read_gb_per_s / 1e6
                    rows.append({"kind": kind, **row})
        del probe
        empty()
    return {"repeats": REPEATS, "rows": rows, "left_out": left_out}


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


def _behind(probe: Probe, cached: int, lengths: list[int], tell: Callable[[str], None]) -> list[dict[str, Any]]:
    """Cache a prefix of `cached` tokens, and measure each number of new tokens after it."""
    if not lengths:
        return []
    tell(f"first token: {cached:,} tokens are cached")
    prefix = probe.ids(cached)
    if prefix:
        probe.first_token_s(prefix + probe.ids(1))
    return [_cell(probe, prefix, new, tell) for new in lengths]


def _cell(probe: Probe, prefix: list[int], new: int, tell: Callable[[str], None]) -> dict[str, Any]:
    tell(f"first token: {new:,} new behind {len(prefix):,} cached")
    taken_ms = []
    for _ in range(WARM_UPS + REPEATS):
        taken_ms.append(probe.first_token_s(prefix + probe.ids(new), num_computed=new) * 1e3)
    counted = taken_ms[WARM_UPS:]
    return {
        "cached": len(prefix),
        "new": new,
        "ttft_ms": statistics.median(counted),
        "slowest_ms": max(counted),
        "each_ms": counted,
    }
