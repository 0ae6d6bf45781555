"""Clients that people use, against a served engine: openai's Responses API, LangChain, llm, lm-evaluation-harness."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.clients.conftest import Run
from tests.clients.questions import TASK, write_task

HERE = Path(__file__).parent


def test_openai_responses_calls_a_function_and_streams(run: Run) -> None:
    said = json.loads(run(HERE / "openai_responses.py"))
    assert said["calls"][:1] == ["weather"]
    assert said["second"]
    assert "Paris" in said["whole"]
    assert said["streamed"] == said["whole"]
    assert {"response.created", "response.output_text.delta", "response.completed"} <= set(said["kinds"])


def test_langchain_chats_calls_tools_and_parses_structured_output(run: Run) -> None:
    said = json.loads(run(HERE / "langchain_chat.py"))
    assert "Paris" in said["answer"]
    assert said["usage"]["input_tokens"] > 0
    assert said["answer"] == said["streamed"] == said["responses"] == said["responses streamed"]
    assert said["call"] == "weather"
    assert said["after"]
    assert said["picked"]["n"] in (1, 2)


def test_llm_command_continues_a_conversation(run: Run, base_url: str, tmp_path: Path) -> None:
    model = f"- model_id: served\n  model_name: default\n  api_base: {base_url}\n"
    (tmp_path / "extra-openai-models.yaml").write_text(model)
    environment = {"LLM_USER_PATH": str(tmp_path)}
    question = ("-m", "llm", "-m", "served", "-o", "temperature", "0", "-o", "max_tokens", "40")
    assert "Paris" in run(*question, "What is the capital of France?", **environment)
    assert run(*question, "-c", "And of Italy?", **environment).strip()


@pytest.mark.timeout(1800)
def test_lm_evaluation_harness_gives_the_score_of_its_own_backend(
    run: Run, base_url: str, default_model_folder: Path, tmp_path: Path
) -> None:
    write_task(tmp_path)
    folder = default_model_folder
    backends = {
        "hf": ("hf", f"pretrained={folder},dtype=float32"),
        "served": (
            "local-completions",
            f"model=default,base_url={base_url}/completions,tokenizer={folder},tokenizer_backend=huggingface,"
            "num_concurrent=2,max_length=2048",
        ),
    }
    scores: dict[str, Any] = {}
    for name, (model, arguments) in backends.items():
        out = tmp_path / name
        run(
            *("-m", "lm_eval", "run", "--model", model, "--model_args", arguments, "--tasks", TASK),
            *(
                "--device",
                "cpu",
                "--include_path",
                tmp_path,
                "--output_path",
                out,
                "--batch_size",
                "8",
                "--log_samples",
            ),
        )
        result = next(out.rglob("results_*.json"))
        scores[name] = json.loads(result.read_text())["results"][TASK]
        samples = next(out.rglob("samples_*.jsonl")).read_text().splitlines()
        likelihoods = [float(one[0][0]) for line in samples for one in json.loads(line)["resps"]]
        scores[f"{name} likelihoods"] = sorted(likelihoods)
    print({name: (scores[name]["acc,none"], scores[name]["acc_norm,none"]) for name in backends})
    assert scores["served likelihoods"] == pytest.approx(scores["hf likelihoods"], abs=1e-3)
    for metric in ("acc,none", "acc_norm,none"):
        assert scores["served"][metric] == scores["hf"][metric]
    assert scores["hf"]["acc,none"] > 0.3
