"""How an engine publishes KV events: `--kv-events-config` with vLLM's fields, their defaults and their meaning."""

from __future__ import annotations

from typing import Annotated, Final, Literal

import msgspec
from msgspec import Meta

from kvscope_telemetry.json_option import read_json_option
from kvscope_telemetry.kv_events.addresses import binds, check_endpoint

OPTION: Final = "--kv-events-config"
_Count = Annotated[int, Meta(ge=1, le=10_000_000)]


class KvEventsConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """vLLM's `KVEventsConfig`, and SGLang's `bind`."""

    enable_kv_cache_events: bool = False
    publisher: Literal["zmq", "null"] | None = None
    """None: `zmq` where events are enabled."""
    endpoint: str = "tcp://*:5557"
    """Where batches are published: `*` and ipc:// are bound, a named host is connected to, unless `bind` says."""
    replay_endpoint: str | None = None
    """Where batches can be had again; None: nowhere."""
    buffer_steps: _Count = 10_000
    """Batches that are kept for that."""
    hwm: _Count = 100_000
    """Batches that wait for one consumer before it misses some."""
    max_queue_size: _Count = 100_000
    """Batches that wait to be published before some are dropped."""
    topic: str = ""
    bind: bool | None = None

    @property
    def is_on(self) -> bool:
        """Whether anything is published."""
        return self.enable_kv_cache_events and self.publisher != "null"

    @property
    def binds(self) -> bool:
        """Whether the publisher waits for consumers, rather than connecting to one."""
        return binds(self.endpoint) if self.bind is None else self.bind


def parse_config(text: str) -> KvEventsConfig:
    """The configuration in a JSON object. Raises BadInput, in one line, for anything else."""
    config = read_json_option(OPTION, text, KvEventsConfig)
    check_endpoint(f"{OPTION}: endpoint", config.endpoint, is_client=not config.binds)
    if config.replay_endpoint is not None:
        check_endpoint(f"{OPTION}: replay_endpoint", config.replay_endpoint)
    return config
