"""Multimodal models: their text part gives the tokens of the whole model."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from kvscope_engine.model.loader.model_loader import load_model
from kvscope_engine.model.loader.supported_models import blueprint
from kvscope_engine.model.loader.text_part import (
    _no_other_parts,
    _whole_class,
    loading_class,
    reading_config,
    text_config,
)
from kvscope_engine.model.verification.hook_check import check_hook
from kvscope_engine.planning.skeleton import read_skeleton
from kvscope_telemetry.engine_config import EngineConfig
from kvscope_telemetry.errors import BadInput

TEXT: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "initializer_range": 0.3,
}
VISION: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
THREE_ROWS = {"rope_parameters": {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 1e4}}
HALVES = {"rope_parameters": THREE_ROWS["rope_parameters"] | {"partial_rotary_factor": 1.0}}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "n_routed_experts": 4}
QWEN_VISION = {"depth": 1, "hidden_size": 32, "num_heads": 2, "intermediate_size": 32, "out_hidden_size": 64}
GEMMA = TEXT | {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]}
PER_LAYER = {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 320, "num_kv_shared_layers": 0}
LATENT = {
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "head_dim": 8,
    "num_key_value_heads": 4,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
MODELS: dict[str, dict[str, Any]] = {
    "gemma3": {
        "text_config": GEMMA | {"query_pre_attn_scalar": 16},
        "vision_config": VISION,
        "mm_tokens_per_image": 4,
    },
    "gemma3n": {"text_config": GEMMA | PER_LAYER | {"laurel_rank": 8, "activation_sparsity_pattern": [0.0, 0.0]}},
    "gemma4": {
        "text_config": GEMMA | PER_LAYER | {"global_head_dim": 32},
        "vision_config": VISION | {"num_key_value_heads": 2, "head_dim": 16},
        "audio_config": None,
    },
    "glm4v_moe": {
        "text_config": TEXT | EXPERTS | {"n_shared_experts": 1, "first_k_dense_replace": 1} | HALVES,
        "vision_config": QWEN_VISION | {"image_size": 28},
    },
    "internvl": {"text_config": TEXT | {"model_type": "qwen2"}, "vision_config": VISION | {"image_size": [28, 28]}},
    "kimi_k25": {
        "text_config": TEXT | EXPERTS | LATENT | {"model_type": "deepseek_v3"},
        "vision_config": {key: VISION[key] for key in VISION if key.startswith(("hidden", "num", "inter"))},
    },
    "llama4": {
        "text_config": TEXT
        | {"num_local_experts": 2, "intermediate_size_mlp": 96, "no_rope_layers": [1, 0]}
        | {"attention_chunk_size": 10, "floor_scale": 9, "attn_scale": 0.5},
        "vision_config": VISION | {"vision_output_dim": 64, "projector_input_dim": 32, "projector_output_dim": 64},
    },
    "llava_next": {
        "text_config": TEXT | {"model_type": "mistral", "sliding_window": None},
        "vision_config": VISION | {"model_type": "clip_vision_model", "projection_dim": 32},
    },
    "mistral3": {"text_config": TEXT | {"model_type": "mistral"}, "vision_config": VISION | {"model_type": "pixtral"}},
    "mllama": {
        "text_config": TEXT | {"num_hidden_layers": 4, "cross_attention_layers": [1, 3]},
        "vision_config": {"hidden_size": 32, "num_hidden_layers": 1, "num_global_layers": 1, "attention_heads": 2}
        | {"intermediate_size": 32, "image_size": 28, "vision_output_dim": 32, "intermediate_layers_indices": [0]},
    },
    "muse_glimmer": {
        "text_config": TEXT | {"output_multiplier": 0.5, "final_logit_softcapping": 3.0},
        "vision_config": VISION | {"layer_types": ["full_attention"]},
    },
    "qwen2_5_vl": {
        "text_config": TEXT | THREE_ROWS,
        "vision_config": QWEN_VISION | {"fullatt_block_indexes": [0]},
    },
    "qwen3_vl_moe": {
        "text_config": TEXT | EXPERTS | THREE_ROWS,
        "vision_config": QWEN_VISION | {"deepstack_visual_indexes": [0], "num_position_embeddings": 16},
    },
}
PROMPTS = (range(5, 25), range(40, 63), (7, 9, 11))
NUM_TOKENS = 6


def config_of(kind: str, **changes: Any) -> Any:
    from transformers import AutoConfig

    return AutoConfig.for_model(kind, **(MODELS[kind] | changes))


def whole_model(kind: str) -> Any:
    """Return a complete transformers model; Gemma 3n's vision part needs a library that is not installed."""
    config = config_of(kind)
    torch.manual_seed(0)
    with _no_other_parts(text_config(config)) if kind == "gemma3n" else nullcontext():
        return _whole_class(config)._from_config(config, dtype=torch.float32, attn_implementation="eager").eval()


def load(folder: Path) -> Any:
    return load_model(EngineConfig(model=str(folder), device="cpu", dtype="float32"), lambda _: None)


def greedy(whole: Any, prompt: Any) -> list[int]:
    ids = torch.tensor([list(prompt)])
    options: dict[str, Any] = {"max_new_tokens": NUM_TOKENS, "do_sample": False, "eos_token_id": None}
    found: list[int] = whole.generate(input_ids=ids, **options)[0, ids.shape[1] :].tolist()
    return found


