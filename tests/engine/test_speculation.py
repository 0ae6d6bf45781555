"""Speculative decoding gives the same tokens as a plain run, whatever is sampled, aborted or preempted."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from tests.engine.test_step_loop import RandomLoad, close_to, generated, jobs_of

from kvscope_engine import Engine, SamplingParams
from kvscope_engine.model.cuda_graphs.decode_graphs import DecodeGraphs
from kvscope_engine.model.input_batch.step_inputs import StepInputs
from kvscope_engine.model.input_batch.step_limits import StepLimits
from kvscope_engine.model.input_batch.step_tensors import StepTensors
from kvscope_engine.policy.request import Request
from kvscope_engine.policy.spec_decode.drafter import Drafter
from kvscope_telemetry.engine_config import SpeculativeConfig
from kvscope_telemetry.errors import BadInput
from kvscope_telemetry.exports.phase_spans import RequestHistoryReader
from kvscope_telemetry.messages.commands import Finished, Submit, Tokens
from kvscope_telemetry.messages.telemetry import Event, Frame, TelemetryMessage
from kvscope_telemetry.messages.wire import encode
from kvscope_telemetry.mirror.coalesce import coalesce
from kvscope_telemetry.mirror.mirror import Mirror
from kvscope_telemetry.recordings.columns import Columns, pack

Make = Callable[..., Engine]
Said = list[tuple[list[int], str | None, Any]]

GUESSING = SpeculativeConfig(num_speculative_tokens=4, prompt_lookup_max=3, prompt_lookup_min=1)


class KnowingDrafter(Drafter):
    """Drafts the tokens of the plain run; one token of the draft is often wrong."""

    def __init__(self, jobs: list[Submit], expected: Said) -> None:
        super().__init__(GUESSING)
        self._random = random.Random(7)
        answers = iter(expected)
        self._answers = {
            (job.prompt_token_ids, index): next(answers)[0] for job in jobs for index in range(job.sampling.n)
        }

    def _guess(self, request: Request, most: int) -> list[int]:
        answer = self._answers[tuple(request.prompt_token_ids), request.index]
        said, wrong = len(request.output_token_ids), self._random.randrange(2 * most)
        guess = (answer + [5] * most)[said : said + most]  # after an end anything may be drafted
        return [token ^ (place == wrong) for place, token in enumerate(guess)]


@pytest.fixture(scope="module")
def jobs() -> list[Submit]:
    """Jobs of which every other one has a long output."""
    jobs = jobs_of(14)
    for job in jobs[::2]:
        sampling = msgspec.structs.replace(job.sampling, max_tokens=30)
        jobs[jobs.index(job)] = msgspec.structs.replace(job, sampling=sampling)
    return jobs


@pytest.fixture(scope="module")
def expected(make_small: Make, jobs: list[Submit]) -> Said:
    """The output without drafts, with room for all."""
    with make_small(num_gpu_blocks_override=2048, max_num_seqs=32) as engine:
        return generated(engine, jobs)


def make_drafting_engine(make: Make, jobs: list[Submit], expected: Said, **options: Any) -> Engine:
    engine = make(speculative_config=GUESSING, **options)
    drafting = engine.components.scheduler.drafting
    assert drafting is not None
    drafting.drafter = KnowingDrafter(jobs, expected)
    return engine


ROOMS: dict[str, dict[str, Any]] = {
    "room for all": {"num_gpu_blocks_override": 2048, "max_num_seqs": 96},
    "alone": {"max_num_seqs": 1},
    "overlapped": {"num_gpu_blocks_override": 2048, "max_num_seqs": 32, "async_scheduling": True},
    "chunks, too few blocks": {"num_gpu_blocks_override": 24, "max_num_batched_tokens": 9, "max_num_seqs": 6},
    "swaps": {"num_gpu_blocks_override": 24, "preemption": "swap", "host_kv_memory_bytes": 1 << 20},
    "no prefix cache": {"enable_prefix_caching": False},
}


@pytest.mark.parametrize("room", ROOMS)
def test_speculative_decoding_gives_the_tokens_of_plain_decoding(
    make_engine: Make, jobs: list[Submit], expected: Said, room: str
) -> None:
    engine = make_drafting_engine(make_engine, jobs, expected, **ROOMS[room])
    found = generated(engine, jobs)
    assert [(ids, reason, [(one.token_id, one.logprob) for one in p]) for ids, reason, p in found] == close_to(expected)
    engine.components.scheduler.check_integrity()
    counters = engine.snapshot().counters
    assert 0 < counters.accepted_tokens < counters.draft_tokens
    assert counters.generation_tokens == sum(len(ids) for ids, _, _ in found)


class FakeDecodeGraphs(DecodeGraphs):
    """Decode graphs of a CPU: a graph runs the given step in the layout that it would read."""

    step: StepTensors
    num_replays = 0

    def stage(self, inputs: StepInputs, size: int) -> StepTensors:
        self.step = super().stage(inputs, size)
        self.num_replays += inputs.is_drafted
        return self.step


@pytest.mark.parametrize("overlaps", [False, True])
def test_speculative_decoding_in_graphs_gives_the_tokens_of_plain_decoding(
    make_engine: Make, jobs: list[Submit], expected: Said, overlaps: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Batches are padded with empty tokens and sequences, and decodes and drafts run together."""
    options = {"num_gpu_blocks_override": 2048, "max_num_seqs": 24, "async_scheduling": overlaps}
    engine = make_drafting_engine(make_engine, jobs, expected, **options)
    runner = engine.components.runner
    limits = StepLimits(
        max_num_seqs=24,
        max_num_batched_tokens=512,
        max_request_tokens=256,
        block_size=4,
        max_drafts=GUESSING.num_speculative_tokens,
    )
    graphs = FakeDecodeGraphs(runner._eager_logits, runner._buffer, limits)
    graph = SimpleNamespace(pool=lambda: (0, 1), replay=lambda: graphs._forward_into_logits(graphs.step))
    for name in ("graph", "stream"):
        monkeypatch.setattr(torch.cuda, name, lambda *_, **__: nullcontext())
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: graph)
    for name in ("synchronize", "current_stream"):
        monkeypatch.setattr(torch.cuda, name, lambda *_: None)
    with torch.inference_mode():
        graphs.capture(graphs.largest)
        graphs.capture_drafted()
    runner._graphs = graphs
    found = generated(engine, jobs)
    assert [(ids, reason, [(one.token_id, one.logprob) for one in p]) for ids, reason, p in found] == close_to(expected)
    counters = engine.snapshot().counters
    assert 0 < counters.accepted_tokens < counters.draft_tokens
    assert graphs.num_replays > 5, "too few steps had only decodes and drafts"


