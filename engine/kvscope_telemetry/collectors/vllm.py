"""Description of vLLM 0.8 and later: its metric names, its server information, and its parameters for
structured output.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from kvscope_telemetry.collectors.external_engine import (
    ExternalEngine,
    Fields,
    PluginLoading,
    Version,
    watched_capabilities,
)
from kvscope_telemetry.collectors.lmcache import LMCACHE_FIGURES, LMCACHE_PREFIX
from kvscope_telemetry.collectors.readings import (
    EngineReading,
    FigureMetric,
    count,
    number,
    read_figures,
    read_latencies,
    share,
)
from kvscope_telemetry.collectors.server_facts import Ask, ServerFacts, mapping, model_facts, printable_text_or_empty
from kvscope_telemetry.collectors.token_counts import count_messages
from kvscope_telemetry.messages.structured import Structured

if TYPE_CHECKING:
    from kvscope_telemetry.collectors.scraped_page import ScrapedPage

_SCHEME: Final = "vllm"
_STRUCTURED_OUTPUTS: Final = "structured_outputs"
_STRUCTURED_OUTPUTS_SINCE: Final = (0, 11)
"""First version of vLLM (major, minor) for which the parameter `structured_outputs` is used. Since 0.12 it is
the only one that vLLM accepts.
"""
_RESIDENCY: Final = "vllm:kv_block_"
_FIGURES: Final = (
    FigureMetric(name="Waiting", metric="vllm:num_requests_waiting_by_reason", by="reason"),
    FigureMetric(
        name="Prompt tokens from", metric="vllm:prompt_tokens_cached_by_source_total", unit="tokens", by="source"
    ),
    FigureMetric(
        name="Prompt tokens asked of the KV connector",
        metric="vllm:external_prefix_cache_queries_total",
        unit="tokens",
        needs=("vllm:external_prefix_cache_queries_total",),
    ),
    FigureMetric(
        name="Prompt tokens found by the KV connector",
        metric="vllm:external_prefix_cache_hits_total",
        unit="tokens",
        needs=("vllm:external_prefix_cache_queries_total",),
    ),
    FigureMetric(name="Host cache in use", metric="vllm:kv_offload_cpu_cache_usage_perc", unit="share"),
    FigureMetric(name="Copied to lower tiers", metric="vllm:kv_offload_store_bytes_total", unit="bytes"),
    FigureMetric(name="Copied back from lower tiers", metric="vllm:kv_offload_load_bytes_total", unit="bytes"),
    FigureMetric(name="Copies refused for lack of room", metric="vllm:kv_offload_allocation_failure_total"),
    FigureMetric(name="Read from tiers below host", metric="vllm:kv_offload_tiering_read_bytes_total", unit="bytes"),
    FigureMetric(name="Written to tiers below host", metric="vllm:kv_offload_tiering_write_bytes_total", unit="bytes"),
    FigureMetric(name="Offload pool held", metric="vllm:simple_kv_offload_used_blocks", unit="blocks"),
    FigureMetric(name="Back from the offload pool", metric="vllm:simple_kv_offload_load_blocks_total", unit="blocks"),
    FigureMetric(name="Mean life of a block", metric=f"{_RESIDENCY}lifetime_seconds", unit="s", is_mean=True),
    FigureMetric(
        name="Mean idle time before eviction", metric=f"{_RESIDENCY}idle_before_evict_seconds", unit="s", is_mean=True
    ),
    FigureMetric(name="Mean time between uses", metric=f"{_RESIDENCY}reuse_gap_seconds", unit="s", is_mean=True),
    *LMCACHE_FIGURES,
)
"""Metrics to display. vLLM samples those about the lifetime of blocks only if it was started with
--kv-cache-metrics.
"""


def _read(page: ScrapedPage) -> EngineReading:
    config = page.labels_of("vllm:cache_config_info")
    success = "vllm:request_success_total"
    cached = page.total("vllm:prompt_tokens_cached_total")
    if cached is None:
        cached = page.total("vllm:prefix_cache_hits_total", "vllm:gpu_prefix_cache_hits_total")
    return EngineReading(
        model=page.label("model_name", "vllm:num_requests_running", success),
        num_running=count(page.gauge("vllm:num_requests_running")),
        num_waiting=count(page.gauge("vllm:num_requests_waiting")),
        used_share=share(page.gauge("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc")),
        num_blocks=number(config.get("num_gpu_blocks", "")),
        block_size=number(config.get("block_size", "")),
        pool_tokens=number(config.get("kv_cache_size_tokens", "")),
        cache_dtype=config.get("cache_dtype", ""),
        prompt_tokens=page.total("vllm:prompt_tokens_total"),
        cached_tokens=cached,
        generation_tokens=page.total("vllm:generation_tokens_total"),
        preemptions=page.total("vllm:num_preemptions_total"),
        draft_tokens=page.total("vllm:spec_decode_num_draft_tokens_total"),
        accepted_tokens=page.total("vllm:spec_decode_num_accepted_tokens_total"),
        finished=page.total(success),
        aborted=page.total(success, where={"finished_reason": "abort"}),
        started_s=page.gauge("process_start_time_seconds"),
        latencies=read_latencies(
            page,
            ("first_token", "vllm:time_to_first_token_seconds"),
            ("inter_token", "vllm:inter_token_latency_seconds", "vllm:time_per_output_token_seconds"),
            ("queued", "vllm:request_queue_time_seconds"),
        ),
        figures=read_figures(page, _FIGURES),
    )


def _ask_facts(ask: Ask) -> ServerFacts:
    """Query the server's facts. vLLM reports its configuration only if VLLM_SERVER_DEV_MODE is set."""
    info = mapping(mapping(ask("/server_info?config_format=json")).get("vllm_config"))
    events = mapping(info.get("kv_events_config"))
    if not events.get("enable_kv_cache_events") or events.get("publisher") == "null":
        events = {}
    return ServerFacts(
        version=printable_text_or_empty(mapping(ask("/version")).get("version")),
        kv_events=printable_text_or_empty(events.get("endpoint")),
        replay=printable_text_or_empty(events.get("replay_endpoint")),
        topic=printable_text_or_empty(events.get("topic")),
        **model_facts(ask),
    )


