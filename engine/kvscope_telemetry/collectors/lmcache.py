"""Metrics of LMCache that kvscope displays, read from the metrics page of the engine in which LMCache runs.

LMCache's own server (`/status`, `lmcache_mp_*` metrics) is not queried, because kvscope does not know its address.
"""

from __future__ import annotations

from typing import Final

from kvscope_telemetry.collectors.readings import FigureMetric

LMCACHE_PREFIX: Final = "lmcache:"
LMCACHE_FIGURES: Final = (
    FigureMetric(name="LMCache: tokens asked for", metric="lmcache:num_requested_tokens_total", unit="tokens"),
    FigureMetric(name="LMCache: tokens found", metric="lmcache:num_hit_tokens_total", unit="tokens"),
    FigureMetric(name="LMCache: in host memory", metric="lmcache:local_cache_usage", unit="bytes"),
    FigureMetric(name="LMCache: on disk", metric="lmcache:local_storage_usage", unit="bytes"),
    FigureMetric(name="LMCache: remote", metric="lmcache:remote_cache_usage", unit="bytes"),
)
