"""`--deterministic`: the numbers of a request do not depend on other requests, preemption or the prefix cache."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.kernels import conftest as kernels

from kvscope_engine import Engine, EngineConfig, SamplingParams
from kvscope_engine.model.batch_invariance.tile_check import differing_part, proven_tiles
from kvscope_engine.model.loader.model_loader import load_model
from kvscope_engine.model.verification.hook_check import check_hook
from kvscope_kernels import ops_for
from kvscope_kernels.attention_args import AttentionArgs, QueryRuns
from kvscope_kernels.cpu.library import library
from kvscope_telemetry.engine_config import LoraModule
from kvscope_telemetry.errors import BadInput
from kvscope_telemetry.messages.commands import Finished, Submit, Tokens

WIDE = {
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 64,
}
"""So wide that products of one row and of several rows sum in different orders."""

Answer = list[tuple[int, float]]
"""Tokens with their log probabilities."""

interpret = kernels.interpret

pytestmark = pytest.mark.skipif(library() is None, reason="no compiler: attention is not the CPU's own")


GPU = [pytest.param(("cuda", dtype), marks=pytest.mark.gpu) for dtype in ("float32", "bfloat16", "float16")]


@pytest.fixture(
    params=[pytest.param(("cpu", "float32"), marks=pytest.mark.storm), ("cpu", "bfloat16"), *GPU], ids=" ".join
)
def make_deterministic_engine(
    request: pytest.FixtureRequest, tiny_model: Callable[..., str]
) -> Iterator[Callable[..., Engine]]:
    """Function that makes deterministic engines, which are closed after the test."""
    engines: list[Engine] = []
    device, dtype = request.param
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    name = tiny_model(**WIDE, initializer_range=0.1)

    def make_engine(**options: Any) -> Engine:
        given = {"block_size": 4, "num_gpu_blocks_override": 256, "max_num_batched_tokens": 64} | options
        engines.append(Engine(EngineConfig(model=name, device=device, dtype=dtype, deterministic=True, **given)))
        return engines[-1]

    yield make_engine
    for engine in engines:
        engine.close()


def submits(count: int) -> list[Submit]:
    """Return prompts of many lengths, of which every other begins like the one before."""
    rng, prompts = random.Random(3), list[tuple[int, ...]]()
    for index in range(count):
        words = tuple(rng.choices(range(3, 256), k=rng.choice((3, 17, 40, 77))))
        prompts.append(words if index % 2 == 0 else prompts[-1][:33] + words)
    return [
        Submit(
            request_id=str(index),
            prompt_token_ids=prompt,
            sampling=SamplingParams(max_tokens=9, logprobs=0, ignore_eos=True, temperature=index % 3 / 2, seed=7),
        )
        for index, prompt in enumerate(prompts)
    ]


def answers(engine: Engine, asked: Sequence[Submit], *, at_once: bool = True) -> dict[str, Answer]:
    said: dict[str, Answer] = {submit.request_id: [] for submit in asked}
    for group in [asked] if at_once else [[submit] for submit in asked]:
        for submit in group:
            engine.submit(submit)
        while engine.has_unfinished:
            for message in engine.step():
                assert not isinstance(message, Finished) or not message.error, message
                if isinstance(message, Tokens):
                    said[message.request_id] += [(entry.token_id, entry.logprob) for entry in message.logprobs]
    return said


def test_request_gives_the_same_bits_alone_and_beside_others(make_deterministic_engine: Callable[..., Engine]) -> None:
    asked = submits(6)
    alone = answers(make_deterministic_engine(), asked, at_once=False)
    assert all(len(answer) == 9 for answer in alone.values())
    for options in (
        {},
        {"max_num_batched_tokens": 16, "max_num_seqs": 4},  # prompts are cut elsewhere
        {"enable_prefix_caching": False, "block_size": 8, "fingerprints": True},
        {"num_gpu_blocks_override": 40},  # preempted and recomputed
        {"num_gpu_blocks_override": 40, "host_kv_memory_bytes": 1 << 22, "preemption": "swap"},
    ):
        assert answers(make_deterministic_engine(**options), asked) == alone, options


def test_cached_output_equals_the_same_tokens_computed_as_prompt(
    make_deterministic_engine: Callable[..., Engine],
) -> None:
    """The second turn of a chat begins with blocks that were written while decoding."""
    engine, (first, *_) = make_deterministic_engine(), submits(1)
    said = [token for token, _ in answers(engine, [first])["0"]]
    sampling = SamplingParams(max_tokens=5, logprobs=0, ignore_eos=True, temperature=0.0)
    turn = Submit(request_id="turn", prompt_token_ids=(*(first.prompt_token_ids or ()), *said, 9, 8), sampling=sampling)
    cached = answers(engine, [turn])
    assert engine.step_recorder.snapshot(engine.hello, 0, 0).counters.cached_tokens > 0
    assert answers(make_deterministic_engine(), [turn]) == cached


def test_deterministic_engine_with_two_threads_gives_the_same_bits_in_any_batch(
    make_deterministic_engine: Callable[..., Engine],
) -> None:
    """The number of threads does change bits, so it stays fixed and is recorded."""
    asked = submits(3)
    try:
        assert answers(make_deterministic_engine(num_threads=2), asked) == answers(
            make_deterministic_engine(num_threads=2), asked, at_once=False
        )
    finally:
        torch.set_num_threads(1)


def test_check_at_load_names_a_layer_that_depends_on_positions(tiny_model: Callable[..., str]) -> None:
    loaded = load_model(EngineConfig(model=tiny_model(), device="cpu", dtype="float32"), lambda progress: None)
    check_hook(loaded.module)
    assert differing_part(loaded.module, 16, ops_for("cpu")) == ""
    mlp = loaded.module.model.layers[0].mlp  # type: ignore[union-attr]
    plain = mlp.forward
    mlp.forward = lambda x: plain(x) + torch.arange(x.shape[1])[:, None] * 1e-3
    assert differing_part(loaded.module, 16, ops_for("cpu")).startswith("on this machine, the results of layer 1 ")


def test_check_at_load_names_an_output_layer_that_depends_on_positions(tiny_model: Callable[..., str]) -> None:
    loaded = load_model(EngineConfig(model=tiny_model(), device="cpu", dtype="float32"), lambda progress: None)
    check_hook(loaded.module)
    head = loaded.module.get_output_embeddings()  # type: ignore[operator]
    plain = head.forward
    head.forward = lambda x: plain(x) + (torch.arange(x.shape[1])[:, None] > 9) * 1e-3
    assert differing_part(loaded.module, 16, ops_for("cpu")).startswith(
        "on this machine, the results of its last layers "
    )


@pytest.mark.interpreter
def test_gpu_attention_gives_the_same_bits_in_every_batch_position(
    interpret: Callable[..., Any], tiny_model: Callable[..., str]
) -> None:
    """The kernel runs between CPU matrix products; with its usual launch options it does not pass the check."""
    name = tiny_model(model_type="mistral", architectures=["MistralForCausalLM"], sliding_window=9)
    loaded = load_model(EngineConfig(model=name, device="cpu", dtype="float32"), lambda progress: None)
    check_hook(loaded.module)
    prefill = ops_for("cuda").prefill

    def fixed(args: AttentionArgs, runs: QueryRuns) -> torch.Tensor:
        result: torch.Tensor = interpret(prefill, args, runs._replace(plans=None, lengths=None))
        return result

    def varying(args: AttentionArgs, runs: QueryRuns) -> torch.Tensor:
        return fixed(args, runs._replace(is_fixed=False))

    assert differing_part(loaded.module, 16, replace(ops_for("cpu"), prefill=fixed)) == ""
    assert differing_part(loaded.module, 16, replace(ops_for("cpu"), prefill=varying)).startswith(
        "on this machine, the results of layer 1 "
    )


@pytest.mark.parametrize("is_rare", [False, True])
def test_deterministic_engine_uses_a_tile_size_only_if_it_gives_the_same_bits(
    tiny_model: Callable[..., str], *, is_rare: bool
) -> None:
    """Also if only a few tokens differ: on some processors, one of thousands of numbers does."""
    loaded = load_model(EngineConfig(model=tiny_model(), device="cpu", dtype="float32"), lambda progress: None)
    check_hook(loaded.module)
    size, *equal_sizes = proven_tiles(loaded)
    assert size == 16
    if not equal_sizes:
        pytest.skip("products of no other size give the same bits on this processor")
    changed = equal_sizes[0]
    mlp = loaded.module.model.layers[0 if is_rare else 1].mlp  # type: ignore[union-attr]
    plain = mlp.forward
    least = 2.3 if is_rare else -torch.inf

    def changing(x: torch.Tensor) -> torch.Tensor:
        return plain(x) + 1e-3 * (x[..., :1] > least) * (x.shape[1] == changed)

    mlp.forward = changing
    assert proven_tiles(loaded) == (size, *equal_sizes[1:]), f"its layer gives something else in tiles of {changed}"


@pytest.mark.parametrize(
    "options",
    [
        {"piecewise_graphs": True},
        {"attention_backend": "flashinfer"},
        {"cpu_offload_gb": 1.0},
        {"tensor_parallel_size": 2},
        {"kv_cache_dtype": "int8"},
        {
            "keep_disk_kv": True,
            "disk_kv_path": "kv.bin",
            "disk_kv_memory_bytes": 1 << 20,
            "host_kv_memory_bytes": 1 << 20,
        },
        {"sparse_decode": 0.5},
        {"page_heat": 4},
        {"async_scheduling": True},
        {"lora_modules": (LoraModule(name="a", path="b"),)},
    ],
)
def test_options_that_depend_on_the_batch_are_refused_by_name(options: dict[str, Any]) -> None:
    with pytest.raises(BadInput, match=f"^{next(iter(options))}=.* is not accepted with deterministic=True: "):
        EngineConfig(deterministic=True, **options)


def test_models_that_depend_on_the_batch_are_refused_by_name(tiny_model: Callable[..., str]) -> None:
    with pytest.raises(BadInput, match=r"not accepted with model .*with float16, the order of additions"):
        Engine(EngineConfig(model=tiny_model(), device="cpu", dtype="float16", deterministic=True))
    experts = {"architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "num_local_experts": 4}
    with pytest.raises(BadInput, match="the number of rows per expert"):
        Engine(EngineConfig(model=tiny_model(**experts), device="cpu", dtype="float32", deterministic=True))
