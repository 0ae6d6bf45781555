"""The simulated engine reports the work of its steps, below the limits of its device."""

from __future__ import annotations

from tests.simulated_engine.engine import SimulatedEngine


def test_every_step_is_below_the_roofline():
    engine = SimulatedEngine(num_blocks=2048)
    device = engine.hello.device
    frames = [frame for frame in (engine.advance() for _ in range(50)) if frame.batch.number]
    assert len(frames) > 40
    shares = []
    for frame in frames:
        seconds = frame.timings.forward_ns / 1e9
        work = frame.work
        limits = work.num_bytes / device.read_bytes_per_s, work.flops / device.flops_per_s
        shares.append(max(limits) / seconds)
    assert all(0.3 < share < 0.9 for share in shares)
    assert max(shares) > 1.5 * min(shares), "all steps use the same share of the limits"


def test_simulated_engine_reports_more_flops_for_a_prompt_step_than_for_a_decode_step():
    engine = SimulatedEngine(num_blocks=2048, num_running=4)
    frames = [engine.advance() for _ in range(100)]
    decode = [f.work.flops for f in frames if f.batch.number and not f.batch.num_prefill_tokens]
    prefill = [f.work.flops for f in frames if f.batch.num_prefill_tokens > 50]
    assert min(prefill) > max(decode)
