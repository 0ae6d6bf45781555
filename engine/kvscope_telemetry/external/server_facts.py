"""What an engine's HTTP server says of itself beside its metrics: version, model, and where its KV events are.

Everything here may be missing: who asks goes on without. Knows what was answered, not how it was asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from kvscope_telemetry.errors import BadInput
from kvscope_telemetry.external.address import ExternalAddress
from kvscope_telemetry.external.http_get import NoAnswer
from kvscope_telemetry.kv_events.addresses import check_endpoint

MAX_NAME_LETTERS: Final = 200
Ask = Callable[[str], tuple[str, bytes]]


@dataclass(frozen=True, slots=True)
class ServerFacts:
    """Empty and 0 for what is not known."""

    version: str = ""
    model: str = ""
    max_model_len: int = 0
    block_size: int = 0
    num_tokens: int = 0
    """That the pool has room for."""
    dtype: str = ""
    kv_events: str = ""
    """Endpoint of rank 0, as we connect to it."""
    replay: str = ""
    topic: str = ""


def ask_facts(address: ExternalAddress, ask: Ask) -> ServerFacts:
    """By several questions; what is not answered is left out. Raises NoAnswer where the server lets nobody in."""
    models = _asked(ask, "/v1/models")
    if address.engine == "vllm":
        version = _asked(ask, "/version")
        info = _mapping(_asked(ask, "/server_info?config_format=json").get("vllm_config"))
        events = _vllm_events(address, _mapping(info.get("kv_events_config")))
        return ServerFacts(version=_text(version.get("version")), **_model(models), **events)
    info = _asked(ask, "/server_info")
    model = _model(models)
    model["model"] = model["model"] or _text(info.get("served_model_name"))
    return ServerFacts(
        version=_text(info.get("version")),
        block_size=_number(info.get("page_size")),
        num_tokens=_number(info.get("max_total_num_tokens")),
        dtype=_text(info.get("kv_cache_dtype")),
        **model,
        **_sglang_events(address, _mapping(info.get("kv_events"))),
    )


def _asked(ask: Ask, path: str) -> Mapping[str, Any]:
    """What is at `path`, empty where nothing is."""
    try:
        return _mapping(msgspec.json.decode(ask(path)[1]))
    except NoAnswer as error:
        if error.is_refusal:
            raise
        return {}
    except (msgspec.DecodeError, ValueError, RecursionError):
        return {}


def _model(models: Mapping[str, Any]) -> dict[str, Any]:
    listed = models.get("data")
    first = _mapping(listed[0]) if isinstance(listed, list) and listed else {}
    return {"model": _text(first.get("id")), "max_model_len": _number(first.get("max_model_len"))}


def _vllm_events(address: ExternalAddress, config: Mapping[str, Any]) -> dict[str, Any]:
    if not config.get("enable_kv_cache_events") or config.get("publisher") == "null":
        return {}
    return _events(address, config.get("endpoint"), config.get("replay_endpoint"), config.get("topic"))


def _sglang_events(address: ExternalAddress, told: Mapping[str, Any]) -> dict[str, Any]:
    host, port, replay = (
        told.get("endpoint_host"),
        told.get("endpoint_port_base"),
        told.get("replay_endpoint_port_base"),
    )
    if not isinstance(host, str) or not _number(port):
        return {}
    replay_endpoint = f"tcp://{host}:{replay}" if _number(replay) else None
    return _events(address, f"tcp://{host}:{port}", replay_endpoint, told.get("topic"))


def _events(address: ExternalAddress, endpoint: object, replay: object, topic: object) -> dict[str, Any]:
    found = {"kv_events": _endpoint(address, endpoint), "replay": _endpoint(address, replay), "topic": _text(topic)}
    return found if found["kv_events"] else {}


def _endpoint(address: ExternalAddress, told: object) -> str:
    if not isinstance(told, str):
        return ""
    endpoint = address.on_this_host(told)
    try:
        check_endpoint("endpoint", endpoint, is_client=True)
    except BadInput:
        return ""
    return endpoint


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _text(value: object) -> str:
    return value[:MAX_NAME_LETTERS] if isinstance(value, str) and value.isprintable() else ""


def _number(value: object) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 < value < 1 << 62 else 0
