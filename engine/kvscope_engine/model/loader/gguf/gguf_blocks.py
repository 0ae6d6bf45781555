"""Converts GGUF blocks with 4 or 8 bits per weight to grouped weights with exactly the file's values.

Defines the layouts of these blocks (https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h), and checks that a
tensor is a layer's weight: dequantized, with rows in the layer's order, it must equal the layer's weight.
"""

from __future__ import annotations

from collections import Counter
from math import prod
from typing import Any, Final

import numpy as np
import torch
from torch import nn

from kvscope_engine.model.loader.gguf.gguf_file import GgufFile
from kvscope_engine.model.loader.gguf.gguf_header import GgufHeader, TensorLocation
from kvscope_engine.model.quantization.stored_weight import StoredWeightReader, name_format, set_stored_weight_readers
from kvscope_kernels.quantized_linear.grouped_weight import CHUNK, GroupedWeight, grouped

Q4_0: Final = 2
Q4_1: Final = 3
Q8_0: Final = 8
BITS: Final = {Q4_0: 4, Q4_1: 4, Q8_0: 8}
"""Bits per weight, by ggml's type number. A block has `CHUNK` weights of a row."""
_BLOCK_BYTES: Final = {Q4_0: 18, Q4_1: 20, Q8_0: 34}
_UNQUANTIZED_TYPES: Final = ("F32", "F16", "BF16", "F64")
_NUM_SAMPLES: Final = 16
"""Number of rows that are compared to decide whether a tensor is a layer's weight. Either all of its rows match or
none.
"""


def attach_gguf(module: nn.Module, file: GgufFile) -> int:
    """Attach each GGUF tensor's blocks to the linear layer of `module` whose weight the tensor contains. Returns the
    number of these layers.

    Skips layers that the file stores in other types, in several tensors, or in an unknown order of rows.
    """
    header = file.header
    name_format(module, main_format(header))
    names = _tensor_names(header, module)
    count = 0
    for layer, name in names:
        blocks = _matching_blocks(layer, header, name) if name in header.locations else None
        if blocks is not None:
            set_stored_weight_readers(layer, [blocks])
            count += 1
    return count


def name_gguf(module: nn.Module, file: GgufFile) -> None:
    """Set the display name of the file's format on `module`, whose weights stay dequantized."""
    kind = main_format(file.header)
    name_format(module, "" if kind in _UNQUANTIZED_TYPES else kind)


def main_bits(header: GgufHeader) -> int:
    """Return the bits per weight, 4 or 8, of the supported block type with most of the file's bytes.

    Returns 0 if less than half of the bytes are in supported blocks.
    """
    sizes: Counter[int] = Counter()
    for location in header.locations.values():
        sizes[BITS.get(location.type_number, 0)] += location.num_bytes
    has_majority = 2 * sizes[0] < sizes.total()
    return max((4, 8), key=lambda bits: sizes[bits]) if has_majority else 0


def main_format(header: GgufHeader) -> str:
    """Return ggml's name of the tensor type with most of the file's bytes."""
    import gguf

    sizes: Counter[int] = Counter()
    for location in header.locations.values():
        sizes[location.type_number] += location.num_bytes
    return str(gguf.GGMLQuantizationType(sizes.most_common(1)[0][0]).name)


def packed_bytes(header: GgufHeader) -> int:
    """Return the bytes of weights that a step reads on a CPU.

    Supported blocks count with scales and offsets, tensors of other types with 8 bits per weight.
    """
    is_tied = "output.weight" not in header.locations
    read = [name for name in header.locations if is_tied or name != "token_embd.weight"]
    return sum(_packed_bytes(header.shapes[name], header.locations[name].type_number) for name in read)


def _packed_bytes(shape: tuple[int, ...], kind: int) -> int:
    count = prod(shape)
    if len(shape) == 1:
        return 4 * count
    # Per weight, with its share of a group's scale and low.
    half_bits = 2 * BITS[kind] + 2 if kind in BITS else 17
    return count * half_bits // 16


def read_blocks(location: TensorLocation, rows: torch.Tensor, outputs: int) -> GroupedWeight:
    """Read `rows` of the tensor at `location`, which has `outputs` rows in all."""
    raw = np.memmap(location.file, np.uint8, "r", location.start, (outputs, location.num_bytes // outputs))
    blocks = torch.from_numpy(raw[rows.numpy()]).view(len(rows), -1, _BLOCK_BYTES[location.type_number])
    scale = _halves(blocks[..., :2])
    if location.type_number == Q8_0:
        codes = blocks[..., 2:] ^ 0x80  # signed to offset binary
        return grouped(codes.flatten(1), scale, -128.0 * scale, 8, CHUNK)
    nibbles = blocks[..., -CHUNK // 2 :]
    codes = torch.cat((nibbles & 15, nibbles >> 4), -1).flatten(1)
    low = _halves(blocks[..., 2:4]) if location.type_number == Q4_1 else -8.0 * scale
    return grouped(codes, scale, low, 4, CHUNK)


def _halves(two_bytes: torch.Tensor) -> torch.Tensor:
    return two_bytes.contiguous().view(torch.float16)[..., 0].float()


def _tensor_names(header: GgufHeader, module: nn.Module) -> list[tuple[Any, str]]:
    """Return the linear layers, each with the name of the GGUF tensor expected to contain its weight."""
    import gguf

    architectures = {name: number for number, name in gguf.MODEL_ARCH_NAMES.items()}
    if header.architecture not in architectures:
        return []
    model: Any = module
    num_layers = int(model.config.num_hidden_layers)
    name_map = gguf.get_tensor_name_map(architectures[header.architecture], num_layers)
    layers_and_names = []
    for name, layer in module.named_modules():
        if type(layer) is nn.Linear:
            tensor_name = f"{name_map.get_name(name)}.weight"
            is_tied = tensor_name not in header.locations and layer is model.get_output_embeddings()
            layers_and_names.append((layer, "token_embd.weight" if is_tied else tensor_name))
    return layers_and_names


def _matching_blocks(layer: nn.Linear, header: GgufHeader, name: str) -> StoredWeightReader | None:
    location, shape = header.locations[name], header.shapes[name]
    outputs, inputs = layer.weight.shape
    if location.type_number not in BITS or shape != (inputs, outputs):
        return None
    samples = torch.linspace(0, outputs - 1, min(outputs, _NUM_SAMPLES)).long()
    expected = layer.weight[samples]
    for order in _orders(header, outputs):
        blocks = read_blocks(location, order[samples], outputs).widened()
        if torch.equal(blocks.to(expected.dtype), expected.cpu()):
            return lambda: read_blocks(location, order, outputs)
    return None


def _orders(header: GgufHeader, outputs: int) -> list[torch.Tensor]:
    """Return the orders in which a file may store a weight's rows: unchanged, or with interleaved halves of heads
    (Llama's queries and keys).
    """
    rows = torch.arange(outputs)
    orders = [rows]
    for key in ("attention.head_count", "attention.head_count_kv"):
        heads = header.fields.get(f"{header.architecture}.{key}")
        if isinstance(heads, int) and heads > 0 and outputs % (2 * heads) == 0:
            orders.append(rows.view(heads, -1, 2).transpose(1, 2).flatten())
    return orders
