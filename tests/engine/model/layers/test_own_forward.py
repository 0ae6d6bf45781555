"""Models whose attention cannot be replaced run transformers' own code over our blocks, one request at a time or
batched.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.engine.model_types import tiny_config
from torch import nn

from kvscope_engine import Engine, EngineConfig, SamplingParams
from kvscope_engine.model.kv_cache import kv_storage
from kvscope_engine.model.kv_cache.kv_storage import KVStorage, TokenPart
from kvscope_engine.model.layers import own_forward as own_module
from kvscope_engine.model.layers.attention.paged_attention import DecodeBatch, PagedContext, PrefillBatch
from kvscope_engine.model.layers.own_forward import OwnBatch, OwnForward, TokensInBlocks, own_forward
from kvscope_engine.model.layers.recurrent.recurrent_layers import StateBatch
from kvscope_engine.model.verification.hook_check import check_hook, own_calls
from kvscope_engine.planning.inference_plan import InferenceQuestion, plan_inference
from kvscope_engine.planning.plan_answer import build_answer
from kvscope_engine.planning.skeleton import read_skeleton
from kvscope_kernels import ops_for
from kvscope_telemetry.engine_config import SpeculativeConfig
from kvscope_telemetry.errors import BadInput
from kvscope_telemetry.messages.commands import Submit

NAMES = ("falcon", "deepseek_v32", "dots3_note_text", "qwen4_exp_text")
Make = Callable[..., Engine]


def config_of(model_type: str) -> Any:
    config = tiny_config(model_type)
    if model_type == "falcon":
        config.alibi = True
    return config


def model_of(model_type: str, dtype: torch.dtype = torch.float32) -> nn.Module:
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    auto: Any = AutoModelForCausalLM
    model: nn.Module = auto.from_config(config_of(model_type), dtype=dtype, attn_implementation="eager").eval()
    return model


@pytest.fixture
def engine_of(tmp_path: Path) -> Iterator[Make]:
    """Function that makes an engine of a tiny model of a type."""
    made: list[Engine] = []

    def make(model_type: str, **options: Any) -> Engine:
        path = tmp_path / f"{model_type}.json"
        config_of(model_type).to_json_file(path, use_diff=False)
        given: dict[str, Any] = {"block_size": 4, "num_gpu_blocks_override": 200, "max_num_batched_tokens": 24}
        given |= {"device": "cpu", "dtype": "float32", "max_model_len": 256} | options
        made.append(Engine(EngineConfig(model=f"dummy:{path}", **given)))
        return made[-1]

    yield make
    for engine in made:
        engine.close()


def prompts() -> list[list[int]]:
    return [random.Random(seed).choices(range(3, 90), k=length) for seed, length in enumerate((5, 40, 17))]


def tokens_of(engine: Engine, asked: list[list[int]]) -> list[tuple[int, ...]]:
    sampling = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    requests = [
        Submit(request_id=str(i), prompt_token_ids=tuple(ids), sampling=sampling) for i, ids in enumerate(asked)
    ]
    return [tuple(completion.token_ids) for completion in engine.generate(requests)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("model_type", NAMES)
def test_tensors_that_each_layer_of_an_own_forward_model_caches_are_found(model_type: str, dtype: torch.dtype) -> None:
    module = model_of(model_type, dtype)
    calls = check_hook(module)
    own = own_forward(module)
    assert own is not None
    assert check_hook(module) is calls, "the result must be cached"
    assert [call.shape.parts for call in calls] == [layer.parts for layer in own.layers]
    if model_type == "falcon":
        assert calls[0].shape.parts == (TokenPart("key", (1, 16), dtype), TokenPart("value", (1, 16), dtype))
        assert (calls[0].shape.num_elements, calls[0].shape.latent_dim) == (2 * 16, 0)
    if model_type == "deepseek_v32":
        assert [part.name for part in calls[0].shape.parts] == ["key", "value", "index"]
        assert [part.shape for part in calls[0].shape.parts] == [(1, 32), (1, 8), (16,)]
        assert (calls[0].shape.num_elements, calls[0].shape.latent_dim) == (32 + 8 + 16, 32)
        assert calls[0].shape.index_bytes(dtype) == 16 * dtype.itemsize
    if model_type == "dots3_note_text":
        assert {call.options.sliding_window for call in calls} == {None, 13}
        assert {call.shape.latent_dim for call in calls} == {32, 48}
    assert bool(own.states) is (model_type == "qwen4_exp_text")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("model_type", ["falcon", "deepseek_v32"])
def test_model_that_reads_cached_values_of_a_wrong_position_is_refused_at_load(
    model_type: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = TokensInBlocks.read

    def wrong(self: TokensInBlocks, layer: int, name: str, first: int) -> torch.Tensor:
        found = read(self, layer, name, first)
        past = self.past - first
        return torch.cat([found[:, :past].roll(1, 1), found[:, past:]], 1) if name == "value" else found

    monkeypatch.setattr(TokensInBlocks, "read", wrong)
    with pytest.raises(BadInput, match="by transformers' own code: its results for a prompt in pieces differ"):
        check_hook(model_of(model_type, dtype))


def test_model_whose_cached_indexer_keys_are_lost_is_refused_at_load(monkeypatch: pytest.MonkeyPatch) -> None:
    read = TokensInBlocks.read

    def wrong(self: TokensInBlocks, layer: int, name: str, first: int) -> torch.Tensor:
        found = read(self, layer, name, first)
        return torch.cat([found[:, : self.past] * 0, found[:, self.past :]], 1) if name == "index" else found

    monkeypatch.setattr(TokensInBlocks, "read", wrong)
    with pytest.raises(BadInput, match="its results for a prompt in pieces differ"):
        check_hook(model_of("deepseek_v32"))


def test_model_that_reads_the_state_of_another_sequence_is_refused_at_load(monkeypatch: pytest.MonkeyPatch) -> None:
    made = own_module.CallStates.__init__

    def all_in_one(self: Any, batch: Any, numbers: Any) -> None:
        made(self, batch, numbers)
        self._slots = torch.ones_like(self._slots)

    monkeypatch.setattr(own_module.CallStates, "__init__", all_in_one)
    with pytest.raises(BadInput, match="its results for a prompt in pieces differ"):
        check_hook(model_of("qwen4_exp_text"))


def test_decodes_are_batched_only_if_the_result_is_right(monkeypatch: pytest.MonkeyPatch) -> None:
    for model_type, is_right in (("falcon", True), ("deepseek_v32", True), ("gpt_neox_japanese", False)):
        module = model_of(model_type)
        check_hook(module)
        own = own_forward(module)
        assert own is not None
        assert own.supports_batches is is_right, model_type
    tokens = OwnForward.tokens_in_blocks

    def unpadded(self: OwnForward, context: Any, numbers: Any, longest: int) -> Any:
        found = tokens(self, context, numbers, longest)
        return replace(
            found, block_slots=[(blocks.roll(1, 0), slots.roll(1, 0)) for blocks, slots in found.block_slots]
        )

    monkeypatch.setattr(OwnForward, "tokens_in_blocks", unpadded)
    module = model_of("falcon")
    check_hook(module)
    own = own_forward(module)
    assert own is not None
    assert not own.supports_batches, "mixed-up tokens must be detected, so that each request runs alone"


def test_decode_batch_larger_than_one_forward_call_allows_is_split(
    engine_of: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = [random.Random(seed).choices(range(3, 90), k=4 + 3 * seed) for seed in range(7)]
    wanted = tokens_of(engine_of("deepseek_v32"), asked)
    monkeypatch.setattr(OwnForward, "max_batched_decodes", lambda self, length: 3)
    assert tokens_of(engine_of("deepseek_v32"), asked) == wanted


@pytest.mark.parametrize("model_type", NAMES)
def test_tokens_of_own_forward_models_are_the_same_batched_and_alone(model_type: str, engine_of: Make) -> None:
    engine = engine_of(model_type, enable_prefix_caching=False)
    together = tokens_of(engine, prompts())
    assert together == [tokens_of(engine, [ids])[0] for ids in prompts()]
    assert len({token for tokens in together for token in tokens}) > 3
    assert any("run by transformers' own code, prompts one after the other" in note for note in engine.notes)


@pytest.mark.parametrize("model_type", ["falcon", "deepseek_v32", "dots3_note_text"])
def test_long_prompts_in_small_chunks_give_the_same_tokens(
    model_type: str, engine_of: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = tokens_of(engine_of(model_type), prompts())
    monkeypatch.setattr(own_module, "MAX_SCORES", 1)
    monkeypatch.setattr(own_module, "MIN_PIECE_TOKENS", 3)
    assert tokens_of(engine_of(model_type), prompts()) == wanted


@pytest.mark.parametrize("model_type", ["falcon", "deepseek_v32", "dots3_note_text"])
def test_gpu_block_layout_gives_the_same_tokens(
    model_type: str, engine_of: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = tokens_of(engine_of(model_type), prompts())
    monkeypatch.setattr(kv_storage, "is_hnd", lambda _: True)
    assert tokens_of(engine_of(model_type), prompts()) == wanted


@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize("model_type", ["falcon", "deepseek_v32", "dots3_note_text", "inkling_text"])
@torch.inference_mode()
def test_all_tensors_are_made_on_the_device_of_the_model(model_type: str, together: bool) -> None:
    """Uses the meta device, whose tensors do not mix with CPU tensors and cannot be synchronized."""
    module = model_of(model_type, torch.bfloat16).to("meta")
    calls = own_calls(module, "it is to be seen")
    own = own_forward(module)
    assert own is not None
    own.supports_batches = together
    device = torch.device("meta")
    storage = KVStorage(16, 4, [call.shape for call in calls], torch.bfloat16, device)
    tables = (torch.zeros(3, 4, dtype=torch.int32, device=device),)
    seq_lens = torch.zeros(2, dtype=torch.int32, device=device)
    decode = DecodeBatch(tables, seq_lens, 9)
    prefill = PrefillBatch(tables, seq_lens, 8, seq_lens, 5)
    context = PagedContext(storage, ops_for("cpu"), (), 2, decode, prefill)
    context.own = OwnBatch([0, 1, 2, 7], [9, 5, 8], [0, 1, 6])
    if own.states:
        context.states = StateBatch(_states_without_data(own.states), [1, 2, 3], [True] * 3, [0, 1, 2, 7])
    ids = torch.zeros(7, dtype=torch.int64, device=device)
    logits = own.run(ids, context, torch.zeros(3, dtype=torch.int64, device=device))
    assert (logits.shape[0], logits.device.type) == (3, "meta")


def _states_without_data(states: Any) -> Any:
    made = [[torch.zeros((4, *part.shape), dtype=part.dtype, device="meta") for part in layer] for layer in states]
    return SimpleNamespace(device=torch.device("meta"), layer=made.__getitem__)


def test_speculation_with_an_own_forward_model_gives_the_tokens_of_plain_decoding(engine_of: Make) -> None:
    asked = [[5, 6, 7, 8] * 6, [9, 8, 7] * 5]
    plain = tokens_of(engine_of("deepseek_v32"), asked)
    guessing = engine_of("deepseek_v32", speculative_config=SpeculativeConfig(num_speculative_tokens=3))
    assert tokens_of(guessing, asked) == plain


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"kv_cache_dtype": "int8"}, "its cache is stored in the model's own data type"),
        ({"page_heat": 4}, "its attention cannot be measured"),
        ({"sparse_decode": 0.5}, "sparse_decode=0.5 is not accepted"),
        ({"allow_runtime_lora_updating": True}, "adapters are not supported there"),
    ],
)
def test_engine_options_unsupported_by_own_forward_models_are_refused(
    options: dict[str, Any], words: str, engine_of: Make
) -> None:
    with pytest.raises(BadInput, match=words):
        engine_of("falcon", **options)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("model_type", ["falcon", "deepseek_v32", "dots3_note_text"])
def test_memory_plan_counts_what_the_engine_allocates(model_type: str, engine_of: Make, tmp_path: Path) -> None:
    engine = engine_of(model_type, dtype="bfloat16")
    skeleton = read_skeleton(str(tmp_path / f"{model_type}.json"))
    plan = plan_inference(skeleton, InferenceQuestion(gpu_memory=8 << 30, block_size=4, max_model_len=256))
    assert plan.tightest.block_bytes == engine.components.storage.block_bytes
    notes = build_answer(skeleton, plan, (64,)).inference.notes
    assert any("by transformers' own code, prompts one after the other" in note for note in notes)
    assert any("are keys of indexers" in note for note in notes) is (model_type != "falcon")
    with pytest.raises(BadInput, match="kv_cache_dtype='fp8' is not accepted"):
        plan_inference(skeleton, InferenceQuestion(gpu_memory=8 << 30, kv_cache_dtype="fp8"))


def test_kv_group_of_an_indexed_model_reports_the_bytes_of_its_indexer_keys(engine_of: Make) -> None:
    [group] = engine_of("deepseek_v32").hello.cache.groups
    assert (group.kind, group.num_layers, group.block_bytes) == ("indexed", 4, 4 * 4 * 56 * 4)
    assert group.index_bytes / group.block_bytes == 16 / 56
