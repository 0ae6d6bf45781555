"""`bench serve` from its options to its table: servers that run, servers that are started, and bad input."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.engine.bench.serving.conftest import answer
from tests.engine.http.served import Served
from tests.telemetry.foreign.prompting.conftest import Call, FakeOpenAI

from kvscope_engine.bench.serving import contenders, rounds
from kvscope_engine.bench.serving.contenders import LLAMA_CPP, OURS, VLLM, Absent, Contender, Wanted
from kvscope_engine.cli.main import main
from kvscope_engine.model.fetching.names import parse_model_name

SMALL = ["--num-prompts", "4", "--num-warmups", "1", "--random-input-len", "6", "--random-output-len", "3"]
SERVER = """
import json, sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.told("application/json", json.dumps({"data": [{"id": "m"}]}))
    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path != "/v1/completions":
            return self.send_error(404)
        chunks = [{"choices": [{"index": 0, "text": " w"}]}] * (body["max_tokens"] - 1)
        chunks += [{"choices": [{"index": 0, "text": " w", "finish_reason": "length"}]}]
        chunks += [{"choices": [], "usage": {"prompt_tokens": 6, "completion_tokens": body["max_tokens"]}}]
        self.told("text/event-stream", "".join("data: " + json.dumps(chunk) + "\\n\\n" for chunk in chunks))
    def told(self, kind, text):
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.end_headers()
        self.wfile.write(text.encode())
    def log_message(self, *_):
        pass
ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


@pytest.fixture
def fake() -> Iterator[FakeOpenAI]:
    made = FakeOpenAI()
    made.script = completions
    yield made
    made.close()


def completions(call: Call) -> None:
    if call.path == "/v1/completions":
        answer(call)
    else:
        call.answer(404, b"")


def report_of(capsys: pytest.CaptureFixture[str], *options: str, code: int = 0) -> Any:
    assert main(["bench", "serve", *SMALL, *options, "--json"]) == code
    return json.loads(capsys.readouterr().out)


def started(name: str, program: str = SERVER) -> Contender:
    return Contender(name, "1.0", lambda port, folder: [sys.executable, "-c", program, str(port)], note="a fake")


def test_a_server_that_runs(fake: FakeOpenAI, capsys: pytest.CaptureFixture[str]) -> None:
    report = report_of(capsys, "--base-url", fake.url, "--goodput", "ttft:600000", "e2el:600000")
    (one,) = report["servers"].values()
    assert (one["completed"], one["failed"], one["wrong_prompt_lengths"]) == (4, 0, 0)
    assert (one["total_input_tokens"], one["total_output_tokens"]) == (24, 12)
    assert one["request_goodput"] == one["request_throughput"] > 0
    assert one["median_ttft_ms"] <= one["median_e2el_ms"]
    assert report["model"] == "m"
    assert report["tokenizer"].startswith("words")
    assert report["workload"]["dataset"] == {
        "name": "random",
        "input_len": 6,
        "output_len": 3,
        "range_ratio": 0.0,
        "prefix_len": 0,
    }
    assert {"date", "device", "versions", "skipped"} <= report.keys()
    assert sum(call.path == "/v1/completions" for call in fake.calls) == 5


def test_its_table(fake: FakeOpenAI, capsys: pytest.CaptureFixture[str]) -> None:
    fake.script = lambda call: call.answer(500, b"") if call.body.get("prompt") == lost[0] else completions(call)
    lost = [""]
    assert main(["bench", "serve", *SMALL, "--base-url", fake.url]) == 0
    lost[0] = next(call.body["prompt"] for call in reversed(fake.calls))
    capsys.readouterr()
    assert main(["bench", "serve", *SMALL, "--base-url", fake.url, "--percentile-metrics", "itl,ttft"]) == 0
    shown = capsys.readouterr().out
    assert f"1 failed: {fake.url}/v1/completions answers with HTTP 500" in shown
    assert "first token (TTFT)" in shown
    assert "between tokens (ITL)" in shown
    assert "end to end" not in shown


def test_our_own_api(capsys: pytest.CaptureFixture[str]) -> None:
    served = Served(step_s=0.002)
    try:
        host, port = served.address
        report = report_of(capsys, "--base-url", f"http://{host}:{port}/v1", "--max-concurrency", "2")
    finally:
        served.close()
    (one,) = report["servers"].values()
    assert (one["completed"], one["failed"], one["total_output_tokens"]) == (4, 0, 12)


def test_the_server_s_own_tokenizer(fake: FakeOpenAI, capsys: pytest.CaptureFixture[str]) -> None:
    letters = {"/tokenize": lambda body: {"tokens": [ord(letter) for letter in body["prompt"]]}}
    letters["/detokenize"] = lambda body: {"prompt": "".join(map(chr, body["tokens"]))}

    def script(call: Call) -> None:
        if call.path in letters:
            call.answer(200, letters[call.path](call.body))
        else:
            answer(call)

    fake.script = script
    report = report_of(capsys, "--base-url", fake.url)
    assert report["tokenizer"] == "the server's tokenizer"
    prompts = [call.body["prompt"] for call in fake.calls if call.path == "/v1/completions"]
    assert {len(prompt) for prompt in prompts} == {6}
    assert len(set(prompts)) == 5


