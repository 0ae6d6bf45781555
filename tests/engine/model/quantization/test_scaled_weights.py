"""Checkpoints with scales next to small weights, written here by their formats' definitions, dequantize to the right
weights.

This reader was compared once with what compressed-tensors 0.20.0 and bitsandbytes 0.50.2 write and dequantize. Where
transformers itself dequantizes a format, it is the reference here.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from kvscope_engine.model.layers.fused.grouped_linear import GroupedLinear
from kvscope_engine.model.loader.model_loader import load_model
from kvscope_engine.model.quantization.stored_weight import read_stored_weight
from kvscope_engine.model.verification.ready_to_run import make_ready_to_run
from kvscope_engine.planning.skeleton import read_skeleton
from kvscope_kernels.quantized_linear.fp8 import Fp8Weight
from kvscope_telemetry.engine_config import EngineConfig
from kvscope_telemetry.errors import BadInput

Tensors = dict[str, torch.Tensor]
Written = tuple[Tensors, torch.Tensor]
"""A layer's tensors by name suffix, and the weight that they represent."""
FP4 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
NF4 = torch.linspace(-1, 1, 16)


def float8(weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return (weight / scale).to(torch.float8_e4m3fn)


def spread(scale: torch.Tensor, weight: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    wide = scale.repeat_interleave(rows, 0).repeat_interleave(columns, 1)
    return wide[: len(weight), : weight.shape[1]]


def fp8_tiles(weight: torch.Tensor) -> Written:
    """Quantize in tiles of 40 x 48, which divide no weight here, so that the last tiles are smaller."""
    scale = torch.rand(-(-len(weight) // 40), -(-weight.shape[1] // 48)) + 0.5
    wide = spread(scale, weight, 40, 48)
    codes = float8(weight, wide)
    return {"weight": codes, "weight_scale_inv": scale}, codes.float() * wide


def fp8_whole(weight: torch.Tensor) -> Written:
    scale = weight.abs().max() / 448
    codes = float8(weight, scale)
    extra = {"weight_scale_inv": scale, "activation_scale": torch.tensor(0.1)}
    return {"weight": codes} | extra, codes.float() * scale


def fp8_rows(weight: torch.Tensor) -> Written:
    scale = weight.abs().amax(1, keepdim=True) / 448
    codes = float8(weight, scale)
    return {"weight": codes, "weight_scale": scale, "input_scale_ub": torch.tensor([1.0])}, codes.float() * scale


def fp8_powers(weight: torch.Tensor) -> Written:
    """Quantize as MXFP8."""
    exponents = torch.randint(120, 130, (len(weight), weight.shape[1] // 32), dtype=torch.uint8)
    wide = spread(torch.exp2(exponents.float() - 127), weight, 1, 32)
    codes = float8(weight, wide)
    return {"weight": codes, "weight_scale": exponents}, codes.float() * wide


def nibbles(codes: torch.Tensor, high_first: bool = False) -> torch.Tensor:
    low, high = (codes[..., 1::2], codes[..., ::2]) if high_first else (codes[..., ::2], codes[..., 1::2])
    return (low | high << 4).to(torch.uint8)


def fp4(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the nearest code of each number and its value."""
    code = (weight.abs()[..., None] - FP4).abs().argmin(-1)
    return code + 8 * (weight < 0), FP4[code] * torch.where(weight < 0, -1.0, 1.0)


def nvfp4(weight: torch.Tensor, divides: bool) -> Written:
    whole = torch.tensor([4.0])
    scale = (torch.rand(len(weight), weight.shape[1] // 16) + 0.5).to(torch.float8_e4m3fn)
    wide = spread(scale.float() / whole if divides else scale.float() * whole, weight, 1, 16)
    codes, meant = fp4(weight / wide)
    if divides:
        return {"weight_packed": nibbles(codes), "weight_scale": scale, "weight_global_scale": whole}, meant * wide
    extra = {"weight_scale_2": whole.reshape(()), "input_scale": torch.tensor(1.0)}
    return {"weight": nibbles(codes), "weight_scale": scale} | extra, meant * wide


def mxfp4(weight: torch.Tensor) -> Written:
    exponents = torch.randint(120, 130, (len(weight), weight.shape[1] // 32), dtype=torch.uint8)
    wide = spread(torch.exp2(exponents.float() - 127), weight, 1, 32)
    codes, meant = fp4(weight / wide)
    return {"weight_packed": nibbles(codes), "weight_scale": exponents}, meant * wide


def words(codes: torch.Tensor, bits: int) -> torch.Tensor:
    each = 32 // bits
    padded = torch.nn.functional.pad(codes.long(), (0, -codes.shape[1] % each)).view(len(codes), -1, each)
    made = (padded << torch.arange(0, 32, bits)).sum(-1)
    return torch.where(made >= 1 << 31, made - (1 << 32), made).int()


def packed(weight: torch.Tensor, bits: int, group: int, zero: bool = False, ordered: bool = False) -> Written:
    half, groups = 2 ** (bits - 1), weight.shape[1] // group
    scale = torch.rand(len(weight), groups) * 0.02 + 0.01
    points = torch.randint(-2, 3, (len(weight), groups)) if zero else torch.zeros(len(weight), groups).long()
    place = torch.arange(weight.shape[1]) // group
    if ordered:
        place = place[torch.randperm(len(place))]
    codes = (weight / scale[:, place] + points[:, place]).round().clamp(-half, half - 1).long()
    tensors = {
        "weight_packed": words(codes + half, bits),
        "weight_scale": scale,
        "weight_shape": torch.tensor(weight.shape),
    }
    if zero:
        tensors["weight_zero_point"] = words((points + half).T, bits).T
    if ordered:
        tensors["weight_g_idx"] = place.int()
    return tensors, scale[:, place] * (codes - points[:, place])


def int8_rows(weight: torch.Tensor, zero: bool = False) -> Written:
    scale = weight.abs().amax(1, keepdim=True) / 100
    points = torch.randint(-9, 9, (len(weight), 1)) if zero else torch.zeros(len(weight), 1).long()
    codes = (weight / scale + points).round().to(torch.int8)
    extra = {"weight_zero_point": points.to(torch.int8)} if zero else {}
    return {"weight": codes, "weight_scale": scale} | extra, scale * (codes.long() - points)


def bnb_int8(weight: torch.Tensor) -> Written:
    largest = weight.abs().amax(1)
    codes = (weight / largest[:, None] * 127).round().to(torch.int8)
    extra = {"SCB": largest, "weight_format": torch.tensor(0, dtype=torch.uint8)}
    return {"weight": codes} | extra, codes.float() * (largest[:, None] / 127)


def bnb_nf4(weight: torch.Tensor, nested: bool) -> Written:
    blocks = weight.reshape(-1, 64)
    state: dict[str, Any] = {"quant_type": "nf4", "blocksize": 64, "dtype": "bfloat16", "shape": list(weight.shape)}
    largest = blocks.abs().amax(1)
    tensors: Tensors = {"weight.absmax": largest}
    if nested:
        numbers, offset = torch.linspace(-1, 1, 256), float(largest.mean())
        outer = (largest - offset).abs().max().reshape(1)
        inner = (((largest - offset) / outer)[:, None] - numbers).abs().argmin(1)
        largest = numbers[inner] * outer + offset
        state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": offset}
        tensors = {
            "weight.absmax": inner.to(torch.uint8),
            "weight.nested_absmax": outer,
            "weight.nested_quant_map": numbers,
        }
    codes = ((blocks / largest[:, None])[..., None] - NF4).abs().argmin(-1)
    told = torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)
    tensors |= {
        "weight": nibbles(codes.reshape(1, -1), high_first=True).T,
        "weight.quant_map": NF4.clone(),
        "weight.quant_state.bitsandbytes__nf4": told,
    }
    return tensors, (NF4[codes] * largest[:, None]).reshape(weight.shape)


def compressed(form: str, **weights: Any) -> dict[str, Any]:
    return {"quant_method": "compressed-tensors", "format": form, "config_groups": {"group_0": {"weights": weights}}}


INT4 = compressed("pack-quantized", num_bits=4, type="int")
CASES: dict[str, tuple[dict[str, Any], Callable[[torch.Tensor], Written]]] = {
    "fp8 of tiles": ({"quant_method": "fp8", "weight_block_size": [40, 48]}, fp8_tiles),
    "fp8 of a number": ({"quant_method": "fp8", "activation_scheme": "static"}, fp8_whole),
    "fbgemm": ({"quant_method": "fbgemm_fp8"}, fp8_rows),
    "fp8 of rows": (compressed("float-quantized", num_bits=8, type="float"), fp8_rows),
    "mxfp8": (compressed("mxfp8-quantized", num_bits=8, type="float"), fp8_powers),
    "nvfp4": (compressed("nvfp4-pack-quantized"), lambda weight: nvfp4(weight, divides=True)),
    "modelopt nvfp4": (
        {"quant_method": "modelopt", "quant_algo": "NVFP4"},
        lambda weight: nvfp4(weight, divides=False),
    ),
    "mxfp4": (compressed("mxfp4-pack-quantized"), mxfp4),
    "int4": (INT4, lambda weight: packed(weight, 4, 32)),
    "int4 of rows with zeros": (INT4, lambda weight: packed(weight, 4, weight.shape[1], zero=True)),
    "int4 in the order of activations": (INT4, lambda weight: packed(weight, 4, 32, ordered=True)),
    "int8 in words": (
        compressed("pack-quantized", num_bits=8, type="int"),
        lambda weight: packed(weight, 8, 32, zero=True),
    ),
    "int8": (compressed("int-quantized", num_bits=8, type="int"), lambda weight: int8_rows(weight, zero=True)),
    "bitsandbytes int8": ({"quant_method": "bitsandbytes", "load_in_8bit": True}, bnb_int8),
    "nf4": ({"quant_method": "bitsandbytes", "load_in_4bit": True}, lambda weight: bnb_nf4(weight, nested=False)),
    "nf4 rounded twice": ({"load_in_4bit": True}, lambda weight: bnb_nf4(weight, nested=True)),
}
KEPT = {"int4": 4, "int4 of rows with zeros": 4, "int8 in words": 8, "int8": 8, "bitsandbytes int8": 8}


def quantize(folder: Path, case: str, text_only: str = "") -> Tensors:
    """Quantize the checkpoint in `folder`. Returns the dequantized weights by layer name."""
    recipe, write = CASES[case]
    torch.manual_seed(1)
    path, meant = folder / "model.safetensors", {}
    tensors = load_file(path)
    for name in sorted(tensors):
        if name.endswith("_proj.weight") and text_only in name:
            parts, meant[name] = write(tensors.pop(name).float())
            tensors |= {name.removesuffix("weight") + part: tensor.contiguous() for part, tensor in parts.items()}
    save_file(tensors, path, {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": recipe}))
    return meant


def load(folder: Path, quantization: str = "none") -> Any:
    config = EngineConfig(model=str(folder), device="cpu", dtype="float32", quantization=quantization)
    return load_model(config, lambda _: None)


@pytest.mark.parametrize("case", CASES)
def test_weights_dequantize_as_the_format_defines(case: str, tiny_checkpoint: Callable[..., Path]) -> None:
    folder = tiny_checkpoint("llama")
    meant = quantize(folder, case)
    loaded = load(folder)
    found = loaded.module.state_dict()
    assert len(meant) == 14
    for name, weight in meant.items():
        torch.testing.assert_close(found[name], weight.float(), rtol=1e-6, atol=1e-7)
    assert any("come as" in note and "widened to float32" in note for note in loaded.notes)
    assert read_skeleton(str(folder)).num_parameters == sum(each.numel() for each in loaded.module.parameters())


@pytest.mark.parametrize("case", ["fp8 of a number", "fbgemm", "fp8 of rows", "mxfp8"])
def test_fp8_weights_are_kept_quantized(case: str, tiny_checkpoint: Callable[..., Path]) -> None:
    """Includes fused layers. Only GPUs serve FP8; the reference is used here."""
    folder = tiny_checkpoint("llama")
    meant = quantize(folder, case)
    loaded = load(folder, "int4")
    assert sum(each.weight.numel() for each in keepers(loaded.module)) == sum(each.numel() for each in meant.values())
    for layer in keepers(loaded.module):
        held = read_stored_weight(layer)
        assert isinstance(held, Fp8Weight)
        torch.testing.assert_close(held.widened(), layer.weight, rtol=1e-6, atol=1e-7)
    fused = make_ready_to_run(loaded.module, "fp8")
    layers = [part for part in loaded.module.modules() if isinstance(part, GroupedLinear)]
    assert len(layers) == fused.int8 == 8


def keepers(module: Any) -> list[Any]:
    """Return the linear layers that keep a quantized weight of the file."""
    return [part for part in module.modules() if type(part) is torch.nn.Linear and read_stored_weight(part) is not None]


@pytest.mark.parametrize("case", KEPT)
def test_integer_weights_are_kept_quantized(case: str, tiny_checkpoint: Callable[..., Path]) -> None:
    folder = tiny_checkpoint("llama")
    quantize(folder, case)
    loaded = load(folder, "int4" if KEPT[case] == 4 else "int8")
    make_ready_to_run(loaded.module, loaded.quantization)
    layers = [part for part in loaded.module.modules() if isinstance(part, GroupedLinear)]
    assert layers
    assert {part.bits for part in layers} == {KEPT[case]}


def test_fp8_tiles_dequantize_like_transformers(tiny_checkpoint: Callable[..., Path]) -> None:
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    folder = tiny_checkpoint("llama", hidden_size=96, intermediate_size=160)
    path = folder / "model.safetensors"
    tensors, expected = load_file(path), {}
    for name in [name for name in tensors if name.endswith("_proj.weight")]:
        rows, columns = (size // 2 for size in tensors[name].shape)
        scale = torch.rand(2, 2) + 0.5
        codes = float8(tensors[name], spread(scale, tensors[name], rows, columns))
        tensors[name], tensors[f"{name}_scale_inv"] = codes, scale
        expected[name] = Fp8Dequantize(None)._dequantize_one(codes, scale, torch.float32)
    save_file(tensors, path, {"format": "pt"})
    found = load(folder).module.state_dict()  # the configuration does not even mention the format
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_gpt_oss_experts_dequantize_like_transformers(tiny_checkpoint: Callable[..., Path]) -> None:
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    folder = tiny_checkpoint("gpt_oss", intermediate_size=64)
    path = folder / "model.safetensors"
    tensors, expected = load_file(path), {}
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, inputs, outputs = tensors.pop(name).shape
        blocks = torch.randint(0, 256, (experts, outputs, inputs // 32, 16), dtype=torch.uint8)
        scales = torch.randint(118, 124, (experts, outputs, inputs // 32), dtype=torch.uint8)
        tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        expected[name] = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
    save_file(tensors, path, {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "mxfp4"}}))
    loaded = load(folder)
    found = loaded.module.state_dict()
    assert len(expected) == 4
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert loaded.notes[-1] == "weights come as MXFP4 and are widened to float32"


@pytest.mark.parametrize("case", ["fp8 of tiles", "int4"])
def test_experts_in_separate_tensors_are_dequantized(case: str, tiny_checkpoint: Callable[..., Path]) -> None:
    sizes = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    folder = tiny_checkpoint("qwen3_moe", **sizes)
    meant = quantize(folder, case)
    found = load(folder, "auto").module.state_dict()
    up = [meant[f"model.layers.1.mlp.experts.{index}.up_proj.weight"] for index in range(4)]
    torch.testing.assert_close(found["model.layers.1.mlp.experts.gate_up_proj"][:, 32:], torch.stack(up).float())


def test_quantized_text_part_of_a_multimodal_model_stays_quantized(tmp_path: Path) -> None:
    """Its layers stay quantized, under other names than in the file."""
    from transformers import AutoConfig, AutoModelForImageTextToText

    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    text = sizes | {"num_key_value_heads": 2, "head_dim": 16, "vocab_size": 320}
    vision = sizes | {"image_size": 28, "patch_size": 14, "num_hidden_layers": 3}
    config = AutoConfig.for_model("gemma3", text_config=text, vision_config=vision, mm_tokens_per_image=4)
    auto: Any = AutoModelForImageTextToText
    auto.from_config(config, dtype=torch.float32).save_pretrained(tmp_path)
    meant = quantize(tmp_path, "int4", text_only="language_model")
    loaded = load(tmp_path, "int4")
    name = next(name for name in meant if name.endswith("layers.1.mlp.up_proj.weight"))
    layer = loaded.module.get_submodule("model.layers.1.mlp.up_proj")
    torch.testing.assert_close(layer.weight, meant[name].float())
    make_ready_to_run(loaded.module, loaded.quantization)
    assert {part.bits for part in loaded.module.modules() if isinstance(part, GroupedLinear)} == {4}
    assert loaded.notes[-1].startswith("gemma3 reads more than text")


@pytest.mark.parametrize(
    ("case", "change", "words"),
    [
        ("fp8 of tiles", {"weight_scale_inv": None}, "lacks .*q_proj.weight_scale"),
        ("fp8 of tiles", {"weight_scale_inv": torch.ones(3, 5)}, "weight_scale_inv is .3, 5., which does not fit"),
        ("fp8 of rows", {"pre_quant_scale": torch.ones(64)}, r"pre_quant_scale \(F32\) is of a form that is not read"),
        ("int4", {"weight_packed": torch.zeros(64, 5).int()}, "weight_packed is .64, 5."),
        ("int8", {"weight_scale": None}, "lacks .*q_proj.weight_scale"),
        ("int8", {"weight": torch.zeros(2, 64, 64).to(torch.int8)}, "weight is .2, 64, 64.: whole numbers"),
    ],
)
def test_inconsistent_tensor_of_a_scaled_checkpoint_is_named(
    case: str, change: dict[str, Any], words: str, tiny_checkpoint: Callable[..., Path]
) -> None:
    folder = tiny_checkpoint("llama")
    quantize(folder, case)
    path = folder / "model.safetensors"
    tensors = load_file(path)
    prefix = "model.layers.0.self_attn.q_proj."
    for part, tensor in change.items():
        tensors.pop(prefix + part, None)
        tensors |= {} if tensor is None else {prefix + part: tensor}
    save_file(tensors, path, {"format": "pt"})
    with pytest.raises(BadInput, match=words):
        load(folder)


@pytest.mark.parametrize(
    ("recipe", "words"),
    [
        (compressed("marlin-24"), "its compressed-tensors format is 'marlin-24'"),
        (INT4 | {"sparsity_config": {"format": "sparse-24-bitmask"}}, "its compressed-tensors sparsity_config is"),
        (INT4 | {"transform_config": {"config_groups": {"u": {}}}}, "its compressed-tensors transform_config is"),
        ({"quant_method": "fp8", "weight_block_size": 128}, "its fp8 weight_block_size is 128, two whole numbers"),
        ({"quant_method": "mxfp4"}, "it has no layer with quantized weights, although its format is mxfp4"),
        ({"quant_method": "aqlm"}, "its weights are quantized with aqlm; supported are GPTQ, AWQ, FP8, MXFP4"),
    ],
)
def test_unsupported_format_is_refused_by_name(
    recipe: dict[str, Any], words: str, tiny_checkpoint: Callable[..., Path]
) -> None:
    folder = tiny_checkpoint("llama")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": recipe}))
    with pytest.raises(BadInput, match=words):
        load(folder)
