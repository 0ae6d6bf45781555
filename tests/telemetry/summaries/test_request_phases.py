"""Phase changes without events: derived from frames like in a plain model, the same while writing and from a file."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from kvscope_telemetry.messages.telemetry import Batch, Frame, Snapshot
from kvscope_telemetry.recordings.overview import computed_part, read_overview
from kvscope_telemetry.recordings.reader import Recording
from kvscope_telemetry.request_phase import RequestPhase
from kvscope_telemetry.summaries.request_phases import PHASE, PhaseLog, PhaseRecorder, decoded_phase_rows
from kvscope_telemetry.summaries.session_overview import SessionOverview


def plain_phases(recording: Recording) -> set[tuple[int, int, RequestPhase]]:
    """Return time, number and kind from a plain model: an announced request is queued; a request whose prompt chunks
    are followed by a single token decodes from then on.
    """
    phases, pieces, decoding = set(), {}, set()
    for at_s, message in recording.messages():
        time_ns = recording.start_ns + round(at_s * 1e9)
        if isinstance(message, Snapshot):
            outputs = np.frombuffer(message.requests.num_output_tokens, "<u4") > 0
            decoding |= set(np.frombuffer(message.requests.number, "<u4")[outputs].tolist())
        if not isinstance(message, Frame):
            continue
        offset_ns = time_ns - message.time_ns
        phases |= {(info.arrival_ns + offset_ns, info.number, RequestPhase.QUEUED) for info in message.new_requests}
        sizes = np.frombuffer(message.batch.num_tokens, "<u4").tolist()
        for number, size in zip(np.frombuffer(message.batch.number, "<u4").tolist(), sizes, strict=True):
            if size > 1:
                decoding.discard(number)
                pieces[number] = time_ns
            elif number not in decoding:
                decoding.add(number)
                phases.add((pieces.pop(number, time_ns), number, RequestPhase.DECODE))
        for number in (event.number for event in message.events if event.kind in ("preempted", "finished", "aborted")):
            decoding.discard(number)
            pieces.pop(number, None)
    return phases


def phase_changes_of(overview: SessionOverview) -> list[tuple[int, int, RequestPhase]]:
    return [(time_ns, number, kind) for time_ns, _, number, kind in decoded_phase_rows(overview.phases.rows)]


def test_speculative_tokens_are_not_a_prompt_chunk() -> None:
    notes, log = PhaseRecorder(), PhaseLog()
    batches = [({1: 46}, 46), ({1: 6}, 0), ({1: 6}, 0), ({1: 4, 2: 30}, 30), ({1: 6, 2: 6}, 0), ({1: 1, 2: 1}, 0)]
    for at_ns, (sizes, num_prefill) in enumerate(batches, 1):
        number, num_tokens = (np.array(list(column), "<u4").tobytes() for column in (sizes, sizes.values()))
        batch = Batch(number, num_tokens, num_prefill, sum(sizes.values()) - num_prefill)
        notes.frame(Frame(epoch=1, seq=at_ns, step=at_ns, time_ns=at_ns, batch=batch), 0)
    log.add(notes.drain(), 1)
    phases = [(time_ns, number, kind) for time_ns, _, number, kind in decoded_phase_rows(log.rows)]
    assert phases == [(1, 1, RequestPhase.DECODE), (4, 2, RequestPhase.DECODE)]


def test_phase_changes_match_a_plain_model_and_a_recomputation(record: Callable[..., Any]) -> None:
    recording = Recording.open(record(700).path)
    overview, computed = read_overview(recording), SessionOverview()
    computed_part(recording, recording.start_ns).append_to(computed)
    assert overview.phases.is_available
    assert phase_changes_of(overview) == phase_changes_of(computed)
    found = set(phase_changes_of(overview))
    plain = plain_phases(recording)
    assert plain <= found
    assert {kind for *_, kind in found} >= {RequestPhase.QUEUED, RequestPhase.DECODE}
    first_ns = min(int(overview.time_ns[0]), recording.start_ns)
    assert all(time_ns <= first_ns + 10**9 for time_ns, *_ in found - plain), (
        "additional changes may only come from the first snapshot"
    )


def test_phase_log_keeps_the_newest_and_counts_the_dropped() -> None:
    log = PhaseLog(max_phases=100)
    log.add(None, 1)
    assert not log.is_available
    assert not len(log)
    for second in range(30):
        log.add(np.array([(second * 10 + place, place + 1, 2) for place in range(10)], PHASE).tobytes(), second)
    assert log.is_available
    assert log.num_forgotten + len(log) == 300
    assert len(log) <= 100
    assert log.rows["time_ns"].tolist() == list(range(300 - len(log), 300))
    log.forget_before(295)
    assert log.rows["time_ns"].tolist() == [295, 296, 297, 298, 299]
    assert log.rows["epoch"].tolist() == [29] * 5


def test_invalid_rows_of_a_file_are_clamped_or_skipped() -> None:
    """The data has a partial row, an impossible time and a kind of a later version."""
    packed = np.array([(-5, 1, 0), ((1 << 63) - 1, 2, 2), (7, 3, 99)], PHASE).tobytes() + b"\1\2\3"
    log = PhaseLog()
    log.add(packed, 4)
    assert decoded_phase_rows(log.rows) == [(0, 4, 1, RequestPhase.QUEUED), ((1 << 62) - 1, 4, 2, RequestPhase.DECODE)]
