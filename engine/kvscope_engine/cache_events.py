"""Publishes changes of the prefix cache after each step, in the format of vLLM's KV events.

Owns the publisher and defines the hash salt, which is equal for all engines with the same seed. An engine has a
publisher only if its configuration enables KV events.
"""

from __future__ import annotations

import hashlib

from kvscope_engine.policy.kv_cache.cache_log import CacheLog
from kvscope_telemetry.engine_config import EngineConfig
from kvscope_telemetry.kv_events.event_publisher import KvEventPublisher


class CacheEvents:
    """Log of prefix cache changes and their ZeroMQ publisher. Its sockets are open before the model is loaded.

    Raises EndpointInUse or BadInput for endpoints that cannot be bound.
    """

    def __init__(self, config: EngineConfig) -> None:
        assert config.kv_events_config is not None, "KV events are disabled"
        self._publisher = KvEventPublisher(config.kv_events_config)
        self.log = CacheLog(config.block_size)

    @property
    def note(self) -> str:
        address = self._publisher.endpoint
        if self._publisher.replay_endpoint:
            address += f", replays on {self._publisher.replay_endpoint}"
        return f"KV events, with the tokens of prompts, are published on {address} to everybody who connects"

    def publish(self) -> None:
        """Publish the changes since the last call as one batch, or nothing if there are none. Does not block."""
        events = self.log.drain()
        if events:
            self._publisher.publish(events)

    def close(self) -> None:
        """Close the sockets. No removal events are sent: consumers see the connection end. Idempotent."""
        self._publisher.close()


def make_cache_events(config: EngineConfig) -> CacheEvents | None:
    return CacheEvents(config) if config.publishes_kv_events else None


def shared_salt(config: EngineConfig) -> bytes | None:
    """Return the hash salt shared by all engines with this seed. None without KV events: a random salt is used then."""
    if not config.publishes_kv_events:
        return None
    return hashlib.sha256(f"kvscope KV events, seed {config.seed}".encode()).digest()
