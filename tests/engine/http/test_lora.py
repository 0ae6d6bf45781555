"""LoRA adapters over HTTP with a real engine: listed, chosen as a model, loaded and unloaded like in vLLM."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.engine.http.served import Served, answer_on, read_all
from tests.engine.lora_folder import write_adapter

from kvscope_engine import Engine, EngineConfig
from kvscope_telemetry import connect
from kvscope_telemetry.engine_config import LoraModule
from kvscope_telemetry.messages.commands import Done, Finished, LoadAdapter, Submit
from kvscope_telemetry.messages.sampling_params import SamplingParams

PROMPT = list(range(3, 23))


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory, tiny_model: Callable[..., str]) -> Path:
    from transformers import AutoConfig, AutoModelForCausalLM

    auto: Any = AutoModelForCausalLM
    path = tmp_path_factory.mktemp("adapters")
    model = auto.from_config(AutoConfig.from_pretrained(tiny_model().removeprefix("dummy:")))
    for seed, name in enumerate(("sql", "python"), 1):
        write_adapter(path / name, model, seed=seed)
    return path


@pytest.fixture(scope="module")
def serve(folders: Path, tiny_model: Callable[..., str]) -> Iterator[Callable[..., Served]]:
    made: list[Served] = []

    def start(**options: Any) -> Served:
        modules = (LoraModule(name="sql", path=str(folders / "sql")),)
        small = {"device": "cpu", "dtype": "float32", "block_size": 4, "num_gpu_blocks_override": 128}
        config = EngineConfig(model=tiny_model(), lora_modules=modules, **(small | options))

        def build(progress: Any, publish: Any, messages_dropped: Any) -> Engine:
            return Engine(config, progress=progress, publish=publish, messages_dropped=messages_dropped)

        made.append(Served(build=build))
        return made[-1]

    yield start
    for one in made:
        one.close()


@pytest.fixture(scope="module")
def served(serve: Callable[..., Served]) -> Served:
    return serve(allow_runtime_lora_updating=True, max_loras=2)


def completion(served: Served, model: str | None) -> tuple[int, Any]:
    asked = {"prompt": PROMPT, "max_tokens": 6, "temperature": 0, "ignore_eos": True, "logprobs": 1}
    return served.ask("/v1/completions", asked | ({} if model is None else {"model": model}))


def tokens(served: Served, model: str | None) -> list[str]:
    status, answer = completion(served, model)
    assert status == 200, answer
    assert answer["model"] == (model or served.api.model_name)
    return answer["choices"][0]["logprobs"]["tokens"]  # type: ignore[no-any-return]


def post(served: Served, path: str, **body: str) -> tuple[int, str]:
    """Return status and text of the answer."""
    head, _, text = read_all(served.post(path, body, "Connection: close")).partition(b"\r\n\r\n")
    return int(head.split()[1]), text.decode()


def listed(served: Served) -> list[dict[str, Any]]:
    status, answer = served.ask("/v1/models")
    assert status == 200
    return answer["data"]  # type: ignore[no-any-return]


def test_adapters_are_listed_as_models_with_a_parent(served: Served, folders: Path) -> None:
    base, sql, *_ = listed(served)
    assert (base["id"], base["parent"], base["root"]) == (served.api.model_name, None, served.api.hello.model.name)
    assert (sql["id"], sql["parent"], sql["root"]) == ("sql", base["id"], str(folders / "sql"))
    assert served.ask("/v1/models/sql") == (200, sql)


def test_request_chooses_an_adapter_as_its_model(served: Served) -> None:
    alone = tokens(served, None)
    assert tokens(served, served.api.model_name) == alone
    assert tokens(served, "sql") != alone
    chat = {"model": "sql", "messages": [{"role": "user", "content": "x"}]}
    status, answer = served.ask("/v1/chat/completions", chat)
    assert (status, "tokenizer" in answer["error"]["message"]) == (400, True)  # this model has none
    status, answer = completion(served, "java")
    assert (status, answer["error"]["code"]) == (404, "model_not_found")
    assert "or its adapters 'sql'" in answer["error"]["message"]


def test_adapter_can_be_loaded_used_and_unloaded(served: Served, folders: Path) -> None:
    path = str(folders / "python")
    done = post(served, "/v1/load_lora_adapter", lora_name="python", lora_path=path)
    assert done == (200, "Success: LoRA adapter 'python' added successfully.")
    assert [model["id"] for model in listed(served)[1:]] == ["sql", "python"]
    found = tokens(served, "python")
    assert found not in (tokens(served, "sql"), tokens(served, None))
    status, text = post(served, "/v1/load_lora_adapter", lora_name="python", lora_path=path)
    assert (status, "is loaded already: unload it first" in text) == (400, True)
    done = post(served, "/v1/unload_lora_adapter", lora_name="python")
    assert done == (200, "Success: LoRA adapter 'python' removed successfully.")
    assert [model["id"] for model in listed(served)[1:]] == ["sql"]
    assert completion(served, "python")[0] == 404
    assert post(served, "/v1/unload_lora_adapter", lora_name="python")[0] == 404


def test_adapter_loaded_by_another_client_is_known_immediately(served: Served, folders: Path) -> None:
    """The adapter is loaded over the engine's own socket, between two of the polls that happen every five seconds."""
    replies: list[Any] = []
    with connect(served.service.telemetry_endpoint) as source:

        def heard(kind: type) -> Callable[[], bool]:
            def poll_for_reply() -> bool:
                replies.extend(source.poll_replies())
                source.update_mirror()
                return any(isinstance(reply, kind) for reply in replies)

            return poll_for_reply

        source.send(LoadAdapter(name="other", path=str(folders / "python"), tag=5))
        assert source.wait(heard(Done), 60.0), replies
        assert completion(served, "other")[0] == 200
        sampling = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
        source.send(Submit(request_id="r", prompt_token_ids=tuple(PROMPT), sampling=sampling, adapter="other"))
        assert source.wait(heard(Finished), 60.0), replies
        assert "other" in source.mirror.requests.adapters
    assert post(served, "/v1/unload_lora_adapter", lora_name="other")[0] == 200


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ({"lora_name": "x", "lora_path": "/no/such/folder"}, "there is no such folder"),
        ({"lora_name": "x"}, "lora_path"),
        ({"lora_name": "", "lora_path": "x"}, "lora_name"),
        ({"lora_name": "x", "lora_path": "x", "load_inplace": "yes"}, "load_inplace"),
    ],
)
def test_invalid_adapter_is_refused_with_the_reason(served: Served, body: dict[str, str], says: str) -> None:
    status, text = post(served, "/v1/load_lora_adapter", **body)
    assert (status, says in text) == (400, True), text
    name = served.api.model_name
    status, text = post(served, "/v1/load_lora_adapter", lora_name=name, lora_path="x")
    assert (status, "the model is called so" in text) == (400, True)


def test_loading_adapters_is_refused_unless_allowed(serve: Callable[..., Served], folders: Path) -> None:
    fixed = serve()
    path = str(folders / "python")
    for name, body in (("load", {"lora_name": "python", "lora_path": path}), ("unload", {"lora_name": "sql"})):
        status, text = post(fixed, f"/v1/{name}_lora_adapter", **body)
        assert (status, "--allow-runtime-lora-updating" in text) == (404, True), text
    assert [model["id"] for model in listed(fixed)[1:]] == ["sql"]


def test_requests_with_several_adapters_run_in_one_batch(served: Served) -> None:
    alone = {model: tokens(served, model) for model in (None, "sql")}
    asked = {"prompt": [PROMPT] * 4, "max_tokens": 6, "temperature": 0, "ignore_eos": True, "logprobs": 1}
    sent = {
        model: served.post("/v1/completions", asked | ({"model": model} if model else {}), "Connection: close")
        for model in (None, "sql")
    }
    for model, connection in sent.items():
        status, answer = answer_on(connection)
        assert status == 200
        assert [choice["logprobs"]["tokens"] for choice in answer["choices"]] == [alone[model]] * 4
