"""Steps of every kind on an emulated GPU: transfers per step, and nothing compiled in service."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kvscope_engine.model.cuda_graphs import capture_failures
from kvscope_engine.model.layers.attention.sparse.block_skips import SKIP_STEPS
from kvscope_engine.policy.request import Request
from kvscope_engine.policy.step_plan import Scheduled, StepPlan
from kvscope_telemetry.messages.sampling_params import ResolvedSampling
from kvscope_telemetry.messages.telemetry import Progress

VOCABULARY = 4000
EVERYTHING: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "plain": {"seed": 1},
    "top_k": {"top_k": 5},
    "large top_k": {"top_k": 2000},
    "top_p": {"top_p": 0.8},
    "min_p": {"min_p": 0.1},
    "all filters": {"top_k": 70, "top_p": 0.9, "min_p": 0.05, "temperature": 2.0},
    "penalties": {"repetition_penalty": 1.2, "presence_penalty": 0.3, "frequency_penalty": -0.1},
    "min_tokens": {"min_tokens": 9, "max_tokens": 20},
    "stop tokens": {"min_tokens": 9, "max_tokens": 20, "stop_token_ids": (5, 6)},
    "biases": {"logit_bias": {5: 1.0, 7: -100.0}},
    "logprobs": {"logprobs": 20, "temperature": 0.0},
    "no top logprobs": {"logprobs": 0},
    "all": {"logprobs": 2, "top_p": 0.5, "top_k": 9, "min_p": 0.1, "repetition_penalty": 0.5, "min_tokens": 3},
}


def make_request(number: int, num_prompt: int, num_output: int = 0, **options: Any) -> Request:
    num_tokens = num_prompt + num_output + 1
    return Request(
        number=number,
        request_id=f"r{number}",
        prompt_token_ids=[7] * num_prompt,
        sampling=ResolvedSampling(**options),
        max_tokens=99,
        arrival_ns=0,
        output_token_ids=[3] * num_output,
        block_tables=(list(range(-(-num_tokens // 16))),),
    )


class AnyTokenMatcher:
    """Matcher that allows every token and counts its calls."""

    has_ended = False
    is_ready = True

    def __init__(self) -> None:
        self.num_asked = 0

    def fill(self, words: Any, row: int, *, may_end: bool) -> None:
        assert words.shape[1] == VOCABULARY // 32
        words[row] = -1
        self.num_asked += 1

    def accept(self, token_id: int) -> None: ...


def decode(number: int, length: int, **options: Any) -> Scheduled:
    request = make_request(number, length - 1, 1, **options)
    return Scheduled(request, length - 1, 1, True)


def chunk(number: int, start: int, count: int, samples: bool, **options: Any) -> Scheduled:
    num_prompt = start + count if samples else start + count + 5
    return Scheduled(make_request(number, num_prompt, **options), start, count, samples)


def equal_decodes(count: int) -> StepPlan:
    """Return decodes of one length."""
    return StepPlan(tuple(decode(number, 20, temperature=0.0) for number in range(count)), count)


def service_plans() -> dict[str, StepPlan]:
    """Return steps of every kind that can occur in service, with sizes that are multiples of nothing."""
    greedy: dict[str, Any] = {"temperature": 0.0}
    plans = {
        f"{count} decodes to {length}": StepPlan(
            tuple(decode(number, length - number % 5, **greedy) for number in range(count)), count
        )
        for count, length in ((1, 6), (1, 1000), (3, 17), (8, 700))
    }
    plans |= {
        f"chunk of {count} at {start}": StepPlan((chunk(1, start, count, samples, **greedy),), 0)
        for count, start, samples in ((2, 11, False), (5, 0, True), (33, 256, True), (500, 0, False))
    }
    plans |= {
        f"{count} decodes beside chunks": StepPlan(
            (
                *(decode(number, 50 + number, **greedy) for number in range(count)),
                chunk(20, 0, 7, True, **greedy),
                chunk(21, 32, 41, False, **greedy),
            ),
            count,
        )
        for count in (1, 3)
    }
    plans["copy on write"] = StepPlan((decode(1, 40, **greedy),), 1, ((3, 5), (1, 2)))
    return plans


@pytest.mark.parametrize("enforce_eager", [False, True])
def test_step_has_one_upload_and_one_read_back(fake_gpu: Any, enforce_eager: bool) -> None:
    runner = fake_gpu.make_runner(enforce_eager=enforce_eager)
    runner.warm_up(lambda _: None)
    assert runner.notes == []
    for name, plan in service_plans().items():
        fake_gpu.seen.clear()
        result = runner.run(plan)
        samples = any(item.samples for item in plan.scheduled)
        assert (fake_gpu.seen.uploads, fake_gpu.seen.read_backs) == (1, int(samples)), name
        assert fake_gpu.seen.waits == 1, name
        assert [bool(tokens) for tokens in result.token_ids] == [item.samples for item in plan.scheduled], name
        is_decode = plan.num_single_token == len(plan.scheduled)
        assert fake_gpu.seen.replays == int(is_decode and not enforce_eager), name


def test_only_a_measured_step_has_a_second_read_back(fake_gpu: Any) -> None:
    """It uses its graph if it has one, and kernels that the warm-up compiled; the host waits no longer than for the
    tokens.
    """
    runner = fake_gpu.make_runner(page_heat=2)
    runner.warm_up(lambda _: None)
    known = set(fake_gpu.seen.compiled)
    for place, (name, plan) in enumerate((n, p) for n, p in service_plans().items() if p.num_single_token):
        is_measured = place % 2 == 0
        fake_gpu.seen.clear()
        result = runner.run(plan)
        assert (fake_gpu.seen.uploads, fake_gpu.seen.read_backs) == (1, 1 + is_measured), name
        assert (result.block_shares is not None) == is_measured, name
        assert fake_gpu.seen.waits == 1, "what comes down beside the tokens is there with them"
        if result.block_shares is not None:
            assert len(result.block_shares[0]) == plan.num_single_token
            is_decode = plan.num_single_token == len(plan.scheduled)
            assert fake_gpu.seen.replays == int(is_decode), name
            assert (fake_gpu.seen.launches["paged_decode_attention"] == 0) == is_decode, name
        assert set(fake_gpu.seen.compiled) <= known, name


def test_decode_graph_that_measures_attention_has_the_kernel_launches_of_a_plain_one(
    fake_gpu: Any, operations: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has one more, which clears the sums; rows are copied after each replay that is read back."""
    monkeypatch.setattr(capture_failures, "FIRST_PAUSE_S", 0.0)
    launches, names = [], []
    for page_heat in (0, 1):
        runner = fake_gpu.make_runner(page_heat=page_heat)
        runner.warm_up(lambda _: None)
        runner.release_graphs()
        fake_gpu.seen.clear()
        with operations() as counted:
            assert runner.run(equal_decodes(3)).graph_size == 4, "captured, after a run without the graph, and replayed"
        launches.append(dict(fake_gpu.seen.launches))
        names.append(sorted(counted.names))
        assert (fake_gpu.seen.read_backs, fake_gpu.seen.waits) == (1 + page_heat, 2), "a capture waits"
    assert launches[0] == launches[1]
    assert launches[0]["merge_splits"] == launches[0]["paged_decode_attention"] == 2 * 2
    assert names[1] == sorted([*names[0], "zero_", "zero_", "clone"])


