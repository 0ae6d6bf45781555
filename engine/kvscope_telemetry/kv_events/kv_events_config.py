"""Configuration of an engine's KV events: `--kv-events-config` with vLLM's fields, defaults and meaning."""

from __future__ import annotations

from typing import Annotated, Final, Literal

import msgspec
from msgspec import Meta

from kvscope_telemetry.json_option import read_json_option
from kvscope_telemetry.kv_events.event_endpoints import binds, check_endpoint

OPTION: Final = "--kv-events-config"
_Count = Annotated[int, Meta(ge=1, le=10_000_000)]


class KvEventsConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The fields of vLLM's `KVEventsConfig`, and the field `bind` of SGLang's."""

    enable_kv_cache_events: bool = False
    publisher: Literal["zmq", "null"] | None = None
    """Transport of the events. None means `zmq` if events are enabled."""
    endpoint: str = "tcp://*:5557"
    """Endpoint at which batches are published. Unless `bind` is set, the publisher binds `*` and ipc://, and connects
    to a named host.
    """
    replay_endpoint: str | None = None
    """Endpoint that serves replays; None for no replays."""
    buffer_steps: _Count = 10_000
    """Number of batches retained for replays."""
    hwm: _Count = 100_000
    """Number of batches queued for one consumer, beyond which it misses batches."""
    max_queue_size: _Count = 100_000
    """Number of batches queued for publishing, beyond which batches are dropped."""
    topic: str = ""
    bind: bool | None = None

    @property
    def is_on(self) -> bool:
        return self.enable_kv_cache_events and self.publisher != "null"

    @property
    def binds(self) -> bool:
        """Whether the publisher binds its endpoint; otherwise it connects to a consumer."""
        return binds(self.endpoint) if self.bind is None else self.bind


def parse_config(text: str) -> KvEventsConfig:
    """Parse a configuration from a JSON object. Raises BadInput with a one-line message if it is invalid."""
    config = read_json_option(OPTION, text, KvEventsConfig)
    check_endpoint(f"{OPTION}: endpoint", config.endpoint, is_client=not config.binds)
    if config.replay_endpoint is not None:
        check_endpoint(f"{OPTION}: replay_endpoint", config.replay_endpoint)
    return config
