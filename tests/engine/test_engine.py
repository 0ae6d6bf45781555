"""A real engine with a tiny random model: what it refuses, returns and releases."""

from __future__ import annotations

import dataclasses
import gc
import random
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from kvscope_engine import Completion, Engine, SamplingParams
from kvscope_engine.tokenization.tokenizer import Detokenizer
from kvscope_telemetry.errors import BadInput, EngineDead
from kvscope_telemetry.ledger import BlockState
from kvscope_telemetry.messages.commands import Finished, Submit, Tokens
from kvscope_telemetry.messages.telemetry import Frame
from kvscope_telemetry.transport.host_id import host_id

Make = Callable[..., Engine]

GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)


def random_prompt(seed: int, length: int = 10) -> tuple[int, ...]:
    return tuple(random.Random(seed).choices(range(3, 256), k=length))


def submit_of(name: str, ids: Sequence[int], sampling: SamplingParams = GREEDY) -> Submit:
    return Submit(request_id=name, prompt_token_ids=tuple(ids), sampling=sampling)


def run_to_end(engine: Engine) -> list[Tokens | Finished]:
    said = []
    while engine.has_unfinished:
        said += engine.step()
    return said


def finished_messages(said: Sequence[Tokens | Finished], name: str) -> list[Finished]:
    return [message for message in said if isinstance(message, Finished) and message.request_id == name]


def tokens_of(said: Sequence[Tokens | Finished], name: str, index: int = 0) -> list[int]:
    pieces = (message for message in said if isinstance(message, Tokens) and message.request_id == name)
    return [token for piece in pieces if piece.index == index for token in piece.token_ids]


def complete(engine: Engine, ids: Sequence[int], **options: Any) -> Completion:
    values = {"temperature": 0.0, "max_tokens": 12, "ignore_eos": True} | options
    (completion,) = engine.generate([submit_of("-", ids, SamplingParams(**values))])
    return completion


def num_active(engine: Engine) -> int:
    return engine.snapshot().blocks.state.count(BlockState.ACTIVE)


# What is refused


BAD = {
    "empty": submit_of("bad", ()),
    "longer than the model's limit": submit_of("bad", [5] * 513),
    "no room for a token": submit_of("bad", [5] * 512),
    "outside the vocabulary": submit_of("bad", (5, 256)),
    "negative token": submit_of("bad", (5, -1)),
    "absurd token": submit_of("bad", (5, 1 << 62)),
    "longer than the pool": submit_of("bad", [5] * 200, SamplingParams(max_tokens=100)),
    "text without a tokenizer": Submit(request_id="bad", prompt="hello"),
    "two prompts": Submit(request_id="bad", prompt="hello", prompt_token_ids=(5,)),
    "no prompt": Submit(request_id="bad"),
}


@pytest.mark.parametrize("name", BAD)
def test_invalid_prompt_is_refused_at_once_and_allocates_nothing(make_engine: Make, name: str) -> None:
    engine = make_engine(num_gpu_blocks_override=64)
    before = engine.snapshot().blocks
    times = []
    for _ in range(3):
        started = time.thread_time()
        with pytest.raises(BadInput) as refusal:
            engine.submit(BAD[name])
        times.append(time.thread_time() - started)
    assert min(times) < 0.5, "of this thread: what others use does not count"
    assert "\n" not in str(refusal.value)
    assert engine.snapshot().blocks == before
    assert engine.snapshot().counters.refused == 3
    assert not engine.has_unfinished


def test_invalid_prompts_do_not_affect_other_requests(make_engine: Make) -> None:
    def outputs(engine: Engine, bad: Sequence[Submit]) -> list[list[int]]:
        said: list[Tokens | Finished] = []
        for number in range(6):
            engine.submit(submit_of(f"r{number}", random_prompt(number)))
            for submit in bad:
                with pytest.raises(BadInput):
                    engine.submit(submit)
            said += engine.step()
        said += run_to_end(engine)
        return [tokens_of(said, f"r{number}") for number in range(6)]

    undisturbed = outputs(make_engine(num_gpu_blocks_override=64), ())
    assert outputs(make_engine(num_gpu_blocks_override=64), list(BAD.values())) == undisturbed
    assert len({tuple(tokens) for tokens in undisturbed}) == 6


