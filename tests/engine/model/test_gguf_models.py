"""A GGUF file gives the logits of the model it was written from, or is refused by the name of the unsupported key."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kvscope_engine.model.hf_config import read_config
from kvscope_engine.model.loader.checkpoint import load_weights
from kvscope_engine.model.loader.gguf.gguf_cache import convert_gguf
from kvscope_telemetry.errors import BadInput

Make = Callable[..., Any]
LogitsOf = Callable[..., torch.Tensor]
SPECIALS = ("<unk>", "<s>", "</s>")
ARCHITECTURES = {
    "gemma3_text": "gemma3",
    "gemma4_text": "gemma4",
    "gpt_oss": "gpt-oss",
    "qwen2_moe": "qwen2moe",
    "qwen3_moe": "qwen3moe",
}
"""Architecture names in GGUF files where they differ from transformers' names."""
IDS = torch.randint(3, 300, (1, 90), generator=torch.Generator().manual_seed(0))
"""Token ids, long enough for wrong positions to show."""


def rope(kind: str, theta: float = 10000.0, **options: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": theta} | options}


@pytest.fixture
def make(vivid_model: Callable[..., Any]) -> Make:
    """Function that makes a tiny model in which all weights, norms and biases are random."""

    def random(model_type: str, **changes: Any) -> Any:
        model = vivid_model(model_type, **changes)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() == 1:
                    parameter.add_(torch.randn_like(parameter) * 0.2)
        return model

    return random


@pytest.fixture
def logits_of(tmp_path: Path) -> LogitsOf:
    """Function that writes a model as a GGUF file, converts it, and returns its logits."""

    def run(model: Any, fields: dict[str, Any] | None = None, extra: dict[str, Any] | None = None) -> torch.Tensor:
        gguf, folder = tmp_path / "tiny.gguf", tmp_path / "converted"
        write_model(model, gguf, fields or {}, extra)
        convert_gguf(gguf, torch.float32, folder, lambda _: None)
        loaded: Any = load_weights(
            folder, read_config(folder / "config.json"), torch.float32, torch.device("cpu"), "x", lambda _: None
        )
        with torch.inference_mode():
            return loaded(IDS).logits  # type: ignore[no-any-return]

    return run


def check_same(found: torch.Tensor, model: Any) -> None:
    with torch.inference_mode():
        expected = model(IDS).logits
    assert torch.allclose(found, expected, atol=2e-3 * float(expected.std()), rtol=0)


YARN = {"factor": 4.0, "original_max_position_embeddings": 64}
YARN_FIELDS = {
    "rope.scaling.type": "yarn",
    "rope.scaling.factor": 4.0,
    "rope.scaling.original_context_length": 64,
    "rope.scaling.finetuned": True,
}
LINEAR_FIELDS = {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}
SAME: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "llama": ("llama", {}, {}),
    "llama, tied, another base": ("llama", {"tie_word_embeddings": True} | rope("default", 5e5), {}),
    "llama, wide heads": ("llama", {"head_dim": 32}, {}),
    "llama, biases": ("llama", {"attention_bias": True, "mlp_bias": True}, {}),
    "llama, linear": ("llama", rope("linear", factor=4.0), LINEAR_FIELDS),
    "llama, a factor alone is linear": ("llama", rope("linear", factor=4.0), {"rope.scaling.factor": 4.0}),
    "llama, as old files say it": ("llama", rope("linear", factor=4.0), {"rope.scale_linear": 4.0}),
    "llama, a factor of nothing": ("llama", {}, {"rope.scaling.type": "none", "rope.scaling.factor": 4.0}),
    "llama, yarn": ("llama", rope("yarn", **YARN), YARN_FIELDS),
    "qwen2": ("qwen2", rope("default", 1e6) | {"head_dim": None}, {}),
    "qwen2, yarn": ("qwen2", rope("yarn", **YARN) | {"head_dim": None}, YARN_FIELDS),
    "qwen3": ("qwen3", {"head_dim": 32}, {}),
    "qwen3, linear": ("qwen3", rope("linear", factor=4.0), LINEAR_FIELDS),
    "starcoder2, another base": ("starcoder2", rope("default", 1e5) | {"head_dim": None}, {}),
    "phi3, half of a head": ("phi3", rope("default", partial_rotary_factor=0.5) | {"head_dim": None}, {}),
    "gemma2": (
        "gemma2",
        {"sliding_window": 8, "query_pre_attn_scalar": 16, "attn_logit_softcapping": 20.0},
        {"attention.sliding_window": 8, "attn_logit_softcapping": 20.0, "final_logit_softcapping": 30.0},
    ),
    "gemma3": (
        "gemma3_text",
        {
            "sliding_window": 8,
            "query_pre_attn_scalar": 16,
            "num_hidden_layers": 6,
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
                "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
            },
        },
        {"attention.sliding_window": 8, "rope.scaling.type": "linear", "rope.scaling.factor": 8.0},
    ),
    "gemma3, other layers": (
        "gemma3_text",
        {
            "sliding_window": 8,
            "query_pre_attn_scalar": 16,
            "num_hidden_layers": 3,
            "layer_types": ["full_attention", "sliding_attention", "full_attention"],
        },
        {
            "attention.sliding_window": 8,
            "attention.sliding_window_pattern": [False, True, False],
            "rope.freq_base": 1e6,
        },
    ),
    "gemma2, each third is full": (
        "gemma2",
        {
            "sliding_window": 8,
            "query_pre_attn_scalar": 16,
            "num_hidden_layers": 3,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
        },
        {
            "attention.sliding_window": 8,
            "attention.sliding_window_pattern": 3,
            "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0,
        },
    ),
    "stablelm": ("stablelm", rope("default", partial_rotary_factor=0.5) | {"head_dim": None}, {}),
    "qwen2_moe": (
        "qwen2_moe",
        {
            "head_dim": None,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 48,
            "shared_expert_intermediate_size": 32,
        },
        {
            "expert_count": 4,
            "expert_used_count": 2,
            "expert_feed_forward_length": 48,
            "expert_shared_feed_forward_length": 32,
        },
    ),
    "qwen3_moe": (
        "qwen3_moe",
        {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "norm_topk_prob": True},
        {"expert_count": 4, "expert_used_count": 2, "expert_feed_forward_length": 48},
    ),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("case", SAME)
