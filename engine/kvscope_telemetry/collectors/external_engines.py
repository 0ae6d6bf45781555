"""List of the external engines that can be watched, each of which has a module. All other code finds engines here."""

from __future__ import annotations

from typing import Final

from kvscope_telemetry.collectors.external_engine import ExternalEngine
from kvscope_telemetry.collectors.llama import LLAMA_CPP
from kvscope_telemetry.collectors.sglang import SGLANG
from kvscope_telemetry.collectors.vllm import VLLM

ENGINES: Final[tuple[ExternalEngine, ...]] = (
    VLLM,
    SGLANG,
    LLAMA_CPP,
)
"""All external engines, in the order in which the user interface lists them."""


def find_engine(scheme: str) -> ExternalEngine | None:
    """Return the engine with this address scheme (its `Capabilities.engine`); None if there is none."""
    return next((engine for engine in ENGINES if engine.scheme == scheme), None)


def engine_name(scheme: str) -> str:
    """Return the display name of an engine, or `scheme` itself if it is unknown."""
    engine = find_engine(scheme)
    return scheme if engine is None else engine.name


def each_engine(form: str, last: str = "or", *, with_events: bool = False) -> str:
    """Format `form` for each engine and join the results: "{name}" gives "vLLM, SGLang or llama.cpp".

    `form` may contain {scheme} and {name}; `last` is the conjunction. `with_events` leaves out engines without KV
    events.
    """
    engines = [engine for engine in ENGINES if not (with_events and engine.publishes_slots)]
    names = [form.format(scheme=engine.scheme, name=engine.name) for engine in engines]
    *others, last_name = names
    return f"{', '.join(others)} {last} {last_name}" if others else last_name
