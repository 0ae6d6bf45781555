"""A request: prompt, tokens so far, sampling parameters, state and block tables. Knows no tensors.

The scheduler owns `state`, `block_tables`, `num_null_blocks`, `saved_tables` and `num_computed_tokens`; the engine's
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
    """One completion of one prompt. `number` counts from 1 within an engine's life.

    Values that do not change are tuples: with very many requests, Python's cyclic garbage collector scans only the
    lists.
    """

    number: int
    request_id: str
    prompt_token_ids: Sequence[int]
    """A tuple, except where only the length of the prompt is known."""
    sampling: ResolvedSampling
    max_tokens: int
    """Maximum number of output tokens: `sampling.max_tokens`, limited by what the model's maximum length leaves."""
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
    """Number of leading tokens whose KV is in the blocks of the table."""
    num_cached_tokens: int = 0
    """Prompt tokens found in the prefix cache at the first admission."""
    waits_for: WaitsFor = WaitsFor.UNKNOWN
    """Why the request was not admitted when it was last first in the queue, or PROMPT while it waits for its parent's
    prompt."""
    num_preemptions: int = 0
    preempted_ns: int = 0
    """Time of the last preemption; 0 if there was none."""
    num_lost_tokens: int = 0
    """Largest number of leading tokens whose KV was in the request's blocks at any of its preemptions."""
    num_restarts: int = 0
    """Number of failed steps that invalidated the request's recurrent state since it had `restarted_at` tokens. Set by
    the scheduler."""
    restarted_at: int = 0
    saved_tables: tuple[list[int], ...] = ()
    """While the request is swapped out: rows of the lower tiers that hold the KV of its first tokens, one table per KV
    group, whose first `num_null_blocks` entries are `NULL_BLOCK`. Empty otherwise."""
    num_saved_tokens: int = 0
    """Number of tokens in `saved_tables`."""
    parent: int = 0
    """Number of the request from which this one is forked once that request's prompt is computed; 0 for none."""
    expected_tokens: int | None = None
    """Final number of tokens, prompt and output, where it is known: only the simulator knows it."""
    num_reserved_tokens: int = 0
    """Token slots reserved for the request, used ones included, under an allocation policy that reserves; otherwise 0.
    """
    block_digests: list[bytes] = field(default_factory=list)
    """Chained digests of its full blocks, as far as they were needed. Set by the scheduler, empty without a prefix
    cache. They depend only on the tokens, so they remain valid after a preemption."""
    admitted_ns: int | None = None
    first_token_ns: int | None = None
    last_token_ns: int | None = None
    finish_reason: FinishReason | None = None
    cache_salt: str = ""
    """Blocks are shared only between requests with the same salt."""
    adapter: Adapter | None = None
    """LoRA adapter that the request is computed with. Blocks are shared only between requests with the same adapter."""
    client: str = ""
    """Client that sent the request. Clients are served in turn (`waiting_queue`)."""
    batch: str = ""
    """Identifier of the group of requests that the client sent together; empty: the completions of this request's
    prompt."""
    num_draft_tokens: int = 0
    """Draft tokens checked for this request. `num_accepted_tokens` of them were accepted. Both are set by the
    scheduler."""
    num_accepted_tokens: int = 0
    state_slot: int = -1
    """Slot of the state of its recurrent layers while it runs, otherwise -1. Set by the state pool."""
    saved_state_slot: int = -1
    """Slot of that state in host memory while the request is swapped out, otherwise -1."""
    state_tables: tuple[list[int], ...] = ()
    """One table with the ledger row of `state_slot` or `saved_state_slot`, empty while the request has neither. No
    table where the model has no recurrent layers."""
    diverged_at: int = 0
    """End of the cached blocks, in tokens, if the request could not resume there because no recurrent state was kept; 0
    if it could. A state is kept there this time, since the texts of prompts diverge at this position."""
    matcher: TokenMatcher | None = None
    """Restricts the output to the requested format. The code that handles the output advances it, the sampler queries
    it."""

    num_prompt_tokens: int = field(init=False)

    def __post_init__(self) -> None:
        self.num_prompt_tokens = len(self.prompt_token_ids)  # counted once: each step reads it for each request

    @property
    def block_table(self) -> list[int]:
        """Block table of the first KV group."""
        return self.block_tables[0]

    @property
    def kv_tables(self) -> tuple[list[int], ...]:
        """Tables of the KV of its tokens, one per KV group: blocks, or rows of lower tiers while it is swapped out."""
        return self.saved_tables or self.block_tables

    @property
    def tables(self) -> tuple[list[int], ...]:
        """Rows of the ledger that the request holds: one table per KV group, then the table of its recurrent state."""
        return (*self.kv_tables, *self.state_tables)

    @property
    def held_blocks(self) -> list[int]:
        """Blocks of all groups in the order of the text: those of the last tokens come last."""
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
        """Rows of lower tiers of all KV groups."""
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
        """Whether the sampling of the next token depends on the values of the previous ones: by structured output or
        penalties.
        """
        return self.matcher is not None or self.is_penalized

    @property
    def awaits_grammar_mask(self) -> bool:
        """Whether the mask of allowed next tokens is still being computed: no token may be sampled until it is
        ready.
        """
        return self.matcher is not None and not self.matcher.is_ready

    @property
    def is_penalized(self) -> bool:
        """Whether the request asks for a penalty on tokens that it already has."""
        asked = self.sampling
        return asked.repetition_penalty != 1.0 or asked.presence_penalty != 0.0 or asked.frequency_penalty != 0.0

    @property
    def is_finished(self) -> bool:
        return self.state is RequestState.FINISHED

    def tokens(self, start: int, stop: int) -> Sequence[int]:
        """Token ids of positions `start` to `stop` (exclusive) over prompt and output."""
        prompt = self.num_prompt_tokens
        if stop <= prompt:
            return self.prompt_token_ids[start:stop]
        if start >= prompt:
            return self.output_token_ids[start - prompt : stop - prompt]
        return [*self.prompt_token_ids[start:], *self.output_token_ids[: stop - prompt]]


class TokenMatcher(Protocol):
    """Restricts one completion to the requested output format, as the engine sees it.

    It depends only on the tokens that the request has, so preemption and batching do not affect it.
    """

    @property
    def is_ready(self) -> bool:
        """Whether the set of allowed next tokens is known. Until then no token is sampled for the request."""

    def fill(self, words: NDArray[np.int32], row: int, *, may_end: bool) -> None:
        """Write the allowed next tokens into `words[row]`: bit token % 32 of word token // 32. Changes no state.

        Unless `may_end`, the end-of-sequence token is allowed only if no other token is.
        """

    def accept(self, token_id: int) -> None:
        """Advance by a sampled token. Raises KvscopeError if the format does not allow it."""

    @property
    def has_ended(self) -> bool:
        """Whether an end-of-sequence token was accepted."""
