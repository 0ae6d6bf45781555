"""The estimate of a message's size is close to its encoded size."""

from __future__ import annotations

from tests.simulated_engine.engine import SimulatedEngine

from kvscope_telemetry.messages.message_size import approximate_bytes
from kvscope_telemetry.messages.wire import encode


def test_size_estimate_is_close_to_the_encoded_size() -> None:
    engine = SimulatedEngine(num_blocks=2_000)
    for message in (engine.hello, engine.snapshot(), *(engine.advance() for _ in range(100))):
        size = len(encode(message))
        assert 0.8 * size <= approximate_bytes(message) + 300 <= 4 * size + 1_500