@pytest.mark.parametrize("enforce_eager", [False, pytest.param(True, marks=pytest.mark.storm)])
def test_sparse_decodes_read_nothing_back_and_compile_nothing(fake_gpu: Any, enforce_eager: bool) -> None:
    """Also in graphs. The step that counts skipped blocks has one more read-back and runs without its graph."""
    runner = fake_gpu.make_runner(sparse_decode=0.25, num_layers=3, enforce_eager=enforce_eager)
    runner.warm_up(lambda _: None)
    assert runner.notes == []
    known = set(fake_gpu.seen.compiled)
    plans = [plan for plan in service_plans().values() if plan.num_single_token]
    for place, plan in enumerate(plans * 3):
        is_counted, is_known = place % SKIP_STEPS == 0, place >= 2 * len(plans)
        fake_gpu.seen.clear()
        result = runner.run(plan)
        assert fake_gpu.seen.read_backs == 1 + is_counted
        assert fake_gpu.seen.uploads == 1 or not is_known, "a capture has one of its own"
        assert (result.block_skips is not None) == is_counted
        is_replayed = fake_gpu.seen.replays == 1
        can_be = not enforce_eager and not is_counted and plan.num_single_token == len(plan.scheduled)
        assert is_replayed <= can_be
        assert is_replayed == can_be or not is_known
        assert (fake_gpu.seen.launches["block_bounds"] == 0) == is_replayed or not is_known
        assert set(fake_gpu.seen.compiled) <= known


