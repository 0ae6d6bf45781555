"""Generates the Grafana dashboard. The output is stored as `resources/kvscope_resources/grafana/kvscope.json`.

The first panels match vLLM's "KV Cache" dashboard, with the same metrics. Further panels show metrics that only kvscope
has.
"""

from __future__ import annotations

import json
import sys
from typing import Any

Panel = dict[str, Any]
DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}
MODEL_SELECTOR = '{instance=~"$instance",model_name=~"$model_name"}'
INSTANCE_SELECTOR = '{instance=~"$instance"}'
GRID_WIDTH = 24


def main() -> None:
    json.dump(dashboard(), sys.stdout, indent=1)
    print()


def dashboard() -> dict[str, Any]:
    return {
        "__elements": {},
        "__requires": [
            {"type": "grafana", "id": "grafana", "name": "Grafana", "version": "10.0.0"},
            {"type": "datasource", "id": "prometheus", "name": "Prometheus", "version": "1.0.0"},
            *({"type": "panel", "id": kind, "name": kind, "version": ""} for kind in ("stat", "timeseries", "row")),
        ],
        "id": None,
        "uid": "kvscope",
        "title": "kvscope / KV cache",
        "description": "The KV cache of a kvscope engine: use, prefix cache, fragmentation, evictions, latencies.",
        "tags": ["kvscope", "vllm", "llm"],
        "schemaVersion": 39,
        "version": 1,
        "editable": True,
        "graphTooltip": 1,
        "refresh": "10s",
        "time": {"from": "now-30m", "to": "now"},
        "timepicker": {},
        "timezone": "browser",
        "annotations": {"list": []},
        "links": [],
        "templating": {"list": variables()},
        "panels": positioned_panels(),
    }


def variables() -> list[dict[str, Any]]:
    source = {
        "name": "datasource",
        "label": "Data source",
        "type": "datasource",
        "query": "prometheus",
        "current": {},  # the first Prometheus: an input (`__inputs`) is not filled in by file provisioning
        "hide": 0,
        "includeAll": False,
        "multi": False,
        "options": [],
        "refresh": 1,
        "regex": "",
    }
    return [
        source,
        label_variable("instance", "Instance", "label_values(kvscope_up, instance)"),
        label_variable("model_name", "Model", 'label_values(kvscope_steps_total{instance=~"$instance"}, model_name)'),
    ]


def label_variable(name: str, label: str, query: str) -> dict[str, Any]:
    """Return a dashboard variable for a label, with all values selected by default."""
    return {
        "name": name,
        "label": label,
        "type": "query",
        "datasource": DATASOURCE,
        "definition": query,
        "query": {"query": query, "refId": name},
        "current": {"text": "All", "value": "$__all"},
        "hide": 0,
        "includeAll": True,
        "allValue": ".*",
        "multi": True,
        "options": [],
        "refresh": 2,
        "regex": "",
        "sort": 1,
    }


def positioned_panels() -> list[Panel]:
    """Return all panels with their ids and positions, arranged in rows from left to right."""
    x = y = row_height = 0
    panels = []
    for number, panel in enumerate(all_panels(), 1):
        width, height = panel.pop("size")
        if x + width > GRID_WIDTH:
            x, y, row_height = 0, y + row_height, 0
        panels.append({"id": number, "gridPos": {"x": x, "y": y, "w": width, "h": height}, **panel})
        x, row_height = x + width, max(row_height, height)
    return panels


def all_panels() -> list[Panel]:
    return [*overview(), *prefixes(), *blocks(), *pressure(), *latencies(), *health()]