def test_gguf_file_gives_the_logits_of_its_model(logits_of: LogitsOf, make: Make, case: str) -> None:
    model_type, changes, fields = SAME[case]
    model = make(model_type, **changes)
    check_same(logits_of(model, fields), model)


def test_llama3_rope_scaling_is_read_from_a_tensor(logits_of: LogitsOf, make: Make) -> None:
    numbers = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
    model = make("llama", **rope("llama3", **numbers))
    factors = llama3_factors(model.config, 8.0, 1.0, 4.0, 64)
    assert len(set(factors)) > 2
    check_same(logits_of(model, {}, {"rope_freqs.weight": factors}), model)


def test_gguf_rope_factors_of_one_do_not_change_the_logits(logits_of: LogitsOf, make: Make) -> None:
    model = make("llama")
    check_same(logits_of(model, {}, {"rope_freqs.weight": torch.ones(8)}), model)


def test_two_lists_of_rope_factors_are_longrope(logits_of: LogitsOf, make: Make) -> None:
    long, short = [1.0 + 0.2 * i for i in range(8)], [1.0 + 0.05 * i for i in range(8)]
    options = {"long_factor": long, "short_factor": short, "original_max_position_embeddings": 128}
    model = make("phi3", head_dim=None, original_max_position_embeddings=128, **rope("longrope", **options))
    attention = model.model.rotary_emb.attention_scaling
    assert attention > 1
    fields = {"rope.scaling.attn_factor": attention, "rope.scaling.original_context_length": 128}
    extra = {"rope_factors_long.weight": long, "rope_factors_short.weight": short}
    check_same(logits_of(model, fields, extra), model)


REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "a tensor of no place": ({}, {"blk.0.attn_q_norm.weight": torch.ones(16)}, r"blk\.0\.attn_q_norm\.weight"),
    "a bias of no place": ({}, {"output.bias": torch.ones(320)}, r"output\.bias"),
    "an unknown key": ({"embedding_scale": 12.0}, {}, r"llama\.embedding_scale=12\.0"),
    "a window": ({"attention.sliding_window": 8}, {}, r"llama\.attention\.sliding_window=8"),
    "experts": ({"expert_count": 4}, {}, r"llama\.expert_count=4"),
    "clamped": ({"attention.clamp_kqv": 8.0}, {}, r"llama\.attention\.clamp_kqv=8\.0"),
    "looks ahead": ({"attention.causal": False}, {}, r"llama\.attention\.causal=False"),
    "layers that differ": ({"attention.head_count_kv": [2, 1]}, {}, r"llama\.attention\.head_count_kv is a list"),
    "a pattern of windows": (
        {"attention.sliding_window_pattern": [True, False]},
        {},
        r"llama\.attention\.sliding_window_pattern='\(True, False\)' needs a feature that is not supported here for",
    ),
    "another rotation": ({"rope.scaling.type": "su"}, {}, r"rope\.scaling\.type='su'"),
    "an attention factor": (YARN_FIELDS | {"rope.scaling.attn_factor": 1.5}, {}, r"attn_factor=1\.5"),
    "values of another size": ({"attention.value_length": 8}, {}, r"attention\.value_length=8"),
    "a part of a head": ({"rope.dimension_count": 8}, {}, r"rope\.dimension_count=8"),
    "scaled twice": (YARN_FIELDS, {"rope_freqs.weight": torch.full((8,), 2.0)}, "scales rotation twice"),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("case", REFUSED)
def test_unsupported_key_is_refused_by_name(logits_of: LogitsOf, make: Make, case: str) -> None:
    fields, extra, reason = REFUSED[case]
    with pytest.raises(BadInput, match=reason) as refused:
        logits_of(make("llama"), fields, extra)
    assert "\n" not in str(refused.value)
    assert "tiny.gguf" in str(refused.value)


GEMMA4: dict[str, Any] = {
    "sliding_window": 8,
    "num_hidden_layers": 6,
    "layer_types": ["sliding_attention", "full_attention"] * 3,
    "head_dim": 16,
    "global_head_dim": 32,
    "hidden_size_per_layer_input": 0,
    "eos_token_id": [1, 2, 50, 106],
    "final_logit_softcapping": 30.0,
}
GEMMA4_KINDS: dict[str, dict[str, Any]] = {
    "small": {
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": 320,
        "num_kv_shared_layers": 2,
        "use_double_wide_mlp": True,
    },
    "large": {"attention_k_eq_v": True, "num_global_key_value_heads": 1},
    "experts": {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 32},
}


def gemma4_fields(changes: dict[str, Any]) -> dict[str, Any]:
    """Return the GGUF keys of a Gemma 4 model; lists have one number per layer."""
    slides = [kind == "sliding_attention" for kind in changes["layer_types"]]
    shared, full_heads = changes.get("num_kv_shared_layers", 0), changes.get("num_global_key_value_heads")
    fields = {
        "context_length": 256,
        "block_count": 6,
        "embedding_length": 64,
        "feed_forward_length": [96] * (6 - shared) + [192] * shared,
        "attention.head_count": 4,
        "attention.head_count_kv": [2 if slide or not full_heads else full_heads for slide in slides],
        "attention.layer_norm_rms_epsilon": 1e-6,
        "attention.sliding_window": 8,
        "attention.sliding_window_pattern": slides,
        "attention.shared_kv_layers": shared,
        "embedding_length_per_layer_input": changes["hidden_size_per_layer_input"],
        "final_logit_softcapping": 30.0,
        "rope.freq_base": 1e6,
        "rope.freq_base_swa": 1e4,
    }
    for name, size in (("_swa", 16), ("", 32)):
        keys = f"attention.key_length{name}", f"attention.value_length{name}", f"rope.dimension_count{name}"
        fields |= dict.fromkeys(keys, size)
    if "num_experts" in changes:
        fields |= {"expert_count": 4, "expert_used_count": 2, "expert_feed_forward_length": 32}
    return fields


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", GEMMA4_KINDS)
def test_gemma4_gguf_file_with_layers_of_different_kinds_gives_the_logits_of_its_model(
    logits_of: LogitsOf, make: Make, kind: str
) -> None:
    changes = GEMMA4 | GEMMA4_KINDS[kind]
    model = make("gemma4_text", **changes)
    divisors = np.array([1.0] * 4 + [1e30] * 12)
    check_same(logits_of(model, gemma4_fields(changes), {"rope_freqs.weight": divisors}), model)