def test_cached_prefixes_equal_the_plain_run(make_engine: Make, jobs: list[Submit], expected: Said) -> None:
    cached = []
    for make in (make_engine, lambda **options: make_drafting_engine(make_engine, jobs, expected, **options)):
        engine = make(num_gpu_blocks_override=2048, max_num_seqs=32)
        generated(engine, jobs)
        pool = engine.components.pool
        prefixes = filter(None, map(pool.prefix, range(pool.num_blocks)))
        cached.append({(prefix.start, bytes(prefix.tokens)) for prefix in prefixes})
    assert cached[0] == cached[1]


@pytest.mark.parametrize("seed", [0, 1])
def test_speculative_decoding_under_random_load_gives_the_same_tokens(
    make_engine: Make, jobs: list[Submit], expected: Said, seed: int, storm: Callable[[int, int], int]
) -> None:
    run = RandomLoad(lambda **options: make_drafting_engine(make_engine, jobs, expected, **options), jobs, seed)
    run.run(storm(120, 500))
    completions = iter(expected)
    wanted = [[next(completions) for _ in range(job.sampling.n)] for job in jobs]
    for (name, index), reason in run.reasons.items():
        tokens, end, _ = wanted[run.job_of[name]][index]
        said = run.said.get((name, index), [])
        assert said == tokens[: len(said)]
        assert reason == "abort" or (len(said), reason) == (len(tokens), end)
    assert set(run.reasons) == {(name, i) for name, job in run.job_of.items() for i in range(jobs[job].sampling.n)}
    assert run.engine.components.scheduler.totals.accepted_tokens > 0
    assert run.engine.overlaps.blockers["drafts of what follows the tokens"] > 0
    assert not any(run.engine.snapshot().blocks.ref_count)


