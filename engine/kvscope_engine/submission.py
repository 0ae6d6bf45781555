"""Converts a client's submission to one request per completion, with limits and seeds resolved."""

from __future__ import annotations

import time
from dataclasses import dataclass

import msgspec

from kvscope_engine.policy.adapter import Adapter
from kvscope_engine.policy.request import Request
from kvscope_telemetry.errors import PromptTooLong
from kvscope_telemetry.messages.commands import Submit
from kvscope_telemetry.messages.sampling_params import ModelSampling, ResolvedSampling


@dataclass(frozen=True, slots=True)
class SubmissionLimits:
    max_model_len: int
    max_pool_tokens: int
    """Maximum number of tokens of a request that runs alone, given by the capacity of the whole pool."""


def child_requests(
    submit: Submit,
    prompt_ids: list[int],
    limits: SubmissionLimits,
    first_number: int,
    engine_seed: int,
    model: ModelSampling | None = None,
    adapter: Adapter | None = None,
) -> list[Request]:
    """Return one request per completion, numbered from `first_number`. All but the first are forks of the first.

    Sampling parameters that the submission leaves unset are taken from `model`. Without `max_tokens`, a request may
    generate as many tokens as the model's limit and the pool's capacity allow. Raises BadInput if the prompt leaves no
    token for the output.
    """
    max_new_tokens = limits.max_model_len - len(prompt_ids)
    if max_new_tokens < 1:
        raise PromptTooLong(
            f"the prompt has {len(prompt_ids)} tokens: send at most {limits.max_model_len - 1}"
            f" (the limit of {limits.max_model_len} includes prompt and output)"
        )
    max_tokens = submit.sampling.max_tokens
    if max_tokens is None:
        max_tokens = max(1, limits.max_pool_tokens - len(prompt_ids))
    if model is not None and model.max_tokens is not None:
        max_tokens = min(max_tokens, model.max_tokens)
    sampling, prompt = submit.sampling.resolved(model), tuple(prompt_ids)
    arrival_ns = time.monotonic_ns()
    return [
        Request(
            number=first_number + index,
            request_id=submit.request_id,
            prompt_token_ids=prompt,
            sampling=_seeded(sampling, index, first_number, engine_seed),
            max_tokens=min(max_tokens, max_new_tokens),
            arrival_ns=arrival_ns,
            index=index,
            priority=submit.priority,
            parent=first_number if index else 0,
            cache_salt=submit.cache_salt,
            adapter=adapter,
            client=submit.client,
            batch=submit.batch,
        )
        for index in range(sampling.n)
    ]


def _seeded(sampling: ResolvedSampling, index: int, first_number: int, engine_seed: int) -> ResolvedSampling:
    """Return `sampling` with a seed for completion `index`: the submission's seed (or one derived from the
    engine's seed) plus `index`. Greedy sampling is returned unchanged.
    """
    if sampling.is_greedy:
        return sampling
    seed = sampling.seed if sampling.seed is not None else engine_seed * 1_000_003 + first_number
    return msgspec.structs.replace(sampling, seed=_as_int64(seed + index))


def _as_int64(value: int) -> int:
    return (value + (1 << 63)) % (1 << 64) - (1 << 63)
