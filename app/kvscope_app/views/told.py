"""What an engine tells and what it does not, in words: why something is unknown, disabled or not drawn. Knows no Qt."""

from __future__ import annotations

from typing import Final

from kvscope_telemetry.alarms.rules import RUN_OUT, STUCK, WAITING
from kvscope_telemetry.messages.capabilities import Capabilities

_ENGINES: Final = {"kvscope": "This engine", "vllm": "vLLM", "sglang": "SGLang", "devices": "This address"}
_NEEDED: Final = {
    "owner": ("owners", "which request owns a block"),
    "fill": ("filled", "how full a block is"),
    "sharing": ("ref_counts", "how many requests hold a block"),
    "age": ("last_used", "when a block was used last"),
    "attention": ("attention", "where attention falls"),
}
_MEASURED: Final = {
    RUN_OUT: ("free_rows", "which blocks are free"),
    WAITING: ("requests", "how long each request waits"),
    STUCK: ("steps", "its steps"),
}
HOW_TO_MEASURE: Final = "it measures that when it is started with --page-heat 16"
DEVICES_ALONE: Final = (
    "This address tells of GPUs, memory and cores alone: Devices shows them.\n"
    "There is no KV cache here. Engine ▸ Attach to an engine shows one."
)
"""In the middle of a window that has no pool to show."""
SLOTS: Final = "cells are slots that kvscope gives out"


def engine_name(told: Capabilities) -> str:
    """What a sentence begins with."""
    return _ENGINES.get(told.engine, told.engine)


def why_no_mode(mode: str, told: Capabilities) -> str:
    """Why blocks cannot be coloured by `mode`, a `ColorMode`; empty when they can."""
    capability, words = _NEEDED.get(mode, ("", ""))
    if not capability or getattr(told, capability) or (capability == "attention" and told.sparse_decode):
        return ""
    how = f": {HOW_TO_MEASURE}" if capability == "attention" and told.commands else ""
    return f"{engine_name(told)} does not tell {words}{how}"


def why_no_addresses(told: Capabilities) -> str:
    """Why rows are no places in memory; empty when they are."""
    if told.physical_rows:
        return ""
    return f"{engine_name(told)} does not tell where in memory a block lies: {SLOTS}, and neighbours mean nothing"


def why_no_requests(told: Capabilities) -> str:
    """Why there is no table of requests; empty when there is one."""
    if not told.blocks:
        return f"{engine_name(told)} tells of devices alone, and there are no requests"
    return "" if told.requests else f"{engine_name(told)} tells how many requests there are, and nothing of each"


def why_no_steps(told: Capabilities) -> str:
    """Why there are no steps to look at; empty when there are."""
    return "" if told.steps else f"{engine_name(told)} does not tell its steps: a frame is a moment of reading"


def why_not_measured(rule: str, told: Capabilities) -> str:
    """Why an alarm by `rule` cannot ring; empty when it can."""
    capability, words = _MEASURED.get(rule, ("", ""))
    return "" if not capability or getattr(told, capability) else f"{engine_name(told)} does not tell {words}"


def why_no_prompts(told: Capabilities) -> str:
    """Why nothing can be sent to it."""
    return "" if told.completions else f"{engine_name(told)} takes no prompts"


def why_no_commands(told: Capabilities) -> str:
    """Why it cannot be told what to do; empty when it can."""
    return "" if told.commands else f"{engine_name(told)} can be watched, and not be told what to do"
