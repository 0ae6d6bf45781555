"""Text of token ids, by the model's tokenizer, in a process of its own: loading one would take the engine's interpreter
for a second.

Owns that process: it is started by the first question, with the lowest priority, and ends with ours.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

LOAD_S: Final = 60.0
"""For the tokenizer to load and answer: after it, there are no texts."""


class DetokenizerProcess:
    """The process with the tokenizer of a folder or a Hugging Face id. Methods may be called from any thread."""

    def __init__(self, tokenizer: str) -> None:
        self._tokenizer = tokenizer
        self._lock = threading.Lock()
        self._process: subprocess.Popen[str] | None = None
        self._has_failed = False

    def texts(self, token_ids: Sequence[Sequence[int]]) -> list[str]:
        """One for each; empty ones where there is no such tokenizer. Waits for the answer."""
        nothing = [""] * len(token_ids)
        with self._lock:
            if self._has_failed:
                return nothing
            try:
                return self._ask(token_ids)
            except (OSError, ValueError):
                self._has_failed = True
                self._end()
                return nothing

    def close(self) -> None:
        """End the process; does not wait for a question in progress."""
        self._has_failed = True
        self._end()

    def _ask(self, token_ids: Sequence[Sequence[int]]) -> list[str]:
        process = self._process = self._process or self._start()
        assert process.stdin is not None, "piped"
        assert process.stdout is not None, "piped"
        late = threading.Timer(LOAD_S, process.kill)
        late.start()
        try:
            process.stdin.write(json.dumps([list(ids) for ids in token_ids]) + "\n")
            process.stdin.flush()
            texts: list[str] = json.loads(process.stdout.readline())
        finally:
            late.cancel()
        if len(texts) != len(token_ids):
            raise ValueError("not as many texts as were asked for")
        return texts

    def _start(self) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", "kvscope_inside.detokenizer", self._tokenizer],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            with contextlib.suppress(OSError):
                process.communicate()


def decoder(tokenizer: str) -> Callable[[Sequence[int]], str]:
    """By the file that `tokenizers` reads, which is there for nearly every model, otherwise by transformers."""
    path = Path(tokenizer) / "tokenizer.json"
    if path.is_file():
        from tokenizers import Tokenizer

        found = Tokenizer.from_file(str(path))
        return lambda ids: str(found.decode(list(ids), skip_special_tokens=False))
    from transformers import AutoTokenizer

    loaded = AutoTokenizer.from_pretrained(tokenizer)
    return lambda ids: str(loaded.decode(list(ids)))


def main() -> None:
    """The process: a line of lists of ids in, a line of texts out."""
    os.nice(10)
    decode = decoder(sys.argv[1])
    for line in sys.stdin:
        lists = [[each for each in ids if each >= 0] for ids in json.loads(line)]  # below are places of tokens to come
        print(json.dumps([decode(ids) for ids in lists]), flush=True)


if __name__ == "__main__":
    main()
