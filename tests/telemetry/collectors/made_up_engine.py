"""A made-up engine: what it takes to add one, except for its line in `collectors/external_engines.py`."""

from __future__ import annotations

from kvscope_telemetry.collectors.external_engine import ExternalEngine, Fields, watched_capabilities
from kvscope_telemetry.collectors.readings import EngineReading, count, number, share
from kvscope_telemetry.collectors.scraped_page import ScrapedPage
from kvscope_telemetry.collectors.server_facts import Ask, ServerFacts, mapping, printable_text_or_empty
from kvscope_telemetry.errors import BadInput
from kvscope_telemetry.messages.structured import Structured

METRICS = b"""madeup:running{shard="0"} 3
madeup:running{shard="1"} 5
madeup:used 0.5
madeup:blocks 32
madeup:tokens_total 7
"""


def _read(page: ScrapedPage) -> EngineReading:
    return EngineReading(
        num_running=count(page.gauge("madeup:running")),
        used_share=share(page.gauge("madeup:used")),
        num_blocks=number(page.gauge("madeup:blocks")),
        generation_tokens=page.total("madeup:tokens_total"),
    )


def _ask_facts(ask: Ask) -> ServerFacts:
    about = mapping(ask("/about"))
    return ServerFacts(
        version=printable_text_or_empty(about.get("release")),
        model="m",
        kv_events=printable_text_or_empty(about.get("events")),
    )


def _form_fields(form: Structured) -> Fields:
    if form.kind != "regex":
        raise BadInput(f"Made-up does not support {form.kind}")
    return {"pattern": form.text}


MADE_UP = ExternalEngine(
    scheme="madeup",
    name="Made-up",
    port=4242,
    how_to_attach="Where its server listens.",
    metrics_prefix="madeup:",
    rank_label="shard",
    read_metrics=_read,
    without_metrics="start Made-up with --figures",
    ask_facts=_ask_facts,
    capabilities=watched_capabilities("madeup"),
    form_fields=_form_fields,
)