def test_servers_that_are_started(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    broken = started(VLLM, "raise SystemExit('no memory')")
    found = {OURS: started(OURS), LLAMA_CPP: started(LLAMA_CPP), VLLM: broken}
    monkeypatch.setattr("kvscope_engine.bench.serve.contender", lambda name, wanted: found[name])
    report = report_of(capsys, "--repeats", "2")
    assert list(report["servers"]) == [OURS, LLAMA_CPP]
    for one in report["servers"].values():
        assert (one["completed"], one["failed"], len(one["rounds"])) == (8, 0, 2)
    assert report["servers"][LLAMA_CPP]["ours_over_it"] > 0
    assert "ours_over_it" not in report["servers"][OURS]
    assert report["skipped"] == {VLLM: "vllm ended with 1 before it served: no memory"}


def test_ours_that_does_not_start_is_an_error(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = started(OURS, "raise SystemExit('no memory')")
    monkeypatch.setattr("kvscope_engine.bench.serve.contender", lambda name, wanted: broken)
    assert main(["bench", "serve", *SMALL, "--only", OURS]) == 1
    assert "kvscope ended with 1 before it served: no memory" in capsys.readouterr().err


def test_who_is_absent_is_named(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "kvscope_engine.bench.serve.contender",
        lambda name, wanted: started(name) if name == OURS else Absent(name, "not installed"),
    )
    assert main(["bench", "serve", *SMALL, "--repeats", "1"]) == 0
    shown = capsys.readouterr().out
    assert "llama-cpp-python: skipped: not installed" in shown
    assert "vllm: skipped: not installed" in shown


def test_commands_of_those_that_are_started(monkeypatch: pytest.MonkeyPatch, tiny_model: Any, tmp_path: Path) -> None:
    for name in ("_missing", "_missing_parts", "_version"):
        monkeypatch.setattr(contenders, name, lambda *_: "")
    gguf = tmp_path / "m.gguf"
    gguf.touch()

    def command(name: str, model: str) -> str:
        wanted = Wanted(parse_model_name(model), "cpu", 2, 192, ["--dtype", "float32"])
        found = contenders.contender(name, wanted)
        return found.why if isinstance(found, Absent) else " ".join(found.command(8000, tmp_path)[1:])

    ours = f"-m kvscope_engine.cli.main serve --endpoint ipc://{tmp_path} --http 127.0.0.1:8000 --model {gguf}"
    assert command(OURS, str(gguf)) == f"{ours} --device cpu --num-threads 2 --dtype float32"
    assert f"--model {gguf}" in command(LLAMA_CPP, str(gguf))
    assert "--n_ctx 192 --n_threads 2" in command(LLAMA_CPP, str(gguf))
    assert command(LLAMA_CPP, tiny_model()) == "it reads .gguf files alone"
    assert f"serve {gguf} --host 127.0.0.1 --port 8000 --max-model-len 192" in command(VLLM, str(gguf))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--base-url", "http://127.0.0.1:1"], "nobody listens at http://127.0.0.1:1"),
        (["--base-url", "127.0.0.1:1"], "--base-url '127.0.0.1:1' is not accepted: http://HOST:PORT"),
        (["--base-url", "http://h", "--only", "kvscope"], "--only is for servers that are started here"),
        (["--request-rate", "0"], "--request-rate 0 is not accepted: a number above 0, or inf"),
        (["--request-rate", "nan"], "--request-rate nan is not accepted"),
        (["--request-rate", "fast"], "'fast' is not accepted: a number"),
        (["--burstiness", "-1"], "--burstiness -1 is not accepted"),
        (["--num-prompts", "0"], "--num-prompts 0 is not accepted: from 1"),
        (["--repeats", "0"], "--repeats 0 is not accepted: from 1"),
        (["--max-concurrency", "0"], "--max-concurrency 0 is not accepted"),
        (["--random-input-len", "0"], "--random-input-len 0 is not accepted"),
        (["--random-range-ratio", "1"], "--random-range-ratio 1 is not accepted: from 0 to below 1"),
        (["--temperature", "nan"], "--temperature nan is not accepted"),
        (["--timeout", "inf"], "--timeout inf is not accepted"),
        (["--goodput", "itl:5"], "--goodput 'itl:5' is not accepted: ttft, tpot, e2el with milliseconds"),
        (["--goodput", "ttft"], "--goodput 'ttft' is not accepted"),
        (["--percentile-metrics", "ttft,x"], "--percentile-metrics 'x' is not accepted: ttft, tpot, itl, e2el"),
        (["--metric-percentiles", "90,101"], "--metric-percentiles '90,101' is not accepted"),
        (["--model", "nothing/here/x"], "'nothing/here/x' not found"),
        (["--engine-args", "'"], "--engine-args"),
        (["--served-model-name", "m"], "--served-model-name goes with --base-url"),
        (["--dataset-name", "sonnet"], "sonnet"),
        (["--tokenizer", "/nowhere"], "--tokenizer '/nowhere' is not accepted"),
    ],
)
def test_bad_input_is_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, options: list[str], words: str
) -> None:
    monkeypatch.setattr(rounds, "process", lambda command: pytest.fail("nothing is started for that"))
    assert main(["bench", "serve", *options]) in (1, 2)
    told = capsys.readouterr().err
    assert words in told
    assert told.count("\n") == 1
