"""Unpacks the 32-bit words in which GPTQ and AWQ store weights of 4 or 8 bits into a `GroupedWeight`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import torch

from kvscope_engine.model.quantization.quantization_recipe import Recipe
from kvscope_kernels.quantized_linear.grouped_weight import CHUNK, GroupedWeight, grouped
from kvscope_telemetry.errors import BadInput

_AWQ_ORDER: Final = (0, 2, 4, 6, 1, 3, 5, 7)
"""For each 4-bit field of a word, from the lowest bits: its index among 8 consecutive outputs."""
TENSOR_NAMES: Final = ("qweight", "qzeros", "scales", "g_idx")


@dataclass(frozen=True)
class PackedWords:
    """A layer's weight in 32-bit words, as stored in a checkpoint.

    GPTQ packs consecutive inputs into a word (https://github.com/AutoGPTQ/AutoGPTQ), AWQ packs outputs, in `_AWQ_ORDER`
    (https://github.com/casper-hansen/AutoAWQ, version `gemm`). In both, a weight is scale * (code - zero).
    """

    recipe: Recipe
    qweight: torch.Tensor
    qzeros: torch.Tensor
    scales: torch.Tensor
    g_idx: torch.Tensor | None

    @property
    def is_in_order(self) -> bool:
        """Whether the inputs of each group are consecutive, as the kernels require."""
        if self.g_idx is None:
            return True
        return torch.equal(self.g_idx.long(), torch.arange(len(self.g_idx)) // self._group)

    def grouped(self) -> GroupedWeight:
        """Return the weight as a `GroupedWeight`. Requires `is_in_order`."""
        codes, scale, low = self._dequantization()
        return grouped(codes, scale, low, self.recipe.bits, self._group)

    def widened(self) -> torch.Tensor:
        """Return the dequantized weight, (outputs, inputs) float32, for inputs in any order."""
        if self.g_idx is None or self.is_in_order:
            return self.grouped().widened()
        codes, scale, low = self._dequantization()
        group_index = self.g_idx.long()
        return scale[:, group_index] * codes + low[:, group_index]

    @property
    def _inputs(self) -> int:
        return len(self.qweight) * (32 // self.recipe.bits if self.recipe.method == "gptq" else 1)

    @property
    def _group(self) -> int:
        return self.recipe.group or -(-self._inputs // CHUNK) * CHUNK

    def _dequantization(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return codes (outputs, inputs), and scales and offsets (outputs, groups). A weight is scale * code +
        offset."""
        bits, scale = self.recipe.bits, self.scales.float()
        if self.recipe.method == "gptq":
            codes = unpack_words(self.qweight.T, bits)  # inputs are packed into words
            zeros = unpack_words(self.qzeros, bits)
        else:
            codes, zeros = _unpack_awq(self.qweight).T, _unpack_awq(self.qzeros)
        zeros = zeros[:, : scale.shape[1]].float() + self.recipe.zero_offset
        return codes.contiguous(), scale.T.contiguous(), (-scale * zeros).T.contiguous()


def words_of(tensors: Mapping[str, torch.Tensor], prefix: str, recipe: Recipe) -> PackedWords:
    """Return the stored weight of the layer `prefix`.

    Raises BadInput, naming a tensor, if one is missing or the shapes are inconsistent.
    """
    tensors_by_name = {name: tensors.get(f"{prefix}.{name}") for name in TENSOR_NAMES}
    qweight, qzeros, scales = (tensors_by_name[name] for name in TENSOR_NAMES[:3])
    if qweight is None or qzeros is None or scales is None:
        missing = next(name for name in TENSOR_NAMES if tensors_by_name[name] is None)
        raise BadInput(f"it lacks {prefix}.{missing}")
    words = PackedWords(recipe, qweight, qzeros, scales, tensors_by_name["g_idx"])
    _check(words, prefix)
    return words


def _check(words: PackedWords, prefix: str) -> None:
    packed, tensors = 32 // words.recipe.bits, (words.qweight, words.qzeros, words.scales)
    if any(tensor.dim() != 2 for tensor in tensors) or any(tensor.dtype != torch.int32 for tensor in tensors[:2]):
        raise BadInput(f"{prefix}.qweight is not in words of 32 bits")
    groups = -(-words._inputs // words._group)
    outputs = words.qweight.shape[1] * (1 if words.recipe.method == "gptq" else packed)
    if words.scales.shape != (groups, outputs) or words.qzeros.shape != (groups, -(-outputs // packed)):
        raise BadInput(f"{prefix}.scales is {list(words.scales.shape)}: {[groups, outputs]} is needed")
    index = words.g_idx
    if index is not None and (
        index.shape != (words._inputs,) or not 0 <= int(index.min()) <= int(index.max()) < groups
    ):
        raise BadInput(f"{prefix}.g_idx does not name one of {groups} groups for each of {words._inputs} inputs")


def unpack_words(words: torch.Tensor, bits: int) -> torch.Tensor:
    """Unpack (rows, n) int32 to (rows, n * 32 / bits) uint8, the lowest bits first."""
    shifts = torch.arange(0, 32, bits, dtype=torch.int32)
    unpacked: torch.Tensor = (words[..., None] >> shifts) & (2**bits - 1)
    return unpacked.to(torch.uint8).flatten(1)


def _unpack_awq(words: torch.Tensor) -> torch.Tensor:
    unpacked = torch.empty((*words.shape, 8), dtype=torch.uint8)
    unpacked[..., list(_AWQ_ORDER)] = unpack_words(words, 4).view(len(words), -1, 8)
    return unpacked.flatten(1)
