"""Tiny models in folders and GGUF files, and the default model as it comes and converted."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kvscope_engine.cache_folder import cache_folder
from kvscope_engine.model.layers.attention.paged_attention import ATTENTION_NAME
from kvscope_engine.model.loaded_model import LoadedModel
from kvscope_engine.model.loader.download.default_model import default_gguf
from kvscope_engine.model.loader.gguf.gguf_cache import converted_gguf
from kvscope_engine.model.loader.model_loader import load_model
from kvscope_engine.model.runner.kv_cache_spec import storage_for_model
from kvscope_engine.model.runner.model_runner import ModelRunner
from kvscope_engine.model.runner.runner_config import RunnerConfig
from kvscope_engine.policy.request import Request
from kvscope_engine.policy.step_plan import Scheduled, StepPlan
from kvscope_engine.tokenization.tokenizer import Tokenizer
from kvscope_engine.tokenization.tokenizer_files import load_tokenizer
from kvscope_telemetry.engine_config import EngineConfig
from kvscope_telemetry.messages.commands import TokenLogprobs
from kvscope_telemetry.messages.sampling_params import ResolvedSampling
from kvscope_telemetry.messages.telemetry import Progress

SIZES = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
TINY: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3": {"tie_word_embeddings": True},
    "mistral": {"sliding_window": 8},
    "gemma2": {"sliding_window": 8, "query_pre_attn_scalar": 16},
    "youtu": {
        "num_key_value_heads": 4,
        "q_lora_rank": 16,
        "kv_lora_rank": 32,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 12,
        "head_dim": 8,
    },
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 8},
}
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<s>' + message['role'] + '\\n' + message['content'] + '</s>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<s>assistant\\n' }}{% endif %}"
)


def same_model(found: Any, expected: Any, ids: torch.Tensor) -> bool:
    """Whether two modules hold the same weights, bit for bit, and say the same.

    What they say is the same but for rounding: products may round by where in memory a weight lies.
    """
    ours, theirs = found.state_dict(), expected.state_dict()
    if ours.keys() != theirs.keys() or not all(torch.equal(ours[name], theirs[name]) for name in ours):
        return False
    with torch.inference_mode():
        wanted = expected(ids).logits
        return torch.allclose(found(ids).logits, wanted, rtol=0, atol=1e-5 * float(wanted.abs().max()))


@pytest.fixture
def same() -> Callable[[Any, Any, torch.Tensor], bool]:
    """Compares two modules: `same_model`."""
    return same_model


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache folder of this test's own."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("KVSCOPE_CACHE", str(folder))
    return folder


@pytest.fixture
def heard() -> list[Progress]:
    """What was told; its `append` is a progress callback."""
    return []


@pytest.fixture
def tiny_checkpoint(tmp_path: Path) -> Callable[..., Path]:
    """Writes a tiny random model of a `model_type` into a new folder."""

    def write(model_type: str, **changes: Any) -> Path:
        from transformers import AutoConfig, AutoModelForCausalLM

        folder = tmp_path / f"tiny-{model_type}"
        options = SIZES | TINY.get(model_type, {}) | changes
        config = AutoConfig.for_model(model_type, **options)
        torch.manual_seed(0)
        auto: Any = AutoModelForCausalLM
        auto.from_config(config, dtype=torch.float32).save_pretrained(folder)
        return folder

    return write


@pytest.fixture
def tiny_tokenizer() -> Any:
    """transformers' tokenizer over bytes, with two special tokens and a chat template."""
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    backend = Backend(models.BPE(vocab={token: index for index, token in enumerate(byte_tokens())}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer: Any = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>")
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


@pytest.fixture
def tiny_gguf(tmp_path: Path) -> Callable[..., Path]:
    """Writes a tiny random Llama as a GGUF file; keyword arguments add or replace fields."""

    def write(name: str = "tiny.gguf", seed: int = 0, **changes: Any) -> Path:
        path = tmp_path / name
        write_gguf(path, seed, changes)
        return path

    return write


def byte_tokens() -> list[str]:
    """Specials, one token a byte in the alphabet of byte-level BPE, and one that is merged."""
    from tokenizers.pre_tokenizers import ByteLevel

    return ["<unk>", "<s>", "</s>", *sorted(ByteLevel.alphabet()), "ab"]


def write_gguf(path: Path, seed: int, changes: dict[str, Any]) -> None:
    """A Llama of two layers, hidden size 64, two heads, one KV head, over `byte_tokens`."""
    import gguf

    tokens = byte_tokens()
    tokens[:3] = changes.get("tokens", tokens[:3])
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name("tiny")
    writer.add_block_count(changes.get("block_count", 2))
    writer.add_context_length(128)
    writer.add_embedding_length(changes.get("embedding_length", 64))
    writer.add_feed_forward_length(96)
    writer.add_head_count(2)
    writer.add_head_count_kv(1)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    if "pre" in changes:
        writer.add_tokenizer_pre(changes["pre"])
    writer.add_token_list(tokens)
    writer.add_token_types([3, 3, 3, *[1] * (len(tokens) - 3)])
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(changes.get("eos_token_id", 2))
    if "eot_token_id" in changes:
        writer.add_eot_token_id(changes["eot_token_id"])
    if "eom_token_id" in changes:
        writer.add_eom_token_id(changes["eom_token_id"])
    writer.add_unk_token_id(0)
    writer.add_chat_template(CHAT_TEMPLATE)
    for name, tensor in gguf_tensors(len(tokens), seed).items():
        if name not in changes.get("without", ()):
            writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def gguf_tensors(vocab_size: int, seed: int) -> dict[str, np.ndarray[Any, np.dtype[np.float32]]]:
    """Weights by their names in a GGUF file; no output.weight, so the embedding is tied."""
    rng = np.random.default_rng(seed)
    shapes: dict[str, tuple[int, ...]] = {"token_embd.weight": (vocab_size, 64), "output_norm.weight": (64,)}
    for layer in range(2):
        shapes |= {
            f"blk.{layer}.{part}.weight": shape
            for part, shape in {
                "attn_norm": (64,),
                "ffn_norm": (64,),
                "attn_q": (64, 64),
                "attn_k": (32, 64),
                "attn_v": (32, 64),
                "attn_output": (64, 64),
                "ffn_gate": (96, 64),
                "ffn_up": (96, 64),
                "ffn_down": (64, 96),
            }.items()
        }
    return {name: rng.normal(0, 0.1, shape).astype(np.float32) for name, shape in shapes.items()}


@pytest.fixture(scope="session")
def default_file() -> Path:
    """The GGUF file of the default model, in the user's own cache."""
    return default_gguf(lambda _: None)


@pytest.fixture(scope="session")
def default_folder(default_file: Path) -> Path:
    """The default model converted to float32, in the user's own cache."""
    assert cache_folder() in default_file.parents
    return converted_gguf(default_file, torch.float32, lambda _: None)


@pytest.fixture(scope="session")
def default_tokenizer(default_folder: Path) -> Tokenizer:
    """The default model's tokenizer."""
    tokenizer = load_tokenizer(default_folder)
    assert tokenizer is not None
    return tokenizer


VIVID = {"initializer_range": 0.3}
"""Weights large enough that attention, positions and masks change which token is most likely."""


@pytest.fixture
def vivid_model() -> Callable[..., Any]:
    """Makes a tiny random model of a `model_type` as transformers does, in float32; a change to None leaves it out."""

    def make(model_type: str, **changes: Any) -> Any:
        from transformers import AutoConfig, AutoModelForCausalLM

        options = {key: value for key, value in (SIZES | VIVID | changes).items() if value is not None}
        torch.manual_seed(0)
        auto: Any = AutoModelForCausalLM
        return auto.from_config(AutoConfig.for_model(model_type, **options), dtype=torch.float32).eval()

    return make


@pytest.fixture
def tiny_loaded(tmp_path: Path) -> Callable[..., LoadedModel]:
    """Loads a tiny random model of a `model_type`, float32 on the CPU; the same weights each time it is asked."""

    def load(model_type: str, **changes: Any) -> LoadedModel:
        from transformers import AutoConfig

        path = tmp_path / f"{model_type}.json"
        config = AutoConfig.for_model(model_type, **(SIZES | VIVID | TINY.get(model_type, {}) | changes))
        config.to_json_file(path, use_diff=False)
        return load_model(EngineConfig(model=f"dummy:{path}", device="cpu", dtype="float32"), lambda _: None)

    return load


@pytest.fixture
def planned() -> type[PlannedRun]:
    """Runs requests on a runner by hand-made plans."""
    return PlannedRun


class PlannedRun:
    """Requests over shuffled blocks of a pool poisoned with NaN, in steps that mix decodes and prefill chunks."""

    def __init__(
        self,
        loaded: LoadedModel,
        *,
        num_blocks: int = 64,
        block_size: int = 4,
        seed: int = 0,
        kv_cache_dtype: str = "auto",
    ) -> None:
        self.storage = storage_for_model(loaded, num_blocks, block_size, kv_cache_dtype)
        for part in self.storage.block_tensors:
            part.fill_(float("nan") if part.is_floating_point() else 0x7F)
        self.runner = ModelRunner(loaded, self.storage, RunnerConfig(max_num_seqs=8, max_num_batched_tokens=64))
        self.rng = np.random.default_rng(seed)
        self.free = self.rng.permutation(num_blocks).tolist()
        self.requests: list[Request] = []
        self.logprobs: dict[int, list[TokenLogprobs]] = {}

    def add(self, prompt: Sequence[int], num_tokens: int, **sampling: Any) -> Request:
        """A request that is to give `num_tokens`."""
        options = ResolvedSampling(**{"temperature": 0.0, **sampling})
        number = len(self.requests) + 1
        request = Request(
            number=number,
            request_id=f"r{number}",
            prompt_token_ids=list(prompt),
            sampling=options,
            max_tokens=num_tokens,
            arrival_ns=0,
        )
        self.requests.append(request)
        self.logprobs[number] = []
        return request

    def preempt(self, request: Request) -> None:
        """Give its blocks to others; it starts again from its first token."""
        self.free = self.rng.permutation(self.free + request.block_table).tolist()
        request.block_table.clear()
        request.num_computed_tokens = 0

    def step(self, max_chunk: int = 1 << 20) -> None:
        """One step of every request that is not done."""
        running = [r for r in self.requests if len(r.output_token_ids) < r.max_tokens]
        items = [self._scheduled(request, max_chunk) for request in running]
        items.sort(key=lambda item: item.num_tokens != 1)
        num_single_token = sum(item.num_tokens == 1 for item in items)
        result = self.runner.run(StepPlan(tuple(items), num_single_token))
        logprobs = result.logprobs or ((),) * len(items)
        for item, tokens, details in zip(items, result.token_ids, logprobs, strict=True):
            item.request.num_computed_tokens += item.num_tokens
            assert len(tokens) == item.samples
            item.request.output_token_ids += tokens
            self.logprobs[item.request.number] += details

    def run(self, max_chunk: int = 1 << 20) -> list[list[int]]:
        """All to their ends; what each gave."""
        while any(len(r.output_token_ids) < r.max_tokens for r in self.requests):
            self.step(max_chunk)
        return [request.output_token_ids for request in self.requests]

    def _scheduled(self, request: Request, max_chunk: int) -> Scheduled:
        start = request.num_computed_tokens
        count = min(request.num_tokens - start, max_chunk)
        while len(request.block_table) * self.storage.block_size < start + count:
            request.block_table.append(self.free.pop())
        return Scheduled(request, start, count, start + count == request.num_tokens)


@pytest.fixture
def eager_tokens() -> Callable[..., list[int]]:
    """Greedy tokens of transformers' own code: eager attention, the whole sequence again for each token."""

    def generate(loaded: LoadedModel, prompt: Sequence[int], num_tokens: int) -> list[int]:
        module: Any = loaded.module
        module.set_attn_implementation("eager")
        ids = list(prompt)
        with torch.inference_mode():
            for _ in range(num_tokens):
                logits = module(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1]
                ids.append(int(logits.argmax()))
        module.set_attn_implementation(ATTENTION_NAME)
        return ids[len(prompt) :]

    return generate