def _form_fields(form: Structured) -> Fields:
    return {_STRUCTURED_OUTPUTS: {form.kind: list(form.choices()) if form.kind == "choice" else form.text}}


def _fit_version(fields: Fields, version: Callable[[], Version]) -> Fields:
    """Replace the structured output parameter by its older forms for versions before
    `_STRUCTURED_OUTPUTS_SINCE`, which silently ignore unknown parameters.
    """
    if _STRUCTURED_OUTPUTS not in fields or version() >= _STRUCTURED_OUTPUTS_SINCE:
        return fields
    older_names = {"regex": "guided_regex", "grammar": "guided_grammar", "choice": "guided_choice"}
    others = {name: value for name, value in fields.items() if name != _STRUCTURED_OUTPUTS}
    return others | {older_names.get(kind, kind): value for kind, value in fields[_STRUCTURED_OUTPUTS].items()}


VLLM: Final = ExternalEngine(
    scheme=_SCHEME,
    name="vLLM",
    port=8000,
    program_names=("vllm",),
    from_inside="start it by `kvscope inside vllm serve MODEL`, with kvscope installed beside it",
    plugin=PluginLoading(
        entry_point_group="vllm.general_plugins",
        plugins_variable="VLLM_PLUGINS",
        rank_options=("--data-parallel-size-local", "-dpl", "--data-parallel-size", "-dp"),
        first_rank_options=("--data-parallel-start-rank", "-dpr"),
        only_rank_options=("--data-parallel-rank", "-dpn"),
    ),
    events_option="""--kv-events-config '{"enable_kv_cache_events": true, "endpoint": "tcp://*:5557"}'""",
    how_to_attach="Host and port of its HTTP server. Blocks are visible if it publishes KV events (its option "
    "kv-events-config); otherwise only metrics are shown.",
    metrics_prefix="vllm:",
    other_prefixes=(LMCACHE_PREFIX,),
    rank_label="engine",
    clears_lower_tiers=False,  # its prefix cache is reset without the offloaded blocks
    read_metrics=_read,
    ask_facts=_ask_facts,
    capabilities=watched_capabilities(_SCHEME),
    form_fields=_form_fields,
    count_tokens=count_messages,
    fit_version=_fit_version,
)
