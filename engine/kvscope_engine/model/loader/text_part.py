"""The part of a model that reads and writes text: the whole of it, or the causal language model inside of one that also
sees or hears.

Owns which of transformers' classes that is, and how it is taken out of the whole. Of a model of several parts no other
part is built in memory, and none of their weights is read.
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
    "blip": "writes about pictures: each layer of its text part attends to one",
    "diffusion_gemma": "writes blocks of text by diffusion, and not token by token",
    "gemma4_assistant": "drafts for a Gemma 4, whose keys and values it reads",
    "gemma4_unified_assistant": "drafts for a Gemma 4, whose keys and values it reads",
    "idefics": "writes about pictures: transformers does not run it without one",
    "kosmos-2": "writes about pictures: transformers does not run it without one",
    "kyutai_speech_to_text": "writes beside a sound as it goes on",
    "paligemma": "attends to its whole prompt in both directions",
    "pi0": "tells a robot how to move, and writes no text",
    "shieldgemma2": "says whether a picture is fit to be seen, and writes no text",
    "voxtral_realtime": "writes beside a sound as it goes on: its layers are told the time in it",
}
"""Types whose text part says nothing to text alone, or not token by token, and why."""
_LOGITS: Final = re.compile(r"^ *logits = (.*)", re.MULTILINE)
_HEAD: Final = {
    r"self\.lm_head\(hidden_states.*": "",
    r"logits / self\.config\.text_config\.logits_scaling": "logits_scaling",
    r"logits \* self\.config\.text_config\.output_multiplier": "output_multiplier",
    r"logits / self\.(?:config\.text_config\.)?final_logit_softcapping": "final_logit_softcapping",
    r"torch\.tanh\(logits\)": "",
    r"logits \* self\.(?:config\.text_config\.)?final_logit_softcapping": "",
}
"""What a whole may do to the numbers of its head, by its source, and the text configuration's name for how much."""
_SCALED: Final = re.compile(r"^ *logits = logits \* self\.logit_scale\b", re.MULTILINE)
"""What Cohere's models of text alone do to them."""


def text_config(config: Any) -> Any:
    """The configuration of the part with text; `config` itself where there is no other part."""
    return config.get_text_config(decoder=True)


def has_other_parts(config: Any) -> bool:
    """Whether the model of `config` reads more than text."""
    return text_config(config) is not config


def reads_more(config: Any) -> bool:
    """Whether the model of `config` reads more than text, be its text in a part of its own or not."""
    return has_other_parts(config) or _flat_class(config) is not None


def why_not_causal(config: Any) -> str:
    """Why the text part does not read and write text token by token; nothing where transformers has a class for it."""
    if config.model_type in _NOT_TEXT_ALONE:
        return _NOT_TEXT_ALONE[config.model_type]
    if has_other_parts(config):
        found, whose = _whole_class(config), "reads more than text, and its text part "
    else:
        found, whose = _causal_class(config), ""
    return "" if found is not None else f"{whose}is not a causal language model"


def make_model(config: Any, dtype: torch.dtype | None = None, attention: str = "eager") -> nn.Module:
    """The causal language model of the text part, without the weights of a file, where torch makes tensors now.

    Raises BadInput, without the model's name, where `is_causal` says there is none.
    """
    options: dict[str, Any] = {"attn_implementation": attention} | ({} if dtype is None else {"dtype": dtype})
    text = text_config(config)
    kind = _causal_class(text)
    if kind is not None and not (has_other_parts(config) and _has_own_head(kind, config)):
        made = _widened(kind._from_config(text, **options))
        return without_image_layers(made if _flat_class(text) is None else _without_own_parts(made))
    return take_text_part(_widened(loading_class(config)._from_config(reading_config(config), **options)), config)


def _widened(model: Any) -> Any:
    """`model`, what transformers reads in 32 bits from any file in 32 bits: without that some do not run."""
    names = "|".join(model._get_dtype_plan(model.dtype))
    for name, parameter in model.named_parameters() if names else ():
        if re.search(names, name):
            parameter.data = parameter.data.float()
    return model


def reading_config(config: Any) -> Any:
    """Of the part that reads; one that also speaks keeps the other apart."""
    return getattr(config, "thinker_config", None) or config


def loading_class(config: Any) -> Any:
    """The class whose `from_pretrained`, with the `reading_config`, reads the weights of the text part alone.

    The names of weights in files of several parts have changed over the years: transformers knows them by this class.
    """
    if not has_other_parts(config):
        return _pruned_class(config)
    config, kind = reading_config(config), _whole_class(config)
    if kind is None:
        raise BadInput(f"{config.model_type} has no text part that writes text token by token")

    def begin(self: Any, *args: Any, **kwargs: Any) -> None:
        try:
            kind.__init__(self, *args, **kwargs)
        except ImportError:  # of a library that only a part which is left out needs
            with _no_other_parts(text_config(args[0])):
                kind.__init__(self, *args, **kwargs)
        _prune(self, config)

    return _named(kind, kind.__name__, __init__=begin, __module__=kind.__module__)


