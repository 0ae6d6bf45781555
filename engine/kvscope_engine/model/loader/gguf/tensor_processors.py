"""Conversion of GGUF tensors to transformers' weights, for architectures without a processor in its loader."""

from __future__ import annotations

import re
from typing import Any, Final

from kvscope_engine.model.loader.gguf.gemma4 import GEMMA4
from kvscope_engine.model.loader.gguf.gguf_header import GgufHeader

_SHARED: Final = re.compile(r"blk\.(\d+)\.attn_(k|v|k_norm)\.weight")
_GEMMA_SCALES: Final = {"ffn_gate_inp.scale": "router.scale", "ffn_down_exps.scale": "router.per_expert_scale"}
_EXPERTS: Final = re.compile(r"blk\.(\d+)\.ffn_(gate|up|down)_exps\.(weight|bias)")


def processors() -> dict[str, Any]:
    """Return processor classes for transformers' loader, by the file's architecture name."""
    import torch
    from transformers import modeling_gguf_pytorch_utils as gguf_loader

    made_of: Any = gguf_loader.GGUFTensor

    class Gemma4(gguf_loader.TensorProcessor):
        """Renames weights that have no `.weight` suffix in transformers, and two that belong to the router."""

        def process(self, weights: Any, name: str, **options: Any) -> Any:
            layer, _, rest = name.removeprefix("blk.").partition(".")
            if rest in _GEMMA_SCALES:
                place = f"model.layers.{layer}.{_GEMMA_SCALES[rest]}"
                options["parsed_parameters"]["tensors"][place] = torch.from_numpy(weights.copy())
                return made_of(weights, None, {})
            return made_of(weights, _known(name, options["tensor_key_mapping"]), {})

    class GptOss(gguf_loader.TensorProcessor):
        """Transposes experts to inputs first and interleaves gate and up."""

        def process(self, weights: Any, name: str, **options: Any) -> Any:
            match = _EXPERTS.fullmatch(name)
            if match is None:
                return made_of(weights, _known(name, options["tensor_key_mapping"]), {})
            layer, part, kind = match.groups()
            made = torch.from_numpy(weights.copy())
            made = made.transpose(1, 2).contiguous() if kind == "weight" else made
            end = "" if kind == "weight" else "_bias"
            tensors = options["parsed_parameters"]["tensors"]
            if part == "down":
                tensors[f"model.layers.{layer}.mlp.experts.down_proj{end}"] = made
            else:
                place = f"model.layers.{layer}.mlp.experts.gate_up_proj{end}"
                both = tensors.setdefault(place, torch.zeros(*made.shape[:-1], 2 * made.shape[-1]))
                both[..., int(part == "up") :: 2] = made
            return made_of(weights, None, {})

    return {GEMMA4: Gemma4, "gpt-oss": GptOss}


def _known(name: str, mapping: dict[str, str]) -> str:
    """Return the name without `.weight` if transformers has that weight as a plain parameter."""
    short = name.removesuffix(".weight")
    return short if short in mapping else name


def is_unused(header: GgufHeader, name: str) -> bool:
    """Whether no program reads the tensor: keys and values of layers that share those of other layers."""
    match = _SHARED.fullmatch(name)
    layers, shared = (header.fields.get(f"{GEMMA4}.{key}") for key in ("block_count", "attention.shared_kv_layers"))
    if match is None or not isinstance(layers, int) or not isinstance(shared, int):
        return False
    return header.architecture == GEMMA4 and int(match[1]) >= layers - shared
