"""Describes an engine that is watched from outside. Each engine's module creates one `ExternalEngine` with everything
that kvscope has to know of it.

Other code must not branch on an engine's name: names, metrics, and capabilities come from its description.
`external_engines.py` lists the engines.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvscope_telemetry.collectors.readings import EngineReading
from kvscope_telemetry.collectors.server_facts import Ask, ServerFacts
from kvscope_telemetry.messages.capabilities import Capabilities
from kvscope_telemetry.messages.structured import Structured

if TYPE_CHECKING:
    from kvscope_telemetry.collectors.scraped_page import ScrapedPage

Fields = dict[str, Any]
"""Fields of a request's JSON body."""
Version = tuple[int, int]


def _as_it_is(fields: Fields, version: Callable[[], Version]) -> Fields:
    return fields


def _as_model(adapter: str) -> Fields:
    return {"model": adapter}


@dataclass(frozen=True, slots=True, kw_only=True)
class ExternalEngine:
    """An engine that kvscope watches through its HTTP server and, if it publishes them, its KV events."""

    scheme: str
    """Scheme of its addresses, SCHEME://HOST:PORT, and its name in `Capabilities.engine`."""
    name: str
    port: int
    """Default port of the engine's HTTP server."""
    events_option: str = ""
    """Command-line option, as the user types it, with which the engine's server publishes KV events."""
    from_inside: str = ""
    """How to start the engine with kvscope's plugin, which shows more than the engine publishes; empty without one."""
    how_to_attach: str
    """Help for users who attach to one: what to type, and how to start the server to see as much as possible."""

    metrics_prefix: str
    other_prefixes: tuple[str, ...] = ()
    """Prefixes of other metrics on its page, added by programs inside it, that `read_metrics` uses."""
    metrics_path: str = "/metrics"
    """Path of its metrics in Prometheus' format."""
    rank_label: str
    """Label of its metrics with the data-parallel rank. Metrics without it apply to all ranks together."""
    replica_labels: tuple[str, ...] = ()
    """Labels that number processes which all report the same values for their rank. The first process is used."""
    read_metrics: Callable[[ScrapedPage], EngineReading]
    without_metrics: str = ""
    """Advice for users if its server has no metrics."""

    ask_facts: Callable[[Ask], ServerFacts]
    """Asks its server for facts that are not in the metrics. Endpoints are those that the server binds."""
    capabilities: Capabilities
    """Telemetry that it can report. Whether aborts are counted depends on the server's metrics (`hello_of`)."""

    publishes_slots: bool = False
    """Whether it reports the contents of its slots (`slot_source`) instead of KV events."""

    form_fields: Callable[[Structured], Fields]
    """Returns structured output as fields of its API, except for JSON, which is the same in OpenAI's API. Raises
    BadInput for a kind that its API does not support."""
    adapter_fields: Callable[[str], Fields] = _as_model
    """Returns the fields of its API that select a LoRA adapter, one of those that its server lists as models."""
    fit_version: Callable[[Fields, Callable[[], Version]], Fields] = _as_it_is
    """Adapts the body of a request to the server's version. Calling the version function may wait for the server."""


def watched_capabilities(scheme: str) -> Capabilities:
    """Capabilities of an engine that reports cached blocks by KV events and everything else by metrics.

    Ledger rows are assigned by kvscope. Only the number of requests is known, and latencies are histograms.
    """
    return Capabilities(
        engine=scheme,
        commands=False,
        completions=True,
        physical_rows=False,
        free_rows=False,
        requests=False,
        owners=False,
        ref_counts=False,
        filled=False,
        prefix_hits=False,
        last_used=False,
        token_ids=True,
        steps=False,
        latencies=False,
    )
