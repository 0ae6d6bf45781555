"""The command line with a small fake engine in place of the real one."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import pytest

from kvscope_engine.cli.main import main
from kvscope_telemetry.errors import BadInput
from kvscope_telemetry.messages.commands import (
    Accepted,
    Finished,
    RequestTiming,
    Submit,
    TokenLogprobs,
    Tokens,
    Usage,
)


class SpellingTokenizer:
    """One token per character; the chat template adds brackets."""

    chat_template = "{{ tools }}"  # the model can call functions

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return [ord(character) for character in text]

    def chat_text(self, messages: Any, tools: Any = None) -> str:
        return "".join(f"[{message.content}]" for message in messages)

    def refuse_too_long(self, text: str, max_len: int) -> None:
        if len(text) >= max_len:
            raise BadInput(f"the prompt has {len(text)} characters, which are more than {max_len} tokens")


class EchoEngine:
    """Echoes its prompt, one token per step, serving the last request of the queue first."""

    made: ClassVar[list[EchoEngine]] = []
    notes: tuple[str, ...] = ()

    def __init__(self, config: Any, *, progress: Any = None, publish: Any = None) -> None:
        self.config = config
        self.tokenizer = SpellingTokenizer()
        self.hello = SimpleNamespace(model=SimpleNamespace(vocab_size=0x110000, max_model_len=1000))
        self.submits: list[Submit] = []
        self.closed = False
        self.on_step: Callable[[int], None] = lambda step: None
        self._left: dict[tuple[str, int], list[int]] = {}
        self._aborted: set[str] = set()
        self._steps = 0
        self.made.append(self)

    def __enter__(self) -> EchoEngine:
        return self

    def __exit__(self, *error: object) -> None:
        self.closed = True

    @property
    def has_unfinished(self) -> bool:
        return bool(self._left)

    def submit(self, submit: Submit) -> Accepted:
        ids = list(submit.prompt_token_ids or ())
        if len(ids) > 500:
            raise BadInput("request needs 63 blocks: the pool has 32")
        self.submits.append(submit)
        for index in range(submit.sampling.n):
            self._left[submit.request_id, index] = ids[: submit.sampling.max_tokens]
        numbers = tuple(range(submit.sampling.n))
        return Accepted(request_id=submit.request_id, numbers=numbers, num_prompt_tokens=len(ids))

    def abort(self, request_id: str) -> None:
        self._aborted.add(request_id)

    def step(self) -> list[Tokens | Finished]:
        self._steps += 1
        self.on_step(self._steps)
        outputs: list[Tokens | Finished] = []
        for (request_id, index), left in reversed(list(self._left.items())):
            reason: Any = "length"
            if request_id in self._aborted:
                reason, left[:] = "abort", []
            if left:
                token = left.pop(0)
                logprobs = (TokenLogprobs(token_id=token, logprob=-0.5),)
                tokens = Tokens(request_id=request_id, index=index, token_ids=(token,), text=chr(token))
                outputs.append(
                    Tokens(
                        request_id=request_id,
                        index=index,
                        token_ids=tokens.token_ids,
                        text=tokens.text,
                        logprobs=logprobs,
                    )
                )
            if not left:
                del self._left[request_id, index]
                usage = Usage(prompt_tokens=1, cached_tokens=0, completion_tokens=2)
                timing = RequestTiming(queue_s=0.1, ttft_s=0.2, total_s=0.3)
                outputs.append(
                    Finished(request_id=request_id, index=index, finish_reason=reason, usage=usage, timing=timing)
                )
        return outputs


@pytest.fixture
def echo(monkeypatch: pytest.MonkeyPatch) -> type[EchoEngine]:
    """The fake engine class in place of `kvscope_engine.engine`; `made` lists its instances."""
    module = ModuleType("kvscope_engine.engine")
    module.Engine = EchoEngine  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "kvscope_engine.engine", module)
    monkeypatch.setattr(EchoEngine, "made", [])
    return EchoEngine


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """Function that runs `kvscope-engine` and returns exit code, standard output and standard error."""

    def run_main(*words: str) -> tuple[int, str, str]:
        code = main(words)
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run_main
