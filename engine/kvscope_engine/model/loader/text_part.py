"""The text part of a model: the whole model, or the causal language model inside a multimodal one.

Chooses the transformers class of the text part, and extracts the text part from the whole model. Other parts of a
multimodal model are not created in memory, and their weights are not read.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final
from unittest.mock import patch

import torch
from torch import nn

from kvscope_engine.model.loader.image_layers import empty_image_layers, without_image_layers
from kvscope_telemetry.errors import BadInput

_NOT_TEXT_ALONE: Final = {
    "blip": "describes images: each layer of its text part attends to an image",
    "diffusion_gemma": "writes text in blocks by diffusion, not token by token",
    "gemma4_assistant": "only drafts tokens for a Gemma 4 model, whose keys and values it reads",
    "gemma4_unified_assistant": "only drafts tokens for a Gemma 4 model, whose keys and values it reads",
    "idefics": "describes images: transformers does not run it without an image",
    "kosmos-2": "describes images: transformers does not run it without an image",
    "kyutai_speech_to_text": "writes text while it listens to a sound",
    "paligemma": "attends to its whole prompt in both directions",
    "pi0": "controls a robot and writes no text",
    "shieldgemma2": "judges whether an image is harmful, and writes no text",
    "voxtral_realtime": "writes text while it listens to a sound, and its layers need the time in the sound",
}
"""Model types that cannot continue plain text token by token, with the reason."""
_LOGITS_LINE: Final = re.compile(r"^ *logits = (.*)", re.MULTILINE)
_LOGIT_OPERATIONS: Final = {
    r"self\.lm_head\(hidden_states.*": "",
    r"logits / self\.config\.text_config\.logits_scaling": "logits_scaling",
    r"logits \* self\.config\.text_config\.output_multiplier": "output_multiplier",
    r"logits / self\.(?:config\.text_config\.)?final_logit_softcapping": "final_logit_softcapping",
    r"torch\.tanh\(logits\)": "",
    r"logits \* self\.(?:config\.text_config\.)?final_logit_softcapping": "",
}
"""Configuration attributes that scale logits, by a pattern of the source line that applies them in a multimodal model.

The attribute is empty if the line has none. A model with any other line that changes logits is not supported.
"""
_COHERE_SCALING: Final = re.compile(r"^ *logits = logits \* self\.logit_scale\b", re.MULTILINE)
"""Source line of Cohere's text-only models that scales logits."""


def text_config(config: Any) -> Any:
    """Return the configuration of the text part, or `config` itself if the model is text-only."""
    return config.get_text_config(decoder=True)


def has_other_parts(config: Any) -> bool:
    return text_config(config) is not config


def is_multimodal(config: Any) -> bool:
    """Whether the model accepts inputs other than text, even if its configuration has no separate text
    configuration.
    """
    return has_other_parts(config) or _flat_class(config) is not None


def causal_refusal(config: Any) -> str:
    """Return why the text part is not a causal language model; empty if transformers has a class for it."""
    if config.model_type in _NOT_TEXT_ALONE:
        return _NOT_TEXT_ALONE[config.model_type]
    if has_other_parts(config):
        model_class, prefix = _whole_class(config), "reads more than text, and its text part "
    else:
        model_class, prefix = _causal_class(config), ""
    return "" if model_class is not None else f"{prefix}is not a causal language model"


def make_model(config: Any, dtype: torch.dtype | None = None, attention: str = "eager") -> nn.Module:
    """Create the causal language model of the text part without loading weights, on torch's current default device.

    Raises BadInput, without the model's name, if there is no class for it (`causal_refusal`).
    """
    options: dict[str, Any] = {"attn_implementation": attention} | ({} if dtype is None else {"dtype": dtype})
    text = text_config(config)
    model_class = _causal_class(text)
    if model_class is not None and not (has_other_parts(config) and _has_own_head(model_class, config)):
        model = _widened(model_class._from_config(text, **options))
        return without_image_layers(model if _flat_class(text) is None else _without_own_parts(model))
    return extract_text_part(_widened(loading_class(config)._from_config(reading_config(config), **options)), config)


