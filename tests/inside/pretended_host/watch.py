"""Watches the pretended engine: what a plugin of a new host calls."""

from __future__ import annotations

import time
from typing import Any

from tests.inside.pretended_host.engine import SIZE
from tests.inside.pretended_host.notes import PretendedNotes
from tests.inside.pretended_host.pretended_translator import PretendedTranslator

from kvscope_inside.endpoints import keys_for
from kvscope_inside.engine_log import engine_log
from kvscope_inside.publisher import Publisher
from kvscope_inside.teller import Teller
from kvscope_telemetry.messages.capabilities import Capabilities
from kvscope_telemetry.messages.telemetry import CacheInfo, DeviceInfo, Hello, ModelInfo
from kvscope_telemetry.producer.cache_state import CacheState


def watch(engine: Any, endpoint: str) -> Teller:
    """Publish on `endpoint` what an engine does, until the returned teller is closed."""
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
    teller = Teller("the pretended engine", log)
    translator = PretendedTranslator(CacheState(hello))
    with teller.beginning():
        notes = PretendedNotes(engine, teller.hooks)
        publisher = Publisher(
            endpoint, translator.state, keys=keys_for(endpoint, log.warning), contents=translator.contents
        )
    teller.start(publisher, endpoint, notes, translator.apply)
    return teller
