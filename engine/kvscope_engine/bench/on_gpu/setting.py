"""Model, engine options and memory limit shared by all measurements of `bench gpu`."""

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

from kvscope_engine.bench.shapes import SHAPES
from kvscope_engine.cli.arguments.engine_options import add_engine_options
from kvscope_engine.command_parser import CommandParser
from kvscope_engine.model.loader.download.model_names import DUMMY_PREFIX
from kvscope_telemetry.engine_config import EngineConfig
from kvscope_telemetry.errors import BadInput
from kvscope_telemetry.options import options_of

DEFAULT_SHAPE: Final = "8b"
FIXED_OPTIONS: Final = ("model", "device", "max_num_seqs", "max_model_len", "enable_prefix_caching", "block_size")
"""Engine options that the benchmark sets itself. `--with` must not change them."""
BLOCK_SIZE: Final = 16
GIB: Final = 1 << 30


@dataclass(frozen=True, slots=True)
class Setting:
    model: str
    device: str
    kv_cache_dtype: str
    share: float
    """`gpu_memory_utilization` relative to this GPU's memory, which may be larger than the memory of the GPU simulated
    by --memory.
    """

    def engine_config(self, **options: Any) -> EngineConfig:
        """Return an engine configuration with bfloat16 and without prefix caching, unless `options` say otherwise."""
        own: dict[str, Any] = {
            "model": self.model,
            "device": self.device,
            "dtype": "bfloat16",
            "kv_cache_dtype": self.kv_cache_dtype,
            "gpu_memory_utilization": self.share,
            "block_size": BLOCK_SIZE,
            "enable_prefix_caching": False,
        }
        return EngineConfig(**own | options)

    def transformers_module(self) -> Any:
        """Return the same model in transformers, with its default attention implementation."""
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
def setting_of(args: argparse.Namespace, longest: int) -> Iterator[Setting]:
    """Yield the setting that the command-line options select.

    Without --model, the model has random weights and at least `longest` positions, because position limits mean nothing
    without training.
    """
    share = _memory_share(args)
    if args.model:
        yield Setting(args.model, args.device, args.kv_cache_dtype, share)
        return
    shape = SHAPES[args.shape or DEFAULT_SHAPE]
    with tempfile.TemporaryDirectory(prefix="kvscope-bench-") as folder:
        path = Path(folder) / "config.json"
        positions = max(longest, shape["max_position_embeddings"])
        path.write_text(json.dumps(shape | {"max_position_embeddings": positions}))
        yield Setting(f"{DUMMY_PREFIX}{path}", args.device, args.kv_cache_dtype, share)


def engine_options(text: str) -> dict[str, Any]:
    """Parse engine options without dashes, such as `quantization=int4 page-heat=16`. Raises BadInput for options with
    dashes and for those in `FIXED_OPTIONS`.
    """
    parser = CommandParser(prog="kvscope-engine serve", add_help=False)
    add_engine_options(parser)
    words = text.split()
    if not words or any(word.startswith("-") for word in words):
        raise BadInput(f"--with {text!r:.60} is not accepted: engine options without dashes, such as quantization=int4")
    parsed = vars(parser.parse_args([f"--{word}" for word in words]))
    changed = {name: parsed[name] for name, each in options_of(EngineConfig).items() if parsed[name] != each.default}
    for name in FIXED_OPTIONS:
        if name in changed:
            raise BadInput(f"--with {text!r:.60} is not accepted: this benchmark sets {name} itself")
    return changed


def free_unused_memory() -> None:
    """Free unreferenced memory, so that the next measurement has all GPU memory available."""
    import torch

    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _memory_share(args: argparse.Namespace) -> float:
    import torch

    share = float(args.gpu_memory_utilization)
    if args.memory is None or args.device == "cpu":
        return share
    total = torch.cuda.mem_get_info()[1]
    if args.memory > total:
        raise BadInput(f"--memory {args.memory / GIB:.0f} GiB is not accepted: the GPU has {total / GIB:.0f} GiB")
    torch.cuda.set_per_process_memory_fraction(args.memory / total)
    return float(share * args.memory / total)