def _widened(model: Any) -> Any:
    """Convert to float32 the parameters that transformers always loads in float32, without which some models do not
    run.
    """
    names = "|".join(model._get_dtype_plan(model.dtype))
    for name, parameter in model.named_parameters() if names else ():
        if re.search(names, name):
            parameter.data = parameter.data.float()
    return model


def reading_config(config: Any) -> Any:
    """Return the `thinker_config` of a model that also generates speech, or `config` itself for other models."""
    return getattr(config, "thinker_config", None) or config


def loading_class(config: Any) -> Any:
    """Return the class whose `from_pretrained`, with the `reading_config`, reads only the weights of the text part.

    Names of weights in multimodal checkpoints have changed over the years; transformers maps them by this class.
    """
    if not has_other_parts(config):
        return _pruned_class(config)
    config, model_class = reading_config(config), _whole_class(config)
    if model_class is None:
        raise BadInput(f"{config.model_type} has no text part that writes text token by token")

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        try:
            model_class.__init__(self, *args, **kwargs)
        except ImportError:  # a library needed only by a part that is left out
            with _no_other_parts(text_config(args[0])):
                model_class.__init__(self, *args, **kwargs)
        _prune(self, config)

    return _subclass(model_class, model_class.__name__, __init__=init, __module__=model_class.__module__)


def extract_text_part(whole: Any, config: Any) -> nn.Module:
    """Return the causal language model inside a model created by a `loading_class`, without copying weights."""
    if not has_other_parts(config):
        return without_image_layers(whole)
    decoder, head = _decoder(whole, config), whole.get_output_embeddings()
    model_class = _causal_class(decoder.config)
    if model_class is not None and isinstance(decoder, model_class):
        return decoder  # type: ignore[no-any-return]
    if model_class is None or _has_own_head(model_class, config):
        from kvscope_engine.model.loader.decoder_and_head import DecoderAndHead

        model_class = _subclass(DecoderAndHead, type(whole).__name__)
        return without_image_layers(model_class(decoder, head, _logit_attributes(_whole_class(config))))
    with torch.device("meta"):
        causal = model_class._from_config(decoder.config, attn_implementation="eager", dtype=decoder.dtype)
    setattr(causal, causal.base_model_prefix, decoder)
    causal.set_output_embeddings(head)
    if any(parameter.is_meta != head.weight.is_meta for parameter in causal.parameters()):
        raise BadInput(f"{config.model_type} does not hold all of {model_class.__name__}")
    return without_image_layers(causal)


def _subclass(base: type, name: str, **members: Any) -> Any:
    return type(name, (base,), members)


def _causal_class(text: Any) -> Any:
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING

    kind = _first(MODEL_FOR_CAUSAL_LM_MAPPING.get(type(text), None))
    if kind is None:  # a few are listed with their multimodal models
        kind = _first(MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING.get(type(text), None))
        return kind if kind is not None and kind.__name__.endswith("ForCausalLM") else _flat_class(text)
    return kind


def _flat_class(config: Any) -> Any:
    """Return the class of a multimodal model whose configuration has no text configuration (Chameleon);
    otherwise None.
    """
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING

    kind = _first(MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING.get(type(config), None))
    is_flat = kind is not None and not has_other_parts(config) and hasattr(kind, "generate")
    return kind if is_flat and type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING else None


def _pruned_class(config: Any) -> Any:
    """Return the causal language model class, without the modules that read images or sound."""
    model_class = _flat_class(config)
    if model_class is None:
        return _causal_class(config)

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        model_class.__init__(self, *args, **kwargs)
        _without_own_parts(self)

    return _subclass(model_class, model_class.__name__, __init__=init, __module__=model_class.__module__)


