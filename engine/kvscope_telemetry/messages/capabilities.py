"""Flags for the data that an engine publishes and the commands that it supports, sent once in its `Hello`.

Views, actions and texts depend on these flags, never on the type of source. Values that a source cannot provide are
unknown: displayed as unknown, exported as empty, never as 0.
"""

from __future__ import annotations

from typing import Final

import msgspec


class Capabilities(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Capabilities of an engine. The defaults are those of kvscope's own engine."""

    engine: str = "kvscope"
    """Kind of engine: "kvscope", "devices" (a machine without an engine), or the scheme of an external engine's
    addresses, such as "vllm".
    """
    commands: bool = True
    """Whether the engine has kvscope's command socket, which accepts prompts, aborts and snapshot requests."""
    completions: bool = True
    """Whether prompts can be sent, through the command socket or an OpenAI-compatible API."""
    physical_rows: bool = True
    """Whether a ledger row is a block's position in memory. Otherwise, kvscope assigns rows itself, and adjacency,
    fragmentation and addresses are meaningless.
    """
    free_rows: bool = True
    """Whether a ledger row without contents is a free block. Otherwise, the row is merely unassigned, and pool usage is
    known from the counters only.
    """
    requests: bool = True
    """Whether individual requests are published with their block tables. Otherwise, at most the number of
    running and waiting requests is known.
    """
    owners: bool = True
    ref_counts: bool = True
    """Whether the ledger's `ref_count` is published, which shows shared and idle blocks."""
    filled: bool = True
    """Whether the ledger's `filled` is published, which shows partial blocks."""
    prefix_hits: bool = True
    last_used: bool = True
    """Whether the ledger's `last_used_step` is published."""
    token_ids: bool = True
    """Whether the tokens of blocks are available: the client can request them, or the engine publishes them."""
    steps: bool = True
    """Whether a frame is a step of the engine, with its batch and timings; otherwise it is one poll of the engine."""
    latencies: bool = True
    """Whether individual latencies are published; otherwise histograms, from which percentiles are known only as
    ranges.
    """
    attention: bool = False
    """Whether the ledger's `attention` is published: the attention that each block receives. kvscope's own engine
    measures it every N steps if it was started with `--page-heat N`.
    """
    blocks: bool = True
    """Whether there is a block pool. Otherwise the source only reports devices, and its single row is meaningless."""
    aborts: bool = True
    """Whether aborted requests are counted separately; otherwise they count as finished, or not at all."""
    allocator_map: bool = False
    """Whether the segments of torch's allocator can be requested. The request is refused on devices without segments.
    """
    groups: bool = False
    """Whether the cache has several KV groups, and the ledger's `group` is published."""
    eviction_order: bool = False
    """Whether the ledger's `eviction_order` is published, which shows the block to be evicted next."""

    sparse_decode: bool = False
    """Whether decodes attend to only a part of their blocks. The skipped blocks are then counted in some of the
    steps and published as the ledger's `skipped`.
    """
    deterministic: bool = False
    """Whether a request's results are bitwise identical, whatever else is in the batch (`--deterministic`)."""
    fingerprints: bool = False
    prompt_estimates: bool = False
    """Whether `EstimatePrompt` is answered, at the command socket or at the engine's API."""
    completion_aborts: bool = False
    """Whether one of a request's several completions can be aborted (`Abort.index`)."""
    counters: bool = True
    """Whether the totals in `Counters` are those of a single engine. If several engines answer in turn at one
    address, the totals are meaningless.
    """

    @property
    def unknown_columns(self) -> frozenset[str]:
        """Names of the ledger's columns that are not published."""
        known = {
            "owner": self.owners,
            "ref_count": self.ref_counts,
            "filled": self.filled,
            "prefix_hits": self.prefix_hits,
            "last_used_step": self.last_used,
        }
        return frozenset(name for name, is_available in known.items() if not is_available)


OWN_ENGINE: Final = Capabilities()