@pytest.mark.parametrize(
    ("fields", "key"),
    [
        ({"attention.sliding_window_pattern": [True] * 6}, "attention.sliding_window_pattern"),
        ({"attention.head_count_kv": [2, 2, 1, 2, 2, 2]}, "attention.head_count_kv"),
        ({"feed_forward_length": [96, 96, 96, 96, 96, 128]}, "feed_forward_length"),
        ({"rope.dimension_sections": [1, 2, 3]}, "rope.dimension_sections"),
        ({"attention.value_length": 24}, "attention.value_length"),
        ({"attention.shift": 1}, "attention.shift=1"),
    ],
)
def test_unsupported_gemma4_key_is_refused_by_name(
    logits_of: LogitsOf, make: Make, fields: dict[str, Any], key: str
) -> None:
    changes = GEMMA4 | GEMMA4_KINDS["large"]
    with pytest.raises(
        BadInput, match=rf"its key gemma4\.{key} needs a feature that is not supported here for gemma4(_text)?"
    ):
        logits_of(make("gemma4_text", **changes), gemma4_fields(changes) | fields)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("scaled", [False, True], ids=["plain", "yarn"])
def test_gpt_oss_gguf_file_gives_the_logits_of_its_model(logits_of: LogitsOf, make: Make, scaled: bool) -> None:
    yarn = rope("yarn", 150000.0, **YARN, beta_fast=32.0, beta_slow=1.0, truncate=False)
    model = make(
        "gpt_oss",
        num_local_experts=4,
        num_experts_per_tok=2,
        sliding_window=8,
        **(yarn if scaled else rope("default", 150000.0)),
    )
    fields = {"expert_count": 4, "expert_used_count": 2, "expert_feed_forward_length": 96}
    check_same(logits_of(model, fields | {"attention.sliding_window": 8} | (YARN_FIELDS if scaled else {})), model)


@pytest.mark.filterwarnings("ignore")
def test_gguf_key_with_a_per_layer_list_of_equal_numbers_is_accepted(logits_of: LogitsOf, make: Make) -> None:
    model = make("llama")
    check_same(logits_of(model, {"attention.head_count_kv": [2, 2], "feed_forward_length": [96, 96]}), model)


# Writing files like llama.cpp's converter


