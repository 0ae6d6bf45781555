"""The model, the engine's options and the memory that all measurements of `bench gpu` share."""

from __future__ import annotations

import argparse
import gc
import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from kvscope_engine.model.fetching.names import DUMMY_PREFIX
from kvscope_telemetry.engine_config import EngineConfig
from kvscope_telemetry.errors import BadInput

LLAMA_8B: Final[dict[str, Any]] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 8192,
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
GIB: Final = 1 << 30


@dataclass(frozen=True, slots=True)
class Setting:
    """What is measured, and with how much memory."""

    model: str
    device: str
    kv_cache_dtype: str
    share: float
    """Of the memory that is there, which may be more than the GPU that is meant has."""

    def engine_config(self, **options: Any) -> EngineConfig:
        """bfloat16 and no prefix caching: each run computes all that it asks for."""
        return EngineConfig(
            model=self.model,
            device=self.device,
            dtype="bfloat16",
            kv_cache_dtype=self.kv_cache_dtype,
            gpu_memory_utilization=self.share,
            enable_prefix_caching=False,
            **options,
        )

    def transformers_module(self) -> Any:
        """The same model of transformers, with its own choice of attention."""
        import torch
        from transformers import AutoConfig, AutoModelForCausalLM

        auto: Any = AutoModelForCausalLM
        if self.model == "default":
            from kvscope_engine.bench.contenders.transformers_generate import plain_default_model

            return plain_default_model(torch.bfloat16).to(self.device).eval()
        if not self.model.startswith(DUMMY_PREFIX):
            return auto.from_pretrained(self.model, dtype=torch.bfloat16).to(self.device).eval()
        with torch.device(self.device):
            hf_config = AutoConfig.from_pretrained(self.model.removeprefix(DUMMY_PREFIX))
            return auto.from_config(hf_config, dtype=torch.bfloat16).eval()


@contextmanager
def setting_of(args: argparse.Namespace) -> Iterator[Setting]:
    """As the options say; without a model random weights of Llama-3-8B's shape."""
    share = _share(args)
    if args.model:
        yield Setting(args.model, args.device, args.kv_cache_dtype, share)
        return
    with tempfile.TemporaryDirectory(prefix="kvscope-bench-") as folder:
        path = Path(folder) / "config.json"
        path.write_text(json.dumps(LLAMA_8B))
        yield Setting(f"{DUMMY_PREFIX}{path}", args.device, args.kv_cache_dtype, share)


def empty() -> None:
    """Give back what no longer has an owner, so that the next finds the GPU free."""
    import torch

    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _share(args: argparse.Namespace) -> float:
    import torch

    share = float(args.gpu_memory_utilization)
    if args.memory is None or args.device == "cpu":
        return share
    total = torch.cuda.mem_get_info()[1]
    if args.memory > total:
        raise BadInput(f"--memory {args.memory / GIB:.0f} GiB is not accepted: the GPU has {total / GIB:.0f} GiB")
    torch.cuda.set_per_process_memory_fraction(args.memory / total)
    return float(share * args.memory / total)
