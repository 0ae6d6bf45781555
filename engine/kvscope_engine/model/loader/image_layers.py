"""Layers of a text decoder that attend only to images and are skipped without one (Llama 3.2 Vision).

Detects them by configuration, and removes them from a model, so that their weights are not read. Other layers keep
their names, which quantized checkpoints and adapters use, and get new indices in the order in which they run.
"""

from __future__ import annotations

import copy
from typing import Any

from torch import nn


def image_layers(text: Any) -> tuple[int, ...]:
    indices = getattr(text, "cross_attention_layers", None) or ()
    return tuple(number for number in indices if number < text.num_hidden_layers)


def empty_image_layers(decoder: Any) -> None:
    """Replace image layers by empty modules, before weights are read, so that their weights are ignored."""
    for number in image_layers(decoder.config):
        decoder.layers[number] = nn.Module()


def without_image_layers(model: nn.Module) -> nn.Module:
    """Remove the image layers of `model`, in place, and adapt its configuration."""
    decoder: Any = model.base_model
    original_config, removed = decoder.config, image_layers(decoder.config)
    if not removed:
        return model
    for number in removed:
        del decoder.layers._modules[str(number)]
    decoder.cross_attention_layers = []
    config = copy.deepcopy(original_config)
    config.cross_attention_layers, config.num_hidden_layers = [], len(decoder.layers)
    for part in model.modules():
        if getattr(part, "config", None) is original_config:
            part.config = config
    for number, layer in enumerate(decoder.layers):
        for part in layer.modules():
            if hasattr(part, "layer_idx"):
                part.layer_idx = number
    return model