def test_ten_impossible_requests_do_not_delay_ten_possible_ones(make_engine: Make) -> None:
    engine = make_engine(num_gpu_blocks_override=32)
    bad = [submit_of("-", random_prompt(n), SamplingParams(max_tokens=400)) for n in range(10)]
    good = [submit_of("-", random_prompt(n)) for n in range(10)]
    completions = list(engine.generate([*bad, *good]))
    for completion in completions[:10]:
        assert completion.finish_reason == "error"
        assert "need 103 blocks of 4 tokens: the whole pool has 32" in completion.error
    assert [(c.finish_reason, len(c.token_ids)) for c in completions[10:]] == [("length", 12)] * 10


# Ids and aborts


def test_request_id_in_use_is_refused_without_harm_to_its_request(make_engine: Make) -> None:
    engine = make_engine()
    expected = complete(engine, random_prompt(1)).token_ids
    engine.submit(submit_of("a", random_prompt(1)))
    said = engine.step()
    with pytest.raises(BadInput, match="'a' is in use"):
        engine.submit(submit_of("a", random_prompt(2)))
    said += run_to_end(engine)
    assert tokens_of(said, "a") == expected
    engine.submit(submit_of("a", random_prompt(1)))
    assert tokens_of(run_to_end(engine), "a") == expected, "an id is free once its request ended"


def test_aborting_unknown_or_finished_requests_changes_nothing(make_engine: Make) -> None:
    engine = make_engine()
    engine.abort("never heard of")
    assert engine.step() == []
    assert complete(engine, random_prompt(1)).finish_reason == "length"
    engine.abort("generate-0")
    assert engine.step() == []
    engine.submit(submit_of("a", random_prompt(1)))
    engine.submit(submit_of("b", random_prompt(2)))
    said = engine.step()
    engine.abort("a")
    engine.abort("a")
    said += run_to_end(engine)
    assert [last.finish_reason for last in finished_messages(said, "a")] == ["abort"], (
        "a second abort says nothing more"
    )
    assert len(tokens_of(said, "b")) == 12
    assert engine.snapshot().counters.aborted == 1
    assert num_active(engine) == 0


def test_request_aborted_before_its_prompt_was_prepared_is_listed(make_engine: Make) -> None:
    frames: list[Frame] = []
    engine = make_engine(publish=lambda message: frames.append(message) if isinstance(message, Frame) else None)
    submit = submit_of("early", (), SamplingParams(n=2, max_tokens=5))
    engine.record_aborted(submit)
    assert engine.step() == []
    listed = [info for frame in frames for info in frame.new_requests]
    assert [(info.number, info.request_id, info.num_prompt_tokens) for info in listed] == [
        (1, "early", 0),
        (2, "early", 0),
    ]
    events = [event for frame in frames for event in frame.events if event.kind == "aborted"]
    assert [event.number for event in events] == [1, 2]
    assert "before its prompt was read" in events[0].cause
    assert frames[-1].counters.aborted == 2
    assert not engine.has_unfinished
    assert complete(engine, random_prompt(1)).finish_reason == "length", "and the engine goes on"


@pytest.mark.parametrize("num_steps", [0, 1, 5])
def test_abort_of_one_completion_leaves_the_others(make_engine: Make, num_steps: int) -> None:
    engine = make_engine()
    engine.submit(submit_of("three", random_prompt(1), SamplingParams(n=3, max_tokens=8, ignore_eos=True)))
    said: list[Tokens | Finished] = []
    for _ in range(num_steps):
        said += engine.step()
    engine.abort("three", 0)  # the completion that computes the prompt
    said += run_to_end(engine)
    reasons = {last.index: last.finish_reason for last in finished_messages(said, "three")}
    assert reasons == {0: "abort", 1: "length", 2: "length"}
    assert num_active(engine) == 0


@pytest.mark.parametrize("num_steps", [0, 1, 5])
def test_abort_ends_every_completion_of_a_request(make_engine: Make, num_steps: int) -> None:
    engine = make_engine()
    several = SamplingParams(temperature=1.0, n=4, max_tokens=50, ignore_eos=True)
    engine.submit(submit_of("four", random_prompt(1), several))
    engine.submit(submit_of("other", random_prompt(2)))
    said: list[Tokens | Finished] = []
    for _ in range(num_steps):
        said += engine.step()
    engine.abort("four")
    said += run_to_end(engine)
    assert sorted(last.index for last in finished_messages(said, "four")) == [0, 1, 2, 3]
    assert {last.finish_reason for last in finished_messages(said, "four")} == {"abort"}
    for last in finished_messages(said, "four"):
        assert last.usage.completion_tokens == len(tokens_of(said, "four", last.index))
    assert len(tokens_of(said, "other")) == 12
    assert num_active(engine) == 0
    engine.submit(submit_of("four", random_prompt(1)))
    assert len(tokens_of(run_to_end(engine), "four")) == 12


