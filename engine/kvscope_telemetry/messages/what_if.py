"""Input and output lines of `kvscope-engine what-if`, one JSON object per line. Must depend neither on the simulator
nor on its callers.

The first line describes the memory, once per engine start. Each following line lists the requests that currently run:

    {"setup": {"num_blocks": 4096, "block_size": 16, "block_bytes": 368640, "num_layers": 30, "max_model_len": 8192,
               "groups": [{"kind": "full", "block_bytes": 368640}, {"kind": "window", "window": 512, ...}]}}
    {"now": [[1, 300, 812], [2, 40, 512, 28]]}

Each `now` is answered with a `WhatIfAnswer`, each invalid line with a `Complaint`; a setup has no answer. A line with a
`question` is explained in `what_if_question`.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Annotated, Final

import msgspec

from kvscope_telemetry.messages.telemetry import KVGroup
from kvscope_telemetry.messages.what_if_question import WhatIfQuestion

MAX_REQUESTS: Final = 100_000
MAX_LINE_BYTES: Final = 8 << 20
MAX_SLOTS: Final = 1 << 25
"""Maximum number of token slots in the pool. Simulating two million blocks of 16 tokens takes some hundred megabytes.
"""
MAX_CELLS: Final = 2000
PAGE_BYTES: Final = 2 << 20
"""CUDA's physical page size: the allocator `virtual` maps one page at a time in each layer's tensor."""
HOST_PAGE_BYTES: Final = 4 << 10
"""Page size of the allocator `virtual` on a CPU."""

NOT_FREED: Final = "without freeing"
"""Name of the scenario in which sliding-window and chunked layers free no blocks, so that all layers keep all tokens.
"""
EXPANDED: Final = "with MLA expanded"
"""Name of the scenario in which keys and values are stored per head instead of latents (MLA)."""

Count = Annotated[int, msgspec.Meta(ge=1, le=1 << 40)]
CountOrUnknown = Annotated[int, msgspec.Meta(ge=0, le=1 << 40)]
Tokens = Annotated[int, msgspec.Meta(ge=0, le=1 << 24)]


class MapKind(IntEnum):
    """State of the token slots in one cell of a map. The values are the bytes of `PolicyUse.cells`."""

    FREE = 0
    USED = 1
    """Slots with a token."""
    RESERVED = 2
    """Empty slots of a request that a later token of the request may fill."""
    INTERNAL = 3
    """Empty slots of a request that will never be used."""
    ROUNDING = 4
    """Slots lost because the allocator rounds up to powers of two, or at the end of the memory, where no block fits."""
    UNREAD = 5
    """Slots with a token that no later token reads, because it is outside the sliding window or before the chunk."""


class Memory(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The engine's KV memory and model. A number is 0 if it is unknown."""

    num_blocks: Count
    """Number of blocks that requests can use."""
    block_size: Annotated[int, msgspec.Meta(ge=1, le=1 << 15)]
    block_bytes: CountOrUnknown = 0
    num_layers: CountOrUnknown = 0
    max_model_len: Tokens = 0
    allocator: str = "paged"
    page_bytes: CountOrUnknown = PAGE_BYTES
    """Size of the pages that the allocator `virtual` maps on this device."""
    groups: tuple[KVGroup, ...] = ()

    @property
    def num_slots(self) -> int:
        """Capacity in tokens."""
        return self.num_blocks * self.block_size


class Running(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False):
    """A request with blocks: `[number, num_tokens, max_tokens, num_prompt_tokens]`. `num_prompt_tokens` may be
    omitted.
    """

    number: Annotated[int, msgspec.Meta(ge=1, le=1 << 32)]
    num_tokens: Tokens
    """Number of tokens whose KV is in blocks."""
    max_tokens: Tokens
    """Maximum number of prompt and output tokens together; 0 if unknown."""
    num_prompt_tokens: Tokens = 0


class WhatIfLine(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """One line of input: either a `setup`, a `now` or a `question`."""

    question: WhatIfQuestion | None = None
    setup: Memory | None = None
    now: Annotated[list[Running], msgspec.Meta(max_length=MAX_REQUESTS)] | None = None


class PolicyUse(msgspec.Struct, frozen=True, kw_only=True):
    """Memory use under one policy. Counts are token slots. The seven counts after `num_slots` add up to it."""

    allocator: str
    block_size: int
    """Tokens per block. For `virtual`, the tokens that fill a physical page of one layer with their KV, or several
    pages if a block is larger.
    """
    is_current: bool
    """Whether the engine uses exactly this policy."""
    question: str = ""
    """Scenario that is simulated in addition to the policy: `NOT_FREED`, `EXPANDED`, or empty for none."""
    num_slots: int
    slot_bytes: float = 0.0
    """Bytes per slot, summed over all layers that share a block table; 0 if unknown."""
    num_used: int = 0
    """Slots with a token that will be read."""
    num_unread: int = 0
    """Slots with a token that no later token reads, although other tokens of the block may be read."""
    num_reserved: int = 0
    num_internal: int = 0
    num_rounding: int = 0
    num_external: int = 0
    """Slots in free blocks."""
    num_outside: int = 0
    """Slots at the end of the memory, too few for a block."""
    external_fragmentation: float = 0.0
    """Share of the free slots outside the largest free range, 0 to 1."""
    wasted_bytes: int = 0
    wasted_share: float = 0.0
    """Share of the slots in requests' blocks that is wasted, 0 to 1."""
    num_placed: int = 0
    num_waiting: int = 0
    """Number of requests that do not fit into the memory under this policy."""
    num_fitting: int = 0
    """Number of requests that would fit if each had the average size of those that fit now; 0 if none fits now."""
    num_preempted: int = 0
    """Number of times since the setup line that a request lost its blocks, either to an older request that grew
    or because the request itself could not grow.
    """
    cells: bytes = b""
    """One `MapKind` per cell, in order of address (base64 in JSON)."""
    slots_per_cell: int = 1
    refused: str = ""
    """Reason why the policy cannot run in this memory, in which case all other results are unset; empty if it can run.
    """

    @property
    def num_held(self) -> int:
        """Number of slots in the requests' blocks, with or without a token."""
        return self.num_used + self.num_wasted

    @property
    def num_wasted(self) -> int:
        """Number of slots in the requests' blocks that are empty, or whose token is no longer read."""
        return self.num_unread + self.num_reserved + self.num_internal + self.num_rounding


class UnsupportedScenario(msgspec.Struct, frozen=True):
    """A scenario (`PolicyUse.question`) that cannot be simulated, and the reason."""

    question: str
    why: str


class WhatIfAnswer(msgspec.Struct, frozen=True, kw_only=True):
    policies: list[PolicyUse]
    page_bytes: int = PAGE_BYTES
    """Page size of the allocator `virtual`."""
    not_asked: list[UnsupportedScenario] = []


class Complaint(msgspec.Struct, frozen=True):
    """Error message for an invalid input line, which was ignored."""

    error: str
