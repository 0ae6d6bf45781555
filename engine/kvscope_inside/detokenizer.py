"""Decodes token ids with the model's tokenizer in a separate process.

Loading a tokenizer in the engine's process would hold its interpreter lock (GIL) for about a second. The child process
is started by the first query, with the lowest priority, and ends when the engine's process ends.
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

LOAD_TIMEOUT_S: Final = 60.0
"""Maximum seconds to load the tokenizer and answer. If exceeded, only empty texts are returned from then on."""


class DetokenizerProcess:
    """Child process with the tokenizer of a model folder or a Hugging Face id. Thread-safe."""

    def __init__(self, tokenizer: str) -> None:
        self._tokenizer = tokenizer
        self._lock = threading.Lock()
        self._process: subprocess.Popen[str] | None = None
        self._has_failed = False

    def texts(self, token_ids: Sequence[Sequence[int]]) -> list[str]:
        """Return the text of each list of token ids; empty texts if the tokenizer cannot be loaded. Blocks until
        answered.
        """
        no_texts = [""] * len(token_ids)
        with self._lock:
            if self._has_failed:
                return no_texts
            try:
                return self._query(token_ids)
            except (OSError, ValueError):
                self._has_failed = True
                self._stop()
                return no_texts

    def close(self) -> None:
        """End the process without waiting for a query in progress."""
        self._has_failed = True
        self._stop()

    def _query(self, token_ids: Sequence[Sequence[int]]) -> list[str]:
        process = self._process = self._process or self._start()
        assert process.stdin is not None, "piped"
        assert process.stdout is not None, "piped"
        timeout = threading.Timer(LOAD_TIMEOUT_S, process.kill)
        timeout.start()
        try:
            process.stdin.write(json.dumps([list(ids) for ids in token_ids]) + "\n")
            process.stdin.flush()
            texts: list[str] = json.loads(process.stdout.readline())
        finally:
            timeout.cancel()
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

    def _stop(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            with contextlib.suppress(OSError):
                process.communicate()


def decoder(tokenizer: str) -> Callable[[Sequence[int]], str]:
    """Return a decode function. It uses `tokenizer.json` if present (true of nearly every model), otherwise
    transformers.
    """
    path = Path(tokenizer) / "tokenizer.json"
    if path.is_file():
        from tokenizers import Tokenizer

        fast_tokenizer = Tokenizer.from_file(str(path))
        return lambda ids: str(fast_tokenizer.decode(list(ids), skip_special_tokens=False))
    from transformers import AutoTokenizer

    slow_tokenizer = AutoTokenizer.from_pretrained(tokenizer)
    return lambda ids: str(slow_tokenizer.decode(list(ids)))


def main() -> None:
    """Answer queries on stdin: each input line is a JSON list of lists of token ids, each output line a JSON list of
    texts.
    """
    os.nice(10)
    decode = decoder(sys.argv[1])
    for line in sys.stdin:
        queries = [
            [token_id for token_id in ids if token_id >= 0] for ids in json.loads(line)
        ]  # negative ids are placeholders for future tokens
        print(json.dumps([decode(ids) for ids in queries]), flush=True)


if __name__ == "__main__":
    main()
