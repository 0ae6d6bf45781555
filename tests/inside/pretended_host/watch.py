"""Watches the pretended engine: what a plugin of a new host calls."""

from __future__ import annotations

import time
from typing import Any

from tests.inside.pretended_host.engine import SIZE
from tests.inside.pretended_host.pretended_recorder import PretendedRecorder
from tests.inside.pretended_host.pretended_translator import PretendedTranslator

from kvscope_inside.endpoints import keys_for
from kvscope_inside.engine_log import engine_log
from kvscope_inside.publisher import Publisher
from kvscope_inside.publishing_thread import PublishingThread
from kvscope_telemetry.messages.capabilities import Capabilities
from kvscope_telemetry.messages.telemetry import CacheInfo, DeviceInfo, Hello, ModelInfo
from kvscope_telemetry.producer.cache_state import CacheState


def watch(engine: Any, endpoint: str) -> PublishingThread:
    """Publish on `endpoint` what an engine does, until the returned thread is closed."""
    hello = Hello(
        epoch=1,
        time_ns=time.monotonic_ns(),
        wall_time_ns=time.time_ns(),
        model=ModelInfo(name="pretended"),
        cache=CacheInfo(num_blocks=len(engine.pool), block_size=SIZE, has_parents=True),
        device=DeviceInfo(kind="cpu"),
        capabilities=Capabilities(engine="pretended", completions=False),
    )
    log = engine_log("pretended")
    thread = PublishingThread("the pretended engine", log)
    translator = PretendedTranslator(CacheState(hello))
    with thread.installing_hooks():
        recorder = PretendedRecorder(engine, thread.hooks)
        publisher = Publisher(
            endpoint, translator.state, keys=keys_for(endpoint, log.warning), contents=translator.contents
        )
    thread.start(publisher, endpoint, recorder, translator.apply)
    return thread