def overview() -> list[Panel]:
    usage = f"vllm:kv_cache_usage_perc{MODEL_SELECTOR}"
    return [
        stat("Max KV cache usage", f"max({usage})", "percentunit", orange=0.9, red=0.98),
        stat("Mean KV cache usage", f"avg({usage})", "percentunit", orange=0.9, red=0.98),
        stat("Prefix cache hit rate", hit_rate(), "percentunit"),
        stat("Cached prompt tokens", f"sum({increase('vllm:prompt_tokens_cached_total')})", "short"),
        stat("Preemptions / s", f"sum({rate('vllm:num_preemptions_total')})", "short", orange=0.000001, red=1),
        stat("Waiting requests", f"sum(vllm:num_requests_waiting{MODEL_SELECTOR})", "short", orange=1),
        curves("KV cache usage by engine", "percentunit", (usage, "{{instance}} {{engine}}"), top=1),
        curves(
            "Scheduler queue",
            "short",
            (f"sum(vllm:num_requests_running{MODEL_SELECTOR})", "running"),
            (f"sum(vllm:num_requests_waiting{MODEL_SELECTOR})", "waiting"),
        ),
    ]


def prefixes() -> list[Panel]:
    return [
        row("Prefix cache"),
        curves("Prefix cache hit rate", "percentunit", (hit_rate(), "hit rate"), top=1),
        curves(
            "Tokens looked up and found",
            "short",
            (f"sum({rate('vllm:prefix_cache_queries_total')})", "looked up / s"),
            (f"sum({rate('vllm:prefix_cache_hits_total')})", "found / s"),
        ),
    ]


def blocks() -> list[Panel]:
    shared = total("kvscope_num_shared_blocks", tier="hbm")
    return [
        row("Blocks and fragmentation"),
        curves(
            "Blocks by state",
            "short",
            (f"{total('kvscope_num_used_blocks', tier='hbm')} - {shared}", "used by one"),
            (shared, "shared"),
            (total("kvscope_num_cached_blocks", tier="hbm"), "cached"),
            (total("kvscope_num_free_blocks", tier="hbm"), "free"),
            is_stacked=True,
        ),
        curves(
            "Fragmentation",
            "percentunit",
            (
                f"max(kvscope_external_fragmentation_ratio{MODEL_SELECTOR})",
                "external: free blocks outside the longest run",
            ),
            (f"max(kvscope_internal_fragmentation_ratio{MODEL_SELECTOR})", "internal: held slots that are wasted"),
            top=1,
        ),
        curves(
            "Slots of the pool by use",
            "short",
            (f"sum by (use) (kvscope_num_slots{MODEL_SELECTOR})", "{{use}}"),
            is_stacked=True,
        ),
        curves(
            "Lower tiers",
            "short",
            (f"sum by (tier) (kvscope_num_used_blocks{with_label('tier', '!=', 'hbm')})", "{{tier}} swapped"),
            (f"sum by (tier) (kvscope_num_cached_blocks{with_label('tier', '!=', 'hbm')})", "{{tier}} cached"),
        ),
        curves("Memory by kind", "bytes", (f"sum by (kind) (kvscope_memory_bytes{MODEL_SELECTOR})", "{{kind}}")),
        curves("Device memory", "bytes", (f"sum by (part) (kvscope_device_memory_bytes{MODEL_SELECTOR})", "{{part}}")),
    ]


def pressure() -> list[Panel]:
    names = ("evicted", "copied", "swapped_out", "swapped_in", "offloaded", "lost")
    moves = [(f"sum({rate(f'kvscope_{name}_blocks_total')})", name.replace("_", " ")) for name in names]
    return [
        row("Evictions and preemptions"),
        curves("Blocks evicted, copied and moved / s", "short", *moves),
        curves(
            "Preemptions / s by cause", "short", (f"sum by (cause) ({rate('kvscope_preemptions_total')})", "{{cause}}")
        ),
    ]


def latencies() -> list[Panel]:
    tokens = ("prompt", "generation")
    seconds = (
        ("Time to first token", "time_to_first_token_seconds"),
        ("Time between tokens", "inter_token_latency_seconds"),
        ("Request latency", "e2e_request_latency_seconds"),
        ("Queue time", "request_queue_time_seconds"),
        ("Prefill time", "request_prefill_time_seconds"),
        ("Decode time", "request_decode_time_seconds"),
    )
    ends = f"sum by (finished_reason) ({rate('vllm:request_success_total')})"
    return [
        row("Load and latencies"),
        curves("Tokens / s", "short", *[(f"sum({rate(f'vllm:{kind}_tokens_total')})", kind) for kind in tokens]),
        curves("Requests that ended / s", "short", (ends, "{{finished_reason}}")),
        *(curves(title, "s", *quantiles(f"vllm:{name}")) for title, name in seconds),
        curves("Tokens in a step", "short", *quantiles("vllm:iteration_tokens_total")),
        curves("Steps / s", "short", (f"sum({rate('kvscope_steps_total')})", "steps")),
        curves(
            "Tokens guessed ahead / s",
            "short",
            (f"sum({rate('vllm:spec_decode_num_draft_tokens_total')})", "checked"),
            (f"sum({rate('vllm:spec_decode_num_accepted_tokens_total')})", "right"),
        ),
    ]


