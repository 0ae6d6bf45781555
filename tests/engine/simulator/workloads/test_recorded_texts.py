"""Texts of recorded prompts whose blocks have no hash, because they were cached in other blocks when computed."""

from __future__ import annotations

from pathlib import Path

from kvscope_engine.simulator.workloads.recorded_workload import recorded_workload
from kvscope_telemetry.recordings.reader import Recording
from kvscope_telemetry.recordings.request_index import RecordedRequest, RequestRecords
from kvscope_telemetry.recordings.sample import named_recording
from kvscope_telemetry.running_time import RunningTime


def text_ids(*hashes: tuple[int, ...]) -> list[tuple[int, ...]]:
    requests = [
        RecordedRequest(
            epoch=1,
            number=number,
            request_id=str(number),
            arrival_ns=number,
            num_prompt_tokens=100,
            num_output_tokens=1,
            max_tokens=1,
            priority=0,
            is_finished=True,
            prefix_hashes=each,
        )
        for number, each in enumerate(hashes, 1)
    ]
    recording = Recording.open(named_recording("sample"))
    workload = recorded_workload(Path("run.mcap"), recording, RequestRecords(requests, RunningTime()))
    return [request.text_ids for request in workload.requests]


def test_blocks_without_hash_continue_the_only_text_known_before_them() -> None:
    assert text_ids((7, 8, 9), (0, 0, 0)) == [(0, 1, 2), (0, 1, 2)]


def test_block_without_hash_is_found_by_the_block_after_it() -> None:
    first, second, third, _ = text_ids((7, 8, 9), (7, 5, 6), (0, 0, 6), (7, 5, 6))
    assert third == second != first


def test_block_without_hash_with_several_possible_texts_is_not_shared() -> None:
    assert text_ids((7, 8), (7, 9), (7, 0), (7, 8))[2] == (0,)
