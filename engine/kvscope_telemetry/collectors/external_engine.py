"""Describes an engine that is watched from outside. Each engine's module creates one `ExternalEngine`.

Other code must not branch on an engine's name, but use the names, metrics and capabilities in the description.
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


def _unchanged(fields: Fields, version: Callable[[], Version]) -> Fields:
    return fields


def _model_field(adapter: str) -> Fields:
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
    """How to start the engine with kvscope's plugin, which publishes more than the engine; empty if there is no plugin.
    """
    how_to_attach: str
    """Help for users who attach to such an engine: the address, and how to start the server to see as much as possible.
    """

    metrics_prefix: str
    other_prefixes: tuple[str, ...] = ()
    """Prefixes of metrics of other programs within the engine that `read_metrics` uses."""
    metrics_path: str = "/metrics"
    """Path of the metrics in Prometheus' format."""
    rank_label: str
    """Metrics label with the data-parallel rank. Metrics without it apply to all ranks together."""
    replica_labels: tuple[str, ...] = ()
    """Labels that number processes which all report the same values for their rank. The first process is used."""
    read_metrics: Callable[[ScrapedPage], EngineReading]
    without_metrics: str = ""
    """Advice for users whose server has no metrics."""

    ask_facts: Callable[[Ask], ServerFacts]
    """Function that queries the server for facts that are not in the metrics. Endpoints are those that the server
    binds.
    """
    capabilities: Capabilities
    """Telemetry that the engine can report. `hello_of` sets whether aborts are counted, which depends on the metrics.
    """

    publishes_slots: bool = False
    """Whether the engine reports the contents of its slots (`slot_source`) instead of KV events."""

    form_fields: Callable[[Structured], Fields]
    """Function that converts a structured output to fields of the engine's API, except for JSON, which is the same in
    OpenAI's API. Raises BadInput for a kind that the API does not support.
    """
    adapter_fields: Callable[[str], Fields] = _model_field
    """Function that returns the API fields that select a LoRA adapter, given its name in the server's list of models.
    """
    fit_version: Callable[[Fields, Callable[[], Version]], Fields] = _unchanged
    """Function that adapts the body of a request to the server's version. Calling the version function may wait for the
    server.
    """


def watched_capabilities(scheme: str) -> Capabilities:
    """Return the capabilities of an engine that reports cached blocks by KV events and everything else by metrics.

    kvscope assigns the ledger rows. Of requests only the number is known, and latencies are histograms.
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