@pytest.mark.parametrize("kind", MODELS)
def test_text_part_of_a_multimodal_model_gives_the_tokens_of_the_whole_model(
    kind: str, tmp_path: Path, planned: Any
) -> None:
    whole = whole_model(kind)
    whole.save_pretrained(tmp_path)
    expected = [greedy(whole, prompt) for prompt in PROMPTS]
    loaded = load(tmp_path)
    check_hook(loaded.module)
    run = planned(loaded)
    for prompt in PROMPTS:
        run.add(prompt, NUM_TOKENS)
    assert run.run(max_chunk=7) == expected
    assert loaded.notes[-1].startswith(f"{kind} reads more than text: its text part is served, and ")


def test_vision_part_of_a_multimodal_model_is_neither_built_nor_read(tmp_path: Path) -> None:
    whole = whole_model("gemma3")
    whole.save_pretrained(tmp_path)
    text = sum(parameter.numel() for parameter in whole.model.language_model.parameters())
    everything = sum(parameter.numel() for parameter in whole.parameters())
    module = load(tmp_path).module
    assert sum(parameter.numel() for parameter in module.parameters()) == text < everything
    assert read_skeleton(str(tmp_path)).num_parameters == text
    path = tmp_path / "model.safetensors"
    kept = {name: tensor for name, tensor in load_file(path).items() if "language_model" in name}
    save_file(kept, path, {"format": "pt"})
    again = load(tmp_path).module
    assert all(torch.equal(a, b) for a, b in zip(module.parameters(), again.parameters(), strict=True))


def test_cross_attention_layers_for_images_are_left_out(tmp_path: Path) -> None:
    """Llama 3.2 Vision skips them if there is no image."""
    whole = whole_model("mllama")
    whole.save_pretrained(tmp_path)
    loaded = load(tmp_path)
    assert loaded.num_layers == len(check_hook(loaded.module)) == read_skeleton(str(tmp_path)).num_layers == 2
    assert loaded.notes[-1].endswith("; 2 of its 4 layers read images and are not run")
    named = dict(whole.model.language_model.named_parameters())
    found = {name: tensor for name, tensor in loaded.module.model.named_parameters() if name.startswith("layers.")}
    assert {name.split(".")[1] for name in found} == {"0", "2"}
    assert all(torch.equal(tensor, named[name]) for name, tensor in found.items())


@pytest.mark.parametrize(
    ("kind", "older"),
    [("gemma3", "language_model.model."), ("llava_next", "language_model.model."), ("qwen2_5_vl", "model.")],
)
def test_tensor_names_of_older_files_are_read(kind: str, older: str, tmp_path: Path) -> None:
    whole_model(kind).save_pretrained(tmp_path)
    expected = load(tmp_path).module.state_dict()
    path = tmp_path / "model.safetensors"
    tensors = {name.replace("model.language_model.", "^"): tensor for name, tensor in load_file(path).items()}
    tensors = {name.replace("language_model.model.", "^"): tensor for name, tensor in tensors.items()}
    renamed = {name.replace("^", older): tensor for name, tensor in tensors.items() if "vision" not in name}
    save_file(renamed, path, {"format": "pt"})
    found = load(tmp_path).module.state_dict()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_model_that_also_speaks_serves_its_reading_part(tmp_path: Path, planned: Any) -> None:
    """Its reading part is itself a model with several parts."""
    from transformers import AutoConfig

    hears = {"encoder_layers": 1, "encoder_attention_heads": 2, "encoder_ffn_dim": 16, "d_model": 16, "output_dim": 64}
    sees = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 64}
    parts = {"text_config": TEXT | THREE_ROWS, "audio_config": hears, "vision_config": sees}
    config = AutoConfig.for_model("qwen2_5_omni", thinker_config=parts)
    torch.manual_seed(0)
    reading: Any = loading_class(config)._from_config(reading_config(config), dtype=torch.float32)
    reading.save_pretrained(tmp_path)
    config.save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = {f"thinker.{name.removeprefix('thinker.')}": tensor for name, tensor in load_file(path).items()}
    save_file(tensors | {"talker.model.norm.weight": torch.ones(8)}, path, {"format": "pt"})
    run = planned(load(tmp_path))
    run.add(PROMPTS[0], 1)
    ids = torch.tensor([list(PROMPTS[0])])
    with torch.inference_mode():
        logits = reading.eval()(input_ids=ids, position_ids=torch.arange(ids.shape[1])[None], use_cache=False).logits
    assert run.run(max_chunk=7) == [[int(logits[0, -1].argmax())]]


def test_text_part_of_a_multimodal_model_can_have_random_weights(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    config_of("qwen2_5_vl").to_json_file(path)
    loaded = load_model(EngineConfig(model=f"dummy:{path}", device="cpu", dtype="float32"), lambda _: None)
    assert type(loaded.module).__name__ == "Qwen2_5_VLForConditionalGeneration"
    assert loaded.num_layers == 2


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("clip", "clip reads more than text, and its text part is not a causal language model"),
        ("paligemma", "paligemma attends to its whole prompt in both directions"),
    ],
)
def test_multimodal_model_without_a_causal_text_part_is_refused_by_name(kind: str, reason: str) -> None:
    from transformers import AutoConfig

    config = AutoConfig.for_model(kind)
    with pytest.raises(BadInput, match=reason):
        blueprint(config, "x")


def test_memory_of_the_text_part_of_a_multimodal_model_can_be_planned(tmp_path: Path) -> None:
    from kvscope_engine.planning.inference_plan import InferenceQuestion, plan_inference

    path = tmp_path / "config.json"
    config_of("gemma3").to_json_file(path)
    plan = plan_inference(read_skeleton(str(path)), InferenceQuestion(gpu_memory=8 << 30))
    assert plan.fits
