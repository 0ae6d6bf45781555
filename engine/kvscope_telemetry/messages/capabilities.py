"""What an engine can tell of itself and be asked for: said once, in its `Hello`, so that a recording knows it too.

Views, actions and texts follow these; nobody asks what kind of source there is. What a source cannot know is unknown:
drawn as that, exported as empty, never 0.
"""

from __future__ import annotations

from typing import Final

import msgspec


class Capabilities(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The defaults are those of our own engine."""

    engine: str = "kvscope"
    """Which engine it is: "kvscope", "devices", or the scheme of another's addresses, such as "vllm"."""
    commands: bool = True
    """Requests can be sent and aborted, and snapshots asked for, over our command socket."""
    completions: bool = True
    """Prompts can be sent to it at all: over commands, or over its OpenAI API."""
    physical_rows: bool = True
    """A row of the ledger is a block's place in memory; otherwise rows are slots that kvscope gives out, and
    neighbours, fragmentation and addresses mean nothing."""
    free_rows: bool = True
    """A row that holds nothing is known to be free; otherwise it is a slot not given out yet, and how much of the
    pool is used is known from the counters alone."""
    requests: bool = True
    """Each request is told of, with its block table; otherwise their number at most."""
    owners: bool = True
    """The ledger's `owner` is told."""
    ref_counts: bool = True
    """The ledger's `ref_count` is told: what is shared, what is idle."""
    filled: bool = True
    """The ledger's `filled` is told: partial blocks are seen."""
    prefix_hits: bool = True
    """The ledger's `prefix_hits` is told."""
    last_used: bool = True
    """The ledger's `last_used_step` is told."""
    token_ids: bool = True
    """Tokens of blocks can be had: from the engine, or as they were told."""
    steps: bool = True
    """A frame is a step of the engine, with its batch and the times of its parts; otherwise a moment of reading."""
    latencies: bool = True
    """Latencies are told one by one; otherwise as histograms, in which percentiles are between two bounds."""
    attention: bool = False
    """The ledger's `attention` is measured now and then; our own engine does so when asked."""
    blocks: bool = True
    """It has a pool of blocks at all; otherwise it tells of devices alone, and its one row stands for nothing."""
    aborts: bool = True
    """Aborted requests are counted apart; otherwise they are among the finished ones, or in no number."""
    allocator_map: bool = False
    """It can be asked for the segments of torch's allocator, and refuses where there are none."""
    groups: bool = False
    """The ledger's `group` is told: the cache has several KV groups."""
    eviction_order: bool = False
    """The ledger's `eviction_order` is told: which block is given out next."""

    sparse_decode: bool = False
    """Decodes attend to a part of their blocks, and the ledger's `skipped` is counted now and then."""
    deterministic: bool = False
    """A request's numbers are the same to the last bit, whatever runs beside it (`--deterministic`)."""
    fingerprints: bool = False
    """`Fingerprints` are told."""
    counters: bool = True
    """Totals are of one engine. Otherwise several engines answer in turn, and nothing follows from their totals."""

    @property
    def unknown_columns(self) -> frozenset[str]:
        """Names of the ledger's columns that are not told."""
        known = {
            "owner": self.owners,
            "ref_count": self.ref_counts,
            "filled": self.filled,
            "prefix_hits": self.prefix_hits,
            "last_used_step": self.last_used,
        }
        return frozenset(name for name, is_available in known.items() if not is_available)


OWN_ENGINE: Final = Capabilities()
"""Everything: what our own engine tells."""