@pytest.mark.parametrize("options", EVERYTHING.values(), ids=EVERYTHING)
def test_no_sampling_option_adds_a_transfer(fake_gpu: Any, options: dict[str, Any]) -> None:
    runner = fake_gpu.make_runner(enforce_eager=True)
    plan = StepPlan((decode(1, 20, **options), decode(2, 30, temperature=0.0), decode(3, 25, **options)), 3)
    fake_gpu.seen.clear()
    result = runner.run(plan)
    assert (fake_gpu.seen.uploads, fake_gpu.seen.read_backs, fake_gpu.seen.waits) == (1, 1, 1)
    assert bool(result.logprobs) == (options.get("logprobs") is not None)


@pytest.mark.parametrize("enforce_eager", [False, pytest.param(True, marks=pytest.mark.storm)])
def test_overlapped_steps_wait_only_for_the_previous_result(fake_gpu: Any, enforce_eager: bool) -> None:
    """With every sampling option over five steps: each sample is an input of the next step, whose launch waits for
    nothing.
    """
    runner = fake_gpu.make_runner(enforce_eager=enforce_eager, max_num_seqs=16)
    runner.warm_up(lambda _: None)
    requests = [make_request(number, 20 + number, 1, **options) for number, options in enumerate(EVERYTHING.values())]
    requests = [request for request in requests if not request.depends_on_tokens]
    fake_gpu.seen.clear()
    before = None
    for step in range(5):
        items = tuple(Scheduled(request, request.num_prompt_tokens + step, 1, True) for request in requests)
        launched = runner.launch(StepPlan(items, len(items)), before)
        assert (fake_gpu.seen.uploads, fake_gpu.seen.read_backs) == (step + 1, step + 1)
        assert fake_gpu.seen.waits == max(0, step - 1), "a launch waits for nothing"
        if before is not None:
            assert len(before.result().token_ids) == len(requests)
            assert fake_gpu.seen.waits == step, "its numbers are all that is waited for"
        before = launched
    assert fake_gpu.seen.replays == (0 if enforce_eager else 5)


@pytest.mark.parametrize("option", ["form", "penalties"])
def test_request_with_output_dependent_sampling_runs_ahead_up_to_its_logits(fake_gpu: Any, option: str) -> None:
    """One request among eight: the step is launched except for its samples, which are added after the previous step is
    committed. A grammar without a mask by then removes its request from the step.
    """
    runner = fake_gpu.make_runner()
    runner.warm_up(lambda _: None)
    known, matcher = set(fake_gpu.seen.compiled), AnyTokenMatcher()
    requests = [make_request(number, 20, 1, seed=1) for number in range(8)]
    if option == "form":
        requests[3].matcher = matcher
    else:
        requests[3] = make_request(3, 20, 1, seed=1, presence_penalty=0.5)

    def plan(step: int) -> StepPlan:
        return StepPlan(tuple(Scheduled(request, 20 + step, 1, True) for request in requests), 8)

    fake_gpu.seen.clear()
    before = runner.launch(plan(0))
    for step in range(1, 4):
        launched = runner.launch(plan(step), before)
        assert (fake_gpu.seen.replays, fake_gpu.seen.read_backs) == (step + 1, step), "it is not sampled yet"
        before.result()
        for request in requests:
            request.output_token_ids.append(3)
        matcher.is_ready = step < 3
        assert fake_gpu.seen.uploads == 2 * step, "one copy for the step, one for how it is sampled"
        left = launched.sample()
        assert len(left.scheduled) == (7 if option == "form" and step == 3 else 8)
        assert (fake_gpu.seen.uploads, fake_gpu.seen.read_backs) == (2 * step + 1, step + 1)
        assert fake_gpu.seen.waits == step, "its numbers are all that is waited for"
        before = launched
    assert len(before.result().token_ids) == len(left.scheduled) == left.num_single_token
    assert fake_gpu.seen.compiled == known
    assert matcher.num_asked == (3 if option == "form" else 0)


