"""Names, types, labels and bucket bounds on the page: vLLM's where the meaning is the same, and valid syntax."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, closing
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as openmetrics_families
from tests.telemetry.metrics.scripted import LABELS, ScrapedMetrics, ScriptedEngine, wait_for, wait_for_subscription

from kvscope_telemetry.ledger import BlockState
from kvscope_telemetry.messages.telemetry import DeviceSample
from kvscope_telemetry.metrics.histogram import length_bounds
from kvscope_telemetry.metrics.metrics_page import MetricsPage

ROOT = Path(__file__).parents[3]
GAUGES = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "cache_config_info")
COUNTERS = (
    "prefix_cache_queries",
    "prefix_cache_hits",
    "num_preemptions",
    "prompt_tokens",
    "prompt_tokens_cached",
    "generation_tokens",
    "spec_decode_num_draft_tokens",
    "spec_decode_num_accepted_tokens",
    "request_success",
)
TO_FIRST = ".001 .005 .01 .02 .04 .06 .08 .1 .25 .5 .75 1 2.5 5 7.5 10 20 40 80 160 640 2560"  # as vLLM has them
PER_TOKEN = ".01 .025 .05 .075 .1 .15 .2 .3 .4 .5 .75 1 2.5 5 7.5 10 20 40 80"
REQUEST = ".3 .5 .8 1 1.5 2 2.5 5 10 15 20 30 40 50 60 120 240 480 960 1920 7680"
LENGTHS = "1 2 5 10 20 50 100 200 500 1000"
HISTOGRAMS = {
    "time_to_first_token_seconds": TO_FIRST,
    "inter_token_latency_seconds": PER_TOKEN,
    "request_time_per_output_token_seconds": PER_TOKEN,
    "e2e_request_latency_seconds": REQUEST,
    "request_queue_time_seconds": REQUEST,
    "request_inference_time_seconds": REQUEST,
    "request_prefill_time_seconds": REQUEST,
    "request_decode_time_seconds": REQUEST,
    "iteration_tokens_total": "1 8 16 32 64 128 256 512 1024 2048 4096 8192 16384",
    "request_prompt_tokens": LENGTHS,
    "request_generation_tokens": LENGTHS,
    "request_params_max_tokens": LENGTHS,
}
OWN_LABELS = {"request_success": {"finished_reason"}}


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MetricsPage]:
    """Page of an engine that reports everything."""
    with ExitStack() as stack:
        endpoint = f"ipc://{tmp_path_factory.mktemp('kv')}"
        engine = stack.enter_context(closing(ScriptedEngine(endpoint)))
        page = stack.enter_context(closing(MetricsPage(endpoint)))
        everything: Any = dict.fromkeys(DeviceSample.__struct_fields__, 1)
        wait_for_subscription(page, engine)
        engine.ledger.state[0], engine.ledger.ref_count[0] = BlockState.ACTIVE, 1
        engine.publish_step(1.0, blocks=[0])
        engine.publish(DeviceSample(**everything))
        for name in ("kvscope_device_power_watts", "kvscope_internal_fragmentation_ratio"):
            wait_for(lambda name=name: ScrapedMetrics(page).value(name) is not None, name)
        yield page


@pytest.fixture(scope="module")
def scraped(page: MetricsPage) -> ScrapedMetrics:
    return ScrapedMetrics(page)


def test_vllm_metrics_have_vllm_types_and_labels(scraped: ScrapedMetrics) -> None:
    kinds = {name: family.type for name, family in scraped.families.items() if name.startswith("vllm:")}
    types = {name: kind for name, kind in kinds.items() if not name.endswith("_created")}
    expected = {f"vllm:{name}": "gauge" for name in GAUGES}
    expected |= {f"vllm:{name}": "counter" for name in COUNTERS} | {f"vllm:{name}": "histogram" for name in HISTOGRAMS}
    assert types == expected
    for name in (*GAUGES[:-1], *COUNTERS, *HISTOGRAMS):
        for sample in scraped.families[f"vllm:{name}"].samples:
            own = sample.labels.keys() - OWN_LABELS.get(name, set()) - {"le"}
            assert own == {"model_name", "engine"}, sample
    (info,) = scraped.families["vllm:cache_config_info"].samples
    assert info.value == 1
    assert info.labels == {
        "engine": "0",
        "block_size": "16",
        "cache_dtype": "bfloat16",
        "enable_prefix_caching": "True",
        "num_gpu_blocks": "8",
        "num_cpu_blocks": "2",
    }


@pytest.mark.parametrize("name", HISTOGRAMS)
def test_histogram_bounds_equal_those_of_vllm(scraped: ScrapedMetrics, name: str) -> None:
    samples = scraped.families[f"vllm:{name}"].samples
    bounds = [sample.labels["le"] for sample in samples if sample.name.endswith("_bucket")]
    assert bounds.pop() == "+Inf"
    assert [float(bound) for bound in bounds] == [float(bound) for bound in HISTOGRAMS[name].split()]


def test_length_histogram_has_one_bucket_if_the_model_limit_is_unknown() -> None:
    assert length_bounds(0) == (1,)
    assert length_bounds(3) == (1, 2)


def test_all_other_metrics_have_our_prefix_and_labels(scraped: ScrapedMetrics) -> None:
    assert all(name.startswith(("vllm:", "kvscope_")) for name in scraped.families)
    engine_s = [each for each in scraped.samples if not re.match(r"kvscope_(up|engine_state|reader_.*)$", each.name)]
    assert all(each.labels.items() >= LABELS.items() for each in engine_s if "cache_config" not in each.name)


OPENMETRICS = "application/openmetrics-text"


@pytest.mark.parametrize(
    ("accept", "kind"),
    [
        ("", "text/plain; version=0.0.4"),
        ("*/*", "text/plain; version=0.0.4"),
        ("text/html", "text/plain; version=0.0.4"),
        ("text/plain;version=1.0.0;escaping=values", "text/plain; version=0.0.4"),
        (f"{OPENMETRICS};version=1.0.0;q=0.8,text/plain;version=0.0.4;q=0.5", f"{OPENMETRICS}; version=1.0.0"),
        (f"{OPENMETRICS};version=1.0.0;escaping=allow-utf-8,*/*;q=0.1", f"{OPENMETRICS}; version=1.0.0"),
        (f"{OPENMETRICS};version=0.0.1", "text/plain; version=0.0.4"),
        (OPENMETRICS, f"{OPENMETRICS}; version=1.0.0"),
    ],
)
def test_text_and_openmetrics_formats_parse(page: MetricsPage, scraped: ScrapedMetrics, accept: str, kind: str) -> None:
    data, content_type = page.render(accept)
    assert content_type == f"{kind}; charset=utf-8"
    if kind.startswith(OPENMETRICS):
        families = list(openmetrics_families(data.decode()))
        names = {sample.name for family in families for sample in family.samples}
        assert names == scraped.names  # colons and all
    else:
        assert data.startswith(b"# HELP kvscope_up")


def test_page_passes_promtool(scraped: ScrapedMetrics) -> None:
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("promtool is not installed")
    asked = subprocess.run([promtool, "check", "metrics"], input=scraped.text, capture_output=True, text=True)
    assert asked.returncode in (0, 3), asked.stderr  # 3: style
    vllm_s = ("should not contain ':'", "vllm:iteration_tokens_total", "_created ")
    complaints = [line for line in asked.stdout.splitlines() if not any(word in line for word in vllm_s)]
    assert not complaints


def test_dashboard_uses_only_existing_metrics(scraped: ScrapedMetrics) -> None:
    dashboard = json.loads(files("kvscope_resources").joinpath("grafana", "kvscope.json").read_text("utf-8"))
    asked = [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", ())]
    asked += [variable["definition"] for variable in dashboard["templating"]["list"] if "definition" in variable]
    names = [re.findall(r"(?:vllm:|kvscope_)\w+", expr) for expr in asked]
    assert len(asked) > 30
    assert all(names)
    assert {name for each in names for name in each} <= scraped.names
    labels = {label for sample in scraped.samples for label in sample.labels} | {"instance"}
    grouped = {label for expr in asked for label in re.findall(r"by \((\w+)\)", expr)}
    assert grouped <= labels


def test_dashboard_is_importable_and_up_to_date(tmp_path: Path) -> None:
    dashboard = json.loads(files("kvscope_resources").joinpath("grafana", "kvscope.json").read_text("utf-8"))
    assert "${DS_" not in json.dumps(dashboard), "file provisioning does not fill in inputs"
    assert dashboard["schemaVersion"] >= 36
    assert dashboard["id"] is None
    assert "datasource" in [variable["name"] for variable in dashboard["templating"]["list"]]
    panels = dashboard["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    assert all(panel["gridPos"]["x"] + panel["gridPos"]["w"] <= 24 for panel in panels)
    written = subprocess.run([sys.executable, ROOT / "scripts/grafana_dashboard.py"], capture_output=True, check=True)
    assert json.loads(written.stdout) == dashboard, "regenerate it with scripts/grafana_dashboard.py"
