"""Facts that an engine's HTTP server reports apart from metrics: version, model, and the endpoints of its KV events.

All facts are optional. Each engine's module queries its server; this module contains the shared parsing, independent of
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
    """Facts about an engine's server. A fact that is unknown is empty or 0."""

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
    """Return the fields of `ServerFacts` that are known from the first model at OpenAI's /v1/models."""
    models = mapping(ask("/v1/models")).get("data")
    first = mapping(models[0]) if isinstance(models, list) and models else {}
    return {
        "model": printable_text_or_empty(first.get("id")),
        "max_model_len": positive_int_or_zero(first.get("max_model_len")),
    }


def mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def printable_text_or_empty(value: object) -> str:
    """Return `value` as printable text, truncated to `MAX_NAME_LETTERS`; empty if it is not a string."""
    return value[:MAX_NAME_LETTERS] if isinstance(value, str) and value.isprintable() else ""


def positive_int_or_zero(value: object) -> int:
    """Return `value` if it is an integer from 1 to 2**62 - 1, otherwise 0."""
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 < value < 1 << 62 else 0