def _without_own_parts(model: Any) -> nn.Module:
    """Remove the modules of `model` whose configuration class is not that of the model, such as an image
    encoder. Text does not pass through them.
    """
    for submodule in list(model.modules()):
        for name, child in list(submodule.named_children()):
            if type(getattr(child, "config", model.config)) is not type(model.config):
                delattr(submodule, name)
    return model  # type: ignore[no-any-return]


def _whole_class(config: Any) -> Any:
    """Return the class of a multimodal model; None if transformers has none that generates only text."""
    import transformers

    reading, kind = type(reading_config(config)), None
    for inputs in ("IMAGE_TEXT_TO_TEXT", "MULTIMODAL_LM", "SEQ_TO_SEQ_CAUSAL_LM"):
        kind = kind or _first(getattr(transformers, f"MODEL_FOR_{inputs}_MAPPING").get(reading, None))
    has_own_class = _causal_class(text_config(config)) is not None
    return kind if kind is None or has_own_class or _logit_attributes(kind) is not None else None


def _first(kinds: Any) -> Any:
    return kinds[0] if isinstance(kinds, tuple | list) else kinds


def _logit_attributes(kind: Any) -> tuple[str, ...] | None:
    """Return the config attributes that scale logits after the head of class `kind`; None if its source is not
    understood.
    """
    lines = _LOGITS_LINE.findall(inspect.getsource(kind.forward))
    attributes = [
        next((name for pattern, name in _LOGIT_OPERATIONS.items() if re.fullmatch(pattern, line)), None)
        for line in lines
    ]
    return None if None in attributes or not attributes else tuple(name for name in attributes if name)


def _has_own_head(kind: Any, config: Any) -> bool:
    """Whether the head of the multimodal model returns unscaled logits, although the text-only class `kind` scales its
    logits.

    This holds for Aya Vision and Command A Vision.
    """
    whole = _whole_class(config)
    return (
        whole is not None
        and _logit_attributes(whole) == ()
        and bool(_COHERE_SCALING.search(inspect.getsource(kind.forward)))
    )


def _decoder(whole: Any, config: Any) -> Any:
    """Return the text part of a multimodal model: a causal language model with its head, or only the decoder."""
    kind = _causal_class(text_config(config))
    if kind is None:
        return whole.get_decoder()
    with torch.device("meta"):
        base = type(kind._from_config(text_config(config)).base_model)
    return next(
        submodule for module_class in (kind, base) for submodule in whole.modules() if type(submodule) is module_class
    )


def _prune(whole: Any, config: Any) -> None:
    """Delete all modules that are neither in the text part nor ancestors of it."""
    decoder, head = _decoder(whole, config), whole.get_output_embeddings()
    empty_image_layers(decoder)
    kept_ids = {id(submodule) for root in (decoder, head) if root is not None for submodule in root.modules()}
    ancestor_ids = {
        id(submodule)
        for submodule in whole.modules()
        if any(id(descendant) in kept_ids for descendant in submodule.modules())
    } - kept_ids
    for submodule in [submodule for submodule in whole.modules() if id(submodule) in ancestor_ids]:
        for name, child in list(submodule.named_children()):
            if id(child) not in kept_ids | ancestor_ids:
                delattr(submodule, name)
    names = whole.state_dict().keys()
    tied = whole.all_tied_weights_keys.items()
    whole.all_tied_weights_keys = {name: source for name, source in tied if name in names and source in names}


@contextmanager
def _no_other_parts(text: Any) -> Iterator[None]:
    """Return a context in which transformers creates empty modules in place of all parts except the text part."""
    from transformers import AutoModel

    original: Any = AutoModel.from_config

    def from_config(config: Any, **options: Any) -> Any:
        return original(config, **options) if type(config) is type(text) else nn.Module()

    with patch.object(AutoModel, "from_config", from_config):
        yield
