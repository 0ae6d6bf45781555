"""Layers run in a single call equal the same layers run part by part, in a whole model, and are used only if
everything is supported.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from kvscope_engine import Engine, EngineConfig, SamplingParams
from kvscope_engine.model.device_memory.read_back import RowReadBack
from kvscope_engine.model.kv_cache.kv_storage import KVStorage, LayerShape
from kvscope_engine.model.layers.attention.attention_scores import AttentionScores
from kvscope_engine.model.layers.fused.compiled_layer import CompiledFusedLayer
from kvscope_engine.model.layers.fused.fused_layer import FusedLayer
from kvscope_engine.model.layers.fused.int8_linear import can_round
from kvscope_engine.model.loaded_model import LoadedModel
from kvscope_engine.model.verification.check_script import (
    NUM_BLOCKS,
    CheckStep,
    ScriptPiece,
    check_block_size,
    check_context,
    check_sequences,
)
from kvscope_engine.model.verification.ready_to_run import make_ready_to_run
from kvscope_kernels import ops_for
from kvscope_kernels.dispatch import torch_ops
from kvscope_kernels.quantized_linear.grouped_weight import rounded
from kvscope_telemetry.messages.commands import Submit

Load = Callable[..., LoadedModel]
CPU, DECODES = torch.device("cpu"), 3
pytestmark = pytest.mark.skipif(not can_round(), reason="needs a C compiler")


class CountingLayer:
    """A compiled layer that records whether it was used."""

    def __init__(self, compiled: Any) -> None:
        self.compiled = compiled
        self.taken: list[bool] = []

    def run(self, *args: Any) -> Any:
        done = self.compiled.run(*args)
        self.taken.append(done is not None)
        return done


def counted_layers(module: Any) -> list[CountingLayer]:
    """Return a counting wrapper for each layer of the model that has a compiled form."""
    layers = [getattr(part, "kvscope_fused", None) for part in module.modules()]
    compiled_layers = [
        layer for layer in layers if isinstance(layer, FusedLayer) and isinstance(layer.compiled, CompiledFusedLayer)
    ]
    for layer in compiled_layers:
        layer.compiled = CountingLayer(layer.compiled)
    return [layer.compiled for layer in compiled_layers if isinstance(layer.compiled, CountingLayer)]


def without_them(module: Any) -> None:
    for part in module.modules():
        layer = getattr(part, "kvscope_fused", None)
        if isinstance(layer, FusedLayer):
            layer.compiled = None


def logits_of(module: Any, cache: torch.dtype | None = None, **changes: Any) -> torch.Tensor:
    """Return the logits of a prefill step and of the decodes after it."""
    config, dtype = module.config, next(module.parameters()).dtype
    shapes = [LayerShape(config.num_key_value_heads, config.head_dim)] * config.num_hidden_layers
    storage = KVStorage(NUM_BLOCKS, check_block_size(CPU), shapes, cache or dtype, CPU)
    sequences = check_sequences(config, CPU)[:2]
    firsts = [sequence.length - DECODES for sequence in sequences]
    steps = [CheckStep(tuple(ScriptPiece(s, 0, first) for s, first in zip(sequences, firsts, strict=True)))]
    for number in range(DECODES):
        places = [first + number for first in firsts]
        steps.append(CheckStep(tuple(ScriptPiece(s, at, at + 1) for s, at in zip(sequences, places, strict=True))))
    found = []
    with torch.inference_mode():
        for step in steps:
            context = check_context(step, storage, ops_for("cpu"))
            context = replace(context, **changes) if context.prefill is None else context
            ids, positions = step.gather("ids")[None], step.gather("positions")[None]
            found.append(module(input_ids=ids, position_ids=positions, use_cache=False, paged=context).logits[0])
    storage.close()
    return torch.cat(found)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("model_type", "quantization"), [("llama", "int8"), ("llama", "int4"), ("qwen3", "int8")])
def test_compiled_layers_give_the_same_logits(
    model_type: str, quantization: str, dtype: torch.dtype, tiny_loaded: Load
) -> None:
    module = tiny_loaded(model_type).module.to(dtype)
    make_ready_to_run(module, quantization)
    layers = counted_layers(module)
    found = logits_of(module)
    assert [layer.taken for layer in layers] == [[False, *[True] * DECODES]] * 2
    again = logits_of(module)  # another storage, which may have the address of the previous one
    without_them(module)
    expected = logits_of(module)
    assert torch.equal(found, expected)
    assert torch.equal(again, expected)


def test_steps_that_compiled_layers_do_not_support_run_uncompiled(tiny_loaded: Load) -> None:
    module = tiny_loaded("llama").module
    make_ready_to_run(module, "int8")
    layers = counted_layers(module)
    logits_of(module, torch.int8)
    logits_of(module, ops=torch_ops())
    assert len(layers) == 2
    assert not any(taken for layer in layers for taken in layer.taken)


def test_compiled_layers_measure_the_same_attention_as_uncompiled_ones(tiny_loaded: Load) -> None:
    module = tiny_loaded("llama").module
    make_ready_to_run(module, "int8")
    layers, found, expected = counted_layers(module), AttentionScores(), AttentionScores()
    logits = logits_of(module, shares=found)
    assert all(any(layer.taken) for layer in layers)
    without_them(module)
    assert torch.equal(logits, logits_of(module, shares=expected))
    rows, wanted = (started() for each in (found, expected) if (started := each.start(RowReadBack(CPU, 0))) is not None)
    assert rows[0].sum(1) == pytest.approx([1.0, 1.0], abs=1e-5)
    assert (rows == wanted).all()


@pytest.mark.filterwarnings("ignore")
def test_tokens_of_compiled_int4_layers_equal_transformers(tmp_path: Path, vivid_model: Callable[..., Any]) -> None:
    """The model has head norms; its weights are already rounded."""
    model = vivid_model("qwen3")
    head = model.get_output_embeddings()
    for part in model.modules():
        if type(part) is torch.nn.Linear and part is not head:
            part.weight.data.copy_(rounded(part.weight.data).widened())
    model.save_pretrained(tmp_path)
    ids, count = list(range(3, 40)), 12
    sampling = SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True)
    options: dict[str, Any] = {"device": "cpu", "dtype": "float32", "quantization": "int4"}
    with Engine(EngineConfig(model=str(tmp_path), num_gpu_blocks_override=16, **options)) as engine:
        submit = Submit(request_id="-", prompt_token_ids=tuple(ids), sampling=sampling)
        found = next(iter(engine.generate([submit]))).token_ids
    given = torch.tensor([ids])
    said = model.generate(given, do_sample=False, max_new_tokens=count, min_new_tokens=count, pad_token_id=0)
    assert list(found) == said[0, len(ids) :].tolist()


def test_layers_of_an_unsupported_structure_are_not_compiled(tiny_loaded: Load) -> None:
    module = tiny_loaded("gemma2").module
    make_ready_to_run(module, "int8")
    assert not counted_layers(module)


def test_unquantized_layers_are_not_compiled(tiny_loaded: Load) -> None:
    module = tiny_loaded("llama").module
    make_ready_to_run(module)
    assert not counted_layers(module)
