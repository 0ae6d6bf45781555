"""Facts about a step's work and execution: bytes, FLOPs, and the share of the device's limits. Imports no Qt."""

from __future__ import annotations

from collections.abc import Iterator

from kvscope_app.ui.number_text import count, num_bytes, percent, plural, seconds
from kvscope_app.views.inspector.facts import Fact
from kvscope_app.views.inspector.phase_strip import StripPhase
from kvscope_app.views.roofline.log_scale import with_prefix
from kvscope_app.views.roofline.point_text import bound_text, bytes_text, flops_text
from kvscope_telemetry.messages.telemetry import DeviceInfo, Frame, Timings, Work


def execution_facts(frame: Frame, device: DeviceInfo) -> Iterator[Fact]:
    """Yield facts on how a step's kernels were launched (CUDA graph or eager), and on the time that the engine waited
    for the device and for copies between tiers.

    Yields none for an engine that does not report work.
    """
    work = frame.work
    if not work.flops:
        return
    if work.graph_size:
        launches = f"a CUDA graph of {plural(work.graph_size, 'request')}"
    elif work.graph_tokens:
        launches = f"CUDA graphs of {plural(work.graph_tokens, 'token')}, attention kernel by kernel"
    else:
        launches = "kernel by kernel" if device.kind == "cuda" else "eager"
    yield Fact("Execution", launches, tip="A CUDA graph is launched as one; without it the host launches each kernel")
    if work.launches:
        yield Fact("Launches", count(work.launches), tip="Launched by the host")
    if work.wait_ns:
        yield Fact("Waited", seconds(work.wait_ns / 1e9), tip="Until the device finished and its tokens were read back")
    if work.copy_ns:
        yield Fact("Tier copies", seconds(work.copy_ns / 1e9), tip="Between the pool, host memory and disk (measured)")


def work_facts(work: Work, forward_ns: int, device: DeviceInfo) -> Iterator[Fact]:
    """Yield the minimum bytes and FLOPs of a step and the rates achieved. Yields none if they are not reported."""
    total = work.num_bytes
    if not work.flops or not total:
        return
    parts = {
        "Weights": (work.weights_bytes, "Weights that the step reads, once"),
        "KV read": (work.kv_read_bytes, "Every sequence, in every layer"),
        "KV written": (work.kv_written_bytes, "Of the computed tokens"),
        "Activations": (work.other_bytes, "Inputs and outputs of linear layers, and logits"),
    }
    yield Fact("Moved", num_bytes(total), tip="Minimum bytes read from and written to device memory")
    for name, (size, tip) in parts.items():
        if size:
            yield Fact(name, f"{num_bytes(size)}, {percent(size / total, 0)}", tip=tip)
    if work.streamed_bytes:
        rate = f", {bytes_text(work.streamed_bytes * 1e9 / forward_ns, 0)}" if forward_ns else ""
        tip = "Offloaded weights (--cpu-offload-gb) copied to the device for this step"
        yield Fact("Streamed", f"{num_bytes(work.streamed_bytes)}{rate}", tip=tip)
    attention = percent(work.attention_flops / work.flops, 0)
    yield Fact("Computed", f"{with_prefix(work.flops, 'FLOP')}, attention {attention}")
    yield Fact("Intensity", f"{work.flops / total:.3g} FLOP/byte")
    if forward_ns:
        yield Fact("Memory", bytes_text(total * 1e9 / forward_ns, device.read_bytes_per_s))
        yield Fact("Compute", flops_text(work.flops * 1e9 / forward_ns, device.flops_per_s))
        bound = bound_text(total * 1e9 / forward_ns, work.flops * 1e9 / forward_ns, device)
        if bound:
            yield Fact("Bound by", bound, tip="The limit that this step came closer to")


def phases_of(timings: Timings) -> tuple[StripPhase, ...]:
    rest_ns = max(timings.run_ns - timings.forward_ns, 0)
    return (
        StripPhase("Schedule", timings.schedule_ns, 1),
        StripPhase("Forward", min(timings.forward_ns, timings.run_ns) if timings.run_ns else timings.forward_ns, 0),
        StripPhase("Sample, wait" if timings.forward_ns else "Run", rest_ns, 2),
        StripPhase("Commit", timings.commit_ns, 3),
        StripPhase("Record", timings.record_ns, 7),
    )
