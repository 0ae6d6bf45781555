"""A request: prompt, tokens so far, sampling, state, its block tables. Knows no tensors.

The scheduler owns `state`, `block_tables`, `num_let_go`, `saved_tables` and `num_computed_tokens`; the engine's
commit appends to `output_token_ids` and ends the request. Nobody else writes here.
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

NOTHING_LET_GO: Final = (0,)


@dataclass(slots=True, eq=False)
class Request:
    """One completion of one prompt. `number` counts from 1 within an engine's life.

    What does not change is in tuples: of very many requests, Python's collector of cycles looks through lists alone.
    """

    number: int
    request_id: str
    prompt_token_ids: Sequence[int]
    """A tuple, but where only its length is known."""
    sampling: ResolvedSampling
    max_tokens: int
    """Resolved: `sampling.max_tokens`, bounded by what the model's limit leaves."""
    arrival_ns: int
    index: int = 0
    priority: int = 0
    output_token_ids: list[int] = field(default_factory=list)
    state: RequestState = RequestState.WAITING
    block_tables: tuple[list[int], ...] = field(default_factory=lambda: ([],))
    """One a KV group, all of one length."""
    num_let_go: tuple[int, ...] = NOTHING_LET_GO
    """Of each group's table, the places from the first whose blocks were let go of (`NULL_BLOCK`)."""
    num_computed_tokens: int = 0
    """Tokens, from the first, whose KV is in the blocks of the table."""
    num_cached_tokens: int = 0
    """Prompt tokens that the prefix cache gave, at the first admission."""
    waits_for: WaitsFor = WaitsFor.UNTOLD
    """While it is first in the queue: what for, where counts of blocks and of requests do not say it."""
    num_preemptions: int = 0
    preempted_ns: int = 0
    """When it last was, 0: never."""
    num_lost_tokens: int = 0
    """The most tokens, from the first, whose KV was in its blocks when it was preempted."""
    num_restarts: int = 0
    """How often a step that failed spoilt its state since it had `restarted_at` tokens; the scheduler's."""
    restarted_at: int = 0
    saved_tables: tuple[list[int], ...] = ()
    """While it is swapped out: rows of lower tiers that hold its first tokens' KV, place by place, a list a KV group,
    of which `num_let_go` places are not there; else empty."""
    num_saved_tokens: int = 0
    """Tokens in them."""
    parent: int = 0
    """Request from which it is to be forked once that one's prompt is computed, 0 for none."""
    expected_tokens: int | None = None
    """Prompt and output together in the end, where somebody knows: only the simulator does."""
    num_reserved_tokens: int = 0
    """Slots set aside for it under a policy that reserves, those in use among them; 0 under one that does not."""
    block_digests: list[bytes] = field(default_factory=list)
    """Chained digests of its full blocks, as far as they were needed; the scheduler's, empty without a prefix
    cache. They follow from the tokens, so they outlive preemption."""
    admitted_ns: int | None = None
    first_token_ns: int | None = None
    last_token_ns: int | None = None
    finish_reason: FinishReason | None = None
    cache_salt: str = ""
    """Its blocks are shared only with requests of the same."""
    adapter: Adapter | None = None
    """That it is computed with; its blocks are shared only with requests of the same."""
    client: str = ""
    """Whose it is: clients are served in turn (`waiting_queue`)."""
    batch: str = ""
    """What its client asked for at once, this request among it; empty: the completions of its own prompt."""
    num_draft_tokens: int = 0
    """Tokens that were guessed ahead for it and checked, and those of them that were right; the scheduler's."""
    num_accepted_tokens: int = 0
    state_slot: int = -1
    """Where the state of its recurrent layers is while it runs; -1: nowhere. The state pool's."""
    saved_state_slot: int = -1
    """Where it is in host memory while the request is swapped out; -1: nowhere."""
    state_tables: tuple[list[int], ...] = ()
    """One table with the ledger's row of either, empty while it has none; no table where the model has no such
    layers."""
    parted_at: int = 0
    """Tokens, from the first, that blocks were found for beyond the last state that could be gone on from."""
    matcher: TokenMatcher | None = None
    """Keeps its output to a form; the stream of its output drives it, the sampler asks it."""

    num_prompt_tokens: int = field(init=False)

    def __post_init__(self) -> None:
        """Counted once: each step asks each request."""
        self.num_prompt_tokens = len(self.prompt_token_ids)

    @property
    def block_table(self) -> list[int]:
        """That of the first KV group."""
        return self.block_tables[0]

    @property
    def kv_tables(self) -> tuple[list[int], ...]:
        """Where the KV of its tokens is, a table a KV group: blocks, or rows of lower tiers while it is swapped out."""
        return self.saved_tables or self.block_tables

    @property
    def tables(self) -> tuple[list[int], ...]:
        """Rows of the ledger that it holds, one table per KV group, then that of its recurrent state."""
        return (*self.kv_tables, *self.state_tables)

    @property
    def held_blocks(self) -> list[int]:
        """Of all groups, in the order of the text: what is read last comes last."""
        tables = self.block_tables
        if len(tables) == 1 and not self.num_let_go[0]:
            return tables[0]
        return [
            table[place]
            for place in range(len(tables[0]))
            for table, let_go in zip(tables, self.num_let_go, strict=True)
            if place >= let_go
        ]

    @property
    def saved_rows(self) -> list[int]:
        """Of all groups."""
        return [
            row for table, let_go in zip(self.saved_tables, self.num_let_go, strict=False) for row in table[let_go:]
        ]

    @property
    def num_output_tokens(self) -> int:
        """Tokens generated so far."""
        return len(self.output_token_ids)

    @property
    def num_tokens(self) -> int:
        """Tokens known so far, prompt and output."""
        return self.num_prompt_tokens + len(self.output_token_ids)

    @property
    def follows_its_tokens(self) -> bool:
        """Whether how its next token is sampled depends on which its last ones were: by a form, or by penalties."""
        return self.matcher is not None or self.is_penalized

    @property
    def awaits_its_form(self) -> bool:
        """Whether it is still being computed which tokens may come next: a step may not sample for it."""
        return self.matcher is not None and not self.matcher.is_ready

    @property
    def is_penalized(self) -> bool:
        """Whether it asks for a penalty on tokens that were seen."""
        asked = self.sampling
        return asked.repetition_penalty != 1.0 or asked.presence_penalty != 0.0 or asked.frequency_penalty != 0.0

    @property
    def is_finished(self) -> bool:
        """Whether it ended, for whatever reason."""
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
    """What keeps a completion to the form that was asked for, as the engine sees it.

    Of one request. It follows the tokens that the request has, so neither preemption nor a batch can hurt it.
    """

    @property
    def is_ready(self) -> bool:
        """Whether it is known which tokens may come next: until then the request samples none."""

    def fill(self, words: NDArray[np.int32], row: int, *, may_end: bool) -> None:
        """Write into `words[row]` which tokens may come next: bit token % 32 of word token // 32.

        Changes nothing. Where it may not end yet, an end is allowed only when nothing else is.
        """

    def accept(self, token_id: int) -> None:
        """Go on by a token that was sampled. Raises KvscopeError for one that is not of the form."""

    @property
    def has_ended(self) -> bool:
        """Whether an end was accepted."""
