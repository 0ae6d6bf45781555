"""Builds the parts of a `Hello` message that are the same for all host engines that run transformers models."""

from __future__ import annotations

import os
import platform
from typing import Any

from kvscope_telemetry.messages.telemetry import DeviceInfo, ModelInfo


def dtype_name(dtype: Any) -> str:
    """Return the name of a torch dtype without the prefix "torch.". `dtype` may also be a name."""
    return str(dtype).removeprefix("torch.")


def model_info(config: Any, text_config: Any, **known: Any) -> ModelInfo:
    """Return the model's properties from its transformers configurations. Values in `known` take precedence."""
    heads = int(getattr(text_config, "num_attention_heads", 0) or 0)
    facts: dict[str, Any] = {
        "architecture": str(next(iter(getattr(config, "architectures", None) or ()), "")),
        "num_layers": int(getattr(text_config, "num_hidden_layers", 0) or 0),
        "num_query_heads": heads,
        "num_kv_heads": int(getattr(text_config, "num_key_value_heads", 0) or heads),
        "head_dim": int(getattr(text_config, "head_dim", 0) or 0),
        "vocab_size": int(getattr(text_config, "vocab_size", 0) or 0),
    }
    return ModelInfo(**(facts | known))


def device_info(device: str) -> DeviceInfo:
    """Return the kind, name and number of threads of a device, such as `cpu` or `cuda:0`, without querying the
    device.
    """
    kind = device.partition(":")[0]
    name = platform.processor() or platform.machine() if kind == "cpu" else ""
    return DeviceInfo(kind=kind, name=name, num_threads=os.cpu_count() or 0)
