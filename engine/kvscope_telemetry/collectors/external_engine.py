"""Describes an external engine, which is watched from outside. Each engine's module creates one `ExternalEngine`.

Other code must not branch on an engine's name, but use the names, metrics and capabilities in the description.
`external_engines.py` lists the engines.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvscope_telemetry.collectors.readings import EngineReading
from kvscope_telemetry.collectors.server_facts import Ask, ServerFacts
from kvscope_telemetry.collectors.token_counts import CountTokens
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
class PluginLoading:
    """How a command line starts the engine with kvscope's plugin."""

    entry_point_group: str
    """Group of entry points in which the engine looks for plugins."""
    plugins_variable: str
    """Environment variable that, if set, lists the plugins to load."""
    rank_options: tuple[str, ...]
    """Options with the number of data-parallel ranks that the command starts; the first one given counts."""
    first_rank_options: tuple[str, ...] = ()
    """Options with the first of these ranks."""
    only_rank_options: tuple[str, ...] = ()
    """Options with the one rank that the command starts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExternalEngine:
    """Description of an engine that kvscope watches through its HTTP server and, if it publishes them, its KV
    events.
    """

    scheme: str
    """Scheme of the engine's addresses (SCHEME://HOST:PORT), and its name in `Capabilities.engine`."""
    name: str
    port: int
    """Default port of the engine's HTTP server."""
    owned_by: str = ""
    """Owner of the models in the server's list of models (`/v1/models`), if it is not the scheme."""
    program_names: tuple[str, ...] = ()
    """Names of the programs and Python packages by which the engine is recognized in a container's command. The name of
    its image may also contain them.
    """
    events_option: str = ""
    """Command-line option, as the user types it, with which the engine's server publishes KV events."""
    from_inside: str = ""
    """Help text: how to start the engine with kvscope's plugin, which publishes more than the engine itself;
    empty if there is no plugin.
    """
    plugin: PluginLoading | None = None
    """How the engine loads the plugin; None if there is none. The engine's Python package has the name `scheme`."""
    how_to_attach: str
    """Help text: the address of such an engine, and how to start the server so that kvscope sees as much as
    possible.
    """

    metrics_prefix: str
    other_prefixes: tuple[str, ...] = ()
    """Prefixes of metric names that do not belong to the engine itself but to programs that run in its process,
    such as LMCache. `read_metrics` also uses these metrics.
    """
    metrics_path: str = "/metrics"
    rank_label: str
    """Metrics label with the data-parallel rank. Metrics without it apply to all ranks together."""
    replica_labels: tuple[str, ...] = ()
    """Metric labels that number processes of one rank, all of which report the same values. The values of the
    first process are used.
    """
    read_metrics: Callable[[ScrapedPage], EngineReading]
    without_metrics: str = ""
    """Help text for users whose server has no metrics."""

    ask_facts: Callable[[Ask], ServerFacts]
    """Function that queries the server for facts that are not in the metrics. The endpoints in the result are
    those that the server binds.
    """
    capabilities: Capabilities
    """Telemetry that the engine can report. `hello_of` sets whether aborts are counted, which depends on the metrics.
    """

    clears_lower_tiers: bool = True
    """Whether `AllBlocksCleared` in KV events means that the tiers below the device were emptied, too."""
    publishes_slots: bool = False
    """Whether the engine reports the contents of its slots (`slot_source`) instead of KV events."""

    form_fields: Callable[[Structured], Fields]
    """Function that converts a structured output request to fields of the engine's API. It is not called for
    JSON objects and JSON schemas, for which all engines accept OpenAI's `response_format`. Raises BadInput for
    a kind that the API does not support.
    """
    adapter_fields: Callable[[str], Fields] = _model_field
    """Function that returns the API fields that select a LoRA adapter, given the adapter's name in the server's
    list of models.
    """
    count_tokens: CountTokens | None = None
    """Function that counts a prompt's tokens through the server's API; None if the server cannot do that. Then
    `Capabilities.prompt_estimates` is False.
    """
    fit_version: Callable[[Fields, Callable[[], Version]], Fields] = _unchanged
    """Function that adapts the body of a request to the server's version. The version is returned by a function
    that may wait for the server.
    """


def watched_capabilities(scheme: str) -> Capabilities:
    """Return the capabilities of an engine that reports cached blocks by KV events and everything else by metrics.

    kvscope assigns the ledger rows. The engine reports how many requests there are, but nothing about individual
    requests, and latencies only as histograms.
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
        prompt_estimates=True,
    )
