"""Flags for the data that an engine publishes and the commands that it supports: sent once in its `Hello`, and
therefore also in recordings.

Views, actions and texts depend on these flags, never on the type of source. Values that a source cannot provide are
unknown: displayed as unknown, exported as empty, never as 0.
"""

from __future__ import annotations

from typing import Final

import msgspec


class Capabilities(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Capabilities of an engine. The defaults are those of our own engine."""

    engine: str = "kvscope"
    """Kind of engine: "kvscope", "devices", or the scheme of another engine's addresses, such as "vllm"."""
    commands: bool = True
    """Whether our command socket accepts requests, aborts and snapshot requests."""
    completions: bool = True
    """Whether prompts can be sent at all, over the command socket or an OpenAI-compatible API."""
    physical_rows: bool = True
    """Whether a ledger row is a block's position in memory. Otherwise, kvscope assigns rows itself, and adjacency,
    fragmentation and addresses are meaningless.
    """
    free_rows: bool = True
    """Whether a row without contents is known to be a free block. Otherwise, it is merely unassigned, and pool usage is
    known from the counters only.
    """
    requests: bool = True
    """Whether individual requests are published with their block tables; otherwise at most their number."""
    owners: bool = True
    """Whether the ledger's `owner` is published."""
    ref_counts: bool = True
    """Whether the ledger's `ref_count` is published, which shows shared and idle blocks."""
    filled: bool = True
    """Whether the ledger's `filled` is published, which shows partial blocks."""
    prefix_hits: bool = True
    """Whether the ledger's `prefix_hits` is published."""
    last_used: bool = True
    """Whether the ledger's `last_used_step` is published."""
    token_ids: bool = True
    """Whether the tokens of blocks are available, either on request or because the engine published them."""
    steps: bool = True
    """Whether a frame is a step of the engine, with its batch and timings; otherwise it is one poll of the engine."""
    latencies: bool = True
    """Whether individual latencies are published; otherwise histograms, whose percentiles are known only between two
    bounds.
    """
    attention: bool = False
    """Whether the ledger's `attention` is measured from time to time. Our own engine does so on request."""
    blocks: bool = True
    """Whether there is a block pool. Otherwise the source only reports devices, and its single row has no meaning."""
    aborts: bool = True
    """Whether aborted requests are counted separately; otherwise they count as finished, or not at all."""
    allocator_map: bool = False
    """Whether the segments of torch's allocator can be requested (refused on devices without any)."""
    groups: bool = False
    """Whether the ledger's `group` is published: the cache has several KV groups."""
    eviction_order: bool = False
    """Whether the ledger's `eviction_order` is published, which shows the block to be evicted next."""

    sparse_decode: bool = False
    """Whether decodes attend to a part of their blocks. The ledger's `skipped` is then counted from time to time."""
    deterministic: bool = False
    """Whether a request's results are bitwise identical, whatever else is in the batch (`--deterministic`)."""
    fingerprints: bool = False
    """Whether `Fingerprints` are published."""
    counters: bool = True
    """Whether totals belong to a single engine. If several engines answer in turn, the totals are meaningless."""

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
"""Capabilities of our own engine."""
