"""What an engine tells and what it does not, in words: why something is unknown, disabled or not drawn. Knows no Qt."""

from __future__ import annotations

from typing import Final

from kvscope_telemetry.alarms.rules import Rule, not_told
from kvscope_telemetry.external import engines as external
from kvscope_telemetry.messages.capabilities import Capabilities

_OWN: Final = {"kvscope": "This engine", "devices": "This address"}
DEVICES_ALONE: Final = (
    "This address reports GPUs, memory and cores only (see Devices).\nFor a KV cache, use Engine ▸ Attach to an engine."
)
"""In the middle of a window that has no pool to show."""
SLOTS: Final = "cell positions are assigned by kvscope, not by the server"


def engine_name(told: Capabilities) -> str:
    """What a sentence begins with."""
    return _OWN.get(told.engine) or external.engine_name(told.engine)


def why_no_addresses(told: Capabilities) -> str:
    """Why rows are no places in memory; empty when they are."""
    if told.physical_rows:
        return ""
    return f"{engine_name(told)} does not report where blocks are in memory: {SLOTS}, and neighbours mean nothing"


def why_no_requests(told: Capabilities) -> str:
    """Why there is no table of requests; empty when there is one."""
    if not told.blocks:
        return f"{engine_name(told)} reports devices only; it has no requests"
    return "" if told.requests else f"{engine_name(told)} reports the number of requests, not each one"


def why_not_measured(rule: Rule, told: Capabilities) -> str:
    """Why an alarm by `rule` cannot ring; empty when it can."""
    names = not_told(rule, told)
    return f"{engine_name(told)} does not tell {', '.join(names)}" if names else ""


def why_no_prompts(told: Capabilities) -> str:
    """Why nothing can be sent to it."""
    return "" if told.completions else f"{engine_name(told)} accepts no prompts"


def why_no_commands(told: Capabilities) -> str:
    """Why it cannot be told what to do; empty when it can."""
    return "" if told.commands else f"{engine_name(told)} can be watched but not controlled"
