"""Models with MLA latents: served as such, with transformers' tokens and log-probabilities, however they are run."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.engine.model.conftest import TINY

from kvscope_engine import Engine, EngineConfig
from kvscope_engine.completion import Completion
from kvscope_engine.components import mla_expansion_notes
from kvscope_engine.model.kv_cache.kv_storage import LayerShape
from kvscope_engine.model.layers.attention.mla.latents import Latents
from kvscope_engine.model.verification.hook_check import check_hook
from kvscope_telemetry.engine_config import SpeculativeConfig
from kvscope_telemetry.errors import BadInput
from kvscope_telemetry.messages.commands import Submit
from kvscope_telemetry.messages.sampling_params import SamplingParams
from kvscope_telemetry.messages.telemetry import Frame, TelemetryMessage

pytestmark = pytest.mark.filterwarnings("ignore")
NUM_TOKENS = 10
LATENTS = TINY["youtu"]
EXPERTS: dict[str, Any] = {
    "first_k_dense_replace": 1,
    "n_routed_experts": 4,
    "n_group": 1,
    "topk_group": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
}
YARN: dict[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
    "mscale": 0.9,
    "mscale_all_dim": 0.8,
    "beta_fast": 32,
    "beta_slow": 1,
}
LONGCAT = {"num_layers": 1, "n_routed_experts": 4, "zero_expert_num": 2, "moe_topk": 2, "expert_ffn_hidden_size": 16}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "deepseek_v2": ("deepseek_v2", LATENTS | EXPERTS),
    "deepseek_v2, queries whole": ("deepseek_v2", LATENTS | EXPERTS | {"q_lora_rank": None}),
    "deepseek_v3": ("deepseek_v3", LATENTS | EXPERTS),
    "deepseek_v3, yarn": ("deepseek_v3", LATENTS | EXPERTS | {"rope_parameters": YARN, "rope_interleave": False}),
    "glm4_moe_lite": ("glm4_moe_lite", LATENTS | EXPERTS | {"v_head_dim": 24}),
    "minicpm3": ("minicpm3", LATENTS),
    "youtu": ("youtu", LATENTS),
    "axk1": ("axk1", LATENTS | EXPERTS),
    "longcat_flash": ("longcat_flash", LATENTS | LONGCAT),
}
"""One model of each architecture with latents for which transformers has a causal model without its own mask."""
HELD = LayerShape(1, 40, latent_dim=32)


def prompts() -> list[list[int]]:
    """Return prompts of many lengths; the last two share a prefix."""
    found = [random.Random(i).choices(range(3, 300), k=k) for i, k in enumerate((1, 5, 33, 70))]
    return [*found, found[-1][:41] + found[0], found[-1][:41] + found[1]]


def growing() -> list[list[int]]:
    """Return prompts whose requests exceed the pool as they grow."""
    return [random.Random(10 + i).choices(range(3, 300), k=8) for i in range(8)]


def greedy(model: Any, prompt: list[int]) -> tuple[list[int], list[list[float]]]:
    """Return tokens, and the log-probabilities of the five most likely tokens at each."""
    model.generation_config.eos_token_id = None
    with torch.inference_mode():
        out = model.generate(
            torch.tensor([prompt]),
            max_new_tokens=NUM_TOKENS,
            do_sample=False,
            output_logits=True,
            return_dict_in_generate=True,
        )
    tops = [logits[0].log_softmax(-1).topk(5).values.tolist() for logits in out.logits]
    return out.sequences[0, len(prompt) :].tolist(), tops


def asked(prompts: Sequence[Sequence[int]], **options: Any) -> list[Submit]:
    sampling = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=5, **options)
    return [Submit(request_id="-", prompt_token_ids=tuple(ids), sampling=sampling) for ids in prompts]


def check(completion: Completion, expected: tuple[list[int], list[list[float]]]) -> None:
    tokens, tops = expected
    assert completion.token_ids == tokens
    for found, wanted in zip(completion.logprobs, tops, strict=True):
        assert [logprob for _, logprob in found.top] == pytest.approx(wanted, abs=1e-3)


def config_of(folder: Path, **changes: Any) -> EngineConfig:
    usual: dict[str, Any] = {"dtype": "float32", "block_size": 4, "num_gpu_blocks_override": 90}
    return EngineConfig(model=str(folder), device="cpu", **(usual | {"max_num_batched_tokens": 24} | changes))


@pytest.mark.parametrize("case", MODELS)
def test_tokens_and_logprobs_equal_transformers(tmp_path: Path, vivid_model: Callable[..., Any], case: str) -> None:
    """Covers chunked prefill, batches, the prefix cache, forks, preemption, and swapping to host memory."""
    model = vivid_model(MODELS[case][0], **MODELS[case][1])
    model.save_pretrained(tmp_path)
    expected, grown = ([greedy(model, ids) for ids in each] for each in (prompts(), growing()))
    frames: list[TelemetryMessage] = []
    few = {"num_gpu_blocks_override": 27, "host_kv_memory_bytes": 1 << 20, "preemption": "swap", "max_num_seqs": 8}
    with Engine(config_of(tmp_path, **few), publish=frames.append) as engine:
        assert set(engine.components.storage.layers) == {HELD}
        for completion, wanted in zip(engine.generate(asked(prompts())), expected, strict=True):
            check(completion, wanted)
        (again,) = engine.generate(asked(prompts()[-1:]))
        check(again, expected[-1])
        assert again.usage.cached_tokens > 0
        for completion in engine.generate(asked(prompts()[3:4], n=3)):
            check(completion, expected[3])
        for completion, wanted in zip(engine.generate(asked(growing())), grown, strict=True):
            check(completion, wanted)
    counters = [message for message in frames if isinstance(message, Frame)][-1].counters
    assert counters.preemptions > 0
    assert counters.swapped_blocks > 0


def test_cache_info_reports_the_latents(tmp_path: Path, vivid_model: Callable[..., Any]) -> None:
    model_type, changes = MODELS["deepseek_v3"]
    vivid_model(model_type, **changes).save_pretrained(tmp_path)
    with Engine(config_of(tmp_path)) as engine:
        cache = engine.hello.cache
        assert cache.block_bytes == 2 * 4 * 40 * 4, "of two layers and four tokens"
        assert [(group.kind, group.num_layers, group.block_bytes) for group in cache.groups] == [("latent", 2, 1280)]
        keys_and_values = 2 * 4 * 24
        assert cache.groups[0].expanded_bytes == 2 * 4 * keys_and_values * 4, "two layers, four tokens, four heads"
        assert not any("latents" in note for note in engine.components.notes)


@pytest.mark.parametrize(
    "options",
    [
        {"page_heat": 1},
        {"allocator": "virtual", "enable_prefix_caching": False},
        {"speculative_config": SpeculativeConfig(num_speculative_tokens=3)},
        {"num_threads": 2},
    ],
    ids=str,
)
def test_mla_model_gives_the_same_tokens_with_options_such_as_speculation_or_page_heat(
    tmp_path: Path, vivid_model: Callable[..., Any], options: dict[str, Any]
) -> None:
    model = vivid_model(MODELS["deepseek_v3"][0], **MODELS["deepseek_v3"][1])
    model.save_pretrained(tmp_path)
    with Engine(config_of(tmp_path, **options)) as engine:
        for completion, ids in zip(engine.generate(asked(prompts())), prompts(), strict=True):
            check(completion, greedy(model, ids))
        if "page_heat" in options:
            ledger = engine.components.pool.ledger
            assert ledger.attention[ledger.attention_step > 0].any()


@pytest.mark.parametrize(
    "options",
    [
        {"dtype": "bfloat16"},
        {"dtype": "float16"},
        {"quantization": "int8"},
        {"kv_cache_dtype": "int8"},
        {"kv_cache_dtype": "fp8", "dtype": "bfloat16"},
        {"kv_cache_dtype": "fp8", "page_heat": 1},
    ],
    ids=str,
)
def test_latents_work_with_fewer_bits(tmp_path: Path, vivid_model: Callable[..., Any], options: dict[str, Any]) -> None:
    """The checks at load pass as they do without latents."""
    vivid_model(MODELS["deepseek_v2"][0], **MODELS["deepseek_v2"][1]).save_pretrained(tmp_path)
    with Engine(config_of(tmp_path, **options)) as engine:
        assert set(engine.components.storage.layers) == {HELD}
        assert not any("latents" in note for note in engine.components.notes)
        assert all(len(completion.token_ids) == NUM_TOKENS for completion in engine.generate(asked(prompts())))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            {"tensor_parallel_size": 2},
            r"tensor_parallel_size=2 is not accepted .* only layers like those of Llama can be split",
        ),
        ({"sparse_decode": 0.5}, r"sparse_decode=0.5 is not accepted with .* latents"),
    ],
)
def test_options_unsupported_with_latents_are_refused(
    tmp_path: Path, vivid_model: Callable[..., Any], options: dict[str, Any], words: str
) -> None:
    model_type, changes = MODELS["deepseek_v3"]
    vivid_model(model_type, **changes).save_pretrained(tmp_path)
    with pytest.raises(BadInput, match=words):
        Engine(config_of(tmp_path, **options))


def test_mla_model_whose_latent_attention_is_wrong_is_served_with_expanded_keys(
    vivid_model: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model is served with expanded keys and values, and a notice gives the cost."""

    def mixed_up(self: Latents, attended: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        return right(self, attended.flip(1), out)

    right = Latents.values
    monkeypatch.setattr(Latents, "values", mixed_up)
    model = vivid_model(MODELS["youtu"][0], **MODELS["youtu"][1])
    assert {call.shape for call in check_hook(model)} == {LayerShape(4, 24)}
    (note,) = mla_expansion_notes(model)
    assert "192 numbers per token and layer instead of 40: the results of paged attention differ" in note


def test_mla_model_with_another_attention_structure_is_served_with_expanded_keys(
    vivid_model: Callable[..., Any],
) -> None:
    """Its values have 12 dimensions, fewer than its keys."""
    model = vivid_model(MODELS["youtu"][0], **MODELS["youtu"][1])
    for layer in model.model.layers:
        layer.self_attn.kv_b_proj.bias = torch.nn.Parameter(torch.zeros(layer.self_attn.kv_b_proj.out_features))
    assert {call.shape for call in check_hook(model)} == {LayerShape(4, 24)}
    assert "the structure of its attention is unknown" in mla_expansion_notes(model)[0]
