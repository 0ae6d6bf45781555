"""The engine's greedy tokens equal `generate` of transformers for every prompt, in float32 on the CPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.conftest import STORMS

from kvscope_engine import Engine, EngineConfig, SamplingParams
from kvscope_telemetry.messages.commands import ChatMessage, Submit
from kvscope_telemetry.messages.telemetry import Frame, TelemetryMessage

pytestmark = pytest.mark.timeout(1_500)
"""Seconds until a test counts as stuck: on a busy machine without vector instructions these take minutes."""

NUM_SHORT, NUM_LONG = (30, 10) if STORMS else (20, 8)
"""Tokens to generate after a short and after a long prompt; a block has 16 or fewer."""
SHORT = (
    "What is the capital of France?",
    "Why is the sky blue?",
    "Write a poem about rain.",
    "Name ten uses of a paper clip.",
    "Explain what a hash table is to a child.",
    "Translate 'good morning' into Spanish, German and Italian.",
    "def fibonacci(n):",
    "List the planets of the solar system in order.",
    "What is 17 times 23? Show your work.",
    "Tell me a story about a lighthouse keeper and a storm. 🌊",
)


BLOCK_BYTES = 30 * 2 * 4 * 3 * 64 * 4
"""Bytes of a block of the default model: layers, keys and values, 4 slots, KV heads, head size, float32."""


def _sampling(prompt: str) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=NUM_SHORT if prompt in SHORT else NUM_LONG)


@pytest.fixture(scope="module")
def short(storm: Callable[[int, int], int]) -> list[str]:
    return list(SHORT[: storm(5, 10)])


@pytest.fixture(scope="module")
def long(storm: Callable[[int, int], int]) -> list[str]:
    """Prompts of over 250 tokens each, cut from a real text."""
    text = (Path(__file__).parents[2] / "LICENSE").read_text()
    return [f"Summarise this in one sentence:\n{text[i * 900 : i * 900 + 1500]}" for i in range(storm(2, 3))]


@pytest.fixture(scope="module")
def prompts(short: list[str], long: list[str]) -> list[str]:
    return [*short, *long]


@pytest.fixture(scope="module")
def engine_alone() -> Iterator[Engine]:
    """An engine with enough room and no prefix cache."""
    config = EngineConfig(dtype="float32", device="cpu", num_gpu_blocks_override=256, enable_prefix_caching=False)
    with Engine(config) as engine:
        yield engine


@pytest.fixture(scope="module")
def answers_alone(engine_alone: Engine, prompts: list[str]) -> list[list[int]]:
    """What the engine answers to each prompt alone."""
    return [_answers(engine_alone, [prompt])[0] for prompt in prompts]


@pytest.fixture(scope="module")
def reference(prompts: list[str], short: list[str], answers_alone: list[list[int]]) -> list[list[int]]:
    """What transformers answers to each prompt alone, with our converted file: `test_gguf_convert` compares those
    weights with the ones that transformers converts, which takes it half a minute.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from kvscope_engine.model.loader.download.default_model import default_gguf
    from kvscope_engine.model.loader.gguf.gguf_cache import converted_gguf

    folder = converted_gguf(default_gguf(lambda progress: None), torch.float32, lambda progress: None)
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    auto: Any = AutoModelForCausalLM
    module = auto.from_pretrained(folder, dtype=torch.float32)
    answers = []
    for prompt, guess in zip(prompts, answers_alone, strict=True):
        ids = tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt}], add_generation_prompt=True, return_tensors="pt", return_dict=True
        )["input_ids"]
        in_steps = prompt in (prompts[0], prompts[len(short)])  # one prompt of either length without a guess
        answers.append(_greedy(module, ids, [] if in_steps else guess, _sampling(prompt).max_tokens or 0))
    return answers


def _greedy(module: Any, ids: torch.Tensor, guess: list[int], max_tokens: int) -> list[int]:
    """Return what `generate` returns. A guess is right if each of its tokens is the likeliest after all before it,
    which one pass over the whole shows; only for a wrong guess every token takes a pass.
    """
    is_whole = bool(guess) and (len(guess) == max_tokens or guess[-1] == module.generation_config.eos_token_id)
    with torch.inference_mode():
        if is_whole:
            said = module(torch.cat([ids, torch.tensor([guess])], 1)).logits[0, ids.shape[1] - 1 : -1].argmax(-1)
            if said.tolist() == guess:
                return guess
        out = module.generate(ids, do_sample=False, max_new_tokens=max_tokens)
    return list(out[0, ids.shape[1] :].tolist())


def _answers(engine: Engine, prompts: list[str]) -> list[list[int]]:
    submits = [Submit(request_id="-", prompt=prompt, sampling=_sampling(prompt)) for prompt in prompts]
    completions = list(engine.generate(submits))
    assert [completion.error for completion in completions] == [""] * len(prompts)
    return [completion.token_ids for completion in completions]


