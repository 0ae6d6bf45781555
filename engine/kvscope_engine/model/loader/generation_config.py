"""Reads a model's recommended sampling options from its `generation_config.json` or the keys of a GGUF file.

Decides which fields are supported. vLLM's `--generation-config auto` uses the same fields and silently ignores others;
here a field that would change the output is refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import msgspec

from kvscope_engine.json_file import read_json
from kvscope_engine.model.loader.gguf.gguf_file import GgufFile
from kvscope_telemetry.errors import BadInput
from kvscope_telemetry.messages.sampling_params import ModelSampling

FILE: Final = "generation_config.json"
SUPPORTED_FIELDS: Final = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_tokens",
}
"""Names of kvscope's sampling options by field of `generation_config.json`."""
UNSUPPORTED_FIELDS: Final[dict[str, tuple[object, ...]]] = {
    "num_beams": (1,),
    "num_beam_groups": (1,),
    "penalty_alpha": (0,),
    "dola_layers": (),
    "forced_bos_token_id": (),
    "forced_eos_token_id": (),
    "suppress_tokens": ([],),
    "begin_suppress_tokens": ([],),
    "bad_words_ids": ([],),
    "force_words_ids": ([],),
    "constraints": ([],),
    "sequence_bias": ([], {}),
    "no_repeat_ngram_size": (0,),
    "encoder_no_repeat_ngram_size": (0,),
    "encoder_repetition_penalty": (1,),
    "exponential_decay_length_penalty": (),
    "guidance_scale": (1,),
    "typical_p": (1,),
    "epsilon_cutoff": (0,),
    "eta_cutoff": (0,),
    "top_h": (),
    "min_length": (0,),
    "min_new_tokens": (0,),
    "max_time": (),
    "stop_strings": ([], ""),
    "token_healing": (False,),
    "watermarking_config": (),
}
"""Unsupported fields that change the output, with the values (besides null) that have no effect."""
GGUF_SUPPORTED_KEYS: Final = {
    "temp": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "penalty_repeat": "repetition_penalty",
}
"""Names of kvscope's sampling options by GGUF key after `general.sampling.`, as llama.cpp writes them."""
GGUF_UNSUPPORTED_KEYS: Final[dict[str, tuple[object, ...]]] = {
    "sequence": ("",),
    "xtc_probability": (0,),
    "mirostat": (0,),
}
_GGUF_PREFIX: Final = "general.sampling."


def model_sampling(option: str, folder: Path, file: GgufFile | None) -> ModelSampling:
    """Return the recommended options of the model in `folder`, loaded from `file`; none unless `option` is "auto".

    Raises BadInput, naming file and field, for invalid or unsupported values.
    """
    if option != "auto":
        return ModelSampling()
    path = folder / FILE
    sampling = (
        _sampling(read_json(path), SUPPORTED_FIELDS, UNSUPPORTED_FIELDS, str(path))
        if path.is_file()
        else ModelSampling()
    )
    if file is None:
        return sampling
    fields = {
        key.removeprefix(_GGUF_PREFIX): value
        for key, value in file.header.fields.items()
        if key.startswith(_GGUF_PREFIX)
    }
    _check_window(fields, str(file.path))
    return _sampling(fields, GGUF_SUPPORTED_KEYS, GGUF_UNSUPPORTED_KEYS, str(file.path)) if fields else sampling


def _sampling(
    fields: Mapping[str, Any], supported: Mapping[str, str], unsupported: Mapping[str, tuple[object, ...]], source: str
) -> ModelSampling:
    for name, harmless in unsupported.items():
        value = fields.get(name)
        if value is not None and value not in harmless:
            raise _refusal(source, name, value, "that is not supported here")
    values = {option: fields[name] for name, option in supported.items() if fields.get(name) is not None}
    try:
        return msgspec.convert(values, ModelSampling)
    except (BadInput, msgspec.ValidationError) as error:
        raise BadInput(f"{source} is not accepted: {error}; --generation-config none leaves it out") from None


def _check_window(fields: dict[str, Any], source: str) -> None:
    """Raise BadInput if llama.cpp's repetition penalty applies only to a window of the last tokens (default 64). In
    kvscope, as in vLLM, the penalty applies to all tokens of a request.

    A window of 0 disables the penalty: it is removed from `fields`.
    """
    window = fields.get("penalty_last_n", 64)
    if window == 0:
        fields.pop("penalty_repeat", None)
    elif window != -1 and fields.get("penalty_repeat", 1.0) != 1.0:
        reason = "repetition is penalized among all tokens here (-1)"
        raise _refusal(source, "penalty_repeat", fields["penalty_repeat"], f"with penalty_last_n={window} {reason}")


def _refusal(source: str, name: str, value: object, reason: str) -> BadInput:
    return BadInput(f"{source}: {name}={value!r:.60}: {reason}; --generation-config none leaves it out")
