"""The messages of the telemetry socket: frozen tagged structs in one union with one typed decoder.

Schema evolution: a new field has a default; a field's name on the wire, type and meaning never change; a new message
is a new tag, a new event a new kind, and readers that do not know it leave it out (`unknown`). Golden bytes in the
tests guard this. Numbers of blocks and requests travel as packed little-endian bytes. No message carries the text of a
prompt or an answer: that is asked for on the command socket.

All `time_ns` are `time.monotonic_ns()` of the engine's machine; `Hello` pairs one with the wall clock.

See docs/internals/decisions/0002-numbers-travel-as-packed-bytes.md.
"""

from __future__ import annotations

import math
from typing import Annotated, Final, TypeAlias

import msgspec
import numpy as np

from kvscope_telemetry.ledger import (
    STATE_TIERS,
    U2,
    BlockRows,
    Ids,
    OptionalCounts,
    Packing,
    RowCounts,
    RowNumbers,
    Tier,
    Times,
    packed,
)
from kvscope_telemetry.messages.capabilities import OWN_ENGINE, Capabilities
from kvscope_telemetry.messages.devices import Devices
from kvscope_telemetry.messages.sampling_params import ModelSampling
from kvscope_telemetry.tier_rows import TierRows

PROTOCOL_VERSION: Final = 1
MAX_MESSAGE_BYTES: Final = 256 << 20
"""Receivers refuse anything larger (a snapshot of 4 million blocks is 136 MB)."""
MAX_TELEMETRY_BYTES: Final = 32 << 20
"""Of a message on the telemetry socket (all rows of 850,000 blocks); a larger change is told by a snapshot."""


class _Message(msgspec.Struct, frozen=True, kw_only=True, tag=True, omit_defaults=True):
    pass


