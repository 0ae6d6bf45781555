"""From a name to a loaded model: every kind of name, every refusal, and the second start."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from kvscope_engine.model.layers.attention.paged_attention import ATTENTION_NAME
from kvscope_engine.model.loaded_model import LoadedModel
from kvscope_engine.model.loader import model_loader
from kvscope_engine.model.loader.model_loader import load_model
from kvscope_telemetry.engine_config import EngineConfig
from kvscope_telemetry.errors import BadInput, KvscopeError
from kvscope_telemetry.messages.telemetry import Progress


def load(model: str | Path, progress_events: list[Progress] | None = None, **options: Any) -> LoadedModel:
    """Return the model, by default on the CPU in float32."""
    config = EngineConfig(**{"model": str(model), "device": "cpu", "dtype": "float32"} | options)
    return load_model(config, [].append if progress_events is None else progress_events.append)


@pytest.mark.usefixtures("default_folder")
def test_default_model_is_loaded(progress_events: list[Progress]) -> None:
    model = load("default", progress_events)
    assert model.tokenizer is not None
    assert (model.num_layers, model.num_query_heads, model.num_kv_heads, model.head_dim) == (30, 9, 3, 64)
    assert model.eos_token_ids == {0, 2}
    assert model.max_model_len == 8192
    assert (model.device.type, model.dtype) == ("cpu", torch.float32)
    assert (model.info.name, model.info.architecture, model.info.dtype) == ("default", "LlamaForCausalLM", "float32")
    assert model.info.num_parameters == sum(parameter.numel() for parameter in model.module.parameters())
    assert {(progress.stage, progress.detail) for progress in progress_events} == {("load", "default")}


@pytest.mark.usefixtures("default_folder")
def test_default_model_is_loaded_from_its_converted_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_loader, "default_gguf", None)
    assert load("default").num_layers == 30


def test_default_model_answers_correctly(default_folder: Path) -> None:
    """Uses its chat template and transformers' generation; the answer is known."""
    from kvscope_engine.model.hf_config import read_config
    from kvscope_engine.model.loader.checkpoint import load_weights

    model = load("default")
    assert model.tokenizer is not None
    ids = model.tokenizer.chat([{"role": "user", "content": "What is the capital of France?"}])
    plain: Any = load_weights(
        default_folder, read_config(default_folder / "config.json"), torch.float32, model.device, "x", lambda _: None
    )
    out = plain.generate(torch.tensor([ids]), max_new_tokens=7, do_sample=False)[0, len(ids) :].tolist()
    assert model.tokenizer.decode(out) == "The capital of France is Paris."


@pytest.mark.parametrize("kind", ["llama", "qwen3", "mistral", "gemma2", "gpt_oss"])
def test_model_folder_of_each_architecture_is_loaded(tiny_checkpoint: Callable[..., Path], kind: str) -> None:
    model = load(tiny_checkpoint(kind))
    module: Any = model.module
    assert not module.training
    assert not any(parameter.requires_grad for parameter in module.parameters())
    assert module.config._attn_implementation == ATTENTION_NAME
    assert model.hf_config.model_type == kind
    assert (model.num_layers, model.num_query_heads, model.num_kv_heads, model.head_dim) == (2, 4, 2, 16)
    assert model.max_model_len == 256
    assert model.tokenizer is None


def test_gguf_file_is_loaded(tiny_gguf: Callable[..., Path], own_cache: Path, progress_events: list[Progress]) -> None:
    model = load(tiny_gguf(), progress_events, dtype="bfloat16")
    assert model.tokenizer is not None
    assert (model.num_layers, model.num_kv_heads, model.head_dim) == (2, 1, 32)
    assert {parameter.dtype for parameter in model.module.parameters()} == {torch.bfloat16}
    stages = [progress.stage for progress in progress_events if progress.done == 0 and progress.stage != "compile"]
    assert stages == ["convert", "convert", "convert", "load"]


