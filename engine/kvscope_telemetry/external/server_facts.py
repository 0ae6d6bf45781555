"""What an engine's HTTP server says of itself beside its metrics: version, model, and where its KV events are.

Everything here may be missing: who asks goes on without. Each engine's module says where its server tells it; here are
the words that they share. Knows what was answered, not how it was asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

MAX_NAME_LETTERS: Final = 200
Ask = Callable[[str], Any]
"""What the server has at a path, from JSON; None where there is nothing that can be read."""


@dataclass(frozen=True, slots=True)
class ServerFacts:
    """Empty and 0 for what is not known."""

    version: str = ""
    model: str = ""
    max_model_len: int = 0
    block_size: int = 0
    num_tokens: int = 0
    """That the pool has room for."""
    dtype: str = ""
    kv_events: str = ""
    """Endpoint of rank 0, as the server binds it."""
    replay: str = ""
    topic: str = ""


def model_facts(ask: Ask) -> dict[str, Any]:
    """Of the first model at OpenAI's /v1/models: fields of `ServerFacts`."""
    listed = mapping(ask("/v1/models")).get("data")
    first = mapping(listed[0]) if isinstance(listed, list) and listed else {}
    return {"model": text(first.get("id")), "max_model_len": whole(first.get("max_model_len"))}


def mapping(value: object) -> Mapping[str, Any]:
    """Empty for what is none."""
    return value if isinstance(value, Mapping) else {}


def text(value: object) -> str:
    """Printable and short; empty for what is none."""
    return value[:MAX_NAME_LETTERS] if isinstance(value, str) and value.isprintable() else ""


def whole(value: object) -> int:
    """A whole number above 0; 0 for what is none."""
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 < value < 1 << 62 else 0
