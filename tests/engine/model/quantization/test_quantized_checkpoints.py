"""GPTQ and AWQ checkpoints, packed here like their libraries do: the tokens equal those of the dequantized weights."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from kvscope_engine.model.layers.fused.grouped_linear import GroupedLinear
from kvscope_engine.model.loader.model_loader import load_model
from kvscope_engine.model.verification.ready_to_run import make_ready_to_run
from kvscope_engine.model.verification.trial import TrialContext
from kvscope_telemetry.engine_config import EngineConfig
from kvscope_telemetry.errors import BadInput

Model = Callable[..., Any]
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": False}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm", "zero_point": True}
CASES = {
    "gptq": GPTQ,
    "gptq of the second version": GPTQ | {"checkpoint_format": "gptq_v2"},
    "gptq of 8 bits": GPTQ | {"bits": 8},
    "gptq of whole rows": GPTQ | {"group_size": -1},
    "gptq in the order of activations": GPTQ | {"desc_act": True},
    "awq": AWQ,
    "AutoRound": GPTQ | {"quant_method": "auto-round", "packing_format": "auto_round:auto_gptq"},
}
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def packed(numbers: torch.Tensor, bits: int, order: tuple[int, ...] | None = None) -> torch.Tensor:
    """Pack (rows, n) numbers into (rows, n * bits / 32) int32, lowest bits first."""
    each = 32 // bits
    words = torch.zeros((len(numbers), numbers.shape[1] // each), dtype=torch.int64)
    for place in range(each):
        words |= numbers[:, (order or tuple(range(each)))[place] :: each].long() << (bits * place)
    return torch.where(words >= 1 << 31, words - (1 << 32), words).int()


def quantized(weight: torch.Tensor, recipe: dict[str, Any]) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Return a layer's tensors in its method's format, and their dequantized weight; written for clarity."""
    outputs, inputs = weight.shape
    most, group = 2 ** recipe["bits"] - 1, recipe["group_size"] if recipe["group_size"] > 0 else inputs
    order = torch.arange(inputs)
    if recipe.get("desc_act"):
        order = torch.randperm(inputs, generator=torch.Generator().manual_seed(0))
    groups = order // group
    codes, widened = torch.empty(outputs, inputs).long(), torch.empty(outputs, inputs)
    scales, zeros = (
        torch.empty(int(groups.max()) + 1, outputs).half(),
        torch.empty(int(groups.max()) + 1, outputs).long(),
    )
    for index in range(len(scales)):
        columns = groups == index
        part = weight[:, columns]
        scales[index] = ((part.amax(1) - part.amin(1)) / most).half()
        scale = scales[index].float()[:, None]
        zeros[index] = (-part.amin(1) / scale[:, 0]).round().clamp(1, most).long()
        codes[:, columns] = (part / scale + zeros[index][:, None]).round().clamp(0, most).long()
        widened[:, columns] = scale * (codes[:, columns] - zeros[index][:, None])
    if recipe["quant_method"] == "awq":
        words = packed(codes.T, 4, AWQ_ORDER), packed(zeros, 4, AWQ_ORDER)
        return {"qweight": words[0], "qzeros": words[1], "scales": scales}, widened
    stored = zeros - int(recipe.get("checkpoint_format") != "gptq_v2")
    words = packed(codes, recipe["bits"]).T.contiguous(), packed(stored, recipe["bits"])
    return {"qweight": words[0], "qzeros": words[1], "scales": scales, "g_idx": groups.int()}, widened


def write(model: Any, recipe: dict[str, Any], folder: Path) -> None:
    """Write `model` as a quantized checkpoint and give it the dequantized weights."""
    tensors = dict(model.state_dict())
    for name, layer in model.named_modules():
        if name.endswith("_proj"):
            parts, widened = quantized(layer.weight.detach(), recipe)
            layer.weight.data.copy_(widened)
            del tensors[f"{name}.weight"]
            tensors |= {f"{name}.{part}": tensor for part, tensor in parts.items()}
    folder.mkdir()
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    config = model.config.to_dict() | {"quantization_config": recipe}
    (folder / "config.json").write_text(json.dumps(config))


def logits_of(module: Any, paged: bool = True) -> torch.Tensor:
    positions = torch.arange(8)[None]
    more = {"paged": TrialContext()} if paged else {}
    with torch.inference_mode():
        found: torch.Tensor = module(input_ids=positions + 4, position_ids=positions, use_cache=False, **more).logits
    return found.float()