def health() -> list[Panel]:
    lost = f"sum(rate(kvscope_reader_frames_lost_total{INSTANCE_SELECTOR}[$__rate_interval]))"
    return [
        row("Engine and reader"),
        curves("Engine up", "short", (f"kvscope_up{INSTANCE_SELECTOR}", "{{instance}}"), top=1),
        curves(
            "Messages lost / s",
            "short",
            (lost, "frames that never came"),
            (f"sum({rate('kvscope_messages_dropped_total')})", "dropped by the engine"),
        ),
    ]


def hit_rate() -> str:
    return f"sum({rate('vllm:prefix_cache_hits_total')}) / sum({rate('vllm:prefix_cache_queries_total')})"


def rate(name: str) -> str:
    return f"rate({name}{MODEL_SELECTOR}[$__rate_interval])"


def increase(name: str) -> str:
    return f"increase({name}{MODEL_SELECTOR}[$__range])"


def total(name: str, *, tier: str) -> str:
    return f"sum({name}{with_label('tier', '=', tier)})"


def with_label(name: str, operator: str, value: str) -> str:
    return MODEL_SELECTOR.replace("}", f',{name}{operator}"{value}"}}')


def quantiles(name: str) -> list[tuple[str, str]]:
    buckets = f"sum by (le) ({rate(f'{name}_bucket')})"
    return [(f"histogram_quantile({share}, {buckets})", f"p{share * 100:.0f}") for share in (0.5, 0.95, 0.99)]


def row(title: str) -> Panel:
    return {"type": "row", "title": title, "collapsed": False, "panels": [], "size": (GRID_WIDTH, 1)}


def stat(title: str, query: str, unit: str, *, orange: float | None = None, red: float | None = None) -> Panel:
    """Return a panel with one large number that turns orange or red from the given values on."""
    steps: list[dict[str, Any]] = [{"color": "green", "value": None}]
    steps += [
        {"color": name, "value": value} for name, value in (("orange", orange), ("red", red)) if value is not None
    ]
    return {
        "type": "stat",
        "title": title,
        "datasource": DATASOURCE,
        "targets": targets((query, "")),
        "fieldConfig": {
            "defaults": {"unit": unit, "thresholds": {"mode": "absolute", "steps": steps}},
            "overrides": [],
        },
        "options": {"reduceOptions": {"calcs": ["lastNotNull"]}, "colorMode": "value", "graphMode": "area"},
        "size": (4, 4),
    }


def curves(
    title: str, unit: str, *queries: tuple[str, str], is_stacked: bool = False, top: float | None = None
) -> Panel:
    custom = {
        "drawStyle": "line",
        "fillOpacity": 40 if is_stacked else 8,
        "lineWidth": 1,
        "showPoints": "never",
        "stacking": {"mode": "normal" if is_stacked else "none", "group": "A"},
    }
    defaults = {"unit": unit, "min": 0, "custom": custom} | ({} if top is None else {"max": top})
    return {
        "type": "timeseries",
        "title": title,
        "datasource": DATASOURCE,
        "targets": targets(*queries),
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "options": {"legend": {"displayMode": "list", "placement": "bottom"}, "tooltip": {"mode": "multi"}},
        "size": (12, 8),
    }


def targets(*queries: tuple[str, str]) -> list[dict[str, Any]]:
    return [
        {"refId": chr(ord("A") + index), "datasource": DATASOURCE, "expr": expr, "legendFormat": legend, "range": True}
        for index, (expr, legend) in enumerate(queries)
    ]


if __name__ == "__main__":
    main()
