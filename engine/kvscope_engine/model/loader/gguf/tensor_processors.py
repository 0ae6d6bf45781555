"""Converts GGUF tensors to transformers' weights, for architectures for which transformers' loader has no processor.

A processor stores converted weights itself and returns a tensor without a name, which the loader then skips.
"""

from __future__ import annotations

import re
from typing import Any, Final

from kvscope_engine.model.loader.gguf.gemma4 import GEMMA4
from kvscope_engine.model.loader.gguf.gguf_header import GgufHeader

_KV_WEIGHTS: Final = re.compile(r"blk\.(\d+)\.attn_(k|v|k_norm)\.weight")
_GEMMA_SCALES: Final = {"ffn_gate_inp.scale": "router.scale", "ffn_down_exps.scale": "router.per_expert_scale"}
_EXPERTS: Final = re.compile(r"blk\.(\d+)\.ffn_(gate|up|down)_exps\.(weight|bias)")


def processors() -> dict[str, Any]:
    """Return processor classes for transformers' loader, by the file's architecture name."""
    import torch
    from transformers import modeling_gguf_pytorch_utils as gguf_loader

    gguf_tensor: Any = gguf_loader.GGUFTensor

    class Gemma4(gguf_loader.TensorProcessor):
        """Renames weights that have no `.weight` suffix in transformers, and two weights that belong to the
        router there.
        """

        def process(self, weights: Any, name: str, **options: Any) -> Any:
            layer, _, suffix = name.removeprefix("blk.").partition(".")
            if suffix in _GEMMA_SCALES:
                target_name = f"model.layers.{layer}.{_GEMMA_SCALES[suffix]}"
                options["parsed_parameters"]["tensors"][target_name] = torch.from_numpy(weights.copy())
                return gguf_tensor(weights, None, {})
            return gguf_tensor(weights, _target_key(name, options["tensor_key_mapping"]), {})

    class GptOss(gguf_loader.TensorProcessor):
        """Transposes the weights of experts to (inputs, outputs) and interleaves the columns of gate and up."""

        def process(self, weights: Any, name: str, **options: Any) -> Any:
            match = _EXPERTS.fullmatch(name)
            if match is None:
                return gguf_tensor(weights, _target_key(name, options["tensor_key_mapping"]), {})
            layer, part, kind = match.groups()
            tensor = torch.from_numpy(weights.copy())
            tensor = tensor.transpose(1, 2).contiguous() if kind == "weight" else tensor
            suffix = "" if kind == "weight" else "_bias"
            tensors = options["parsed_parameters"]["tensors"]
            if part == "down":
                tensors[f"model.layers.{layer}.mlp.experts.down_proj{suffix}"] = tensor
            else:
                target_name = f"model.layers.{layer}.mlp.experts.gate_up_proj{suffix}"
                gate_up = tensors.setdefault(target_name, torch.zeros(*tensor.shape[:-1], 2 * tensor.shape[-1]))
                gate_up[..., int(part == "up") :: 2] = tensor
            return gguf_tensor(weights, None, {})

    return {GEMMA4: Gemma4, "gpt-oss": GptOss}


def _target_key(name: str, mapping: dict[str, str]) -> str:
    """Return the key of the tensor `name` in `mapping`. The key has no `.weight` suffix if the weight is a
    plain parameter in transformers.
    """
    short = name.removesuffix(".weight")
    return short if short in mapping else name


def is_unused(header: GgufHeader, name: str) -> bool:
    """Whether the tensor is a K or V weight of a Gemma 4 layer that uses the KV of another layer instead."""
    match = _KV_WEIGHTS.fullmatch(name)
    layers, shared = (header.fields.get(f"{GEMMA4}.{key}") for key in ("block_count", "attention.shared_kv_layers"))
    if match is None or not isinstance(layers, int) or not isinstance(shared, int):
        return False
    return header.architecture == GEMMA4 and int(match[1]) >= layers - shared
