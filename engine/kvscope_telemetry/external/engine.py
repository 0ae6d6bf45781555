"""Describes an engine that is watched from outside. Each such engine's module makes one description with everything
kvscope has to know of it.

Engines differ in nothing else: whoever wants to know what an engine is called, how it is read or what it can tell asks
its description and never its name. `engines.py` lists them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvscope_telemetry.external.readings import EngineReading
from kvscope_telemetry.external.server_facts import Ask, ServerFacts
from kvscope_telemetry.messages.capabilities import Capabilities
from kvscope_telemetry.messages.structured import Structured

if TYPE_CHECKING:
    from kvscope_telemetry.external.page import ScrapedPage

Fields = dict[str, Any]
"""Of a request's body."""
Version = tuple[int, int]


def _as_it_is(fields: Fields, version: Callable[[], Version]) -> Fields:
    return fields


def _as_model(adapter: str) -> Fields:
    return {"model": adapter}


@dataclass(frozen=True, slots=True, kw_only=True)
class ExternalEngine:
    """An engine that kvscope watches by its HTTP server and, where it publishes them, its KV events."""

    scheme: str
    """Of its addresses, SCHEME://HOST:PORT, and its name in `Capabilities.engine`."""
    name: str
    """What a person calls it."""
    port: int
    """That its server listens on unless told otherwise."""
    events_option: str = ""
    """With which its server reports KV events, as it is typed."""
    from_inside: str = ""
    """How a person sees what it does not publish, where kvscope can go inside."""
    how_to_attach: str
    """What a person is told who attaches to one: what to type, and how to start it so that there is much to see."""

    metrics_prefix: str
    """Which its metrics' names begin with."""
    other_prefixes: tuple[str, ...] = ()
    """Of metrics that programs within it add to its page and `read` knows."""
    metrics_path: str = "/metrics"
    """Where its server has them, in Prometheus' format."""
    rank_label: str
    """Label of its metrics with the data-parallel rank; those without it are of all ranks together."""
    replica_labels: tuple[str, ...] = ()
    """Labels with the number of one of several processes that all tell the same of their rank: the first is taken."""
    read: Callable[[ScrapedPage], EngineReading]
    """What its metrics say."""
    without_metrics: str = ""
    """What a person can do where its server has no metrics."""

    ask_facts: Callable[[Ask], ServerFacts]
    """What its server says beside its metrics, where its KV events are among it: endpoints as the server binds them."""
    capabilities: Capabilities
    """What it can tell. Whether aborts are counted is known of each server, by its metrics."""

    tells_slots: bool = False
    """It tells what each of its slots holds (`slot_source`), and has no KV events."""

    form_fields: Callable[[Structured], Fields]
    """A form of the answer in the words of its API, but for JSON, which OpenAI's API has words for. Raises BadInput for
    one that it has no word for."""
    adapter_fields: Callable[[str], Fields] = _as_model
    """A LoRA adapter, of those that its server lists as models, in the words of its API."""
    fit_version: Callable[[Fields, Callable[[], Version]], Fields] = _as_it_is
    """The body of a request as a server of that version takes it. To ask for the version may wait for the server."""


def watched_capabilities(scheme: str) -> Capabilities:
    """Of an engine that tells of cached blocks by KV events, and the rest by its metrics.

    Rows are slots that kvscope gives out; requests are told by their number alone, latencies as histograms.
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
