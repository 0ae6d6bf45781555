"""Log times in a recording never decrease, and each frame has its own."""

from __future__ import annotations

import msgspec
from tests.simulated_engine.engine import SimulatedEngine

from kvscope_telemetry.messages.telemetry import Heartbeat
from kvscope_telemetry.recordings.writer import LogClock


def test_frames_overtaken_by_a_heartbeat_have_distinct_times() -> None:
    engine = SimulatedEngine(num_blocks=20, num_running=2, epoch=3)
    clock = LogClock()
    times = [clock.log_time_ns(engine.snapshot())]
    first = engine.advance()
    beat = Heartbeat(epoch=3, time_ns=first.time_ns + 1_000_000_000, seq=first.seq + 2, step=first.step + 2)
    frames = [msgspec.structs.replace(engine.advance(), time_ns=first.time_ns + at) for at in (0, 0, 5)]
    later = msgspec.structs.replace(engine.advance(), time_ns=beat.time_ns + 7)
    times += [clock.log_time_ns(message) for message in (first, beat, *frames, later)]
    assert times == sorted(times)
    of_frames = [times[1], *times[3:]]
    assert len(set(of_frames)) == len(of_frames)
    assert times[-1] - times[1] == later.time_ns - first.time_ns, (
        "a frame that was not overtaken keeps the engine's time"
    )