def test_dummy_model_is_loaded_with_random_weights(tiny_checkpoint: Callable[..., Path], tiny_tokenizer: Any) -> None:
    folder = tiny_checkpoint("llama")
    (folder / "model.safetensors").unlink()
    by_file, by_folder = load(f"dummy:{folder}/config.json"), load(f"dummy:{folder}")
    other = load(f"dummy:{folder}", seed=1)
    head, same, different = (
        dict(model.module.named_parameters())["lm_head.weight"] for model in (by_file, by_folder, other)
    )
    assert torch.equal(head, same)
    assert not torch.equal(head, different)
    assert by_file.tokenizer is None
    tiny_tokenizer.save_pretrained(folder)
    assert load(f"dummy:{folder}").tokenizer is not None


def test_shorter_context_is_used_and_a_longer_one_refused(tiny_checkpoint: Callable[..., Path]) -> None:
    folder = tiny_checkpoint("llama")
    assert load(folder, max_model_len=100).max_model_len == load(folder, max_model_len=100).info.max_model_len == 100
    with pytest.raises(BadInput, match=r"max_model_len=257 is not accepted: .* can do 256"):
        load(folder, max_model_len=257)


def test_dynamic_rope_is_frozen(tiny_checkpoint: Callable[..., Path]) -> None:
    folder = tiny_checkpoint("llama", rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4})
    module: Any = load(folder).module
    assert module.model.rotary_emb.rope_type == "default"


def break_folder(folder: Path, damage: str) -> None:
    """Damage a model folder in the given way."""
    weights, config = folder / "model.safetensors", folder / "config.json"
    if damage == "no weights":
        weights.unlink()
    elif damage == "no config":
        config.unlink()
    elif damage == "cut short":
        os.truncate(weights, weights.stat().st_size - 1)
    elif damage == "other sizes":
        config.write_text(json.dumps(json.loads(config.read_bytes()) | {"intermediate_size": 97}))
    else:
        config.write_text(json.dumps({"model_type": damage, "num_hidden_layers": 2}))


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        ("no weights", "no weights"),
        ("no config", r"config\.json"),
        ("cut short", "cut short"),
        ("other sizes", "wrong shape"),
        ("openai-gpt", "OpenAIGPTLMHeadModel"),
        ("t5", "encoder-decoder"),
        ("nonesuch", "unknown"),
    ],
)
def test_damaged_folder_is_refused_with_the_reason(
    tiny_checkpoint: Callable[..., Path], damage: str, reason: str
) -> None:
    folder = tiny_checkpoint("llama")
    break_folder(folder, damage)
    with pytest.raises(BadInput, match=reason) as refused:
        load(folder)
    assert str(folder) in str(refused.value)
    assert "\n" not in str(refused.value)


def test_truncated_gguf_file_is_refused(tiny_gguf: Callable[..., Path], own_cache: Path) -> None:
    gguf = tiny_gguf()
    os.truncate(gguf, gguf.stat().st_size // 2)
    with pytest.raises(BadInput, match="cut short"):
        load(gguf)
    assert not list((own_cache / "converted").glob("*-v*/"))


def test_insufficient_memory_is_reported(tiny_checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tiny_checkpoint("llama")
    monkeypatch.setattr(model_loader, "free_bytes", lambda device: 1000)
    with pytest.raises(KvscopeError, match=r"no memory for model .*weights in float32 take 0\.0 GB"):
        load(folder)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_missing_cuda_device_is_refused(tiny_checkpoint: Callable[..., Path]) -> None:
    with pytest.raises(BadInput, match="device='cuda'"):
        load(tiny_checkpoint("llama"), device="cuda")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_model_is_loaded_on_the_gpu_in_bfloat16(tiny_checkpoint: Callable[..., Path]) -> None:
    folder = tiny_checkpoint("llama")
    for name in (str(folder), f"dummy:{folder}"):
        model = load(name, device="auto", dtype="auto")
        assert {parameter.device.type for parameter in model.module.parameters()} == {"cuda"}
        assert {parameter.dtype for parameter in model.module.parameters()} == {torch.bfloat16}


def test_damaged_conversion_is_repaired(default_folder: Path, own_cache: Path, tiny_gguf: Callable[..., Path]) -> None:
    gguf = tiny_gguf()
    load(gguf)
    entry = next((own_cache / "converted").glob("*-v*/"))
    shutil.rmtree(entry)
    assert load(gguf).num_layers == 2
    (entry / "config.json").write_text("{}")
    assert load(gguf).num_layers == 2
