"""The list of engines that are watched from outside, a module and a line for each. All other code finds
engines here.
"""

from __future__ import annotations

from typing import Final

from kvscope_telemetry.external.engine import ExternalEngine
from kvscope_telemetry.external.llama import LLAMA_CPP
from kvscope_telemetry.external.sglang import SGLANG
from kvscope_telemetry.external.vllm import VLLM

ENGINES: Final[tuple[ExternalEngine, ...]] = (
    VLLM,
    SGLANG,
    LLAMA_CPP,
)
"""In the order in which a person is offered them."""


def find_engine(scheme: str) -> ExternalEngine | None:
    """That of addresses with `scheme`, which is `Capabilities.engine` too; None where there is none."""
    return next((engine for engine in ENGINES if engine.scheme == scheme), None)


def engine_name(scheme: str) -> str:
    """What a person calls it; `scheme` itself where it is not known here."""
    engine = find_engine(scheme)
    return scheme if engine is None else engine.name


def each_engine(form: str, last: str = "or", *, with_events: bool = False) -> str:
    """`form` with the {scheme} and {name} of each, or of those that have KV events: "{name}" gives "vLLM or SGLang"."""
    engines = [engine for engine in ENGINES if not (with_events and engine.tells_slots)]
    forms = [form.format(scheme=engine.scheme, name=engine.name) for engine in engines]
    *others, end = forms
    return f"{', '.join(others)} {last} {end}" if others else end
