"""What a model's makers say of its sampling: taken, left out, or refused by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvscope_engine import Engine, EngineConfig
from kvscope_engine.model.loader.generation_config import NOT_DONE, model_sampling
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


def said(folder: Path, wanted: str = "auto", **fields: Any) -> ModelSampling:
    (folder / "generation_config.json").write_text(json.dumps(fields))
    return model_sampling(wanted, folder, None)


def said_by_gguf(folder: Path, **fields: Any) -> ModelSampling:
    file = GgufFile(folder / "some.gguf")
    file.header = GgufHeader({f"general.sampling.{name}": value for name, value in fields.items()})
    return model_sampling("auto", folder, file)


def test_fields_that_are_done(tmp_path: Path) -> None:
    assert model_sampling("auto", tmp_path, None) == ModelSampling()
    assert said(tmp_path, **QWEN3) == ModelSampling(temperature=0.6, top_k=20, top_p=0.95)
    more = {"min_p": 0.1, "repetition_penalty": 1.05, "max_new_tokens": 2048, "max_length": 4096, "num_beams": 1}
    assert said(tmp_path, **more) == ModelSampling(min_p=0.1, repetition_penalty=1.05, max_tokens=2048)
    assert said(tmp_path, "none", **QWEN3) == said(tmp_path, "vllm", num_beams=4) == ModelSampling()


@pytest.mark.parametrize("name", NOT_DONE)
def test_fields_that_are_not_done_are_refused_by_name(name: str, tmp_path: Path) -> None:
    values = {
        **{key: [[5]] for key in ("suppress_tokens", "begin_suppress_tokens", "bad_words_ids", "force_words_ids")},
        "constraints": [1],
        "sequence_bias": [[[1], 2.0]],
        "stop_strings": ["x"],
        "token_healing": True,
    }
    with pytest.raises(BadInput, match=rf"generation_config.json: {name}=.*--generation-config none"):
        said(tmp_path, **{name: values.get(name, 3)})
    assert said(tmp_path, **dict.fromkeys(NOT_DONE)) == ModelSampling()
    assert said(tmp_path, **{name: harmless for name, (harmless, *_) in _with_harmless()}) == ModelSampling()


def _with_harmless() -> list[tuple[str, tuple[object, ...]]]:
    return [(name, harmless) for name, harmless in NOT_DONE.items() if harmless]


@pytest.mark.parametrize(
    ("field", "words"),
    [
        ({"temperature": -1.0}, "temperature=-1.0 is not accepted"),
        ({"temperature": "hot"}, "Expected `float"),
        ({"top_k": 2.5}, "Expected `int"),
        ({"max_new_tokens": 0}, "max_tokens=0 is not accepted"),
    ],
)
def test_bad_values_name_the_file(field: dict[str, Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=rf"generation_config.json is not accepted: {words}"):
        said(tmp_path, **field)


def test_keys_of_a_gguf_file(tmp_path: Path) -> None:
    taken = said_by_gguf(tmp_path, temp=0.5, top_k=40, top_p=0.9, min_p=0.05, penalty_repeat=1.0, mirostat=0)
    assert taken == ModelSampling(temperature=0.5, top_k=40, top_p=0.9, min_p=0.05, repetition_penalty=1.0)
    assert said_by_gguf(tmp_path) == ModelSampling()
    assert said_by_gguf(tmp_path, penalty_repeat=1.1, penalty_last_n=-1) == ModelSampling(repetition_penalty=1.1)
    assert said_by_gguf(tmp_path, penalty_repeat=1.1, penalty_last_n=0) == ModelSampling()
    for refused in ({"mirostat": 2}, {"xtc_probability": 0.5}, {"sequence": "top_k;temp"}, {"penalty_repeat": 1.1}):
        with pytest.raises(BadInput, match=rf"some.gguf: {next(iter(refused))}=.*--generation-config none"):
            said_by_gguf(tmp_path, **refused)


def test_requests_that_do_not_say_are_sampled_so(tiny_checkpoint: Callable[..., Path]) -> None:
    """With top_k=1 every draw is the likeliest token; what a request says wins, field by field."""
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
