"""A request: prompt, tokens so far, sampling parameters, state and block tables. Imports no torch.

The scheduler owns `state`, `block_tables`, `num_null_blocks`, `saved_tables` and `num_computed_tokens`. The engine's
commit appends to `output_token_ids` and ends the request. No other code writes to these fields.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol

import numpy as np
from numpy.typing import NDArray

from kvscope_engine.policy.adapter import Adapter
from kvscope_telemetry.messages.commands import FinishReason
from kvscope_telemetry.messages.request_state import RequestState, WaitsFor
from kvscope_telemetry.messages.sampling_params import ResolvedSampling

NO_NULL_BLOCKS: Final = (0,)


@dataclass(slots=True, eq=False)
class Request:
    """One completion of one prompt. `number` counts from 1 in each engine process.

    Values that do not change are tuples: with very many requests, Python's cyclic garbage collector then scans only the
    lists.
    """

    number: int
    request_id: str
    prompt_token_ids: Sequence[int]
    """Token ids of the prompt: a tuple, except in the simulator, where only the length of the prompt is known."""
    sampling: ResolvedSampling
    max_tokens: int
    """Maximum number of output tokens: `sampling.max_tokens`, limited by the model's maximum length less the prompt."""
    arrival_ns: int
    index: int = 0
    priority: int = 0
    output_token_ids: list[int] = field(default_factory=list)
    state: RequestState = RequestState.WAITING
    block_tables: tuple[list[int], ...] = field(default_factory=lambda: ([],))
    """One block table per KV group, all of the same length."""
    num_null_blocks: tuple[int, ...] = NO_NULL_BLOCKS
    """Number of leading entries of each group's table that are `NULL_BLOCK`, because their blocks were freed."""
    num_computed_tokens: int = 0
    """Number of leading tokens whose KV is in the blocks of `block_tables`."""
    num_cached_tokens: int = 0
    """Number of prompt tokens found in the prefix cache at the first admission."""
    waits_for: WaitsFor = WaitsFor.UNKNOWN
    """Why the request was not admitted when it was last at the head of the queue; PROMPT while it waits for the
    prompt of `parent`.
    """
    num_preemptions: int = 0
    preempted_ns: int = 0
    """Time of the last preemption in nanoseconds on the engine's clock; 0 if there was none."""
    num_lost_tokens: int = 0
    """Largest number of computed tokens that the request had at any of its preemptions."""
    num_restarts: int = 0
    """Number of failed steps that invalidated the request's recurrent state since it had `restarted_at` tokens."""
    restarted_at: int = 0
    saved_tables: tuple[list[int], ...] = ()
    """Ledger rows of host memory and disk that contain the KV of the first tokens of a swapped-out request.

    One table per KV group, whose first `num_null_blocks` entries are `NULL_BLOCK`. Empty while the request is not
    swapped out.
    """
    num_saved_tokens: int = 0
    parent: int = 0
    """Number of another request for the same prompt, whose blocks this request shares once the prompt is
    computed; 0 if there is no such request.
    """
    expected_tokens: int | None = None
    """Final number of tokens, prompt and output; None if unknown. Only the simulator knows it."""
    num_reserved_tokens: int = 0
    """Number of token slots reserved for the request, used ones included; 0 unless the allocation policy reserves."""
    block_digests: list[bytes] = field(default_factory=list)
    """Chained digests of the leading full blocks, as far as they were needed so far; empty without a prefix cache.

    They depend only on the tokens, so they remain valid after a preemption.
    """
    admitted_ns: int | None = None
    first_token_ns: int | None = None
    last_token_ns: int | None = None
    finish_reason: FinishReason | None = None
    cache_salt: str = ""
    """Client's cache salt. Blocks are shared only between requests with the same salt."""
    adapter: Adapter | None = None
    """LoRA adapter, or None for the base model. Blocks are shared only between requests with the same adapter."""
    client: str = ""
    """Client that sent the request. Scheduling is fair between clients (`waiting_queue`)."""
    batch: str = ""
    """Identifier of the requests that the client sent together; if empty, the completions of this prompt form a
    batch.
    """
    num_draft_tokens: int = 0
    """Number of draft tokens that were verified for this request; `num_accepted_tokens` of them were accepted."""
    num_accepted_tokens: int = 0
    state_slot: int = -1
    """Slot of the recurrent layers' state while the request runs, otherwise -1. Set by the state pool."""
    saved_state_slot: int = -1
    """Slot of the recurrent state in host memory while the request is swapped out, otherwise -1."""
    state_tables: tuple[list[int], ...] = ()
    """One table with the ledger row of `state_slot` or `saved_state_slot`, which is empty while the request has
    neither.

    The tuple is empty if the model has no recurrent layers.
    """
    diverged_at: int = 0
    """End of the cached blocks, in tokens, if the request could not resume from that position because no recurrent
    state was saved there. Otherwise 0.

    The request saves its own state at that position, because other prompts are likely to diverge there too.
    """
    matcher: TokenMatcher | None = None
    """Restricts the output to the requested format; None without structured output.

    The output handling advances it, and the sampler reads its token mask.
    """

    num_prompt_tokens: int = field(init=False)

    def __post_init__(self) -> None:
        self.num_prompt_tokens = len(self.prompt_token_ids)  # counted once: each step reads it for each request

    @property
    def block_table(self) -> list[int]:
        return self.block_tables[0]

    @property
    def kv_tables(self) -> tuple[list[int], ...]:
        """Block tables of the request, one per KV group. While the request is swapped out, they contain ledger
        rows of lower tiers.
        """
        return self.saved_tables or self.block_tables

    @property
    def tables(self) -> tuple[list[int], ...]:
        """All ledger rows of the request: one table per KV group, then the table of its recurrent state."""
        return (*self.kv_tables, *self.state_tables)

    @property
    def held_blocks(self) -> list[int]:
        """Blocks of the request in all KV groups, in the order of the text."""
        tables = self.block_tables
        if len(tables) == 1 and not self.num_null_blocks[0]:
            return tables[0]
        return [
            table[index]
            for index in range(len(tables[0]))
            for table, num_null in zip(tables, self.num_null_blocks, strict=True)
            if index >= num_null
        ]

    @property
    def saved_rows(self) -> list[int]:
        """Ledger rows in `saved_tables` of all KV groups, without null blocks."""
        return [
            row
            for table, num_null in zip(self.saved_tables, self.num_null_blocks, strict=False)
            for row in table[num_null:]
        ]

    @property
    def num_output_tokens(self) -> int:
        return len(self.output_token_ids)

    @property
    def num_tokens(self) -> int:
        return self.num_prompt_tokens + len(self.output_token_ids)

    @property
    def depends_on_tokens(self) -> bool:
        """Whether sampling the next token depends on the values of the previous tokens, because of structured
        output or penalties.
        """
        return self.matcher is not None or self.is_penalized

    @property
    def awaits_grammar_mask(self) -> bool:
        """Whether the token mask of structured output is still being computed. Until it is ready, no token may
        be sampled.
        """
        return self.matcher is not None and not self.matcher.is_ready

    @property
    def is_penalized(self) -> bool:
        """Whether sampling applies a penalty to tokens that the request already has."""
        sampling = self.sampling
        return (
            sampling.repetition_penalty != 1.0 or sampling.presence_penalty != 0.0 or sampling.frequency_penalty != 0.0
        )

    @property
    def scores_prompt(self) -> bool:
        """Whether log-probabilities of the prompt's tokens are computed. Of several completions, the first one does."""
        return self.sampling.prompt_logprobs is not None and self.index == 0

    @property
    def is_finished(self) -> bool:
        return self.state is RequestState.FINISHED

    def tokens(self, start: int, stop: int) -> Sequence[int]:
        """Return the token ids at positions `start` to `stop` (exclusive) of prompt and output."""
        prompt = self.num_prompt_tokens
        if stop <= prompt:
            return self.prompt_token_ids[start:stop]
        if start >= prompt:
            return self.output_token_ids[start - prompt : stop - prompt]
        return [*self.prompt_token_ids[start:], *self.output_token_ids[: stop - prompt]]


class TokenMatcher(Protocol):
    """Restricts the tokens of one completion to the requested output format.

    Its state depends only on the tokens that the request has, so preemption and batching do not affect it.
    """

    @property
    def is_ready(self) -> bool:
        """Whether the mask of allowed next tokens is available."""

    def fill(self, words: NDArray[np.int32], row: int, *, may_end: bool) -> None:
        """Write the mask of allowed next tokens to `words[row]`: bit token % 32 of word token // 32. Does not advance
        the matcher.

        If `may_end` is False, the end-of-sequence token is allowed only if no other token is.
        """

    def accept(self, token_id: int) -> None:
        """Advance by a sampled token. Raises KvscopeError if the format does not allow it."""

    @property
    def has_ended(self) -> bool: ...
