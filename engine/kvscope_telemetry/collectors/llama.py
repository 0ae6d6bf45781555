"""Description of llama.cpp's server: its metric names, its server information, and its parameters for
structured output.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from kvscope_telemetry.collectors.external_engine import ExternalEngine, Fields
from kvscope_telemetry.collectors.readings import EngineReading, count
from kvscope_telemetry.collectors.server_facts import Ask, ServerFacts, mapping, printable_text_or_empty
from kvscope_telemetry.collectors.token_counts import count_formatted
from kvscope_telemetry.errors import BadInput
from kvscope_telemetry.messages.capabilities import Capabilities
from kvscope_telemetry.messages.structured import Structured

if TYPE_CHECKING:
    from kvscope_telemetry.collectors.scraped_page import ScrapedPage

_NAME: Final = "llama.cpp"


def _read(page: ScrapedPage) -> EngineReading:
    return EngineReading(
        num_running=count(page.gauge("llamacpp:requests_processing")),
        num_waiting=count(page.gauge("llamacpp:requests_deferred")),
        prompt_tokens=page.total("llamacpp:prompt_tokens_total"),
        cached_tokens=page.total("llamacpp:prompt_tokens_cached_total"),
        generation_tokens=page.total("llamacpp:tokens_predicted_total"),
        draft_tokens=page.total("llamacpp:spec_decode_num_draft_tokens_total"),
        accepted_tokens=page.total("llamacpp:spec_decode_num_accepted_tokens_total"),
    )


def _ask_facts(ask: Ask) -> ServerFacts:
    props = mapping(ask("/props"))
    path, name = printable_text_or_empty(props.get("model_path")), printable_text_or_empty(props.get("model_alias"))
    is_named = name and name != path  # a model without a name is reported under its file's path
    return ServerFacts(
        version=printable_text_or_empty(props.get("build_info")), model=name if is_named else path.rpartition("/")[2]
    )


def _form_fields(form: Structured) -> Fields:
    if form.kind == "grammar":
        return {"grammar": form.text}
    raise BadInput(f"{_NAME} does not support {form.kind}: send a grammar (GBNF) instead")


LLAMA_CPP: Final = ExternalEngine(
    scheme="llama",
    name=_NAME,
    port=8080,
    program_names=("llama.cpp", "llama-server", "llamacpp"),
    owned_by="llamacpp",
    how_to_attach=(
        "Host and port of llama-server. It reports slots unless it was started with --no-slots, and waiting requests "
        "if it was started with --metrics."
    ),
    metrics_prefix="llamacpp:",
    rank_label="rank",
    read_metrics=_read,
    without_metrics="start llama-server with --metrics",
    ask_facts=_ask_facts,
    capabilities=Capabilities(
        engine="llama",
        commands=False,
        ref_counts=False,
        prefix_hits=False,
        last_used=False,
        token_ids=False,
        steps=False,
        latencies=False,
        aborts=False,
        prompt_estimates=True,
    ),
    form_fields=_form_fields,
    count_tokens=count_formatted,
    publishes_slots=True,
)