def test_long_prompts_have_over_250_tokens(engine_alone: Engine, long: list[str]) -> None:
    assert engine_alone.tokenizer is not None
    assert min(len(engine_alone.tokenizer.encode(prompt)) for prompt in long) > 250


def test_tokens_of_single_requests_equal_transformers(
    answers_alone: list[list[int]], reference: list[list[int]]
) -> None:
    assert answers_alone == reference


def test_tokens_with_batches_chunks_and_preemptions_equal_transformers(
    short: list[str], prompts: list[str], reference: list[list[int]]
) -> None:
    """The prefix cache is on; `test_engine_storms` tests it off, with a smaller model."""
    frames: list[Frame] = []

    def keep(message: TelemetryMessage) -> None:
        if isinstance(message, Frame):
            frames.append(message)

    config = EngineConfig(
        dtype="float32",
        device="cpu",
        block_size=4,
        num_gpu_blocks_override=96,
        max_num_batched_tokens=72,
    )
    with Engine(config, publish=keep) as engine:
        answers = _answers(
            engine, [*short, *short, *short, *prompts]
        )  # more requests at once, so that more are preempted
    assert answers == [*reference[: len(short)] * 3, *reference]
    assert frames[-1].counters.preemptions >= 5
    assert frames[-1].counters.num_running == frames[-1].counters.num_waiting == 0


def test_tokens_with_all_features_equal_transformers(
    short: list[str], long: list[str], prompts: list[str], reference: list[list[int]], tmp_path: Path
) -> None:
    """Prefix cache, forks, chunks, a small pool, swaps to host memory and disk, and async scheduling."""
    config = EngineConfig(
        dtype="float32",
        device="cpu",
        block_size=4,
        num_gpu_blocks_override=96,
        max_num_batched_tokens=72,
        host_kv_memory_bytes=40 * BLOCK_BYTES,
        disk_kv_memory_bytes=800 * BLOCK_BYTES,
        disk_kv_path=str(tmp_path / "tier"),
        preemption="swap",
        async_scheduling=True,
    )
    frames: list[Frame] = []

    def keep(message: TelemetryMessage) -> None:
        if isinstance(message, Frame):
            frames.append(message)

    with Engine(config, publish=keep) as engine:
        assert engine.hello.cache.block_bytes == BLOCK_BYTES
        sampling = SamplingParams(temperature=0.0, max_tokens=NUM_LONG, n=2)
        some = [*short[:7], *long[:3], *short[:3], long[0]]
        submits = [Submit(request_id="-", prompt=prompt, sampling=sampling) for prompt in some]
        found = [completion.token_ids for completion in engine.generate(submits)]
        engine.components.scheduler.check_integrity()
        assert engine.overlaps.overlapped > 0, engine.overlaps
    assert found == [reference[prompts.index(prompt)][:NUM_LONG] for prompt in some for _ in range(2)]
    counters = frames[-1].counters
    assert counters.preemptions > 0
    assert counters.copied_blocks > 0
    assert counters.offloaded_blocks > 0
    assert counters.loaded_blocks > 0
    assert counters.swapped_blocks > 0


@pytest.mark.storm
def test_tokens_with_the_virtual_allocator_equal_transformers(
    short: list[str], long: list[str], prompts: list[str], reference: list[list[int]]
) -> None:
    """`test_engine_storms` tests all allocators with a smaller model."""
    config = EngineConfig(
        dtype="float32",
        device="cpu",
        allocator="virtual",
        enable_prefix_caching=False,
        max_model_len=512,
        num_gpu_blocks_override=40,
        max_num_batched_tokens=72,
        max_num_seqs=8,
    )
    some = [*short[:6], long[0]]
    sampling = SamplingParams(temperature=0.0, max_tokens=NUM_LONG)
    with Engine(config) as engine:
        submits = [Submit(request_id="-", prompt=prompt, sampling=sampling) for prompt in some]
        found = [completion.token_ids for completion in engine.generate(submits)]
        assert engine.hello.cache.allocator == "virtual"
    assert found == [reference[prompts.index(prompt)][:NUM_LONG] for prompt in some]


def test_token_ids_as_prompt_give_the_same_answer(
    engine_alone: Engine, prompts: list[str], reference: list[list[int]]
) -> None:
    """Prompts of token ids do not go through a chat template."""
    assert engine_alone.tokenizer is not None
    ids = tuple(engine_alone.tokenizer.chat((ChatMessage(role="user", content=prompts[0]),)))
    sampling = _sampling(prompts[0])
    (completion,) = engine_alone.generate([Submit(request_id="a", prompt_token_ids=ids, sampling=sampling)])
    assert completion.token_ids == reference[0]
