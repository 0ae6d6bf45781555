"""Ranks as processes over gloo: the tokens of one process, and a clean end."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.engine.lora_folder import write_adapter

from kvscope_engine import Engine, EngineConfig
from kvscope_telemetry.engine_config import LoraModule
from kvscope_telemetry.errors import BadInput, KvscopeError
from kvscope_telemetry.messages.commands import Submit
from kvscope_telemetry.messages.sampling_params import SamplingParams

HEADS = {
    "hidden_size": 64,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 16,
    "initializer_range": 0.3,
    "num_hidden_layers": 4,
}
PROMPTS = (range(3, 20), range(40, 45), range(100, 220), range(100, 130), (*range(3, 250), *range(5, 240)))
"""The last prompt is long enough for sparse decode to select blocks."""
Make = Callable[..., Engine]


@pytest.fixture
def model(tiny_model: Callable[..., str]) -> str:
    """Model whose heads can be divided among 1, 2 and 4 ranks, with weights that affect the tokens."""
    return tiny_model(**HEADS)


def submits(**sampling: float) -> list[Submit]:
    params = SamplingParams(**({"max_tokens": 24, "temperature": 0.0} | sampling))  # type: ignore[arg-type]
    return [
        Submit(request_id=f"r{index}", prompt_token_ids=tuple(prompt), sampling=params)
        for index, prompt in enumerate(PROMPTS)
    ]


def tokens_with(engine: Engine, *adapters: str) -> list[tuple[int, ...]]:
    """Return the tokens of one prompt with each of these adapters, in one batch."""
    params = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
    asked = [
        Submit(request_id=f"r{index}", prompt_token_ids=tuple(range(3, 40)), sampling=params, adapter=adapter)
        for index, adapter in enumerate(adapters)
    ]
    return [tuple(one.token_ids) for one in engine.generate(asked)]


@pytest.fixture
def adapters(tmp_path: Path) -> Callable[[str], Path]:
    """Function that writes three adapters of a model into a folder, and one of another model."""

    def write(model: str) -> Path:
        from transformers import AutoConfig, AutoModelForCausalLM

        auto: Any = AutoModelForCausalLM
        config: Any = AutoConfig.from_pretrained(model.removeprefix("dummy:"))
        whole = auto.from_config(config)
        write_adapter(tmp_path / "a", whole, seed=1)
        write_adapter(tmp_path / "b", whole, seed=2, rank=2, targets=("k_proj", "o_proj", "down_proj"))
        write_adapter(tmp_path / "c", whole, seed=3, targets=("q_proj", "v_proj", "up_proj"))
        config.hidden_size = 32
        write_adapter(tmp_path / "other", auto.from_config(config))
        return tmp_path

    return write


def finish(engine: Engine) -> None:
    while engine.has_unfinished:
        engine.step()


def all_tokens(engine: Engine) -> list[tuple[int, ...]]:
    """Return greedy and sampled tokens, with chunked prefill, cached prefixes, and so few blocks that requests wait."""
    greedy = [tuple(one.token_ids) for one in engine.generate(submits())]
    drawn = [tuple(one.token_ids) for one in engine.generate(submits(temperature=1.5, seed=5))]
    return greedy + drawn


def test_two_ranks_give_the_tokens_of_one_and_report_a_killed_rank(model: str, make_engine: Make) -> None:
    """One test for several checks, because starting a process takes seconds. Each rank also selects blocks for its own
    KV heads.
    """
    options = {"model": model, "num_gpu_blocks_override": 140, "max_num_batched_tokens": 32, "quantization": "none"}
    in_full = all_tokens(make_engine(**options))
    options |= {"sparse_decode": 0.1}
    expected = all_tokens(make_engine(**options))
    assert expected != in_full
    engine = make_engine(**options, tensor_parallel_size=2)
    assert all_tokens(engine) == expected

    ranks = engine.components.leader
    assert ranks is not None
    (joined,) = ranks.joined_ranks
    memory = engine.memory()
    assert joined.kv_bytes == memory.kv_bytes
    assert [one.rank for one in memory.ranks] == [0, 1]
    assert engine.hello.num_ranks == 2

    for one in submits():
        engine.submit(one)
    engine.step()
    (child,) = ranks.processes.children.values()
    folder = ranks.processes.folder
    os.kill(child.pid, signal.SIGKILL)
    with pytest.raises(KvscopeError, match="rank 1 of 2 ended by SIGKILL"):
        finish(engine)
    engine.close()
    assert child.returncode == -signal.SIGKILL
    assert not folder.exists()


@pytest.mark.storm({"num_kv_heads": 1})
@pytest.mark.parametrize("num_kv_heads", [4, 1])
def test_lora_adapters_give_the_same_tokens_on_two_ranks(
    num_kv_heads: int, tiny_model: Callable[..., str], make_engine: Make, adapters: Callable[[str], Path]
) -> None:
    """Adapters are given at the start, loaded, unloaded and reloaded while serving, and exceed the slots; also with
    both ranks sharing the only KV head.
    """
    model = tiny_model(**HEADS | {"num_key_value_heads": num_kv_heads})
    folder = adapters(model)
    options = {
        "model": model,
        "quantization": "none",
        "lora_modules": (LoraModule(name="a", path=str(folder / "a")),),
        "allow_runtime_lora_updating": True,
        "max_loras": 2,
    }

    def said_by_all(engine: Engine) -> list[list[tuple[int, ...]]]:
        does, found = engine.interventions, []
        for name, path in (("b", "b"), ("c", "c")):
            does.load_adapter(name, str(folder / path), "me")
        found.append(tokens_with(engine, "a", "b", "", "c", "a", "b"))
        does.unload_adapter("a", "me")
        does.load_adapter("a", str(folder / "c"), "me")
        found.append(tokens_with(engine, "a", "c", "b", "", "a"))
        return found

    expected = said_by_all(make_engine(**options))
    assert len(set(expected[0])) == 4, "each says something else"
    assert expected[0][:4] != expected[1][:4]
    engine = make_engine(**options, tensor_parallel_size=2)
    assert said_by_all(engine) == expected
    parts = {part.name: part.num_bytes for part in engine.memory().modules}
    assert parts["LoRA adapters"] > 0
    with pytest.raises(BadInput, match=r"'other' .* this model's has 128 and 64"):
        engine.interventions.load_adapter("other", str(folder / "other"), "me")
    assert tokens_with(engine, "c") == expected[1][1:2], "a refused adapter must change nothing"


@pytest.mark.storm
def test_four_ranks_give_the_tokens_of_one(model: str, make_engine: Make) -> None:
    engine = make_engine(model=model, tensor_parallel_size=4)
    assert all_tokens(engine) == all_tokens(make_engine(model=model, quantization="none"))
    ranks = engine.components.leader
    assert ranks is not None
    children = list(ranks.processes.children.values())
    engine.close()
    assert [child.returncode for child in children] == [0, 0, 0]


def test_indivisible_model_is_refused_before_loading(make_engine: Make, tiny_model: Callable[..., str]) -> None:
    with pytest.raises(BadInput, match="tensor_parallel_size=3 is not accepted for model"):
        make_engine(model=tiny_model(), tensor_parallel_size=3, quantization="none")


@pytest.mark.parametrize(
    "options",
    [
        {"keep_disk_kv": True, "disk_kv_path": "/tmp/file", "disk_kv_memory_bytes": 1, "host_kv_memory_bytes": 1},
        {"quantization": "int8"},
        {"page_heat": 8},
        {"allocator": "virtual", "enable_prefix_caching": False},
        {"tensor_parallel_size": 0},
        {"tensor_parallel_size": 65},
    ],
)
def test_options_unsupported_with_ranks_are_refused(options: dict[str, object]) -> None:
    with pytest.raises(BadInput, match=next(iter(options))):
        EngineConfig(**({"tensor_parallel_size": 2} | options))  # type: ignore[arg-type]


def test_folder_with_too_long_a_path_for_sockets_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, make_engine: Make
) -> None:
    """The path of a Unix socket has a maximum length."""
    deep = tmp_path / ("x" * 120)
    deep.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(deep))
    with pytest.raises(KvscopeError, match=r"ranks cannot meet in .*TMPDIR"):
        make_engine(tensor_parallel_size=2)
    assert not list(deep.iterdir())
