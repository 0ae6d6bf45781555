"""Messages about what an engine does not report: why something is unknown, disabled or not drawn. Imports no Qt.

Each function `why_…` returns "" if nothing is missing.
"""

from __future__ import annotations

from typing import Final

from kvscope_telemetry.alarms.rules import Rule, unreported_figures
from kvscope_telemetry.collectors import external_engines as external
from kvscope_telemetry.messages.capabilities import Capabilities

_OWN_ENGINE_NAMES: Final = {"kvscope": "This engine", "devices": "This address"}
DEVICES_ALONE: Final = (
    "This address reports GPUs, memory and cores only (see Devices).\nFor a KV cache, use File ▸ Attach to an engine."
)
"""Message in the middle of a window if the address has devices but no KV cache."""
SLOTS: Final = "cell positions are assigned by kvscope, not by the server"


def engine_name(capabilities: Capabilities) -> str:
    """Return the engine's name for the start of a sentence, such as "vLLM" or "This engine"."""
    return _OWN_ENGINE_NAMES.get(capabilities.engine) or external.engine_name(capabilities.engine)


def plugin_hint(capabilities: Capabilities) -> str:
    """Return a hint on kvscope's plugin, which reports what the engine itself does not, as the end of a sentence.

    "" if there is no plugin for the engine, or if the engine reports requests.
    """
    engine = external.find_engine(capabilities.engine)
    return f": {engine.from_inside}" if engine is not None and engine.from_inside and not capabilities.requests else ""


def why_no_addresses(capabilities: Capabilities) -> str:
    """Return why the order of rows on the page map is not their order in memory."""
    if capabilities.physical_rows:
        return ""
    return (
        f"{engine_name(capabilities)} does not report where blocks are in memory: {SLOTS}, so neighbouring cells need "
        "not be neighbours in memory"
    )


def why_no_requests(capabilities: Capabilities) -> str:
    if not capabilities.blocks:
        return f"{engine_name(capabilities)} reports devices only; it has no requests"
    if capabilities.requests:
        return ""
    return f"{engine_name(capabilities)} reports the number of requests, not each one{plugin_hint(capabilities)}"


def why_not_measured(rule: Rule, capabilities: Capabilities) -> str:
    """Return why an alarm by `rule` can never be raised."""
    names = unreported_figures(rule, capabilities)
    return f"{engine_name(capabilities)} does not report {', '.join(names)}" if names else ""


def why_no_prompts(capabilities: Capabilities) -> str:
    return "" if capabilities.completions else f"{engine_name(capabilities)} accepts no prompts"


def why_no_commands(capabilities: Capabilities) -> str:
    return "" if capabilities.commands else f"{engine_name(capabilities)} can be watched but not controlled"
