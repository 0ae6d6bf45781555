"""Quantized blocks of GGUF files in a model's layers: exactly the file's values, in the layers' row order."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from kvscope_engine.model.loader.gguf.gguf_blocks import main_bits, read_blocks
from kvscope_engine.model.loader.gguf.gguf_header import check_gguf
from kvscope_engine.model.loader.model_loader import load_model
from kvscope_engine.model.quantization.stored_weight import read_stored_weight
from kvscope_telemetry.engine_config import EngineConfig

Kind = gguf.GGMLQuantizationType
Write = Callable[..., Path]


@pytest.fixture
def write(tiny_gguf: Write, own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> Write:
    """Function that writes a tiny GGUF file with matrices of a quantization kind."""
    plain = gguf.GGUFWriter.add_tensor

    def make(kind: Kind) -> Path:
        def add(writer: Any, name: str, tensor: np.ndarray[Any, Any]) -> None:
            if tensor.ndim == 2:
                plain(writer, name, gguf.quants.quantize(tensor, kind), raw_dtype=kind)
            else:
                plain(writer, name, tensor)

        monkeypatch.setattr(gguf.GGUFWriter, "add_tensor", add)
        return tiny_gguf(f"{kind.name}.gguf")

    return make


@pytest.mark.parametrize("kind", [Kind.Q4_0, Kind.Q4_1, Kind.Q8_0])
def test_quantized_gguf_blocks_dequantize_to_the_values_of_the_file(kind: Kind, write: Write) -> None:
    path = write(kind)
    header = check_gguf(path)
    assert main_bits(header) == (8 if kind == Kind.Q8_0 else 4)
    raw = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    for name in ("blk.0.ffn_down.weight", "token_embd.weight"):
        inputs, outputs = header.shapes[name]
        expected = torch.from_numpy(gguf.quants.dequantize(raw[name].data, kind)).view(outputs, inputs)
        rows = torch.randperm(outputs)
        found = read_blocks(header.locations[name], rows, outputs)
        assert torch.equal(found.widened(), expected[rows])


@pytest.mark.parametrize(("kind", "num_stored"), [(Kind.Q4_0, 15), (Kind.Q8_0, 15), (Kind.Q5_1, 0)])
def test_quantized_gguf_weights_are_found_for_each_linear_layer(kind: Kind, num_stored: int, write: Write) -> None:
    """Includes queries and keys, whose rows have another order in the file, and a head tied to the embedding."""
    config = EngineConfig(model=str(write(kind)), device="cpu", dtype="float32", quantization="int4")
    loaded = load_model(config, lambda _: None)
    found = 0
    for layer in (part for part in loaded.module.modules() if isinstance(part, torch.nn.Linear)):
        weight = read_stored_weight(layer)
        if weight is not None:
            assert torch.equal(weight.widened(), layer.weight)
            found += 1
    assert found == num_stored
