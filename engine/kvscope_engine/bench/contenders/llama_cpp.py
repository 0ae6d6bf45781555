"""llama.cpp as a contender, through the low-level batch interface of llama-cpp-python, if installed.

All sequences share one llama.cpp context. Finished sequences leave the batch.
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
    return importlib.util.find_spec("llama_cpp") is not None


class LlamaCpp:
    """Runs a GGUF file in its own quantization, on one thread, with greedy sampling."""

    name = "llama.cpp"

    def __init__(self, gguf: Path, num_sequences: int, context_tokens: int, *, is_unified: bool = True) -> None:
        """Load the model.

        `context_tokens` is the total of all sequences. If `is_unified` is False, it is split evenly among them.
        """
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
        """Run the workload.

        Each batch contains the next token of all running sequences, and as many tokens of prompts that have arrived as
        fit.
        """
        self.forget()
        waiting = deque(
            (arrival, token, position, sequence, position == len(prompt) - 1)
            for arrival, (sequence, prompt) in zip(workload.arrivals, enumerate(workload.prompts), strict=True)
            for position, token in enumerate(prompt)
        )
        running: dict[int, tuple[int, int]] = {}
        num_remaining, step = list(workload.output_tokens), 0
        while waiting or running:
            entries = [(token, position, sequence, True) for sequence, (token, position) in running.items()]
            while waiting and len(entries) < BATCH_TOKENS and (waiting[0][0] <= step or not entries):
                entries.append(waiting.popleft()[1:])
            sampled = [(position, sequence) for _, position, sequence, is_wanted in entries if is_wanted]
            for token, (position, sequence) in zip(self.decode(entries), sampled, strict=True):
                num_remaining[sequence] -= 1
                running[sequence] = (token, position + 1)
                if not num_remaining[sequence]:
                    del running[sequence]
            step += 1

    def forget(self) -> None:
        self._api.llama_memory_clear(self._memory, True)

    def copy(self, sequence: int, to: int) -> None:
        """Copy the KV cache of `sequence` to the empty sequence `to`."""
        self._api.llama_memory_seq_cp(self._memory, sequence, to, -1, -1)

    def decode(self, entries: list[tuple[int, int, int, bool]]) -> list[int]:
        """Decode `entries`, each a (token, position, sequence, whether logits are needed).

        Returns the greedy next token of each entry that needs logits, in order.
        """
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
