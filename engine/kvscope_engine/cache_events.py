"""Publishes the changes of the prefix cache after each step, as vLLM's KV events.

Owns the publisher, and the salt by which engines with the same seed give the same text the same hash. Where it was not
asked for there is none.
"""

from __future__ import annotations

import hashlib

from kvscope_engine.policy.blocks.cache_log import CacheLog
from kvscope_telemetry.engine_config import EngineConfig
from kvscope_telemetry.kv_events.publisher import KvEventPublisher


class CacheEvents:
    """Published until `close`; the sockets are up from the beginning, before a model is loaded.

    Raises EndpointInUse and BadInput for endpoints that cannot be had.
    """

    def __init__(self, config: EngineConfig) -> None:
        assert config.kv_events_config is not None, "nobody asked for KV events"
        self._publisher = KvEventPublisher(config.kv_events_config)
        self.log = CacheLog(config.block_size)

    @property
    def note(self) -> str:
        """What who started the engine should know."""
        where = self._publisher.endpoint
        if self._publisher.replay_endpoint:
            where += f", replays on {self._publisher.replay_endpoint}"
        return f"KV events, with the tokens of prompts, are published on {where} to everybody who connects"

    def publish(self) -> None:
        """What changed since the last call is a batch, unless it is nothing. Never waits."""
        events = self.log.drain()
        if events:
            self._publisher.publish(events)

    def close(self) -> None:
        """What is cached goes with the engine: consumers see the connection end. Idempotent."""
        self._publisher.close()


def make_cache_events(config: EngineConfig) -> CacheEvents | None:
    """None where the configuration asks for no KV events."""
    return CacheEvents(config) if config.publishes_kv_events else None


def shared_salt(config: EngineConfig) -> bytes | None:
    """The salt of all engines with this seed that publish KV events; None, for one of its own, where none are."""
    if not config.publishes_kv_events:
        return None
    return hashlib.sha256(f"kvscope KV events, seed {config.seed}".encode()).digest()
