"""A token passes a limited number of files from the sampler to an HTTP client: a real run is traced.

A file counts if one of its functions handles the token as a number, a text, a message or bytes while one chat request
streams: not code that only runs at the same time, starts or ends the request, or uses the token in a block or in the
next step.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import pytest
import tokenizers
import torch
from tests.engine.http.served import Served
from tests.ways import Following, check_way

from kvscope_engine import Engine, EngineConfig

VOCABULARY: Final = 30_000
MAX_TOKENS: Final = 24
OTHERS: Final = (
    "StepRecorder.record",
    "EngineComponents.work_of",
    "Scheduler.commit",
    "build_inputs",
    "stage_inputs",
    "ModelRunner._forward",
)
"""Telemetry, the blocks that the token is written to, and the next step, which has it as input."""
WAY: Final = (
    "engine/kvscope_engine/model/layers/sampling/sampler.py",
    "engine/kvscope_engine/model/runner/model_runner.py",
    "engine/kvscope_engine/model/device_memory/read_back.py",
    "engine/kvscope_engine/model/runner/in_flight_step.py",
    "engine/kvscope_engine/step_loop.py",
    "engine/kvscope_engine/engine.py",
    "engine/kvscope_engine/outputs.py",
    "engine/kvscope_engine/tokenization/tokenizer.py",
    "engine/kvscope_engine/server/dispatcher.py",
    "engine/kvscope_engine/server/sessions.py",
    "engine/kvscope_telemetry/transport/server_sockets.py",
    "engine/kvscope_telemetry/transport/reply_sender.py",
    "engine/kvscope_telemetry/messages/wire.py",
    "engine/kvscope_telemetry/transport/client_sockets.py",
    "engine/kvscope_engine/http/engine_client.py",
    "engine/kvscope_engine/http/generation.py",
    "engine/kvscope_engine/http/chat_generation.py",
    "engine/kvscope_engine/http/completions.py",
    "engine/kvscope_engine/http/http_connection.py",
)


@pytest.fixture
def model(tiny_model: Callable[..., str]) -> str:
    """A tiny model whose tokens are unique words."""
    name = tiny_model(vocab_size=VOCABULARY)
    words = {f"word{number}": number for number in range(VOCABULARY)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="word0"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    folder = Path(name.removeprefix("dummy:")).parent
    tokenizer.save(str(folder / "tokenizer.json"))
    extras = {"special_tokens": {}, "chat_template": "word1 word2"}
    (folder / "kvscope_tokenizer.json").write_text(json.dumps(extras))
    return name


@pytest.fixture
def serve(model: str) -> Iterator[Callable[[], Served]]:
    """Function that serves the model with the HTTP API: `serve()`."""
    made: list[Served] = []

    def make() -> Served:
        config = EngineConfig(model=model, device="cpu", num_gpu_blocks_override=64, max_model_len=256)

        def build(progress: Any, publish: Any, messages_dropped: Any) -> Engine:
            return Engine(config, progress=progress, publish=publish, messages_dropped=messages_dropped)

        made.append(Served(build=build))
        return made[-1]

    yield make
    for one in made:
        one.close()


def stream_chat(served: Served, heard: Callable[[str], None]) -> None:
    """Stream a chat with one token per event."""
    body: dict[str, Any] = {"messages": [{"role": "user", "content": "x"}], "temperature": 0, "max_tokens": MAX_TOKENS}
    body |= {"stream": True, "ignore_eos": True}
    with (
        served.post("/v1/chat/completions", body, "Connection: close") as connection,
        connection.makefile("rb") as lines,
    ):
        for line in lines:
            if line.startswith(b"data: {"):
                choice = json.loads(line[6:])["choices"][0]
                heard(choice["delta"].get("content") or "")


class TracedToken:
    """A token that is recognized as a number, in text and in bytes, on the host and on the device."""

    number = -1

    def is_it(self, value: Any) -> bool:
        if isinstance(value, bool):
            return False
        if isinstance(value, int):
            return value == self.number
        if isinstance(value, str):
            return f"word{self.number}" in value.split()
        if isinstance(value, bytes):
            return f"word{self.number}".encode() in value
        return isinstance(value, torch.Tensor) and value.numel() == 1 and value.item() == self.number


def test_sampled_token_reaches_the_http_client_through_the_listed_source_files_only(
    serve: Callable[[], Served],
) -> None:
    token = TracedToken()
    with Following(token.is_it, but_not_in=OTHERS) as trace:
        served = serve()
        said: list[str] = []
        stream_chat(served, said.append)
        words = [text.strip() for text in said if text.strip()]
        word = next(word for word in words[4:-4] if words.count(word) == 1 and len(word) == len("word12345"))
        token.number = int(word.removeprefix("word"))
        trace.begin()
        stream_chat(served, lambda text: None)
        time.sleep(0.1)
        trace.end()
    print(*sorted(trace.functions), sep="\n")  # shown if the test fails
    check_way(trace.ran, WAY, {})