@pytest.mark.parametrize("case", CASES)
def test_tokens_equal_those_of_the_dequantized_weights(case: str, vivid_model: Model, tmp_path: Path) -> None:
    from kvscope_engine.engine import Engine
    from kvscope_telemetry.messages.commands import Submit
    from kvscope_telemetry.messages.sampling_params import SamplingParams

    model = vivid_model("llama")
    write(model, CASES[case], tmp_path / "model")
    prompt = tuple(range(5, 25))
    with torch.inference_mode():
        expected = model.generate(torch.tensor([prompt]), max_new_tokens=12, do_sample=False, eos_token_id=None)[0]
    options: dict[str, Any] = {
        "model": str(tmp_path / "model"),
        "device": "cpu",
        "dtype": "float32",
        "quantization": "none",
    }
    with Engine(EngineConfig(**options, num_gpu_blocks_override=16, max_num_seqs=2)) as engine:
        sampling = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
        (found,) = engine.generate([Submit(request_id="r", prompt_token_ids=prompt, sampling=sampling)])
        assert any("come as" in note for note in engine.notes)
    assert list(found.token_ids) == expected[len(prompt) :].tolist()


@pytest.mark.parametrize("case", CASES)
def test_quantized_checkpoint_layers_run_on_the_stored_bits_if_the_order_allows(
    case: str, vivid_model: Model, tmp_path: Path
) -> None:
    recipe = CASES[case]
    write(vivid_model("llama"), recipe, tmp_path / "model")
    options: dict[str, Any] = {"model": str(tmp_path / "model"), "device": "cpu", "dtype": "float32"}
    exact = load_model(EngineConfig(**options, quantization="none"), lambda _: None).module
    expected = logits_of(exact)
    wanted = "int8" if recipe["bits"] == 8 else "int4"
    loaded = load_model(EngineConfig(**options, quantization=wanted), lambda _: None)
    assert loaded.info.quantization == f"{wanted}-a8"
    assert bool(loaded.notes) == bool(recipe.get("desc_act"))
    fused = make_ready_to_run(loaded.module, loaded.quantization)
    assert (fused.int8 if wanted == "int8" else fused.int4) >= 8
    found = logits_of(loaded.module)
    allowed = 0.5 if recipe.get("desc_act") else 0.1  # those weights are rounded a second time
    assert float((found - expected).norm()) <= allowed * float(expected.norm())
    if not recipe.get("desc_act"):
        layers = [part for part in loaded.module.modules() if isinstance(part, GroupedLinear)]
        assert {part.bits for part in layers} == {recipe["bits"]}


@pytest.mark.parametrize(
    ("recipe", "words"),
    [
        (GPTQ | {"bits": 3}, "its gptq bits is 3, 4 or 8 is accepted"),
        (GPTQ | {"group_size": 24}, "its gptq group_size is 24, a multiple of 32"),
        (GPTQ | {"checkpoint_format": "marlin"}, "its gptq checkpoint_format is 'marlin'"),
        (AWQ | {"version": "gemv"}, "its awq version is 'gemv', gemm is accepted"),
        ({"quant_method": "hqq"}, "quantized with hqq; supported are GPTQ, AWQ, FP8"),
    ],
)
def test_unsupported_variant_is_refused(
    recipe: dict[str, Any], words: str, tiny_checkpoint: Callable[..., Path]
) -> None:
    folder = tiny_checkpoint("llama")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": recipe}))
    with pytest.raises(BadInput, match=words):
        load_model(EngineConfig(model=str(folder), device="cpu"), lambda _: None)


@pytest.mark.parametrize(
    ("part", "words"), [("qzeros", "lacks .*qzeros"), ("scales", "scales is"), ("g_idx", "g_idx does not name")]
)
def test_inconsistent_tensor_of_a_gptq_checkpoint_is_named(
    part: str, words: str, vivid_model: Model, tmp_path: Path
) -> None:
    from safetensors.torch import load_file

    write(vivid_model("llama"), GPTQ, tmp_path / "model")
    path = tmp_path / "model" / "model.safetensors"
    tensors = load_file(path)
    name = f"model.layers.1.mlp.up_proj.{part}"
    changed = {"qzeros": None, "scales": tensors[name][:1], "g_idx": tensors[name] + 9}[part]
    del tensors[name]
    save_file(tensors if changed is None else tensors | {name: changed.contiguous()}, path)
    with pytest.raises(BadInput, match=words):
        load_model(EngineConfig(model=str(tmp_path / "model"), device="cpu"), lambda _: None)
