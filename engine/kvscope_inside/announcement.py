"""Announces kvscope's endpoint on the engine's own metrics page, where external tools can discover it."""

from __future__ import annotations

import contextlib
from typing import Any, Final

METRIC: Final = "kvscope_inside_info"
_MEANS: Final = "Where kvscope tells of this engine from inside it."


def announce(endpoint: str, registry: Any = None) -> None:
    """Add a gauge with `endpoint` to the metrics of `registry`, by default those of this process.

    Works with prometheus_client's multiprocess folder. Does nothing without prometheus_client.
    """
    with contextlib.suppress(Exception):
        from prometheus_client import REGISTRY, Gauge

        told = Gauge(METRIC, _MEANS, ["endpoint"], registry=registry or REGISTRY, multiprocess_mode="livemax")
        told.labels(endpoint).set(1)