@pytest.mark.parametrize(
    ("kv_dtype", "enforce_eager"),
    [(torch.bfloat16, False), pytest.param(torch.bfloat16, True, marks=pytest.mark.storm), (torch.int8, True)],
)
def test_nothing_is_compiled_after_the_warm_up(fake_gpu: Any, kv_dtype: torch.dtype, enforce_eager: bool) -> None:
    """Uses the keys with which Triton looks up its kernels."""
    runner = fake_gpu.make_runner(kv_dtype=kv_dtype, enforce_eager=enforce_eager)
    runner.warm_up(lambda _: None)
    known = set(fake_gpu.seen.compiled)
    assert {key.split()[0] for key in known} == {
        "_paged_decode_attention_kernel",
        "_plan_decode_kernel",
        "_paged_prefill_attention_kernel",
        "_merge_splits_kernel",
        "_rotate_write_kernel",
        "_rms_norm_kernel",
        "_gated_activation_kernel",
        "_skinny_linear_kernel",
        "_copy_rows_kernel",
        "_allow_tokens_kernel",
        "_draw_tokens_kernel",
    }
    for name, plan in service_plans().items():
        runner.run(plan)
        assert fake_gpu.seen.compiled == known, f"{name} would be compiled while requests wait"
        for item in plan.scheduled:
            item.request.matcher = AnyTokenMatcher()
        runner.run(plan)
        assert fake_gpu.seen.compiled == known, f"{name} with forms would be compiled while requests wait"


@pytest.mark.parametrize("kv_dtype", [torch.bfloat16, pytest.param(torch.int8, marks=pytest.mark.storm)])
def test_short_chunks_after_long_contexts_share_a_plan_and_compile_nothing(
    fake_gpu: Any, kv_dtype: torch.dtype
) -> None:
    """They are split among programs and merged in each layer; a prompt chunk is not."""
    runner = fake_gpu.make_runner(kv_dtype=kv_dtype, num_blocks=256)
    runner.warm_up(lambda _: None)
    known = set(fake_gpu.seen.compiled)
    drafted = Scheduled(make_request(2, 1500, 1), 1500, 4, True, drafts=(5, 6, 7))
    steps = {
        "a turn": StepPlan((chunk(1, 3000, 16, True),), 0),
        "turns and a draft": StepPlan((chunk(1, 3000, 70, True), drafted, chunk(3, 900, 9, True)), 0),
        "a chunk": StepPlan((chunk(1, 3000, 300, True),), 0),
    }
    for name, plan in steps.items():
        fake_gpu.seen.clear()
        runner.run(plan)
        is_cut = name != "a chunk"
        launches = [
            fake_gpu.seen.launches[kernel] for kernel in ("plan_decode", "paged_prefill_attention", "merge_splits")
        ]
        assert launches == [is_cut, 2, 2 * is_cut], name
        assert fake_gpu.seen.compiled == known, f"{name} would be compiled while requests wait"
        assert fake_gpu.seen.waits == 1, name


def drafted(number: int, length: int, *drafts: int, **options: Any) -> Scheduled:
    request = make_request(number, length - 1, 1 + len(drafts), **options)
    del request.output_token_ids[1:]
    return Scheduled(request, length - 1, 1 + len(drafts), True, drafts)


@pytest.mark.parametrize("kv_dtype", [torch.bfloat16, pytest.param(torch.int8, marks=pytest.mark.storm)])
def test_step_with_drafts_is_one_replay_and_nothing_is_captured_in_service(
    fake_gpu: Any, kv_dtype: torch.dtype
) -> None:
    """For any lengths, together with decodes, sampled or greedy."""
    runner = fake_gpu.make_runner(kv_dtype=kv_dtype, num_blocks=256, max_drafts=5)
    runner.warm_up(lambda _: None)
    assert runner.notes == []
    known = set(fake_gpu.seen.compiled)
    fake_gpu.capture_error += [AssertionError("a capture in service")] * 9
    steps = (
        (4, StepPlan((decode(1, 900, temperature=0.0), drafted(2, 30, 5)), 1)),
        (8, StepPlan((decode(1, 900), decode(2, 3), drafted(3, 3000, 5, 6, logprobs=2), drafted(4, 30, 7)), 2)),
        (8, StepPlan((drafted(1, 3000, 5, 6, 7, 8, 9, temperature=0.0),), 0)),
    )
    for size, plan in steps:
        fake_gpu.seen.clear()
        result = runner.run(plan)
        assert (result.launches, fake_gpu.seen.replays) == (1, 1), size
        assert (fake_gpu.seen.uploads, fake_gpu.seen.read_backs, fake_gpu.seen.waits) == (1, 1, 1), size
        assert not fake_gpu.seen.launches.keys() - {"draw_tokens"}, "all else is in the graph"
        assert result.graph_size == size, "there may be as many requests as tokens"
        assert fake_gpu.seen.compiled == known
        assert [1 <= len(said) <= item.num_tokens for item, said in zip(plan.scheduled, result.token_ids, strict=True)]


