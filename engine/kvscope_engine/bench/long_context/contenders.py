"""kvscope's engine, transformers and llama.cpp as contenders that decode after long contexts.

Each fills its contexts in its fastest way, to keep the benchmark short.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from kvscope_engine.bench.contenders.llama_cpp import BATCH_TOKENS, LlamaCpp, is_installed
from kvscope_engine.bench.long_context.rounds import LongBatch, LongContender
from kvscope_engine.engine import Engine
from kvscope_engine.model.loader.download.default_model import default_gguf
from kvscope_telemetry.engine_config import EngineConfig
from kvscope_telemetry.messages.commands import Submit, Tokens
from kvscope_telemetry.messages.sampling_params import SamplingParams

BLOCK_SIZE = 16


def long_contenders(batch: LongBatch, dtype: str, module: Any) -> list[LongContender]:
    """Return all contenders that are available. `module` is the transformers model."""
    contenders: list[LongContender] = [OurLongContexts(batch, dtype), TransformersLongContexts(batch, module)]
    if is_installed():
        contenders.append(LlamaCppLongContexts(batch, default_gguf(lambda progress: None)))
    return contenders


class OurLongContexts:
    """kvscope's engine without prefix caching, so that the context of each request is computed and stored
    separately.
    """

    name = "kvscope"

    def __init__(self, batch: LongBatch, dtype: str) -> None:
        self._batch = batch
        self._engine = Engine(
            EngineConfig(
                model="default",
                dtype=dtype,
                device="cpu",
                num_threads=1,
                block_size=BLOCK_SIZE,
                max_model_len=batch.length,
                num_gpu_blocks_override=batch.num_requests * (batch.length // BLOCK_SIZE + 1),
                enable_prefix_caching=False,
            )
        )

    def fill(self, prompt: Sequence[int]) -> None:
        sampling = SamplingParams(temperature=0.0, max_tokens=self._batch.length - len(prompt), ignore_eos=True)
        for index in range(self._batch.num_requests):
            self._engine.submit(Submit(request_id=str(index), prompt_token_ids=tuple(prompt), sampling=sampling))
        started: set[str] = set()
        while len(started) < self._batch.num_requests:
            started |= {message.request_id for message in self._engine.step() if isinstance(message, Tokens)}

    def decode(self, num_tokens: int) -> None:
        num_remaining = self._batch.num_requests * num_tokens
        while num_remaining > 0:
            num_remaining -= sum(len(m.token_ids) for m in self._engine.step() if isinstance(m, Tokens))


class TransformersLongContexts:
    """transformers with greedy decoding: calls the model with its own cache, as `generate` does. One batch row is
    prefilled and then repeated.
    """

    name = "transformers"

    def __init__(self, batch: LongBatch, module: Any) -> None:
        self._batch = batch
        self._module = module

    @torch.inference_mode()
    def fill(self, prompt: Sequence[int]) -> None:
        output = self._module(input_ids=torch.tensor([list(prompt)]), use_cache=True, logits_to_keep=1)
        self._cache = output.past_key_values
        self._cache.batch_repeat_interleave(self._batch.num_requests)
        self._ids = output.logits[:, -1].argmax(-1, keepdim=True).repeat(self._batch.num_requests, 1)

    @torch.inference_mode()
    def decode(self, num_tokens: int) -> None:
        for _ in range(num_tokens):
            output = self._module(input_ids=self._ids, past_key_values=self._cache, use_cache=True)
            self._ids = output.logits[:, -1].argmax(-1, keepdim=True)


class LlamaCppLongContexts:
    """llama.cpp with separate memory per sequence. One sequence is prefilled and copied to all others."""

    name = "llama.cpp"

    def __init__(self, batch: LongBatch, gguf: Path) -> None:
        self._batch = batch
        self._model = LlamaCpp(gguf, batch.num_requests, batch.num_requests * batch.length, is_unified=False)

    def fill(self, prompt: Sequence[int]) -> None:
        last = len(prompt) - 1
        entries = [(token, position, 0, position == last) for position, token in enumerate(prompt)]
        sampled: list[int] = []
        for start in range(0, len(entries), BATCH_TOKENS):
            sampled += self._model.decode(entries[start : start + BATCH_TOKENS])
        for sequence in range(1, self._batch.num_requests):
            self._model.copy(0, sequence)
        self._tokens, self._position = sampled * self._batch.num_requests, len(prompt)

    def decode(self, num_tokens: int) -> None:
        for _ in range(num_tokens):
            entries = [(token, self._position, sequence, True) for sequence, token in enumerate(self._tokens)]
            self._tokens = self._model.decode(entries)
            self._position += 1
