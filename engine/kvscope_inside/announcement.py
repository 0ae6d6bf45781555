"""Adds a Prometheus metric with the endpoint of kvscope's plugin to the engine's metrics, so that tools can
find the plugin.
"""

from __future__ import annotations

import contextlib
from typing import Any, Final

METRIC: Final = "kvscope_inside_info"
_HELP: Final = "Address at which kvscope's plugin publishes this engine's telemetry."


def announce(endpoint: str, registry: Any = None) -> None:
    """Add a gauge with the label `endpoint` to the metrics of `registry`, by default those of this process.

    Works with prometheus_client's multiprocess folder. Does nothing without prometheus_client.
    """
    with contextlib.suppress(Exception):
        from prometheus_client import REGISTRY, Gauge

        gauge = Gauge(METRIC, _HELP, ["endpoint"], registry=registry or REGISTRY, multiprocess_mode="livemax")
        gauge.labels(endpoint).set(1)
