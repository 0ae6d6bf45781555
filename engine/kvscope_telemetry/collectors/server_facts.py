"""Facts that an engine's HTTP server reports apart from metrics: version, model, and the endpoints of its KV events.

All facts are optional. Each engine's module queries its server; this module has the shared parsing, independent of
HTTP.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

MAX_NAME_LETTERS: Final = 200
Ask = Callable[[str], Any]
"""Function that returns the decoded JSON at a path of the server; None if there is no readable answer."""


@dataclass(frozen=True, slots=True)
class ServerFacts:
    """Facts about a server; empty or 0 if unknown."""

    version: str = ""
    model: str = ""
    max_model_len: int = 0
    block_size: int = 0
    num_tokens: int = 0
    """Capacity of the KV pool in tokens."""
    dtype: str = ""
    kv_events: str = ""
    """Endpoint of rank 0's KV events, as the server binds it."""
    replay: str = ""
    topic: str = ""


def model_facts(ask: Ask) -> dict[str, Any]:
    """Return fields of `ServerFacts` for the first model at OpenAI's /v1/models."""
    models = mapping(ask("/v1/models")).get("data")
    first = mapping(models[0]) if isinstance(models, list) and models else {}
    return {"model": text(first.get("id")), "max_model_len": whole(first.get("max_model_len"))}


def mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def text(value: object) -> str:
    """Return a printable string, truncated to `MAX_NAME_LETTERS`; empty for any other value."""
    return value[:MAX_NAME_LETTERS] if isinstance(value, str) and value.isprintable() else ""


def whole(value: object) -> int:
    """Return an integer from 1 to 2**62 - 1; 0 for any other value."""
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 < value < 1 << 62 else 0