class ModelInfo(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What model runs and what its KV costs."""

    name: str
    architecture: str = ""
    dtype: str = ""
    num_layers: int = 0
    num_query_heads: int = 0
    num_kv_heads: int = 0
    head_dim: int = 0
    vocab_size: int = 0
    num_parameters: int = 0
    max_model_len: int = 0
    quantization: str = ""
    """Bits of layers' weights (`int8`, `int4`), with `-a8` where activations are rounded too, `dtype` being that of the
    rest; empty: they have as many as that."""
    quantization_option: str = ""
    """The engine's option that gives it, as `int8` and `a8` may be shown alike; empty with it, or not told."""
    sampling: ModelSampling = ModelSampling()
    """Of requests that do not say."""


class KVGroup(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Layers that keep their KV alike. Each group has a block table of its own for each request, and its own rule of
    what may be freed; what a prompt finds cached is what all groups have of it."""

    kind: str
    """"full", "window" (sliding), "chunked", "latent" (MLA), "indexed" (of layers that choose tokens by an indexer's
    keys, as DeepSeek's sparse attention), "state" (Mamba, linear attention), "cross", "chunks" (of a store beside the
    engine, as LMCache's, which hold what other groups hold), "prefixes" (no layer keeps any: blocks are places of texts
    in the prefix cache), "" (not told), or a word of a later version."""
    num_layers: int = 0
    block_size: int = 0
    """Tokens that one of its blocks is for; 0: `CacheInfo.block_size`."""
    block_bytes: int = 0
    """Of one of its blocks, over its layers; 0: unknown."""
    window: int = 0
    """Tokens that a query looks back at most; 0: all of them."""
    num_blocks: int = 0
    """Of a pool that is its alone; 0: all groups have one pool, or it is not told."""
    expanded_bytes: int = 0
    """Of a block of latents, if each head's keys and values were held in their place; 0: no latents, or unknown."""
    index_bytes: int = 0
    """Of `block_bytes`, what indexers keep."""


class CacheInfo(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Shape of the block pool and limits of the scheduler."""

    num_blocks: int
    """Of the pool that requests run on, the ledger's first rows; those of the lower tiers follow them."""
    block_size: int
    block_bytes: int = 0
    """Bytes of one block over all layers, K and V."""
    dtype: str = ""
    allocator: str = "paged"
    prefix_caching: bool = False
    max_num_seqs: int = 0
    max_num_batched_tokens: int = 0
    num_host_blocks: int = 0
    """Places in host memory, 0 without that tier."""
    num_disk_blocks: int = 0
    num_physical_blocks: int = 0
    """Blocks that there is memory for where not every row has some (allocator `virtual`); 0: all rows have."""
    has_parents: bool = False
    """Whether the ledger's `parent` is told; older engines did not tell it."""
    max_request_tokens: int = 0
    """The longest prompt and output together that is taken while no block is pinned; 0: not told."""
    groups: tuple[KVGroup, ...] = ()
    """The ledger's `group` counts them from 0; empty: one, of all layers."""
    num_reserved_blocks: int = 0
    """The first rows, which the engine keeps for itself and no request ever has (vLLM's null block)."""
    pool_tokens: int = 0
    """Of requests, that the pool of another engine has room for; 0: not told. With several KV groups, each of which
    needs blocks for a request, it is not blocks times their size."""

    slot_blocks: int = 0
    """Rows of a slot, which one request has at a time, in the order of its text (llama.cpp); 0: there are none."""
    num_states: int = 0
    """Slots of recurrent states, the last rows of the ledger but those of the next. Each holds the state of one request
    that runs, or one that was kept for prompts that begin alike; of the group of kind "state"."""
    num_host_states: int = 0
    """The same in host memory."""
    hit_tokens: int = 0
    """What `smallest_hit` is, as another engine says it; 0: where blocks end together."""

    @property
    def block_sizes(self) -> tuple[int, ...]:
        """Tokens of a block of each KV group."""
        return tuple(group.block_size or self.block_size for group in self.groups) or (self.block_size,)

    @property
    def hit_block_sizes(self) -> tuple[int, ...]:
        """Of KV groups whose blocks make up what a prompt can find. Recurrent states in slots of their own may be kept
        after any block; where a block of the pool has one, it is that at the block's end."""
        kept_beside = ("cross", "chunks", "state") if self.num_states else ("cross", "chunks")
        sizes = zip(self.block_sizes, self.groups or (None,), strict=True)
        return tuple(size for size, group in sizes if group is None or group.kind not in kept_beside)

    @property
    def smallest_hit(self) -> int:
        """Tokens of the shortest prefix that a prompt can find, and what longer ones are multiples of."""
        return self.hit_tokens or math.lcm(*self.hit_block_sizes)

    @property
    def first_state(self) -> int:
        """The row of the first slot of recurrent states, where there are any."""
        return self.rows_by_tier.first_state

    @property
    def group_of_states(self) -> int:
        """The KV group whose rows are `num_states` recurrent states, in no pool's blocks; -1: there is none."""
        kinds = [group.kind for group in self.groups]
        return kinds.index("state") if self.num_states and "state" in kinds else -1

    @property
    def state_bytes(self) -> int:
        """Of one recurrent state, over its layers; 0: unknown, or there are none."""
        return self.groups[self.group_of_states].block_bytes if self.group_of_states >= 0 else 0

    @property
    def num_rows(self) -> int:
        """Rows of the ledger: blocks of the pool, places of the lower tiers, and recurrent states."""
        return self.rows_by_tier.num_rows

    @property
    def rows_by_tier(self) -> TierRows:
        """The rows of each tier."""
        return TierRows(
            {
                Tier.HBM: self.num_blocks,
                Tier.HOST: self.num_host_blocks,
                Tier.DISK: self.num_disk_blocks,
                Tier.STATES: self.num_states,
                Tier.HOST_STATES: self.num_host_states,
            }
        )

    def row_bytes(self, tier: Tier) -> int:
        """Bytes of one row of `tier`, a block or a recurrent state; 0: unknown."""
        return self.state_bytes if tier in STATE_TIERS else self.block_bytes

    @property
    def host_tier_bytes(self) -> int:
        """Bytes of host memory below the pool, for blocks and recurrent states; 0: no such tier, or unknown."""
        return self.num_host_blocks * self.block_bytes + self.num_host_states * self.state_bytes


class DeviceInfo(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Where the engine runs."""

    kind: str
    """"cpu" or "cuda"."""
    name: str = ""
    total_bytes: int = 0
    num_threads: int = 0
    read_bytes_per_s: int = 0
    """That it reads from its memory at most, as measured; 0: unknown, the next too."""
    flops_per_s: int = 0
    """Of products of large matrices in the model's dtype, as measured."""
    attention: str = ""
    """Whose attention runs prompts and why, a line for people; empty: there was nothing to choose."""
    uuids: tuple[str, ...] = ()
    """Of the GPUs that the engine computes on, in the order of its ranks, without "GPU-" or "MIG-"; empty: unknown."""
    software: str = ""
    """What computes, and its version, such as "torch 2.9.1"; empty: not told."""


class Hello(_Message, frozen=True, kw_only=True):
    """First message of an epoch; also inside each snapshot."""

    epoch: int
    """Random number of this engine start."""
    time_ns: int
    wall_time_ns: int
    """`time.time_ns()` at `time_ns`."""
    model: ModelInfo
    cache: CacheInfo
    device: DeviceInfo
    protocol_version: int = PROTOCOL_VERSION
    engine_version: str = ""
    pid: int = 0
    host: str = ""
    """Which start of which machine `time_ns` is of (`host_id`); empty: unknown."""
    capabilities: Capabilities = OWN_ENGINE
    """What it can tell and be asked for."""
    num_ranks: int = 1
    """Processes that the model is shared out among, each with its heads of every block (tensor parallel)."""
    api: str = ""
    """Where prompts go that its command socket does not take, as an address of `external.address`, such as
    vllm://127.0.0.1:8000, seen from the engine's machine; empty: nowhere else."""


class RequestInfo(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """What never changes about a request. `number` counts from 1 within an epoch."""

    number: int
    request_id: str
    arrival_ns: int
    num_prompt_tokens: int
    max_tokens: int = 0
    priority: int = 0
    index: int = 0
    """Which of the `n` completions of the same prompt."""
    adapter: str = ""
    """The LoRA adapter that it is computed with, by name; empty: none, or not told."""
    client: int = 0
    """Which client sent it, counted from 1 within an epoch by their first requests; 0: unknown. Telemetry has no
    names or addresses of clients."""


class RequestRows(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """Requests that changed, packed little-endian, one entry a request in each column.

    A request's block table becomes `table[:table_start]` followed by its next `table_count` ids of
    `table_blocks`. The last columns are empty where they are 0 for all. Where there are several KV groups, a row is of
    one of them, and a request has as many rows as tables that changed: they differ in nothing else.
    """

    number: RowNumbers = b""
    state: Annotated[bytes, packed(Packing(np.dtype("u1"), is_row=True))] = b""  # RequestState
    num_computed_tokens: RowCounts = b""  # tokens whose KV is in blocks
    num_cached_tokens: RowCounts = b""  # prompt tokens found in the prefix cache when it first ran
    num_output_tokens: RowCounts = b""
    num_preemptions: Annotated[bytes, packed(Packing(U2, is_row=True))] = b""
    table_start: RowCounts = b""
    table_count: RowCounts = b""
    table_blocks: Ids = b""  # concatenated
    num_draft_tokens: OptionalCounts = b""  # guessed ahead and checked
    num_accepted_tokens: OptionalCounts = b""  # those of them that were right
    table_group: OptionalCounts = b""  # whose block table it is
    waits_for: OptionalCounts = b""  # WaitsFor


NO_REQUESTS: Final = RequestRows()
"""No rows. This object, as the other defaults of messages, is left out on the wire."""


class Batch(msgspec.Struct, frozen=True, gc=False):
    """Who ran in this step, and with how many tokens. Packed little-endian."""

    number: RowNumbers = b""
    num_tokens: RowCounts = b""
    num_prefill_tokens: int = 0
    num_decode_tokens: int = 0


class Moves(msgspec.Struct, frozen=True, gc=False):
    """Blocks that changed hands or places in this step, ids packed as little-endian u4, in no order."""

    evicted: Ids = b""
    """Lost their cached prefix, to another request's tokens or to a newer prefix."""
    copied: Ids = b""
    """Targets of copy on write."""
    saved: Ids = b""
    """Rows of a lower tier that were written: swapped out, or offloaded from the tier above."""
    loaded: Ids = b""
    """Rows that were read back from the tier below."""


class Timings(msgspec.Struct, frozen=True, gc=False):
    """How long the parts of the step took."""

    schedule_ns: int = 0
    run_ns: int = 0
    forward_ns: int = 0
    """On the device, inside the model's forward pass: within `run_ns`, or beside other parts where steps overlap."""
    commit_ns: int = 0
    record_ns: int = 0
    """The previous step's: this one is not over when it is written down."""


NO_TIMINGS: Final = Timings()
"""The timings of a step that was not measured."""


class Work(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """What the forward pass of a step had to do at least, however it was done; all 0 where that is not told."""

    flops: int = 0
    """Additions and multiplications, each counted."""
    attention_flops: int = 0
    """The part of them that grows with the length of what was said before."""
    weights_bytes: int = 0
    """Read, once for all that run in the step."""
    kv_read_bytes: int = 0
    kv_written_bytes: int = 0
    other_bytes: int = 0
    """Activations and logits, read and written."""
    graph_size: int = 0
    """Requests that the CUDA graph which was replayed has room for; 0: none was."""
    wait_ns: int = 0
    """The host stood still until the device was done and the tokens were read back."""
    copy_ns: int = 0
    """Copies from and to lower tiers took, as far as they were told since the step before."""
    launches: int = 0
    """Handed to the device by the host; 0: not counted."""
    streamed_bytes: int = 0
    """Weights that were copied from host memory, since they do not stay on the device."""
    graph_tokens: int = 0
    """Tokens that the CUDA graphs have room for that were replayed between attention; 0: none were."""

    @property
    def num_bytes(self) -> int:
        """Moved between the device and its memory, read and written."""
        return self.weights_bytes + self.kv_read_bytes + self.kv_written_bytes + self.other_bytes


NO_WORK: Final = Work()
"""The work of a step that was not measured."""


class Counters(msgspec.Struct, frozen=True, gc=False):
    """Totals since the epoch began, except the three `num_…` that say how things stand."""

    prompt_tokens: int = 0
    """Of requests that ran for the first time, the tokens of their prompts that had to be computed: each prompt counts
    once, whatever a preemption makes of it."""
    cached_tokens: int = 0
    """The others of these prompts: found in the prefix cache, or shared by a fork."""
    generation_tokens: int = 0
    preemptions: int = 0
    admitted: int = 0
    finished: int = 0
    aborted: int = 0
    refused: int = 0
    evicted_blocks: int = 0
    num_running: int = 0
    num_waiting: int = 0
    messages_dropped: int = 0
    """Messages of any kind that the engine threw away because its publisher was behind."""
    swapped_blocks: int = 0
    """Blocks of preempted requests that were moved to a lower tier instead of being computed again."""
    offloaded_blocks: int = 0
    """Cached blocks that went to a lower tier instead of being forgotten."""
    loaded_blocks: int = 0
    """Blocks that came back from a lower tier."""
    copied_blocks: int = 0
    """Copied on write."""
    lost_blocks: int = 0
    """Blocks of a lower tier that could not be read back whole and are computed again."""
    draft_tokens: int = 0
    """Tokens that were guessed ahead (speculation) and checked, and those of them that were right."""
    accepted_tokens: int = 0
    restored_tokens: int = 0
    """That requests which came back after a preemption had again without computing them: from the prefix cache, or from
    a lower tier."""
    recomputed_tokens: int = 0
    """That they had lost, and computed again."""
    swapped_states: int = 0
    """Recurrent states of preempted requests that were moved to host memory with their blocks."""
    offloaded_states: int = 0
    """Kept states that went to host memory instead of being forgotten."""
    loaded_states: int = 0
    """States that came back from there."""


class EventData(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """What the cause of an event is made of; `kind` says which fields are meant. Words are made of it in `event_kinds`.

    A later version may have other kinds and fields; who does not know them takes the words in `Event.cause`.
    """

    kind: str
    """"started" (admitted or resumed), "forked", "preempted", "made_way" (preempted for a client or a batch that ran
    nothing), "asked" (preempted by a person), "restarted" (preempted since a step failed that had begun to change its
    recurrent state), "evicted", "states_evicted" (of recurrent layers, kept for prompts that begin alike), "ended"
    (finished), or a kind that tells of a stop."""
    waited_ns: int = 0
    """started: running time (`RunningTime`) since the request came, or was preempted."""
    num_known_tokens: int = 0
    """started: of its prompt, and those it had generated; `Event.num_tokens` of them need not be computed."""
    num_pool_blocks: int = 0
    """started: blocks of the pool that it begins with; the next came back from lower tiers."""
    num_loaded_blocks: int = 0
    num_lost_tokens: int = 0
    """started: could not be read back whole."""
    missed: str = ""
    """started: why not more was there: "evicted", "differs", "unseen", "new", "salt" or "adapter"
    (its text is cached under another one), "state" (blocks are cached that no recurrent state was kept with), or ""
    where nothing was missed."""
    missed_token: int = 0
    """Where in its text that is."""
    missed_step: int = 0
    """When it was evicted."""
    num_needed: int = 0
    """preempted: blocks that `Event.other` needed, and how many of them could be had."""
    num_available: int = 0
    choice: str = ""
    """preempted: why this one: "itself", "priority", "share" (its client held the most), "spared" (it was preempted
    less often) or "newest"; made_way: for a "client", or a "batch" of its own client."""
    choice_number: int = 0
    """The priority, or how often."""
    is_swapped: bool = False
    """preempted: its blocks moved to a lower tier, and are not computed again."""
    swap_ns: int = -1
    """preempted: there and back, as measured; -1 unknown, the next too."""
    recompute_ns: int = -1
    num_offloaded: int = 0
    """evicted, states_evicted: how many of the blocks, or states, went to host memory."""
    num_states: int = 0
    """states_evicted: how many kept states; started: 1 where it goes on from one of them, or from its own; preempted:
    1 where a state shared the fate of its blocks."""
    by: str = ""
    """asked: who did; its costs are as in preempted. engine_paused, single_step: who asked. engine_resumed: who had
    paused it."""
    finish_reason: str = ""
    """ended: a `FinishReason`, or a word of a later version."""
    num_set_aside: int = 0
    """started: blocks that it got at once, in one run, whatever it will use of them; 0 where they come as tokens do."""
    stopped_ns: int = 0
    """started: how long the engine stood still meanwhile, paused or suspended; no part of `waited_ns`."""
    lasted_ns: int = 0
    """engine_resumed: since it was paused; single_step: the step took; process_suspended: until it ran again."""
    slept_ns: int = 0
    """process_suspended: of that, how long the machine slept: the engine's clock stood still as well."""
    why: str = ""
    """engine_resumed: what ended the pause, in words. restarted: why the step failed; its costs are as in preempted."""
    num_loaded_states: int = 0
    """started: 1 where the state that it goes on from came back from host memory."""


class Event(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """Something that happened to a request, with its cause in words a person reads."""

    kind: str
    """The name of an `EventKind`; once decoded never any other."""
    time_ns: int
    number: int = 0
    """The request it happened to, 0 for none."""
    other: int = 0
    """The request that caused it (for whom a block was needed), 0 for none."""
    cause: str = ""
    """For readers that do not know the data, and all there is where there are none."""
    num_blocks: int = 0
    num_tokens: int = 0
    data: EventData | None = None


PAUSED: Final = "paused"
SUSPENDED: Final = "suspended"


class Stop(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """A time in which the engine stood still. The clock is that of whoever tells it."""

    begin_ns: int
    end_ns: int = 0
    """0: it goes on."""
    kind: str = PAUSED
    """`PAUSED`, by a person, or `SUSPENDED`: the process was stopped, or the machine slept."""
    by: str = ""
    """Who paused it, by name."""


class Frame(_Message, frozen=True, kw_only=True):
    """One step of the engine: everything that changed since the frame before."""

    epoch: int
    seq: int
    """Counts frames of the epoch from 1. A hole means: ask for a snapshot."""
    step: int
    time_ns: int
    blocks: BlockRows = BlockRows()
    new_requests: tuple[RequestInfo, ...] = ()
    requests: RequestRows = NO_REQUESTS
    batch: Batch = Batch()
    timings: Timings = NO_TIMINGS
    counters: Counters = Counters()
    events: tuple[Event, ...] = ()
    first_token_ns: Times = b""
    """u8 a request that got its first token in this step: time since its arrival."""
    inter_token_ns: Times = b""
    """u8 a request that got a later token in this step: time since the one before."""
    moves: Moves = Moves()
    work: Work = NO_WORK


class DeltaCheckpoint(Frame, frozen=True, kw_only=True):
    """Several frames joined into one, in recordings alone: no engine sends it. How all that changed between two frames
    stands after the second, which gives it number, step and time.

    What only happened in between (batches, timings, events, moves) is not in it.
    """

    since_seq: int = 0
    """The frame that it follows."""


class Snapshot(_Message, frozen=True, kw_only=True):
    """The whole state after frame `seq`: frames up to it are dropped, later ones applied."""

    hello: Hello
    seq: int
    step: int
    time_ns: int
    blocks: BlockRows
    """All rows in order; `ids` is empty."""
    requests_info: tuple[RequestInfo, ...] = ()
    """Requests that are not finished."""
    requests: RequestRows = NO_REQUESTS
    counters: Counters = Counters()
    tag: int = 0
    """The number the asker gave."""
    stops: tuple[Stop, ...] = ()
    """When the engine stood still, as far as requests that are told of were there; the last one may go on."""


class Heartbeat(_Message, frozen=True, kw_only=True):
    """Sent every half second by the publisher, even while a step runs: quiet and stuck look different."""

    epoch: int
    time_ns: int
    seq: int
    """The last frame published: a subscriber that lost the last one before a pause sees it here."""
    step: int
    num_unfinished: int = 0
    step_started_ns: int = 0
    """When the step in progress began, 0 between steps."""
    paused_by: str = ""
    """Who paused the engine, by name; empty: nobody."""
    pinned: bytes = b""
    """u4 a block that is not evicted while it is pinned, ascending."""
    pinned_by: str = ""
    """Who pinned them, by name."""
    max_num_seqs: int = 0
    """As the scheduler has it now, 0 from engines that do not say; the next too."""
    max_num_batched_tokens: int = 0


class DeviceSample(_Message, frozen=True, kw_only=True):
    """What the device and the process say of themselves; -1 means unknown, never zero."""

    epoch: int
    time_ns: int
    memory_total_bytes: int = -1
    memory_used_bytes: int = -1
    """By everybody on the device (host memory when the device is a CPU)."""
    process_bytes: int = -1
    """By the engine: device memory on a GPU, resident set on a CPU."""
    utilization: float = -1.0
    """0 to 1: GPU busy, or the engine's share of all CPUs; where devices are told of without an engine, CPUs busy."""
    power_watts: float = -1.0
    temperature_celsius: float = -1.0


class ModuleBytes(msgspec.Struct, frozen=True, kw_only=True):
    """Weights of a part of the model. The parts add up to all weights."""

    name: str
    num_bytes: int


class RankMemory(msgspec.Struct, frozen=True, kw_only=True):
    """What one rank of tensor parallel holds."""

    rank: int
    device: str
    weights_bytes: int
    kv_bytes: int
    uuid: str = ""
    """Of its GPU, as in `DeviceInfo.uuids`; empty: unknown, or none."""


class MemoryBreakdown(_Message, frozen=True, kw_only=True):
    """Where the memory went, in bytes. KV in use, cached and free follow from the ledger."""

    epoch: int
    time_ns: int
    weights_bytes: int = 0
    kv_bytes: int = 0
    """The whole pool: num_blocks x block_bytes, or all pages (allocator `virtual`)."""
    workspace_bytes: int = -1
    """Activations, graphs and buffers, where the allocator can tell; -1 unknown."""
    kv_resident_bytes: int = -1
    """Of `kv_bytes`, what is behind blocks now, measured (allocator `virtual`); -1: not measured."""
    step_bytes: int = -1
    """Set aside for the largest step: activations, logits, partial results of attention; -1: nothing was planned."""
    graphs_bytes: int = -1
    """Set aside for graphs and what they read; 0: there are none."""
    staging_bytes: int = -1
    """Of the buffers through which blocks go to host memory."""
    modules: tuple[ModuleBytes, ...] = ()
    """`weights_bytes` by what they are of: embeddings, attention, MLP, …; empty where that is not told."""
    allocated_bytes: int = -1
    """By torch's allocator: in tensors, of what it holds; -1 where it cannot tell (a CPU), the next three too."""
    reserved_bytes: int = -1
    """What it holds of the device: in tensors, and cached for the next ones."""
    split_bytes: int = -1
    """Of what is cached: rests of blocks that are partly in use, which go back to the device with them alone."""
    peak_bytes: int = -1
    """In tensors at most at one time since the engine served."""
    context_bytes: int = -1
    """What the process had on the device beside torch's memory when the engine began to serve: the driver's context,
    its kernels and libraries; -1: the driver did not tell."""
    ranks: tuple[RankMemory, ...] = ()
    """Of each rank in order, where a model is shared out among several; all else here is rank 0's."""
    host_weights_bytes: int = 0
    """Weights that stay in host memory and are streamed to the device; no part of `weights_bytes`."""


class Progress(_Message, frozen=True, kw_only=True):
    """How far a download or the load of a model is, before there is an engine to speak of."""

    stage: str
    """"compile", "download", "convert", "wait" (for another engine), "load", "warm up", or "ready"."""
    detail: str = ""
    done: int = 0
    total: int = 0
    """0: unknown."""
    unit: str = ""
    """"bytes", "tensors", or ""."""


class Goodbye(_Message, frozen=True, kw_only=True):
    """The engine ends: `reason` is empty after an orderly stop, otherwise the error in one line."""

    epoch: int
    reason: str = ""


class Histogram(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """Latencies of which only is told how many lay between two bounds; packed little-endian."""

    kind: str
    """"first_token", "inter_token" or "queued"; readers leave out those that they do not know."""
    bounds_ns: bytes = b""
    """u8 a bound, ascending: the upper ones of all intervals but the last, which has none."""
    counts: bytes = b""
    """u8 an interval, so one more than bounds: latencies since the reading before."""


class MetricFigure(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """A number of another engine's metrics that kvscope shows as it is, in the words of that engine's module."""

    name: str
    """What it is to a person: "Sliding-window pool in use"."""
    value: float
    unit: str = ""
    """"share" (0 to 1), "tokens", "bytes", "blocks", "s", or a word of a later version."""
    metric: str = ""
    """Where it stands on the server's page."""


class Reading(_Message, frozen=True, kw_only=True):
    """What an engine's metrics say that frames cannot: sent where `Capabilities` has no free rows or no latencies."""

    epoch: int
    time_ns: int
    used_share: float = -1.0
    """Of the pool's blocks, 0 to 1, as the engine counts them; -1 unknown."""
    latencies: tuple[Histogram, ...] = ()
    figures: tuple[MetricFigure, ...] = ()


class Fingerprints(_Message, frozen=True, kw_only=True):
    """What a deterministic engine computed in a step, as digests: of a block that became full one for each layer, and
    one for the logits of each sampled token. Those of two runs can be compared whatever their schedules were."""

    epoch: int
    step: int
    time_ns: int
    num_layers: int = 0
    """That keep keys and values."""
    number: RowNumbers = b""
    """u4 a block: whose it is. A block that was found in the prefix cache is not told again."""
    place: RowCounts = b""
    """u4 a block: which of its request's blocks, from 0."""
    digests: bytes = b""
    """u8 a layer, of one block after the other: BLAKE2b of 8 bytes over its keys, then its values, slot by slot; 0 of a
    layer whose KV another layer holds, or that has let go of the block."""
    sampled_number: bytes = b""
    """u4 a token: whose it is; a token that turned out to be wrong after a guess is not told."""
    sampled_place: bytes = b""
    """u4 a token: how many its request had said before it."""
    logit_sums: bytes = b""
    """u8 a token: the bits of its logits as whole numbers, added modulo 2^64."""


TelemetryMessage: TypeAlias = (
    Hello
    | Frame
    | Snapshot
    | Heartbeat
    | DeviceSample
    | MemoryBreakdown
    | Progress
    | Goodbye
    | Reading
    | Devices
    | Fingerprints
)