def take_text_part(whole: Any, config: Any) -> nn.Module:
    """The causal language model of what a `loading_class` made. Its weights are not copied."""
    if not has_other_parts(config):
        return without_image_layers(whole)
    decoder, head = _decoder(whole, config), whole.get_output_embeddings()
    kind = _causal_class(decoder.config)
    if kind is not None and isinstance(decoder, kind):
        return decoder  # type: ignore[no-any-return]
    if kind is None or _has_own_head(kind, config):
        from kvscope_engine.model.loader.decoder_and_head import DecoderAndHead

        kind = _named(DecoderAndHead, type(whole).__name__)
        return without_image_layers(kind(decoder, head, _head_words(_whole_class(config))))
    with torch.device("meta"):
        causal = kind._from_config(decoder.config, attn_implementation="eager", dtype=decoder.dtype)
    setattr(causal, causal.base_model_prefix, decoder)
    causal.set_output_embeddings(head)
    if any(parameter.is_meta != head.weight.is_meta for parameter in causal.parameters()):
        raise BadInput(f"{config.model_type} does not hold all of {kind.__name__}")
    return without_image_layers(causal)


def _named(kind: type, name: str, **members: Any) -> Any:
    """A class that is `kind` but for `members`."""
    return type(name, (kind,), members)


def _causal_class(text: Any) -> Any:
    """Of a configuration with text alone; None where transformers has none."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING

    kind = _first(MODEL_FOR_CAUSAL_LM_MAPPING.get(type(text), None))
    if kind is None:  # a few are listed beside the whole that they are for
        kind = _first(MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING.get(type(text), None))
        return kind if kind is not None and kind.__name__.endswith("ForCausalLM") else _flat_class(text)
    return kind


def _flat_class(config: Any) -> Any:
    """Of a configuration in which text has no part of its own, but other things have: Chameleon. None for others."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING

    kind = _first(MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING.get(type(config), None))
    is_flat = kind is not None and not has_other_parts(config) and hasattr(kind, "generate")
    return kind if is_flat and type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING else None


def _pruned_class(config: Any) -> Any:
    """Without what reads other things, where the configuration is one of all."""
    kind = _flat_class(config)
    if kind is None:
        return _causal_class(config)

    def begin(self: Any, *args: Any, **kwargs: Any) -> None:
        kind.__init__(self, *args, **kwargs)
        _without_own_parts(self)

    return _named(kind, kind.__name__, __init__=begin, __module__=kind.__module__)


def _without_own_parts(model: Any) -> nn.Module:
    """`model` without modules that are configured on their own: no text passes them."""
    for part in list(model.modules()):
        for name, child in list(part.named_children()):
            if type(getattr(child, "config", model.config)) is not type(model.config):
                delattr(part, name)
    return model  # type: ignore[no-any-return]


def _whole_class(config: Any) -> Any:
    """Of a configuration of several parts; None where transformers has none that writes text and no more."""
    import transformers

    reading, kind = type(reading_config(config)), None
    for inputs in ("IMAGE_TEXT_TO_TEXT", "MULTIMODAL_LM", "SEQ_TO_SEQ_CAUSAL_LM"):
        kind = kind or _first(getattr(transformers, f"MODEL_FOR_{inputs}_MAPPING").get(reading, None))
    has_own_class = _causal_class(text_config(config)) is not None
    return kind if kind is None or has_own_class or _head_words(kind) is not None else None


def _first(kinds: Any) -> Any:
    return kinds[0] if isinstance(kinds, tuple | list) else kinds


def _head_words(kind: Any) -> tuple[str, ...] | None:
    """Names in the text configuration by which logits are changed behind the head; None where it is not known how."""
    lines = _LOGITS.findall(inspect.getsource(kind.forward))
    found = [next((name for form, name in _HEAD.items() if re.fullmatch(form, line)), None) for line in lines]
    return None if None in found or not found else tuple(name for name in found if name)


def _has_own_head(kind: Any, config: Any) -> bool:
    """Whether the whole leaves out what `kind` does behind its head: of Aya Vision and Command A Vision, a scale."""
    whole = _whole_class(config)
    return whole is not None and _head_words(whole) == () and bool(_SCALED.search(inspect.getsource(kind.forward)))


def _decoder(whole: Any, config: Any) -> Any:
    """The module with the text part in it: with its head, where it is a causal language model itself."""
    kind = _causal_class(text_config(config))
    if kind is None:
        return whole.get_decoder()
    with torch.device("meta"):
        base = type(kind._from_config(text_config(config)).base_model)
    return next(part for wanted in (kind, base) for part in whole.modules() if type(part) is wanted)


def _prune(whole: Any, config: Any) -> None:
    """Let go of all modules that are neither the text part nor around it."""
    decoder, head = _decoder(whole, config), whole.get_output_embeddings()
    empty_image_layers(decoder)
    kept = {id(part) for root in (decoder, head) if root is not None for part in root.modules()}
    around = {id(part) for part in whole.modules() if any(id(below) in kept for below in part.modules())} - kept
    for part in [part for part in whole.modules() if id(part) in around]:
        for name, child in list(part.named_children()):
            if id(child) not in kept | around:
                delattr(part, name)
    names = whole.state_dict().keys()
    tied = whole.all_tied_weights_keys.items()
    whole.all_tied_weights_keys = {name: source for name, source in tied if name in names and source in names}


@contextmanager
def _no_other_parts(text: Any) -> Iterator[None]:
    """Inside, transformers makes nothing of a configuration that is not the text's."""
    from transformers import AutoModel

    make: Any = AutoModel.from_config

    def from_config(config: Any, **options: Any) -> Any:
        return make(config, **options) if type(config) is type(text) else nn.Module()

    with patch.object(AutoModel, "from_config", from_config):
        yield
