"""Sampling defaults of a model's publisher: used, ignored, or refused by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvscope_engine import Engine, EngineConfig
from kvscope_engine.model.loader.generation_config import UNSUPPORTED_FIELDS, model_sampling
from kvscope_engine.model.loader.gguf.gguf_file import GgufFile
from kvscope_engine.model.loader.gguf.gguf_header import GgufHeader
from kvscope_telemetry.errors import BadInput
from kvscope_telemetry.messages.commands import Submit
from kvscope_telemetry.messages.sampling_params import ModelSampling, SamplingParams

QWEN3 = {
    "bos_token_id": 151643,
    "do_sample": True,
    "eos_token_id": [151645, 151643],
    "temperature": 0.6,
    "top_k": 20,
    "top_p": 0.95,
    "transformers_version": "4.51.0",
}


def sampling_defaults(folder: Path, wanted: str = "auto", **fields: Any) -> ModelSampling:
    (folder / "generation_config.json").write_text(json.dumps(fields))
    return model_sampling(wanted, folder, None)


def sampling_defaults_of_gguf(folder: Path, **fields: Any) -> ModelSampling:
    file = GgufFile(folder / "some.gguf")
    file.header = GgufHeader({f"general.sampling.{name}": value for name, value in fields.items()})
    return model_sampling("auto", folder, file)


def test_supported_generation_config_fields_become_sampling_defaults(tmp_path: Path) -> None:
    assert model_sampling("auto", tmp_path, None) == ModelSampling()
    assert sampling_defaults(tmp_path, **QWEN3) == ModelSampling(temperature=0.6, top_k=20, top_p=0.95)
    more = {"min_p": 0.1, "repetition_penalty": 1.05, "max_new_tokens": 2048, "max_length": 4096, "num_beams": 1}
    assert sampling_defaults(tmp_path, **more) == ModelSampling(min_p=0.1, repetition_penalty=1.05, max_tokens=2048)
    assert (
        sampling_defaults(tmp_path, "none", **QWEN3)
        == sampling_defaults(tmp_path, "vllm", num_beams=4)
        == ModelSampling()
    )


@pytest.mark.parametrize("name", UNSUPPORTED_FIELDS)
def test_unsupported_fields_are_refused_by_name(name: str, tmp_path: Path) -> None:
    values = {
        **{key: [[5]] for key in ("suppress_tokens", "begin_suppress_tokens", "bad_words_ids", "force_words_ids")},
        "constraints": [1],
        "sequence_bias": [[[1], 2.0]],
        "stop_strings": ["x"],
        "token_healing": True,
    }
    with pytest.raises(BadInput, match=rf"generation_config.json: {name}=.*--generation-config none"):
        sampling_defaults(tmp_path, **{name: values.get(name, 3)})
    assert sampling_defaults(tmp_path, **dict.fromkeys(UNSUPPORTED_FIELDS)) == ModelSampling()
    assert (
        sampling_defaults(tmp_path, **{name: harmless for name, (harmless, *_) in _with_harmless()}) == ModelSampling()
    )


def _with_harmless() -> list[tuple[str, tuple[object, ...]]]:
    return [(name, harmless) for name, harmless in UNSUPPORTED_FIELDS.items() if harmless]


@pytest.mark.parametrize(
    ("field", "words"),
    [
        ({"temperature": -1.0}, "temperature=-1.0 is not accepted"),
        ({"temperature": "hot"}, "Expected `float"),
        ({"top_k": 2.5}, "Expected `int"),
        ({"max_new_tokens": 0}, "max_tokens=0 is not accepted"),
    ],
)
def test_invalid_value_is_refused_with_the_file_name(field: dict[str, Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=rf"generation_config.json is not accepted: {words}"):
        sampling_defaults(tmp_path, **field)


def test_sampling_defaults_are_read_from_gguf_keys(tmp_path: Path) -> None:
    taken = sampling_defaults_of_gguf(
        tmp_path, temp=0.5, top_k=40, top_p=0.9, min_p=0.05, penalty_repeat=1.0, mirostat=0
    )
    assert taken == ModelSampling(temperature=0.5, top_k=40, top_p=0.9, min_p=0.05, repetition_penalty=1.0)
    assert sampling_defaults_of_gguf(tmp_path) == ModelSampling()
    assert sampling_defaults_of_gguf(tmp_path, penalty_repeat=1.1, penalty_last_n=-1) == ModelSampling(
        repetition_penalty=1.1
    )
    assert sampling_defaults_of_gguf(tmp_path, penalty_repeat=1.1, penalty_last_n=0) == ModelSampling()
    for refused in ({"mirostat": 2}, {"xtc_probability": 0.5}, {"sequence": "top_k;temp"}, {"penalty_repeat": 1.1}):
        with pytest.raises(BadInput, match=rf"some.gguf: {next(iter(refused))}=.*--generation-config none"):
            sampling_defaults_of_gguf(tmp_path, **refused)


def test_request_options_override_the_publisher_defaults(tiny_checkpoint: Callable[..., Path]) -> None:
    """With top_k=1 every sample is the most likely token; the options of a request win field by field."""
    folder = tiny_checkpoint("llama")
    (folder / "generation_config.json").write_text(json.dumps({"temperature": 50.0, "top_k": 1, "max_new_tokens": 5}))

    def answers(wanted: str, **options: Any) -> list[list[int]]:
        sampling = SamplingParams(max_tokens=8, ignore_eos=True, n=6, **options)
        with Engine(EngineConfig(model=str(folder), device="cpu", dtype="float32", generation_config=wanted)) as engine:
            assert engine.hello.model.sampling == (
                ModelSampling(temperature=50.0, top_k=1, max_tokens=5) if wanted == "auto" else ModelSampling()
            )
            asked = Submit(request_id="a", prompt_token_ids=(5, 6, 7), sampling=sampling)
            return [completion.token_ids for completion in engine.generate([asked])]

    (greedy,) = {tuple(answer) for answer in answers("none", temperature=0.0)}
    assert answers("auto") == [list(greedy[:5])] * 6
    assert len({tuple(answer) for answer in answers("auto", top_k=0)}) > 1
    assert len({tuple(answer) for answer in answers("none", temperature=50.0)}) > 1
