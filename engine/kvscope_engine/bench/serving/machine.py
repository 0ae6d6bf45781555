"""Where and with what a result was measured: every table and JSON object says it."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from datetime import UTC, datetime
from typing import Any

from kvscope_engine.model.running.cpu_count import usable_cores
from kvscope_telemetry.about import program_version
from kvscope_telemetry.devices.gpus import Gpus
from kvscope_telemetry.devices.host import HostReader


def machine() -> dict[str, Any]:
    """Now and here. Asks NVML for GPUs, and imports nothing heavy."""
    gpus = [gpu.name for gpu in Gpus().sample() if gpu.name]
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "device": ", ".join(gpus) or HostReader(()).sample().name,
        "gpus": gpus,
        "cores": usable_cores(),
        "load_average": os.getloadavg()[0],
        "versions": {"kvscope": program_version(), "python": platform.python_version(), **_libraries()},
    }


def _libraries() -> dict[str, str]:
    found = {}
    for name in ("torch", "transformers", "triton"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found
