"""Completions of the command `generate`: collected as they arrive, and printed in the order of the prompts."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec

from kvscope_telemetry.messages.commands import (
    Finished,
    RequestTiming,
    Submit,
    TokenLogprobs,
    Tokens,
    Usage,
)
from kvscope_telemetry.messages.telemetry import Progress
from kvscope_telemetry.printable import print_line, printable

TITLE_CHARACTERS = 60


@dataclass(slots=True)
class PrintedCompletion:
    """Completion of a prompt, as printed. `index` is the prompt's index; `completion` is the index among the prompt's
    `n` completions.
    """

    index: int
    submit: Submit
    prompt_token_ids: list[int]
    completion: int
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: str | None = None
    usage: Usage = field(default_factory=Usage)
    timing: RequestTiming = field(default_factory=RequestTiming)
    error: str = ""

    @property
    def request_id(self) -> str:
        return self.submit.request_id

    def add_output(self, output: Tokens | Finished) -> None:
        if isinstance(output, Tokens):
            self.token_ids += output.token_ids
            self.text += output.text
            self.logprobs += output.logprobs
            self.prompt_logprobs += output.prompt_logprobs
        else:
            self.finish_reason, self.error = output.finish_reason, output.error
            self.usage, self.timing = output.usage, output.timing

    def as_json(self) -> dict[str, Any]:
        """Return the JSON object for `--json`. `messages`, `completion`, `error` and log-probabilities are included
        only if they apply.
        """
        entry: dict[str, Any] = {"index": self.index, "prompt": self.submit.prompt}
        if self.submit.messages is not None:
            entry["messages"] = self.submit.messages
        if self.submit.sampling.n > 1:
            entry["completion"] = self.completion
        entry |= {
            "prompt_token_ids": self.prompt_token_ids,
            "token_ids": self.token_ids,
            "text": self.text,
            "finish_reason": self.finish_reason,
            "usage": self.usage,
            "timing": self.timing,
        }
        if self.submit.sampling.logprobs is not None:
            entry["logprobs"] = self.logprobs
        if self.submit.sampling.prompt_logprobs is not None and not self.completion:
            entry["prompt_logprobs"] = self.prompt_logprobs
        if self.error:
            entry["error"] = self.error
        return entry


class Printer(Protocol):
    """Prints completions as they grow. `show` is called after each step, `close` once at the end."""

    def show(self, answers: Sequence[PrintedCompletion]) -> None: ...

    def close(self, answers: Sequence[PrintedCompletion]) -> None: ...


class JsonPrinter:
    """Prints one JSON line per completion, in the order of the prompts, once it and all completions before it have
    ended.
    """

    def __init__(self) -> None:
        self._num_printed = 0

    def show(self, answers: Sequence[PrintedCompletion]) -> None:
        while self._num_printed < len(answers) and answers[self._num_printed].finish_reason is not None:
            line = msgspec.json.encode(answers[self._num_printed].as_json()).decode()
            print(line, flush=True)
            self._num_printed += 1

    def close(self, answers: Sequence[PrintedCompletion]) -> None:
        self.show(answers)


class StreamPrinter:
    def __init__(self) -> None:
        self._num_shown = 0

    def show(self, answers: Sequence[PrintedCompletion]) -> None:
        text = answers[0].text
        print(_for_terminal(text[self._num_shown :]), end="", flush=True)
        self._num_shown = len(text)

    def close(self, answers: Sequence[PrintedCompletion]) -> None:
        self.show(answers)
        print()
        _print_error(answers[0])


class TextPrinter:
    def __init__(self, num_completions: int) -> None:
        from kvscope_engine.model.loader.download.progress import TerminalProgress

        self._bar = TerminalProgress()
        self._num_completions = num_completions

    def show(self, answers: Sequence[PrintedCompletion]) -> None:
        done = sum(answer.finish_reason is not None for answer in answers)
        self._bar(Progress(stage="generate", done=done, total=self._num_completions, unit="completions"))

    def close(self, answers: Sequence[PrintedCompletion]) -> None:
        self._bar.close()
        for answer in answers:
            if answer.error:
                _print_error(answer)
            else:
                print(f"[{answer.index + 1}] {_title(answer)}\n{_for_terminal(answer.text.strip())}\n", flush=True)


def _for_terminal(text: str) -> str:
    """Return a model's text without terminal escape sequences; unchanged if standard output is not a terminal."""
    return printable(text, keep="\n\t") if sys.stdout.isatty() else text


def _title(answer: PrintedCompletion) -> str:
    messages = answer.submit.messages
    prompt = answer.submit.prompt or (messages[-1].content if messages else "")
    title = " ".join(prompt.split())
    return title if len(title) <= TITLE_CHARACTERS else f"{title[: TITLE_CHARACTERS - 1]}…"


def _print_error(answer: PrintedCompletion) -> None:
    if answer.error:
        print_line(f"kvscope-engine: prompt {answer.index + 1}: {answer.error}", file=sys.stderr)