def test_graph_for_drafts_is_the_smallest_with_enough_tokens_and_requests(fake_gpu: Any) -> None:
    """Few requests with drafts after long contexts are split in graphs as well."""
    runner = fake_gpu.make_runner(max_num_seqs=128, num_blocks=256, max_drafts=4)
    fake_gpu.seen.clear()
    runner.warm_up(lambda _: None)
    rooms = [
        runner.run(StepPlan(tuple(drafted(number, 30, *[5] * count) for number in range(num_requests)), 0)).graph_size
        for num_requests, count in ((3, 1), (10, 4), (32, 1), (33, 1), (25, 4))
    ]
    assert rooms == [8, 32, 32, 128, 32]


def test_measured_step_with_drafts_runs_without_its_graph(fake_gpu: Any) -> None:
    runner = fake_gpu.make_runner(page_heat=2, max_drafts=3)
    runner.warm_up(lambda _: None)
    found = []
    for _ in range(4):
        fake_gpu.seen.clear()
        result = runner.run(StepPlan((decode(1, 90), drafted(2, 30, 5)), 1))
        found.append((result.block_shares is not None, fake_gpu.seen.replays))
    assert found == [(True, 0), (False, 1)] * 2


def test_failed_capture_for_drafts_affects_only_its_size(fake_gpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A size without memory uses the next larger one, and gets its graph when the engine is next idle."""
    now_s = 1000.0
    monkeypatch.setattr(capture_failures.time, "monotonic", lambda: now_s)
    runner = fake_gpu.make_runner(max_drafts=3, max_num_seqs=16)
    fake_gpu.capture_error += [torch.OutOfMemoryError("CUDA out of memory"), None, *[None] * 5]  # behind all decodes
    runner.warm_up(lambda _: None)
    (note,) = runner.notes
    assert note.startswith("no CUDA graph for steps with drafts of 8 tokens and 8 requests, which run slower: OutOf")
    plan = StepPlan(tuple(drafted(number, 30, 5) for number in range(4)), 0)
    assert runner.run(plan).graph_size == 16
    now_s += capture_failures.FIRST_PAUSE_S
    runner.do_idle_work()
    assert runner.run(plan).graph_size == 8
    assert runner.notes == [note, "steps with drafts of 8 tokens and 8 requests have a CUDA graph again"]


def test_refused_capture_for_drafts_is_not_retried_for_other_sizes(fake_gpu: Any) -> None:
    """Neither immediately nor later, since each try would leak a pool. Decodes keep their graphs."""
    runner = fake_gpu.make_runner(max_drafts=3)
    refused = RuntimeError("CUDA error: operation not permitted when stream is capturing")
    fake_gpu.capture_error[:] = [refused, None, None, None, None]  # after decodes of 8, 4, 2 and 1
    runner.warm_up(lambda _: None)
    (note,) = runner.notes
    assert (
        note
        == f"no CUDA graph for steps with drafts of 8 tokens and 8 requests, which run slower: RuntimeError: {refused}"
    )
    assert len(fake_gpu.held) == 5
    assert not runner.do_idle_work(), "there must be nothing to retry"
    assert runner.run(StepPlan((drafted(1, 30, 5),), 0)).graph_size == 0
    assert runner.run(equal_decodes(4)).graph_size == 4


def test_warm_up_reports_progress(fake_gpu: Any) -> None:
    heard: list[Progress] = []
    fake_gpu.make_runner().warm_up(heard.append)
    assert {message.stage for message in heard} == {"warm up"}
    assert [message.done for message in heard] == list(range(heard[0].total))
    assert heard[-1].detail == "CUDA graphs of decodes"


def test_engine_runs_without_graphs_and_reports_why(fake_gpu: Any) -> None:
    runner = fake_gpu.make_runner()
    fake_gpu.capture_error += [torch.OutOfMemoryError("CUDA out of memory")] * 4
    runner.warm_up(lambda _: None)
    assert len(runner.notes) == 1
    assert "without them (slower): OutOfMemoryError: CUDA out of memory" in runner.notes[0]
    fake_gpu.seen.clear()
    runner.run(StepPlan((decode(1, 20, temperature=0.0),), 1))
    assert fake_gpu.seen.replays == 0
    assert fake_gpu.seen.launches == {
        "rms_norm": 5,
        "rotate_write": 2,
        "plan_decode": 1,
        "paged_decode_attention": 2,
        "gated_activation": 2,
        "skinny_linear": 9,
    }


def test_first_step_of_any_length_is_a_graph_replay(fake_gpu: Any) -> None:
    """Nothing is captured in a step."""
    runner = fake_gpu.make_runner()
    runner.warm_up(lambda _: None)
    known, found = set(fake_gpu.seen.compiled), []
    for _ in range(3):
        fake_gpu.seen.clear()
        result = runner.run(equal_decodes(3))
        found.append((result.graph_size, fake_gpu.seen.replays, fake_gpu.seen.uploads, fake_gpu.seen.read_backs))
    assert found == [(4, 1, 1, 1)] * 3
    assert fake_gpu.seen.launches == {}, "all of it is in the graph"
    fake_gpu.seen.clear()
    assert runner.run(StepPlan((decode(1, 1000, temperature=0.0), decode(2, 2), decode(3, 3)), 3)).graph_size == 4
    assert fake_gpu.seen.compiled == known
    assert runner.notes == []


def test_failed_capture_in_service_costs_no_request(fake_gpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The size had been released by an engine that is never idle. Also tested while a step is in flight whose token
    this one needs.
    """
    runner = fake_gpu.make_runner()
    runner.warm_up(lambda _: None)
    monkeypatch.setattr(capture_failures, "FIRST_PAUSE_S", 0.0)
    assert runner.release_graphs()
    fake_gpu.capture_error.append(torch.OutOfMemoryError("CUDA out of memory"))
    fake_gpu.seen.clear()
    request = make_request(1, 20, 1, temperature=0.0)
    first = runner.launch(StepPlan((Scheduled(request, 20, 1, True),), 1))
    second = runner.launch(StepPlan((Scheduled(request, 21, 1, True),), 1), first)
    assert [len(step.result().token_ids) for step in (first, second)] == [1, 1]
    assert fake_gpu.seen.replays == 1, "the second captured its size"
    given_back, *notes = runner.notes
    assert given_back.startswith("a step failed twice")
    why = "OutOfMemoryError: CUDA out of memory; it will be retried later"
    assert notes == [f"no CUDA graph for batches of 1, which run slower: {why}", "batches of 1 have a CUDA graph again"]


ERRORS = (
    torch.OutOfMemoryError("CUDA out of memory"),
    RuntimeError("CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    RuntimeError("operation not permitted"),
)


@pytest.mark.parametrize("error", ERRORS)
def test_failed_decode_graph_capture_affects_only_its_batch_size(
    fake_gpu: Any, monkeypatch: pytest.MonkeyPatch, error: RuntimeError
) -> None:
    """4 and 16 keep their graphs; 8 uses that of 16, and gets its own when the engine is idle."""
    now_s = 1000.0
    monkeypatch.setattr(capture_failures.time, "monotonic", lambda: now_s)
    runner = fake_gpu.make_runner(max_num_seqs=16)
    fake_gpu.capture_error[:] = [error, None]  # the largest is captured first
    runner.warm_up(lambda _: None)
    sizes = [runner.run(equal_decodes(count)).graph_size for count in (8, 8, 4, 16, 7, 1)]
    assert sizes == [16, 16, 4, 16, 16, 1]
    (note,) = runner.notes
    assert note.startswith("no CUDA graph for batches of 8, which run slower: ")
    assert note.endswith("; it will be retried later")
    runner.do_idle_work()
    assert runner.run(equal_decodes(8)).graph_size == 16, "too early"
    now_s += capture_failures.FIRST_PAUSE_S
    runner.do_idle_work()
    uploads = fake_gpu.seen.uploads
    assert runner.run(equal_decodes(8)).graph_size == 8
    assert fake_gpu.seen.uploads == uploads + 1, "the graph must have been captured before the step"
    assert runner.notes == [note, "batches of 8 have a CUDA graph again"]


@pytest.mark.parametrize("error", ERRORS)
def test_failed_graph_capture_is_retried_after_pauses_of_up_to_a_minute(
    fake_gpu: Any, monkeypatch: pytest.MonkeyPatch, error: RuntimeError
) -> None:
    """Memory is missing for ten minutes; a minute later the size has its graph. What CUDA refuses is given up."""
    now_s = 1000.0
    monkeypatch.setattr(capture_failures.time, "monotonic", lambda: now_s)
    runner = fake_gpu.make_runner(max_num_seqs=16)
    fake_gpu.capture_error[:] = [error, None]
    runner.warm_up(lambda _: None)
    fake_gpu.capture_error[:] = [error] * 100
    for _ in range(600):
        now_s += 1.0
        runner.do_idle_work()
    num_tries = 1 + 100 - len(fake_gpu.capture_error)
    is_memory = error is not ERRORS[-1]
    assert (20 < num_tries < 30) if is_memory else num_tries == capture_failures.MAX_TRIES
    fake_gpu.capture_error.clear()
    for _ in range(60):
        now_s += 1.0
        runner.do_idle_work()
    assert runner.run(equal_decodes(8)).graph_size == (8 if is_memory else 16)


@pytest.mark.parametrize("options", [{}, {"piecewise_graphs": True}])
def test_released_graphs_are_captured_again(
    fake_gpu: Any, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    now_s = 1000.0
    monkeypatch.setattr(capture_failures.time, "monotonic", lambda: now_s)
    runner = fake_gpu.make_runner(max_num_seqs=16, **options)
    runner.warm_up(lambda _: None)
    assert runner.release_graphs()
    assert not runner.release_graphs(), "there are none now"
    assert [runner.run(equal_decodes(count)).graph_size for count in (4, 16)] == [0, 0]
    now_s += 60
    for _ in range(10):
        runner.do_idle_work()
    uploads = fake_gpu.seen.uploads
    assert [runner.run(equal_decodes(count)).graph_size for count in (4, 16)] == [4, 16]
    assert fake_gpu.seen.uploads == uploads + 2
    assert bool(runner.run(StepPlan((chunk(1, 0, 30, True),), 0)).graph_tokens) == bool(options)


def test_engine_without_memory_for_its_largest_decode_graph_captures_the_next_smaller(fake_gpu: Any) -> None:
    runner = fake_gpu.make_runner(max_num_seqs=16)
    fake_gpu.capture_error.append(torch.OutOfMemoryError("CUDA out of memory"))
    runner.warm_up(lambda _: None)
    (note,) = runner.notes
    assert note.startswith("no CUDA graph for batches of 16, which run slower")
    assert [runner.run(equal_decodes(count)).graph_size for count in (16, 8)] == [0, 8]


@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
def test_each_decoder_layer_has_ten_kernel_launches(fake_gpu: Any, operations: Any, architecture: str) -> None:
    """Products, kernels and the merge of splits, counted as what two more layers add to a step."""
    counts = []
    for num_layers in (2, 4):
        runner = fake_gpu.make_runner(architecture=architecture, num_layers=num_layers, enforce_eager=True)
        fake_gpu.seen.clear()
        with operations() as seen:
            runner.run(StepPlan((decode(1, 1000, temperature=0.0),), 1))
        assert fake_gpu.seen.launches["merge_splits"] == num_layers
        counts.append(len(seen.names) + sum(fake_gpu.seen.launches.values()))
        print(architecture, num_layers, "layers:", counts[-1], "launches", dict(fake_gpu.seen.launches), seen.names)
    assert counts[1] - counts[0] == 2 * 10


def test_step_reports_its_number_of_launches(fake_gpu: Any) -> None:
    """Counted at the first step of its kind; a graph is a single launch."""
    received = []
    for num_layers in (2, 4):
        runner = fake_gpu.make_runner(num_layers=num_layers, enforce_eager=True)
        plan = StepPlan((decode(1, 1000, temperature=0.0),), 1)
        received.append([runner.run(plan).launches for _ in range(2)])
    assert received[0][0] == received[0][1] > 0
    assert received[1][0] - received[0][0] == 2 * 10
    captured = fake_gpu.make_runner()
    captured.warm_up(lambda _: None)
    captured.run(plan)  # a graph of this size is captured when it is needed again
    assert captured.run(plan).launches == 1
    mixed = StepPlan((decode(1, 20, temperature=0.0), chunk(2, 0, 30, True, temperature=0.0)), 1)
    assert captured.run(mixed).launches > 1


def test_grammar_adds_one_launch_and_no_transfer(fake_gpu: Any) -> None:
    runner = fake_gpu.make_runner(enforce_eager=True)
    items = [decode(number, 20 + number, temperature=0.0) for number in range(4)]
    plan = StepPlan(tuple(items), len(items))
    fake_gpu.seen.clear()
    runner.run(plan)
    assert "allow_tokens" not in fake_gpu.seen.launches, "who asks for no form pays nothing"
    matchers = [AnyTokenMatcher(), AnyTokenMatcher()]
    items[1].request.matcher, items[3].request.matcher = matchers
    launched = dict(fake_gpu.seen.launches)
    fake_gpu.seen.clear()
    runner.run(plan)
    assert dict(fake_gpu.seen.launches) == launched | {"allow_tokens": 1}
    assert (fake_gpu.seen.uploads, fake_gpu.seen.read_backs) == (1, 1)
    assert [matcher.num_asked for matcher in matchers] == [1, 1]


def test_logit_biases_add_one_operation(fake_gpu: Any, operations: Any) -> None:
    counts = []
    for options in ({}, {"logit_bias": {3: 1.0, 5: -2.0}}):
        runner = fake_gpu.make_runner(enforce_eager=True)
        with operations() as seen:
            runner.run(StepPlan((decode(1, 20, temperature=0.0, **options), decode(2, 30, temperature=0.0)), 2))
        counts.append(seen.names)
    assert sorted(counts[1]) == sorted([*counts[0], "index_add_"])


def test_token_counts_beyond_the_buffer_are_uploaded_separately(fake_gpu: Any) -> None:
    runner = fake_gpu.make_runner(num_blocks=8, max_num_seqs=2, enforce_eager=True, max_model_len=128)
    request = make_request(1, 100, 1, temperature=0.0, repetition_penalty=1.1)
    request.prompt_token_ids[:] = range(100)
    runner._buffer.num_bytes = 2048
    fake_gpu.seen.clear()
    runner.run(StepPlan((Scheduled(request, 100, 1, True),), 1))
    assert fake_gpu.seen.uploads > 1
    assert fake_gpu.seen.read_backs == 1


def test_emulation_detects_host_reads_and_device_mismatches(fake_gpu: Any) -> None:
    """Also detects a launch on the wrong device."""
    there = torch.zeros(4, device="cuda:0")
    with pytest.raises(Exception, match=r"data-dependent|DataDependent|_local_scalar_dense"):
        there.max().item()
    with pytest.raises(RuntimeError, match="device"):
        there + torch.zeros(4)
    fake_gpu.seen.clear()
    there.to("cpu")
    torch.zeros(4).to("cuda:0")
    assert (fake_gpu.seen.uploads, fake_gpu.seen.read_backs) == (1, 1)


def test_graphs_without_memory_are_dropped_until_it_is_free(fake_gpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 1000.0
    monkeypatch.setattr(capture_failures.time, "monotonic", lambda: now_s)
    runner = fake_gpu.make_runner(max_num_seqs=16, piecewise_graphs=True)
    runner.warm_up(lambda _: None)
    notes = list(runner.notes)

    def graphs_of(*plans: StepPlan) -> list[int]:
        nonlocal now_s
        for _ in range(60):
            now_s += 1.0
            runner.do_idle_work()
        found = []
        for plan in plans:
            fake_gpu.seen.clear()
            runner.run(plan)
            found.append(fake_gpu.seen.replays)
        return found

    prompt = StepPlan((Scheduled(make_request(1, 20, 0), 0, 20, True),), 0)
    decodes, prefills = graphs_of(equal_decodes(4), prompt)
    assert (decodes, prefills > 1) == (1, True)
    runner.keep_graphs(of_decodes=True, of_prefills=False)
    assert graphs_of(equal_decodes(4), prompt) == [1, 0]
    runner.keep_graphs(of_decodes=False, of_prefills=False)
    assert graphs_of(equal_decodes(4), prompt, equal_decodes(4)) == [0, 0, 0]
    assert not runner.do_idle_work(), "there must be nothing to restore"
    runner.keep_graphs(of_decodes=True, of_prefills=True)
    assert graphs_of(equal_decodes(4), prompt) == [decodes, prefills]
    assert runner.notes == notes
