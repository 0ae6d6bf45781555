"""Greedy tokens with an adapter equal transformers with the adapter merged, whatever runs in the same batch."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.engine.lora_folder import greedy, merged, write_adapter
from tests.engine.recurrent_models import recurrent_model

from kvscope_engine import Engine, EngineConfig
from kvscope_engine.completion import Completion
from kvscope_telemetry.engine_config import LoraModule, parse_speculative_config
from kvscope_telemetry.messages.commands import Submit
from kvscope_telemetry.messages.sampling_params import SamplingParams

NUM_TOKENS = 8
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {"attention_bias": True}),
    "qwen3": ("qwen3", {"tie_word_embeddings": True}),
    "qwen3, experts": ("qwen3_moe", {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}),
    "gemma 2": ("gemma2", {"sliding_window": 8, "query_pre_attn_scalar": 16, "tie_word_embeddings": False}),
    "phi 3, fused as it comes": ("phi3", {"head_dim": None}),
}
OPTIONS: dict[str, dict[str, Any]] = {
    "one adapter at a time": {"max_loras": 1},
    "overlapped": {"async_scheduling": True},
    "guessed ahead": {"speculative_config": parse_speculative_config('{"num_speculative_tokens": 3}')},
    "swapped out": {
        "num_gpu_blocks_override": 40,
        "host_kv_memory_bytes": 1 << 20,
        "preemption": "swap",
        "max_num_seqs": 6,
    },
    "buddies": {"allocator": "buddy"},
}


def prompts() -> list[tuple[int, ...]]:
    """Return prompts of many lengths, some with a common prefix."""
    found = [tuple(random.Random(i).choices(range(3, 300), k=k)) for i, k in enumerate((1, 7, 33))]
    return [*found, found[-1][:21] + found[1]]


class AdapterFolders:
    """A model and three adapters of it."""

    def __init__(self, path: Path, model: Any) -> None:
        model.save_pretrained(path / "model")
        self.path, self.model = path, model
        names = {name.rpartition(".")[2] for name, part in model.named_modules() if isinstance(part, torch.nn.Linear)}
        targets = sorted(names - {"lm_head"})
        attention = [name for name in targets if name in ("q_proj", "v_proj", "qkv_proj")]
        write_adapter(path / "few", model, seed=1, rank=3, targets=attention)
        write_adapter(path / "all", model, seed=2, rank=8, targets=targets, use_rslora=True)
        self.names = ("", "few", "all")
        self.models = {name: merged(model, path / name) if name else model for name in self.names}

    def config(self, **options: Any) -> EngineConfig:
        modules = tuple(LoraModule(name=name, path=str(self.path / name)) for name in self.names if name)
        small = {"block_size": 4, "num_gpu_blocks_override": 160, "max_num_batched_tokens": 24}
        given = {"model": str(self.path / "model"), "device": "cpu", "dtype": "float32", "lora_modules": modules}
        return EngineConfig(**(given | small | options))

    def expected(self) -> list[tuple[int, ...]]:
        return [greedy(self.models[name], prompt, NUM_TOKENS) for prompt in prompts() for name in self.names]

    def submits(self, **fields: Any) -> list[Submit]:
        sampling = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
        asked: dict[str, Any] = {"request_id": "-", "sampling": sampling} | fields
        return [Submit(prompt_token_ids=prompt, adapter=name, **asked) for prompt in prompts() for name in self.names]


def tokens(completions: list[Completion]) -> list[tuple[int, ...]]:
    return [tuple(one.token_ids) for one in completions]


@pytest.fixture
def folders(tmp_path: Path, vivid_model: Callable[..., Any]) -> Callable[..., AdapterFolders]:
    return lambda model_type, **changes: AdapterFolders(tmp_path, vivid_model(model_type, **changes))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("case", MODELS)
def test_lora_tokens_equal_those_of_a_model_with_merged_weights(
    folders: Callable[..., AdapterFolders], case: str
) -> None:
    """Runs all requests in a batch, again with a full prefix cache, and each alone."""
    model_type, changes = MODELS[case]
    made = folders(model_type, **changes)
    expected, submits = made.expected(), made.submits()
    assert len(set(expected)) > len(expected) // 2, "adapters change what is said"
    with Engine(made.config()) as engine:
        assert tokens(list(engine.generate(submits))) == expected
        again = list(engine.generate(submits))
        assert tokens(again) == expected
        assert all(one.usage.cached_tokens > 20 for one in again[-6:])
        engine.reset_prefix_cache()
        assert [tuple(next(iter(engine.generate([submit]))).token_ids) for submit in submits] == expected


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("family", ["lfm2", "qwen3_next"])
def test_adapters_apply_to_the_right_rows_of_recurrent_layers(tmp_path: Path, family: str) -> None:
    """Recurrent layers run decodes in the order of their states and prefills separately, not in batch order."""
    model = recurrent_model(family, vocab_size=300)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.mul_(4)
    made = AdapterFolders(tmp_path, model)
    cases = list(zip(made.submits(), made.expected(), strict=True))
    assert len({tokens for _, tokens in cases}) > len(cases) // 2, "adapters change what is said"
    with Engine(made.config(enable_prefix_caching=False)) as engine:
        for seed in range(3):
            random.Random(seed).shuffle(cases)
            assert tokens(list(engine.generate([submit for submit, _ in cases]))) == [expected for _, expected in cases]
        assert not any("failed" in note for note in engine.notes)


@pytest.mark.parametrize("case", OPTIONS)
def test_lora_tokens_equal_those_of_merged_weights_also_with_other_engine_options(
    folders: Callable[..., AdapterFolders], case: str
) -> None:
    made = folders("llama")
    with Engine(made.config(**OPTIONS[case])) as engine:
        assert tokens(list(engine.generate(made.submits()))) == made.expected()
        engine.components.scheduler.check_integrity()


def test_completions_of_one_prompt_share_blocks_and_adapter(folders: Callable[..., AdapterFolders]) -> None:
    made = folders("llama")
    sampling = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True, n=2)
    with Engine(made.config()) as engine:
        found = tokens(list(engine.generate(made.submits(sampling=sampling))))
    assert found == [one for one in made.expected() for _ in range(2)]


@pytest.mark.parametrize(
    "options", [{"dtype": "bfloat16"}, {"quantization": "int8"}, {"quantization": "int4"}], ids=str
)
def test_rounded_weights_give_the_same_tokens_in_a_batch_and_alone(
    folders: Callable[..., AdapterFolders], options: dict[str, Any]
) -> None:
    """Deltas are added to the results of rounded weights; compiled layers are run part by part."""
    made = folders("llama")
    submits = made.submits()
    with Engine(made.config(**options, enable_prefix_caching=False)) as engine:
        together = tokens(list(engine.generate(submits)))
        alone = [tuple(next(iter(engine.generate([submit]))).token_ids) for submit in submits]
    same = sum(one == other for one, other in zip(together, alone, strict=True))
    assert same >= len(submits) - 2, "near ties may be resolved differently in another batch"
    assert len(set(together)) > len(together) // 2
