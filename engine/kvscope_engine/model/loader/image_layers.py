"""Layers of a text part that read pictures alone, and are passed over where there is none: those of Llama 3.2 Vision.

Owns which they are by a configuration, and a model without them: their weights are not read. The other layers keep
their names, by which files of quantized weights and adapters know them, and are numbered as they run.
"""

from __future__ import annotations

import copy
from typing import Any

from torch import nn


def image_layers(text: Any) -> tuple[int, ...]:
    """Numbers of the layers in a text part's configuration that attend to pictures alone."""
    told = getattr(text, "cross_attention_layers", None) or ()
    return tuple(number for number in told if number < text.num_hidden_layers)


def empty_image_layers(decoder: Any) -> None:
    """Before weights are read: there is no place for theirs."""
    for number in image_layers(decoder.config):
        decoder.layers[number] = nn.Module()


def without_image_layers(model: nn.Module) -> nn.Module:
    """`model`, changed: its other layers alone, under a configuration of as many."""
    decoder: Any = model.base_model
    told, left_out = decoder.config, image_layers(decoder.config)
    if not left_out:
        return model
    for number in left_out:
        del decoder.layers._modules[str(number)]
    decoder.cross_attention_layers = []
    config = copy.deepcopy(told)
    config.cross_attention_layers, config.num_hidden_layers = [], len(decoder.layers)
    for part in model.modules():
        if getattr(part, "config", None) is told:
            part.config = config
    for number, layer in enumerate(decoder.layers):
        for part in layer.modules():
            if hasattr(part, "layer_idx"):
                part.layer_idx = number
    return model
