"""The lines of `kvscope-engine what-if`: what is asked, what is answered. JSON, a line each; knows neither side.

First the memory, once an engine start; then, as often as wanted, the requests that run now:

    {"setup": {"num_blocks": 4096, "block_size": 16, "block_bytes": 368640, "num_layers": 30, "max_model_len": 8192,
               "groups": [{"kind": "full", "block_bytes": 368640}, {"kind": "window", "window": 512, …}]}}
    {"now": [[1, 300, 812], [2, 40, 512, 28]]}

Each `now` is answered by an `WhatIfAnswer`, each line that cannot be read by a `Complaint`; a setup has no answer.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Annotated, Final

import msgspec

from kvscope_telemetry.messages.telemetry import KVGroup

MAX_REQUESTS: Final = 100_000
MAX_LINE_BYTES: Final = 8 << 20
MAX_SLOTS: Final = 1 << 25
"""Of the pool: shadows of two million blocks of 16 take some hundred megabytes."""
MAX_CELLS: Final = 2000
"""Of a map."""
PAGE_BYTES: Final = 2 << 20
"""The physical page that `virtual` maps, one in each layer's tensor at a time: CUDA's."""
HOST_PAGE_BYTES: Final = 4 << 10
"""The same on a CPU."""

NOT_FREED: Final = "without freeing"
"""The question: what if windows and chunks let go of nothing, and all layers held all tokens?"""
EXPANDED: Final = "with MLA expanded"
"""The question: what if keys and values of each head were held in place of latents (MLA)?"""

Count = Annotated[int, msgspec.Meta(ge=1, le=1 << 40)]
CountOrUnknown = Annotated[int, msgspec.Meta(ge=0, le=1 << 40)]
Tokens = Annotated[int, msgspec.Meta(ge=0, le=1 << 24)]


class MapKind(IntEnum):
    """What the slots of a map's cell are; the values are the bytes of `PolicyUse.cells`."""

    FREE = 0
    USED = 1
    """Hold a token."""
    RESERVED = 2
    """Held and empty; a token of the request may come."""
    INTERNAL = 3
    """Held, and never to be used."""
    ROUNDING = 4
    """Held because the allocator has only powers of two, or at the end of the memory, where no block fits."""
    UNREAD = 5
    """Hold a token that no later token reads: it is behind a window or before a chunk."""


class Memory(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The engine's KV memory, and what runs in it. 0 means unknown."""

    num_blocks: Count
    """That requests can have."""
    block_size: Annotated[int, msgspec.Meta(ge=1, le=1 << 15)]
    block_bytes: CountOrUnknown = 0
    num_layers: CountOrUnknown = 0
    max_model_len: Tokens = 0
    allocator: str = "paged"
    """The engine's own."""
    page_bytes: CountOrUnknown = PAGE_BYTES
    """What `virtual` would map on this device."""
    groups: tuple[KVGroup, ...] = ()
    """As its `Hello` has them."""

    @property
    def num_slots(self) -> int:
        """Tokens that it has room for."""
        return self.num_blocks * self.block_size


class Running(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False):
    """A request that holds blocks: `[number, num_tokens, max_tokens, num_prompt_tokens]`, the last may be left out."""

    number: Annotated[int, msgspec.Meta(ge=1, le=1 << 32)]
    num_tokens: Tokens
    """Tokens whose KV is in blocks."""
    max_tokens: Tokens
    """Prompt and output together, at most; 0 when that is not known."""
    num_prompt_tokens: Tokens = 0


class WhatIfLine(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """One line of input: a `setup` or a `now`."""

    setup: Memory | None = None
    now: Annotated[list[Running], msgspec.Meta(max_length=MAX_REQUESTS)] | None = None


class PolicyUse(msgspec.Struct, frozen=True, kw_only=True):
    """What one policy does with the memory. Counts are slots; the seven after `num_slots` sum up to it."""

    allocator: str
    block_size: int
    """Tokens a block; under `virtual`, those whose KV of one layer is a physical page (or pages, of a larger block)."""
    is_current: bool
    """Whether the engine runs with just this."""
    question: str = ""
    """What is otherwise than in the engine, beside the policy: `NOT_FREED`, `EXPANDED`, or empty."""
    num_slots: int
    slot_bytes: float = 0.0
    """Of one slot, over all layers that share a block table; 0: unknown."""
    num_used: int = 0
    """Hold a token that will be read."""
    num_unread: int = 0
    """Hold a token that no later token reads, though something else in the block may be read."""
    num_reserved: int = 0
    num_internal: int = 0
    num_rounding: int = 0
    num_external: int = 0
    """In free blocks."""
    num_outside: int = 0
    """At the end of the memory, too few for a block."""
    external_fragmentation: float = 0.0
    """1 - largest free run / free slots."""
    wasted_bytes: int = 0
    wasted_share: float = 0.0
    """Of the slots that are held: 0 to 1."""
    num_placed: int = 0
    num_waiting: int = 0
    """Requests that do not fit."""
    num_fitting: int = 0
    """Requests that hold on average what those placed hold, that would fill the memory; 0: none is placed."""
    num_preempted: int = 0
    """Times that a request lost its place since the setup, to an older one that grew or as it could not grow itself."""
    cells: bytes = b""
    """A `MapKind` each, in the order of addresses (base64 in JSON)."""
    slots_per_cell: int = 1
    refused: str = ""
    """Why the policy could not run in this memory at all; then there is nothing else."""

    @property
    def num_held(self) -> int:
        """Slots that requests hold, with a token or without."""
        return self.num_used + self.num_wasted

    @property
    def num_wasted(self) -> int:
        """Slots that are held for nothing: empty, or with a token that is read no more."""
        return self.num_unread + self.num_reserved + self.num_internal + self.num_rounding


class NotAsked(msgspec.Struct, frozen=True):
    """A question that cannot be answered, and why."""

    question: str
    why: str


class WhatIfAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to a `now`."""

    policies: list[PolicyUse]
    page_bytes: int = PAGE_BYTES
    """Of `virtual`."""
    not_asked: list[NotAsked] = []


class Complaint(msgspec.Struct, frozen=True):
    """Says what is wrong with a line, which changed nothing."""

    error: str
