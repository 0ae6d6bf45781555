"""Asks an HTTP server which engine it is: one short request, or two if the server wants an API key.

Sends no API key, uses no proxy, follows no redirect and reads at most `MAX_BYTES`. Uses Python's own HTTP client,
because importing httpx takes longer than all requests together.
"""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from kvscope_telemetry.collectors import external_engines
from kvscope_telemetry.collectors.external_engine import ExternalEngine
from kvscope_telemetry.collectors.http_client import OK, REFUSALS
from kvscope_telemetry.collectors.server_facts import mapping, printable_text_or_empty
from kvscope_telemetry.discovery.found_engine import FoundEngine
from kvscope_telemetry.discovery.probed_ports import OLLAMA_PORT
from kvscope_telemetry.program_version import program_version

TIMEOUT_S: Final = 1.0
"""Timeout in seconds of connecting, of each read of an answer, and of reading the body of an answer."""
MAX_BYTES: Final = 1 << 20
OWN_NAME: Final = "kvscope"
"""Name of kvscope's engine in its list of models (`owned_by`)."""
_MODELS: Final = "/v1/models"
_METRICS: Final = "/metrics"
_OLLAMA_MODELS: Final = "/api/ps"
_NEEDS_KEY: Final = "needs an API key"
_OLLAMA_NOTE: Final = "cannot be watched: Ollama reports nothing about its KV cache"
_OWN_API_NOTE: Final = "the API of an engine of kvscope's own: attach to the engine's endpoint"


def probe_server(host: str, port: int) -> FoundEngine | None:
    """Return the engine whose HTTP server is at `host` and `port`; None if there is none that kvscope knows."""
    path = _OLLAMA_MODELS if port == OLLAMA_PORT else _MODELS
    answer = _get(host, port, path)
    if answer is None:
        return None
    if answer.status in REFUSALS:
        return _refusing_engine(host, port)
    if answer.status != OK:
        return None
    content = mapping(answer.json())
    return _ollama(host, port, content) if path == _OLLAMA_MODELS else _listed_engine(host, port, content)


@dataclass(frozen=True, slots=True)
class _Answer:
    status: int
    body: bytes

    def json(self) -> Any:
        try:
            return json.loads(self.body)
        except (ValueError, RecursionError):
            return None


def _get(host: str, port: int, path: str) -> _Answer | None:
    """Return the answer at `path`; None if there is none in HTTP, or none within the timeout."""
    connection = http.client.HTTPConnection(host.strip("[]"), port, timeout=TIMEOUT_S)
    try:
        connection.request("GET", path, headers={"User-Agent": f"kvscope/{program_version()}".replace(" ", "-")})
        response = connection.getresponse()
        return _Answer(response.status, _read(response))
    except (OSError, http.client.HTTPException, ValueError):
        return None
    finally:
        connection.close()


def _read(response: http.client.HTTPResponse) -> bytes:
    """Return the body as far as it arrives within the timeout: a server may send it byte by byte."""
    body = b""
    deadline_s = time.monotonic() + TIMEOUT_S
    while len(body) < MAX_BYTES and (part := response.read1(MAX_BYTES - len(body))):
        body += part
        if time.monotonic() > deadline_s:
            break
    return body


def _listed_engine(host: str, port: int, content: Mapping[str, Any]) -> FoundEngine | None:
    """Return the engine that answered with the list of models `content`, by the owner of the first one."""
    models = content.get("data")
    first = mapping(models[0]) if isinstance(models, list) and models else {}
    owner, model = first.get("owned_by"), printable_text_or_empty(first.get("id"))
    if owner == OWN_NAME:
        return FoundEngine(f"http://{host}:{port}", OWN_NAME, model, note=_OWN_API_NOTE, can_attach=False)
    engine = next((each for each in external_engines.ENGINES if owner and owner in (each.scheme, each.owned_by)), None)
    return None if engine is None else FoundEngine(f"{engine.scheme}://{host}:{port}", engine.name, model)


def _ollama(host: str, port: int, content: Mapping[str, Any]) -> FoundEngine | None:
    models = content.get("models")
    if not isinstance(models, list):
        return None
    names = [printable_text_or_empty(mapping(each).get("name")) for each in models]
    model = ", ".join(filter(None, names))
    return FoundEngine(f"http://{host}:{port}", "Ollama", model, note=_OLLAMA_NOTE, can_attach=False)


def _refusing_engine(host: str, port: int) -> FoundEngine | None:
    """Return the engine that lists its models only with an API key, by its metrics, which usually need none."""
    answer = _get(host, port, _METRICS)
    if answer is None:
        return None
    engine = _engine_of_metrics(answer.body.decode("utf-8", "replace")) if answer.status == OK else None
    note = _NEEDS_KEY
    if engine is None:
        engine = next((each for each in external_engines.ENGINES if port in (each.port, each.port + 1)), None)
        note = f"{_NEEDS_KEY}; assumed to be {'' if engine is None else engine.name}, because of its port"
    return None if engine is None else FoundEngine(f"{engine.scheme}://{host}:{port}", engine.name, note=note)


def _engine_of_metrics(page: str) -> ExternalEngine | None:
    lines = page.splitlines()
    return next(
        (each for each in external_engines.ENGINES if any(line.startswith(each.metrics_prefix) for line in lines)),
        None,
    )
