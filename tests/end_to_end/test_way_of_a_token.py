"""How many files a token goes through, from the sampler to an HTTP client: a real run, traced.

What counts is a file of ours of which a function has the token in hand, as a number, a text, a message or bytes, while
one request of a chat streams: not what only runs at the same time, not what starts or ends the request, and not what
becomes of the token as a part of a block or of the next step.
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
    "put_inputs",
    "ModelRunner._forward",
)
"""Telemetry, the blocks that the token is written into, and the next step, whose input it is."""
WAY: Final = (
    "engine/kvscope_engine/model/layers/sampling/sampler.py",
    "engine/kvscope_engine/model/runner/model_runner.py",
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
    "engine/kvscope_engine/http/completions.py",
    "engine/kvscope_engine/http/http_connection.py",
)


@pytest.fixture
def model(tiny_model: Callable[..., str]) -> str:
    """A tiny model whose tokens are words that nothing else is."""
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
    """An engine with the model, and the API before it."""
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


def stream(served: Served, heard: Callable[[str], None]) -> None:
    """A chat, a token an event."""
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


class TheToken:
    """Known as a number, in a text and in bytes, on the host and on the device."""

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


def test_a_token_goes_through_the_files_of_its_way(serve: Callable[[], Served]) -> None:
    token = TheToken()
    with Following(token.is_it, but_not_in=OTHERS) as trace:
        served = serve()
        said: list[str] = []
        stream(served, said.append)
        words = [text.strip() for text in said if text.strip()]
        word = next(word for word in words[4:-4] if words.count(word) == 1 and len(word) == len("word12345"))
        token.number = int(word.removeprefix("word"))
        trace.begin()
        stream(served, lambda text: None)
        time.sleep(0.1)
        trace.end()
    print(*sorted(trace.functions), sep="\n")  # shown where it fails
    check_way(trace.ran, WAY, {})
