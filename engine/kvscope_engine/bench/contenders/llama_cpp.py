"""llama.cpp as a contender, through llama-cpp-python's low-level batch interface, when it is installed.

All sequences live in one context; finished ones leave the batch, as they do in its own server.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections import deque
from pathlib import Path
from typing import Any

import numpy as np

from kvscope_engine.bench.workloads import BenchWorkload

BATCH_TOKENS = 512


def is_installed() -> bool:
    """Whether llama-cpp-python can be imported."""
    return importlib.util.find_spec("llama_cpp") is not None


class LlamaCpp:
    """The GGUF file as it is (its own quantization), one thread, greedy."""

    name = "llama.cpp"

    def __init__(self, gguf: Path, num_sequences: int, context_tokens: int, *, is_unified: bool = True) -> None:
        """`context_tokens` of all sequences together; not `is_unified`: each has its share of them to itself."""
        self._api: Any = importlib.import_module("llama_cpp")
        api = self._api
        self._log = api.llama_log_callback(lambda level, text, data: None)
        api.llama_log_set(self._log, None)
        api.llama_backend_init()
        self._model = api.llama_model_load_from_file(str(gguf).encode(), api.llama_model_default_params())
        self._vocab_size = api.llama_vocab_n_tokens(api.llama_model_get_vocab(self._model))
        params = api.llama_context_default_params()
        params.n_ctx = context_tokens
        params.n_batch = params.n_ubatch = BATCH_TOKENS
        params.n_seq_max = num_sequences
        params.n_threads = params.n_threads_batch = 1
        params.kv_unified = is_unified
        self._context = api.llama_init_from_model(self._model, params)
        self._memory = api.llama_get_memory(self._context)
        self._batch = api.llama_batch_init(BATCH_TOKENS, 0, 1)

    def run(self, workload: BenchWorkload) -> None:
        """Each batch holds the next token of all living sequences, then as much as there is room for of the prompts
        that have arrived."""
        self.forget()
        waiting = deque(
            (arrival, token, position, sequence, position == len(prompt) - 1)
            for arrival, (sequence, prompt) in zip(workload.arrivals, enumerate(workload.prompts), strict=True)
            for position, token in enumerate(prompt)
        )
        living: dict[int, tuple[int, int]] = {}
        left, step = list(workload.output_tokens), 0
        while waiting or living:
            entries = [(token, position, sequence, True) for sequence, (token, position) in living.items()]
            while waiting and len(entries) < BATCH_TOKENS and (waiting[0][0] <= step or not entries):
                entries.append(waiting.popleft()[1:])
            said = [(position, sequence) for _, position, sequence, is_wanted in entries if is_wanted]
            for token, (position, sequence) in zip(self.decode(entries), said, strict=True):
                left[sequence] -= 1
                living[sequence] = (token, position + 1)
                if not left[sequence]:
                    del living[sequence]
            step += 1

    def forget(self) -> None:
        """Empty all sequences."""
        self._api.llama_memory_clear(self._memory, True)

    def copy(self, sequence: int, to: int) -> None:
        """All of a sequence into another, which is empty."""
        self._api.llama_memory_seq_cp(self._memory, sequence, to, -1, -1)

    def decode(self, entries: list[tuple[int, int, int, bool]]) -> list[int]:
        """Run (token, position, sequence, wants logits); the most likely next token of those that want."""
        batch = self._batch
        batch.n_tokens = len(entries)
        for row, (token, position, sequence, wanted) in enumerate(entries):
            batch.token[row], batch.pos[row] = token, position
            batch.n_seq_id[row], batch.seq_id[row][0] = 1, sequence
            batch.logits[row] = wanted
        if self._api.llama_decode(self._context, batch) != 0:
            raise RuntimeError("llama_decode failed")
        return [self._argmax(row) for row, entry in enumerate(entries) if entry[3]]

    def _argmax(self, row: int) -> int:
        logits = self._api.llama_get_logits_ith(self._context, row)
        return int(np.argmax(np.ctypeslib.as_array(logits, shape=(self._vocab_size,))))
