"""Says on an engine's own page of metrics where kvscope tells from inside it: who watches from outside finds it so."""

from __future__ import annotations

import contextlib
from typing import Any, Final

METRIC: Final = "kvscope_inside_info"
_MEANS: Final = "Where kvscope tells of this engine from inside it."


def announce(endpoint: str, registry: Any = None) -> None:
    """On the page of `registry`: the one that this process serves, or shares by prometheus_client's folder. Where there
    is none, nothing."""
    with contextlib.suppress(Exception):
        from prometheus_client import REGISTRY, Gauge

        told = Gauge(METRIC, _MEANS, ["endpoint"], registry=registry or REGISTRY, multiprocess_mode="livemax")
        told.labels(endpoint).set(1)
