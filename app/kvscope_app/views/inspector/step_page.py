"""Inspector page of a step: durations of its phases, requests that ran, changed blocks, events. Imports no Qt."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Final

import numpy as np
import numpy.typing as npt

from kvscope_app.ui.clock_text import wall_text
from kvscope_app.ui.number_text import count, plural, seconds
from kvscope_app.views.events.event_entries import why_text
from kvscope_app.views.inspector.event_facts import THIS_EVENT
from kvscope_app.views.inspector.facts import Fact, FactsPage, Link, LinkTarget, page, request_link
from kvscope_app.views.inspector.request_page import wall_offset_ns
from kvscope_app.views.roofline.point_text import bytes_text, flops_text
from kvscope_app.views.roofline.step_facts import execution_facts, work_facts
from kvscope_telemetry.messages.event_kinds import kind_text
from kvscope_telemetry.messages.telemetry import CacheInfo, Frame, Timings
from kvscope_telemetry.mirror.mirror import Mirror

_MAX_REQUESTS: Final = 300
_PHASES: Final = {
    "schedule_ns": ("Schedule", "Choosing requests and allocating blocks"),
    "run_ns": ("Run", "Launching this step, or the next one with async scheduling, and waiting for this step's result"),
    "forward_ns": (
        "Forward pass",
        "Device time in the model: part of Run, or at the same time as other parts with async scheduling",
    ),
    "commit_ns": ("Commit", "Appending tokens, hashing full blocks"),
    "record_ns": ("Record", "Recording the previous step"),
}
Series = Mapping[str, npt.NDArray[np.int64]]
"""Values per frame, as in `Update.series`: int64 columns of shape (frames,), oldest first."""


def step_page(
    mirror: Mirror,
    frame: Frame | None,
    newest: Series,
    why_no_batch: str,
    *,
    can_step: bool,
    event: Iterable[Fact] = (),
) -> FactsPage:
    """Return the inspector page of the step that `mirror` shows.

    Args:
        frame: Frame of the step; None if it was not read.
        newest: Series of the newest update. If there is no `frame`, the durations are taken from it.
        why_no_batch: Reason why the requests that ran are unknown, which is shown if there is no `frame`.
        can_step: Whether the cursor can move by single frames.
        event: Facts about the event shown.
    """
    assert mirror.hello is not None, "there are steps only once there is an engine"
    if not mirror.capabilities.steps:
        reading = ("Reading", _step(mirror, can_step=can_step))
        return page(f"Reading {count(mirror.seq)}", (THIS_EVENT, event), reading)
    return page(
        f"Step {count(mirror.step)}",
        (THIS_EVENT, event),
        ("Step", _step(mirror, can_step=can_step)),
        ("Duration", _phases(frame) if frame is not None else _newest_phases(mirror, newest)),
        ("Execution", () if frame is None else execution_facts(frame, mirror.hello.device)),
        ("Work", _work(mirror, frame, newest)),
        ("Batch", _batch(frame) if frame is not None else _newest_batch(mirror, newest, why_no_batch)),
        ("Changed", () if frame is None else _changed(frame, mirror.hello.cache)),
        ("Events", () if frame is None else _events(frame)),
    )


def _step(mirror: Mirror, *, can_step: bool) -> Iterator[Fact]:
    assert mirror.hello is not None, "there are steps only once there is an engine"
    if mirror.seq:
        yield Fact("Time", wall_text(mirror.time_ns + wall_offset_ns(mirror.hello)))
    yield Fact("Frame", count(mirror.seq), tip="Frames so far in this engine run")
    yield Fact("Running", plural(mirror.counters.num_running, "request"))
    yield Fact("Waiting", plural(mirror.counters.num_waiting, "request"))
    if can_step:
        yield Fact("Go to", "previous frame", Link(LinkTarget.FRAMES, -1))
        yield Fact("Go to", "next frame", Link(LinkTarget.FRAMES, 1))


def _phases(frame: Frame) -> Iterator[Fact]:
    for field, (name, tip) in _PHASES.items():
        if time_ns := getattr(frame.timings, field):
            yield Fact(name, seconds(time_ns / 1e9), tip=tip)


def _has_step(mirror: Mirror, newest: Series) -> bool:
    return bool(newest) and int(newest["seq"][-1]) == mirror.seq


def _newest_phases(mirror: Mirror, newest: Series) -> Iterator[Fact]:
    if _has_step(mirror, newest):
        for field, (name, tip) in _PHASES.items():
            if time_ns := int(newest[field][-1]):
                yield Fact(name, seconds(time_ns / 1e9), tip=tip)


def _work(mirror: Mirror, frame: Frame | None, newest: Series) -> Iterator[Fact]:
    assert mirror.hello is not None, "there are steps only once there is an engine"
    device = mirror.hello.device
    if frame is not None:
        yield from work_facts(frame.work, frame.timings.forward_ns, device)
    elif _has_step(mirror, newest) and (forward_ns := int(newest["forward_ns"][-1])) and int(newest["flops"][-1]):
        yield Fact("Memory", bytes_text(int(newest["num_bytes"][-1]) * 1e9 / forward_ns, device.read_bytes_per_s))
        yield Fact("Arithmetic", flops_text(int(newest["flops"][-1]) * 1e9 / forward_ns, device.flops_per_s))


def newest_timings(mirror: Mirror, newest: Series) -> Timings:
    """Return the phase durations of the step shown if `newest` ends with it, else zeros."""
    if not _has_step(mirror, newest):
        return Timings()
    return Timings(**{field: int(newest[field][-1]) for field in _PHASES})


def _newest_batch(mirror: Mirror, newest: Series, why_no_batch: str) -> Iterator[Fact]:
    if _has_step(mirror, newest):
        size, prefill, decode = (int(newest[f][-1]) for f in ("batch_size", "prefill_tokens", "decode_tokens"))
        yield from _sizes(size, prefill, decode)
    if why_no_batch:
        yield Fact("Requests run", why_no_batch)


def _sizes(num_requests: int, num_prefill: int, num_decode: int) -> Iterator[Fact]:
    yield Fact("Requests", count(num_requests))
    yield Fact("Prefill", plural(num_prefill, "token"), tip="Prompt tokens computed")
    yield Fact("Decode", plural(num_decode, "token"), tip="Requests that decoded one token")


def _batch(frame: Frame) -> Iterator[Fact]:
    batch = frame.batch
    numbers, sizes = np.frombuffer(batch.number, "<u4").tolist(), np.frombuffer(batch.num_tokens, "<u4").tolist()
    yield from _sizes(len(numbers), batch.num_prefill_tokens, batch.num_decode_tokens)
    num_decodes_left = batch.num_decode_tokens  # decodes come first, with one token each
    for number, size in list(zip(numbers, sizes, strict=False))[:_MAX_REQUESTS]:
        is_decode = size == 1 and num_decodes_left > 0
        num_decodes_left -= is_decode
        work_text = "decode, 1 token" if is_decode else f"prefill, {plural(size, 'token')}"
        yield Fact(f"Request #{count(number)}", work_text, request_link(number))
    if len(numbers) > _MAX_REQUESTS:
        yield Fact("And", f"{count(len(numbers) - _MAX_REQUESTS)} more")


def _changed(frame: Frame, cache: CacheInfo) -> Iterator[Fact]:
    moves, first_state = frame.moves, cache.first_state if cache.num_states else cache.num_rows
    rows = (
        ("Blocks", "States", frame.blocks.ids),
        ("Evicted", "States evicted", moves.evicted),
        ("Copied on write", "States copied", moves.copied),
        ("Saved to a lower tier", "States saved to host memory", moves.saved),
        ("Loaded", "States loaded", moves.loaded),
    )
    for name, states_name, packed in rows:
        is_state = np.frombuffer(packed, "<u4") >= first_state
        num_blocks, num_states = int((~is_state).sum()), int(is_state.sum())
        if num_blocks:
            yield Fact(name, plural(num_blocks, "block"))
        if num_states:
            yield Fact(states_name, plural(num_states, "state"))
    for name, number in (("First tokens", len(frame.first_token_ns) // 8), ("New", len(frame.new_requests))):
        if number:
            yield Fact(name, plural(number, "request"))


def _events(frame: Frame) -> Iterator[Fact]:
    for event in frame.events:
        reason = why_text(event)
        link = request_link(event.number) if event.number else None
        request_text = f" #{count(event.number)}" if event.number else ""
        kind = kind_text(event.kind)
        yield Fact(f"{kind}{request_text}", reason or kind, link)