# What is said


def test_completions_of_a_request_have_consecutive_seeds(make_engine: Make) -> None:
    engine = make_engine()
    options = {"temperature": 0.8, "max_tokens": 8, "ignore_eos": True}
    sampling = SamplingParams(n=5, seed=40, **options)
    completions = list(engine.generate([submit_of("-", random_prompt(3), sampling)]))
    assert [(c.index, c.completion) for c in completions] == [(0, i) for i in range(5)]
    assert len({tuple(c.token_ids) for c in completions}) == 5
    for completion in completions:
        alone = complete(engine, random_prompt(3), seed=40 + completion.completion, **(options | {"n": 1}))
        assert alone.token_ids == completion.token_ids
    greedy = list(
        engine.generate([submit_of("-", random_prompt(3), SamplingParams(n=3, temperature=0.0, max_tokens=8))])
    )
    assert greedy[0].token_ids == greedy[1].token_ids == greedy[2].token_ids


def test_several_completions_compute_their_prompt_once(make_engine: Make) -> None:
    frames: list[Frame] = []
    engine = make_engine(publish=lambda message: frames.append(message) if isinstance(message, Frame) else None)
    sampling = SamplingParams(n=4, temperature=0.0, max_tokens=6, ignore_eos=True)
    completions = list(engine.generate([submit_of("-", random_prompt(3, 30), sampling)]))
    counters = frames[-1].counters
    assert counters.prompt_tokens == 30 + 3, "the others compute the last token of the prompt, to draw from it"
    assert counters.copied_blocks == 3, "of the last block, which is partial"
    assert sum(len(frame.moves.copied) // 4 for frame in frames) == 3
    assert [completion.usage.cached_tokens for completion in completions] == [0, 29, 29, 29]
    assert all(completion.token_ids == completions[0].token_ids for completion in completions)


def test_token_counts_and_times_of_a_completion_are_consistent(make_engine: Make) -> None:
    engine = make_engine(max_num_seqs=1)
    started = time.monotonic()
    first, second = engine.generate([submit_of("-", random_prompt(4, 30))] * 2)
    wall_s = time.monotonic() - started
    for completion in (first, second):
        assert completion.usage.prompt_tokens == 30
        assert completion.usage.completion_tokens == len(completion.token_ids) == 12
        timing = completion.timing
        assert timing.queue_s is not None
        assert timing.ttft_s is not None
        assert 0 <= timing.queue_s <= timing.ttft_s <= timing.total_s <= wall_s
    assert first.usage.cached_tokens == 0
    assert second.usage.cached_tokens == 28, "seven full blocks of four; at least one token is computed"
    assert second.timing.queue_s is not None
    assert first.timing.ttft_s is not None
    assert second.timing.queue_s >= first.timing.total_s - first.timing.ttft_s, "it waited for the first's last token"
    assert first.token_ids == second.token_ids


def test_request_that_never_ran_has_no_times(make_engine: Make) -> None:
    engine = make_engine(max_num_seqs=1)
    engine.submit(submit_of("runs", random_prompt(1)))
    engine.submit(submit_of("waiting", random_prompt(2)))
    said = engine.step()
    engine.abort("waiting")
    (last,) = finished_messages(said + engine.step(), "waiting")
    assert (last.timing.queue_s, last.timing.ttft_s) == (None, None)
    assert last.timing.total_s > 0
    assert last.usage.completion_tokens == 0


def test_end_of_sequence_token_ends_a_request_unless_ignored_or_before_min_tokens(
    make_engine: Make, tiny_model: Callable[..., str]
) -> None:
    said = complete(make_engine(), random_prompt(5)).token_ids
    place = next(i for i in range(3, 12) if said.index(said[i]) == i)
    engine = make_engine(model=tiny_model(eos_token_id=said[place]))
    stopped = complete(engine, random_prompt(5), ignore_eos=False)
    assert (stopped.finish_reason, stopped.token_ids) == ("stop", said[: place + 1])
    assert complete(engine, random_prompt(5), ignore_eos=True).token_ids == said
    later = complete(engine, random_prompt(5), ignore_eos=False, min_tokens=place + 3)
    assert later.token_ids[:place] == said[:place]
    assert said[place] not in later.token_ids[: place + 3]
    assert len(later.token_ids) > place + 3 or later.finish_reason == "length"


class FakeSentencePieceTokenizer:
    """A tokenizer like SentencePiece: each token is a word after a space, which is dropped at the beginning of
    a text.
    """

    def detokenizer(self, stop: Sequence[str], context: Sequence[int]) -> Detokenizer:
        return Detokenizer(lambda ids: "".join(f" {token}" for token in ids)[1:], stop, context)

    def token_text(self, token_id: int) -> str:
        return f" {token_id}"


@pytest.mark.parametrize(("raw", "beginning"), [(True, " "), (False, "")], ids=["raw", "an answer"])
def test_raw_completion_continues_its_prompt_with_a_space(make_engine: Make, raw: bool, beginning: str) -> None:
    engine = make_engine()
    marks: Any = FakeSentencePieceTokenizer()
    loaded = dataclasses.replace(engine.components.loaded, tokenizer=marks)
    engine.components = dataclasses.replace(engine.components, loaded=loaded)
    engine.submit(Submit(request_id="a", prompt_token_ids=random_prompt(1), raw=raw, sampling=GREEDY))
    said = run_to_end(engine)
    text = "".join(message.text for message in said if isinstance(message, Tokens))
    assert text == beginning + " ".join(map(str, tokens_of(said, "a")))


# The output is compared with the model computed without an engine.


@pytest.fixture
def reference_logits(tiny_model: Callable[..., str]) -> Callable[[Sequence[int]], Any]:
    """Function that returns float32 logits after the last token, computed by transformers: `reference_logits(ids)`."""
    import torch

    from kvscope_engine.model.hf_config import read_config
    from kvscope_engine.model.loader.download.model_names import parse_model_name
    from kvscope_engine.model.loader.model_loader import random_model

    config = read_config(parse_model_name(tiny_model()).path)
    module = random_model(config, torch.float32, torch.device("cpu"), 0, lambda progress: None).eval()

    def compute(ids: Sequence[int]) -> torch.Tensor:
        with torch.no_grad():
            return module(input_ids=torch.tensor([list(ids)])).logits[0, -1]

    return compute


def test_log_probabilities_equal_the_reference(
    make_engine: Make, reference_logits: Callable[[Sequence[int]], Any]
) -> None:
    ids = random_prompt(6)
    options: list[dict[str, Any]] = [{}, {"temperature": 1.5, "seed": 3}, {"repetition_penalty": 3.0}]
    for changes in options:
        completion = complete(make_engine(), ids, logprobs=5, **changes)
        assert [entry.token_id for entry in completion.logprobs] == completion.token_ids
        for place, entry in enumerate(completion.logprobs):
            expected = reference_logits([*ids, *completion.token_ids[:place]]).log_softmax(-1)
            assert entry.logprob == pytest.approx(float(expected[entry.token_id]), abs=1e-4)
            assert [token for token, _ in entry.top] == expected.topk(5).indices.tolist()
            assert [value for _, value in entry.top] == pytest.approx(expected.topk(5).values.tolist(), abs=1e-4)
            if not changes:
                assert entry.top[0] == (entry.token_id, entry.logprob), "greedy takes the likeliest"


def test_asking_for_log_probabilities_changes_no_token(make_engine: Make) -> None:
    engine = make_engine()
    for seed in (1, 2):
        plain = complete(engine, random_prompt(seed), temperature=0.9, seed=seed)
        assert plain.logprobs == []
        asked = complete(engine, random_prompt(seed), temperature=0.9, seed=seed, logprobs=0)
        assert asked.token_ids == plain.token_ids
        assert [len(entry.top) for entry in asked.logprobs] == [0] * 12


@pytest.mark.parametrize(
    "penalty", [{"repetition_penalty": 2.0}, {"presence_penalty": 2.0}, {"frequency_penalty": 2.0}], ids=str
)
def test_penalties_equal_the_formula(
    make_engine: Make,
    reference_logits: Callable[[Sequence[int]], Any],
    penalty: dict[str, float],
    storm: Callable[[int, int], int],
) -> None:
    """Greedy decoding over penalized logits, for a prompt that repeats itself, compared with a few lines of
    arithmetic.
    """
    engine = make_engine()
    sampling = SamplingParams(**penalty).resolved()  # type: ignore[arg-type]
    num_changed = 0
    for seed in range(storm(2, 5)):
        ids = random_prompt(seed, 4) * 3
        said: list[int] = []
        for _ in range(20):
            logits = reference_logits([*ids, *said])
            for token in {*ids, *said}:
                value = float(logits[token])
                factor = sampling.repetition_penalty
                value = value / factor if value > 0 else value * factor
                count = said.count(token)
                logits[token] = value - sampling.frequency_penalty * count - sampling.presence_penalty * (count > 0)
            said.append(int(logits.argmax()))
        assert complete(engine, ids, max_tokens=20, **penalty).token_ids == said
        num_changed += complete(engine, ids, max_tokens=20).token_ids != said
    assert num_changed > 0, "the penalty made no difference: the test says nothing"


def test_engine_snapshot_says_that_parent_hashes_of_blocks_are_reported(make_engine: Make) -> None:
    assert make_engine().snapshot().hello.cache.has_parents


def test_engine_reports_the_host_of_its_clock(make_engine: Make) -> None:
    assert make_engine().snapshot().hello.host == host_id()


# What it leaves behind


def test_loop_left_early_aborts_the_remaining_requests(make_engine: Make) -> None:
    engine = make_engine()
    for completion in engine.generate([submit_of("-", random_prompt(n)) for n in range(6)]):
        assert completion.index == 0
        break
    assert not engine.has_unfinished
    assert num_active(engine) == 0
    assert [c.finish_reason for c in engine.generate([submit_of("-", random_prompt(9))])] == ["length"]


def test_waiting_completions_can_be_closed_after_the_engine(make_engine: Make) -> None:
    engine = make_engine()
    completions = engine.generate([submit_of("-", random_prompt(n)) for n in range(3)])
    assert next(completions).finish_reason == "length"
    engine.close()
    completions.close()  # type: ignore[attr-defined]


def test_generate_is_refused_beside_other_requests(make_engine: Make) -> None:
    engine = make_engine()
    engine.submit(submit_of("mine", random_prompt(1)))
    with pytest.raises(BadInput, match="a request is unfinished"):
        list(engine.generate([submit_of("-", random_prompt(2))]))
    assert len(tokens_of(run_to_end(engine), "mine")) == 12


def test_bytes_saved_to_host_memory_equal_the_number_of_offloaded_blocks(make_engine: Make) -> None:
    plain = make_engine()
    assert plain.components.mover is None
    block_bytes = plain.hello.cache.block_bytes
    engine = make_engine(
        num_gpu_blocks_override=8, host_kv_memory_bytes=8 * block_bytes, disk_kv_memory_bytes=64 * 2 * block_bytes
    )
    for seed in range(3):  # each fills the pool: older blocks go to host memory, and from there to disk
        engine.submit(submit_of(str(seed), random_prompt(seed, 20)))
        run_to_end(engine)
    assert engine.components.mover.drain()
    stats, counters = engine.components.mover.stats, engine.snapshot().counters
    assert stats is not None
    assert stats.saved_bytes == counters.offloaded_blocks * block_bytes > 0
    assert stats.disk_written_bytes > 0


def test_closed_engine_frees_its_memory_and_refuses_calls(make_engine: Make) -> None:
    engine = make_engine(num_gpu_blocks_override=64)
    complete(engine, random_prompt(1))
    engine.submit(submit_of("left", random_prompt(1)))
    engine.step()
    weights = [weakref.ref(parameter) for parameter in engine.components.loaded.module.parameters()]
    blocks = weakref.ref(engine.components.storage.kv(0)[0])
    assert weights
    engine.close()
    gc.collect()
    assert all(weight() is None for weight in weights)
    assert blocks() is None
    engine.close()
    with pytest.raises(EngineDead, match="closed"):
        engine.submit(submit_of("late", random_prompt(1)))
    with pytest.raises(EngineDead, match="closed"):
        engine.step()


def test_failed_forward_pass_leaves_requests_that_can_be_aborted(
    make_engine: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    frames: list[Frame] = []
    engine = make_engine(publish=lambda message: frames.append(message) if isinstance(message, Frame) else None)
    engine.submit(submit_of("a", random_prompt(1)))
    engine.step()
    with monkeypatch.context() as broken:
        broken.setattr(engine.components.runner, "run", lambda plan: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            engine.step()
    engine.components.scheduler.check_integrity()
    engine.abort("a")
    assert [last.finish_reason for last in finished_messages(run_to_end(engine), "a")] == ["abort"]
    assert num_active(engine) == 0
    assert frames[-1].counters.aborted == 1
    assert complete(engine, random_prompt(1)).token_ids == complete(make_engine(), random_prompt(1)).token_ids
