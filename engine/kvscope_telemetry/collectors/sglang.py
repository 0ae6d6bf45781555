"""Description of SGLang 0.4 and later: its metric names, its server information, and its parameters for
structured output.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from kvscope_telemetry.collectors.external_engine import ExternalEngine, Fields, PluginLoading, watched_capabilities
from kvscope_telemetry.collectors.lmcache import LMCACHE_FIGURES, LMCACHE_PREFIX
from kvscope_telemetry.collectors.readings import (
    EngineReading,
    FigureMetric,
    count,
    gib,
    number,
    read_figures,
    read_latencies,
    share,
)
from kvscope_telemetry.collectors.server_facts import (
    Ask,
    ServerFacts,
    mapping,
    model_facts,
    positive_int_or_zero,
    printable_text_or_empty,
)
from kvscope_telemetry.collectors.token_counts import count_messages
from kvscope_telemetry.errors import BadInput
from kvscope_telemetry.messages.structured import Structured

if TYPE_CHECKING:
    from kvscope_telemetry.collectors.scraped_page import ScrapedPage

_SCHEME: Final = "sglang"
_NAME: Final = "SGLang"


def _pool(label: str, usage: str, prefix: str, unit: str) -> tuple[FigureMetric, ...]:
    """Return the gauges to display for one pool. SGLang exports them with the value 0 for pools that a model
    does not have.
    """
    names = [f"sglang:{prefix}_{part}_tokens" for part in ("used", "evictable", "available")]
    needs = tuple(names)
    return (
        FigureMetric(name=f"{label} in use", metric=f"sglang:{usage}", unit="share", needs=needs),
        FigureMetric(name=f"{label}: used", metric=names[0], unit=unit, needs=needs),
        FigureMetric(name=f"{label}: cached, can be evicted", metric=names[1], unit=unit, needs=needs),
        FigureMetric(name=f"{label}: free", metric=names[2], unit=unit, needs=needs),
    )


_FIGURES: Final = (
    *_pool("Pool of full attention", "full_token_usage", "kv", "tokens"),
    *_pool("Pool of sliding windows", "swa_token_usage", "swa", "tokens"),
    *_pool("Pool of states", "mamba_usage", "mamba", "states"),
    FigureMetric(name="Prompt tokens from", metric="sglang:cached_tokens_total", unit="tokens", by="cache_source"),
    FigureMetric(
        name="Host cache in use",
        metric="sglang:hicache_host_used_tokens",
        unit="tokens",
        needs=("sglang:hicache_host_total_tokens",),
    ),
    FigureMetric(
        name="Mean accepted length of drafts", metric="sglang:spec_accept_length", needs=("sglang:spec_accept_length",)
    ),
    FigureMetric(
        name="Draft tokens accepted",
        metric="sglang:spec_accept_rate",
        unit="share",
        needs=("sglang:spec_accept_length",),
    ),
    FigureMetric(name="Loaded back from lower tiers", metric="sglang:load_back_tokens_total", unit="tokens"),
    *LMCACHE_FIGURES,
)


def _read(page: ScrapedPage) -> EngineReading:
    page_size = number(page.gauge("sglang:page_size"))
    tokens = number(page.gauge("sglang:max_total_num_tokens"))
    pages = number(page.gauge("sglang:num_pages"))
    if pages is None and tokens is not None:
        pages = tokens // (page_size or 1)
    return EngineReading(
        model=page.label("model_name", "sglang:num_running_reqs", "sglang:prompt_tokens_total"),
        num_running=count(page.gauge("sglang:num_running_reqs")),
        num_waiting=count(page.gauge("sglang:num_queue_reqs")),
        used_share=share(page.gauge("sglang:full_token_usage", "sglang:token_usage")),
        num_blocks=pages,
        block_size=page_size,
        pool_tokens=tokens,
        prompt_tokens=page.total("sglang:prompt_tokens_total"),
        cached_tokens=page.total("sglang:cached_tokens_total"),
        generation_tokens=page.total("sglang:generation_tokens_total"),
        preemptions=page.total("sglang:num_retracted_requests_total"),
        finished=page.total("sglang:num_requests_total"),
        aborted=page.total("sglang:num_aborted_requests_total"),
        evicted_tokens=page.total("sglang:evicted_tokens_total"),
        host_tokens=number(page.gauge("sglang:hicache_host_total_tokens")),
        weights_bytes=gib(page.gauge("sglang:weight_memory_usage_gb")),
        kv_bytes=gib(page.gauge("sglang:kv_cache_memory_usage_gb")),
        graphs_bytes=gib(page.sum_of("sglang:graph_memory_usage_gb")),
        started_s=page.gauge("process_start_time_seconds"),
        latencies=read_latencies(
            page,
            ("first_token", "sglang:time_to_first_token_seconds"),
            ("inter_token", "sglang:inter_token_latency_seconds", "sglang:time_per_output_token_seconds"),
            ("queued", "sglang:queue_time_seconds"),
        ),
        figures=read_figures(page, _FIGURES),
    )


def _ask_facts(ask: Ask) -> ServerFacts:
    info = mapping(ask("/server_info"))
    facts = ServerFacts(
        version=printable_text_or_empty(info.get("version")),
        block_size=positive_int_or_zero(info.get("page_size")),
        num_tokens=positive_int_or_zero(info.get("max_total_num_tokens")),
        dtype=printable_text_or_empty(info.get("kv_cache_dtype")),
        **model_facts(ask),
        **_events(info.get("kv_events")),
    )
    return facts if facts.model else replace(facts, model=printable_text_or_empty(info.get("served_model_name")))


def _events(config: object) -> dict[str, Any]:
    config = mapping(config)
    host, port = (
        printable_text_or_empty(config.get("endpoint_host")),
        positive_int_or_zero(config.get("endpoint_port_base")),
    )
    if not host or not port:
        return {}
    replay = positive_int_or_zero(config.get("replay_endpoint_port_base"))
    return {
        "kv_events": f"tcp://{host}:{port}",
        "replay": f"tcp://{host}:{replay}" if replay else "",
        "topic": printable_text_or_empty(config.get("topic")),
    }


def _form_fields(form: Structured) -> Fields:
    if form.kind == "choice":
        raise BadInput(f"{_NAME} does not support choice: send a regex instead")
    if form.kind == "structural_tag":
        raise BadInput(f"{_NAME} does not support structural_tag")
    return {"regex" if form.kind == "regex" else "ebnf": form.text}


SGLANG: Final = ExternalEngine(
    scheme=_SCHEME,
    name=_NAME,
    port=30000,
    program_names=("sglang",),
    from_inside="start it by `kvscope inside python -m sglang.launch_server …`, with kvscope installed beside it",
    plugin=PluginLoading(
        entry_point_group="sglang.srt.plugins",
        plugins_variable="SGLANG_PLUGINS",
        rank_options=("--data-parallel-size", "--dp-size", "--dp"),
    ),
    events_option="""--kv-events-config '{"publisher": "zmq", "endpoint": "tcp://*:5557"}'""",
    how_to_attach="Host and port of its HTTP server, started with enable-metrics. Blocks are visible if it publishes "
    "KV events (its option kv-events-config).",
    metrics_prefix="sglang:",
    other_prefixes=(LMCACHE_PREFIX,),
    rank_label="dp_rank",
    replica_labels=("tp_rank", "pp_rank", "moe_ep_rank"),
    read_metrics=_read,
    without_metrics="start SGLang with --enable-metrics",
    ask_facts=_ask_facts,
    capabilities=watched_capabilities(_SCHEME),
    form_fields=_form_fields,
    count_tokens=count_messages,
    # SGLang ignores the model name, except for the part after a colon.
    adapter_fields=lambda adapter: {"lora_path": adapter},
)
