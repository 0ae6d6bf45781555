"""A model of random weights for a configuration: for benchmarks and tests, where what it says matters not."""

from __future__ import annotations

from typing import Any

import torch

from kvscope_engine.model.fetching.progress import Meter, ProgressCallback


def random_model(
    hf_config: Any, dtype: torch.dtype, device: torch.device, seed: int, progress: ProgressCallback
) -> torch.nn.Module:
    """The causal language model of `hf_config`, initialised on `device` in `dtype`; a seed gives it again."""
    from transformers import AutoModelForCausalLM

    auto: Any = AutoModelForCausalLM
    with Meter(progress, "load", "random weights"), torch.random.fork_rng(_devices(device)), device:
        torch.manual_seed(seed)
        model: torch.nn.Module = auto.from_config(
            hf_config, dtype=dtype, attn_implementation="eager", trust_remote_code=False
        )
    return model


def _devices(device: torch.device) -> list[int]:
    return [torch.cuda.current_device()] if device.type == "cuda" else []