def test_each_request_reports_its_accepted_drafts(make_engine: Make, jobs: list[Submit], expected: Said) -> None:
    """The counts are in the request's rows on the wire, in a mirror, in a recording and in the table of requests."""
    mirror, histories, heard = Mirror(), RequestHistoryReader(), list[Frame]()

    def hear(message: TelemetryMessage) -> None:
        if isinstance(message, Frame):
            heard.append(message)

    engine = make_drafting_engine(
        make_engine, jobs, expected, publish=hear, num_gpu_blocks_override=2048, max_num_seqs=96
    )
    snapshot = engine.snapshot()
    mirror.reset(snapshot)
    histories.add_message(snapshot, 0)
    generated(engine, jobs)
    heard = [msgspec.msgpack.decode(encode(frame), type=Frame) for frame in heard]
    for frame in heard:
        histories.add_message(frame, frame.time_ns)
    for begin in range(0, len(heard), 3):
        mirror.apply(coalesce(heard[begin : begin + 3]))
    totals = engine.snapshot().counters
    columns = mirror.requests.num_draft_tokens, mirror.requests.num_accepted_tokens
    assert [int(column.sum()) for column in columns] == [totals.draft_tokens, totals.accepted_tokens]
    rows = histories.histories.values()
    assert sum(history.num_draft_tokens for history in rows) == totals.draft_tokens
    assert sum(history.num_accepted_tokens for history in rows) == totals.accepted_tokens > 0
    assert Columns(pack(heard)).records(Frame) == heard


def test_speculative_drafts_of_repeated_text_are_accepted(make_engine: Make) -> None:
    """A bias makes the model repeat one token, which is soon drafted."""
    sampling = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True, logit_bias={9: 100.0})
    finishes: list[Event] = []

    def hear(message: TelemetryMessage) -> None:
        finishes.extend(event for event in getattr(message, "events", ()) if event.kind == "finished")

    engine = make_engine(speculative_config=GUESSING, publish=hear)
    engine.submit(Submit(request_id="one", prompt_token_ids=(4, 5, 6), sampling=sampling))
    outputs: list[Tokens | Finished] = []
    while engine.has_unfinished:
        outputs += engine.step()
        engine.components.scheduler.check_integrity()
    assert [token for output in outputs if isinstance(output, Tokens) for token in output.token_ids] == [9] * 40
    counters = engine.snapshot().counters
    assert counters.draft_tokens >= counters.accepted_tokens > 20
    assert engine.step_count < 20
    assert " draft tokens accepted; " in finishes[0].cause


def test_structured_output_and_penalties_get_no_drafts(make_engine: Make) -> None:
    engine = make_engine(speculative_config=GUESSING)
    sampling = SamplingParams(temperature=0.0, max_tokens=12, presence_penalty=0.1, logit_bias={9: 100.0})
    (said,) = engine.generate([Submit(request_id="-", prompt_token_ids=(9, 9, 9, 9), sampling=sampling)])
    assert (len(said.token_ids), engine.snapshot().counters.draft_tokens) == (12, 0)


def test_speculation_needs_the_paged_allocator(make_engine: Make) -> None:
    with pytest.raises(BadInput, match="--speculative-config"):
        make_engine(allocator="virtual", enable_prefix_caching=False, speculative_config=GUESSING)
