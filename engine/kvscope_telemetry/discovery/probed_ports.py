"""The ports that a search asks. Imports no HTTP client, because the help of `kvscope find` lists the ports."""

from __future__ import annotations

from typing import Final

from kvscope_telemetry.collectors import external_engines

OLLAMA_PORT: Final = 11434


def probed_ports() -> tuple[int, ...]:
    """Return the HTTP ports to ask: the default port of each engine and the next one, and Ollama's."""
    of_engines = [port for engine in external_engines.ENGINES for port in (engine.port, engine.port + 1)]
    return tuple(dict.fromkeys([*of_engines, OLLAMA_PORT]))