def write_model(model: Any, path: Path, fields: dict[str, Any], extra: dict[str, Any] | None = None) -> None:
    """Write `model` with the architecture keys `fields`, and additional tensors."""
    import gguf

    architecture = ARCHITECTURES.get(model.config.model_type, model.config.model_type)
    writer = gguf.GGUFWriter(path, architecture)
    common = common_fields(model.config) if architecture != "gemma4" else {}
    for key, value in (common | fields).items():
        if value is not None:
            _add(writer, f"{architecture}.{key}", value)
    _add_tokenizer(writer, model.config.vocab_size)
    for name, tensor in (tensors_of(model) | (extra or {})).items():
        writer.add_tensor(name, np.ascontiguousarray(tensor, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def common_fields(config: Any) -> dict[str, Any]:
    """Return the keys that converters write for nearly every model."""
    eps = getattr(config, "rms_norm_eps", None)
    layer_eps = next(
        (getattr(config, name) for name in ("layer_norm_eps", "norm_epsilon") if hasattr(config, name)), None
    )
    rope = config.rope_parameters.get("full_attention", config.rope_parameters)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return {
        "context_length": config.max_position_embeddings,
        "block_count": config.num_hidden_layers,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.layer_norm_rms_epsilon": eps,
        "attention.layer_norm_epsilon": layer_eps,
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
        "rope.freq_base": float(rope["rope_theta"]),
        "rope.dimension_count": int(head_dim * rope.get("partial_rotary_factor", 1.0)),
    }


def tensors_of(model: Any) -> dict[str, Any]:
    """Return the weights by their GGUF names, in the order of numbers that files have."""
    from transformers.modeling_gguf_pytorch_utils import TENSOR_PROCESSORS, TensorProcessor, get_gguf_hf_weights_map

    config = model.config
    architecture = ARCHITECTURES.get(config.model_type, config.model_type)
    processor = TENSOR_PROCESSORS.get(architecture, TensorProcessor)(config=config.to_dict())
    names = get_gguf_hf_weights_map(model, processor)
    state = {name: tensor.detach().float() for name, tensor in model.state_dict().items()}
    tensors: dict[str, Any] = {}
    if architecture in ("gemma4", "gpt-oss"):
        names = _names_of(architecture, names, state)
    for name, source in names.items():
        if "_exps" in name and architecture == "gpt-oss":
            tensors |= _interleaved(name, state[source])
        elif "_exps" in name and architecture != "gemma4":
            tensors |= _experts(name, state[source])
        else:
            tensor = _written(config, name, state[source])
            tensors[name] = (tensor[0] if "ffn_gate_inp_shexp" in name else tensor).numpy()
    if config.tie_word_embeddings:
        tensors.pop("output.weight", None)
    return tensors


def llama3_factors(config: Any, factor: float, low: float, high: float, original: int) -> np.ndarray[Any, Any]:
    """Return the `rope_freqs.weight` that a converter writes for transformers' rope type `llama3`."""
    theta = config.rope_parameters["rope_theta"]
    frequencies = 1.0 / theta ** (np.arange(0, config.head_dim, 2) / config.head_dim)
    wavelengths = 2 * np.pi / frequencies
    smooth = (original / wavelengths - low) / (high - low)
    factors = np.where(wavelengths > original / low, factor, 1 / ((1 - smooth) / factor + smooth))
    return np.where(wavelengths < original / high, 1.0, factors)


def _written(config: Any, name: str, tensor: torch.Tensor) -> torch.Tensor:
    if config.model_type == "llama" and (".attn_q." in name or ".attn_k." in name):
        heads = config.num_attention_heads if ".attn_q." in name else config.num_key_value_heads
        return tensor.reshape(heads, 2, -1, *tensor.shape[1:]).swapaxes(1, 2).reshape(tensor.shape)
    is_norm = name.endswith("norm.weight")
    return tensor + 1 if is_norm and config.model_type in ("gemma2", "gemma3_text", "nemotron") else tensor


def _names_of(architecture: str, names: dict[str, str], state: dict[str, Any]) -> dict[str, str]:
    """Return the names of a file that transformers' loader does not know."""
    if architecture == "gemma4":
        scales = {"router.scale": "ffn_gate_inp.scale", "router.per_expert_scale": "ffn_down_exps.scale"}
        routers = [source for source in state if source.endswith(tuple(scales))]
        found = {f"blk.{source.split('.')[2]}.{scales[source.split('.', 3)[3]]}": source for source in routers}
        return {name if "." in name[-7:] else f"{name}.weight": source for name, source in names.items()} | found
    parts = {
        "self_attn.sinks": "attn_sinks.weight",
        "mlp.router.weight": "ffn_gate_inp.weight",
        "mlp.router.bias": "ffn_gate_inp.bias",
        "mlp.experts.gate_up_proj": "ffn_gate_up_exps.weight",
        "mlp.experts.gate_up_proj_bias": "ffn_gate_up_exps.bias",
        "mlp.experts.down_proj": "ffn_down_exps.weight",
        "mlp.experts.down_proj_bias": "ffn_down_exps.bias",
    }
    layers = [source.split(".", 3) for source in state if ".layers." in source]
    own = {
        f"blk.{layer}.{parts[rest]}": f"model.layers.{layer}.{rest}" for _, _, layer, rest in layers if rest in parts
    }
    return {name: source for name, source in names.items() if source not in own.values()} | own


def _interleaved(name: str, tensor: torch.Tensor) -> dict[str, Any]:
    """Convert a gpt-oss tensor: outputs before inputs, gate and up separate."""
    made = tensor.transpose(1, 2) if tensor.dim() == 3 else tensor
    if "gate_up" not in name:
        return {name: made.numpy()}
    gate, up = made[:, ::2], made[:, 1::2]
    return {name.replace("gate_up", "gate"): gate.numpy(), name.replace("gate_up", "up"): up.numpy()}


def _experts(name: str, tensor: torch.Tensor) -> dict[str, Any]:
    """Split the tensor in which transformers has gate and up together."""
    stem = name.removesuffix(".weight")
    if "down" in stem:
        return {f"{stem}.weight": tensor.numpy()}
    gate, up = tensor.chunk(2, dim=1)
    return {f"{stem}.weight": (gate if "ffn_gate" in stem else up).numpy()}


def _add(writer: Any, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)


def _add_tokenizer(writer: Any, vocab_size: int) -> None:
    from tokenizers.pre_tokenizers import ByteLevel

    tokens = [*SPECIALS, *sorted(ByteLevel.alphabet()), "ab"]
    tokens += [f"<more{index}>" for index in range(vocab_size - len(tokens))]
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_types([3, 3, 3, *[1] * (len(tokens) - 3)])
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
