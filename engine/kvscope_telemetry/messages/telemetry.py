"""Messages of the telemetry socket: frozen tagged structs in one union with one typed decoder.

Schema evolution: a new field has a default; the wire name, type and meaning of a field never change; a new message is a
new tag, a new event a new kind. Readers skip unknown tags and kinds (`unknown`). Golden bytes in the tests enforce
this. Block ids and per-request numbers are packed little-endian bytes. No message carries the text of a prompt or a
completion: clients request that over the command socket.

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
"""Maximum size of a message in bytes that receivers accept. A snapshot of 4 million blocks has 136 MB."""
MAX_TELEMETRY_BYTES: Final = 32 << 20
"""Maximum size of a message in bytes on the telemetry socket, enough for all rows of 850,000 blocks. A larger change is
sent as a snapshot.
"""


class _Message(msgspec.Struct, frozen=True, kw_only=True, tag=True, omit_defaults=True):
    pass


class ModelInfo(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The served model, and the dimensions that determine the size of its KV cache."""

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
    """Bit width of the layers' weights (`int8`, `int4`), with the suffix `-a8` if activations are also quantized to 8
    bits.

    Empty if the weights have the type `dtype`, which is also the type of all unquantized parameters.
    """
    quantization_option: str = ""
    """Engine option that selected `quantization`; empty if unquantized or unknown.

    Several options, such as `int8` and `a8`, can have the same `quantization`.
    """
    sampling: ModelSampling = ModelSampling()


class KVGroup(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Layers that store their KV in the same way (a KV cache group in vLLM).

    Each group has a separate block table per request and its own rule for which blocks may be freed. A prefix hit can
    end only where every group has cached what it needs.
    """

    kind: str
    """"full", "window" (sliding window), "chunked", "latent" (MLA), "indexed" (layers that select tokens by an
    indexer's keys, as in DeepSeek sparse attention), "state" (Mamba, linear attention), "cross", "chunks" (chunks of an
    external store such as LMCache, which duplicate the KV of other groups), "prefixes" (no layer stores KV in them:
    blocks are positions of texts in the prefix cache), "" (unknown), or a kind introduced by a later version.
    """
    num_layers: int = 0
    block_size: int = 0
    """Tokens per block of this group. If 0, `CacheInfo.block_size` applies."""
    block_bytes: int = 0
    """Bytes per block of this group, summed over its layers; 0 if unknown."""
    window: int = 0
    """Number of most recent tokens that a query attends to; 0 if it is unlimited."""
    num_blocks: int = 0
    """Number of blocks in a pool that only this group uses; 0 if all groups share one pool, or if it is unknown."""
    expanded_bytes: int = 0
    """Bytes that a block of latents (MLA) would have with keys and values stored per head; 0 without latents, or
    unknown.
    """
    index_bytes: int = 0
    """Part of `block_bytes` with the indexers' keys."""
    num_draft_layers: int = 0
    """Number of the layers that belong to a draft model of speculative decoding; -1 if it is some of them, and unknown
    how many.
    """


class CacheInfo(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Layout of the block pool, and limits of the scheduler."""

    num_blocks: int
    """Number of blocks in the pool on which requests run. They are the first rows of the ledger, before those of the
    lower tiers.
    """
    block_size: int
    block_bytes: int = 0
    """Bytes of the keys and values of one block, summed over all layers."""
    dtype: str = ""
    allocator: str = "paged"
    prefix_caching: bool = False
    max_num_seqs: int = 0
    max_num_batched_tokens: int = 0
    num_host_blocks: int = 0
    """Number of blocks in host memory; 0 without that tier."""
    num_disk_blocks: int = 0
    num_physical_blocks: int = 0
    """Number of blocks that can have physical memory at the same time, if that is less than the number of rows
    (allocator `virtual`); 0 if all rows have memory.
    """
    has_parents: bool = False
    """Whether the ledger's `parent` column is published. Older engines did not publish it."""
    max_request_tokens: int = 0
    """Maximum number of prompt and output tokens of a request that is accepted while no block is pinned; 0 if unknown.
    """
    groups: tuple[KVGroup, ...] = ()
    """KV groups, indexed from 0 by the ledger's `group` column; empty for a single group of all layers."""
    num_reserved_blocks: int = 0
    """Number of leading ledger rows that the engine reserves and never assigns to a request (vLLM's null block)."""
    pool_tokens: int = 0
    """Number of tokens of requests that an external engine's pool can hold; 0 if unknown.

    With several KV groups, each of which needs blocks for a request, this is less than the number of blocks times the
    block size.
    """

    slot_blocks: int = 0
    """Number of ledger rows per slot of llama.cpp; 0 if the engine has no slots. A slot contains one request at a time,
    in token order.
    """
    num_states: int = 0
    """Number of slots for recurrent states outside the block pool. In the ledger, their rows follow those of all blocks
    and precede those of `num_host_states`.

    Each slot contains the state of one running request, or a state retained for prompts with the same prefix. All slots
    belong to the KV group of kind "state".
    """
    num_host_states: int = 0
    """Number of slots for recurrent states in host memory."""
    state_interval: int = 0
    """Tokens between two saved states of recurrent layers; 0 without such layers, or if not reported."""
    hit_tokens: int = 0
    """Value of `smallest_hit` as reported by an external engine; 0 if not reported, in which case
    `smallest_hit` is the least common multiple of the block sizes.
    """

    @property
    def block_sizes(self) -> tuple[int, ...]:
        """Tokens per block of each KV group."""
        return tuple(group.block_size or self.block_size for group in self.groups) or (self.block_size,)

    @property
    def hit_block_sizes(self) -> tuple[int, ...]:
        """Block sizes of the KV groups that determine the length of a prefix hit.

        Recurrent states in separate slots may be retained after any block, so they do not count. A state stored in a
        pool block is the one at the end of that block, so the size of these blocks counts.
        """
        uncounted_kinds = ("cross", "chunks", "state") if self.num_states else ("cross", "chunks")
        sizes = zip(self.block_sizes, self.groups or (None,), strict=True)
        return tuple(size for size, group in sizes if group is None or group.kind not in uncounted_kinds)

    @property
    def smallest_hit(self) -> int:
        """Length of the shortest possible prefix hit in tokens. All hits are multiples of it."""
        return self.hit_tokens or math.lcm(*self.hit_block_sizes)

    @property
    def first_state(self) -> int:
        """Ledger row of the first slot for recurrent states. If there are no such slots in HBM, this is the row
        at which those in host memory would begin.
        """
        return self.rows_by_tier.first_state

    @property
    def group_of_states(self) -> int:
        """Index of the KV group of the `num_states` slots outside the block pool; -1 if there is none."""
        kinds = [group.kind for group in self.groups]
        return kinds.index("state") if self.num_states and "state" in kinds else -1

    @property
    def state_bytes(self) -> int:
        """Bytes of one recurrent state, summed over its layers; 0 if unknown, or if there is no such group."""
        return self.groups[self.group_of_states].block_bytes if self.group_of_states >= 0 else 0

    @property
    def num_rows(self) -> int:
        return self.rows_by_tier.num_rows

    @property
    def rows_by_tier(self) -> TierRows:
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
        """Return the bytes of one row of `tier` (a block or a recurrent state); 0 if unknown."""
        return self.state_bytes if tier in STATE_TIERS else self.block_bytes

    @property
    def host_tier_bytes(self) -> int:
        """Bytes of blocks and recurrent states in host memory; 0 without that tier, or if unknown."""
        return self.num_host_blocks * self.block_bytes + self.num_host_states * self.state_bytes


class DeviceInfo(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    kind: str
    """"cpu" or "cuda"."""
    name: str = ""
    total_bytes: int = 0
    num_threads: int = 0
    read_bytes_per_s: int = 0
    """Measured peak read bandwidth of the device's memory; 0 if unknown."""
    flops_per_s: int = 0
    """Measured throughput of large matmuls in the model's dtype, in operations per second; 0 if unknown."""
    attention: str = ""
    """Attention backend of prefills and the reason for it, as one line of text; empty if there was no choice."""
    uuids: tuple[str, ...] = ()
    """UUIDs of the engine's GPUs in the order of its ranks, without "GPU-" or "MIG-"; empty if unknown."""
    software: str = ""
    """Compute library and version, such as "torch 2.9.1"; empty if unknown."""


class Hello(_Message, frozen=True, kw_only=True):
    """First message of an epoch, also included in each snapshot."""

    epoch: int
    """Random number that identifies one start of the engine."""
    time_ns: int
    wall_time_ns: int
    """Value of `time.time_ns()` at the moment `time_ns`, which relates the engine's monotonic clock to the wall
    clock.
    """
    model: ModelInfo
    cache: CacheInfo
    device: DeviceInfo
    protocol_version: int = PROTOCOL_VERSION
    engine_version: str = ""
    pid: int = 0
    host: str = ""
    """Identifier of the machine and boot with the clock of `time_ns` (`host_id`); empty if unknown."""
    capabilities: Capabilities = OWN_ENGINE
    num_ranks: int = 1
    """Number of tensor-parallel processes. Each stores the KV of some of the heads of every block."""
    api: str = ""
    """Address of an OpenAI API for prompts, if the command socket accepts no prompts; otherwise empty.

    It has the form of an `ExternalAddress`, such as vllm://127.0.0.1:8000, as reachable from the engine's machine.
    """


class RequestInfo(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """Properties of a request that never change. `number` counts from 1 within an epoch, that is, one start of the
    engine.
    """

    number: int
    request_id: str
    arrival_ns: int
    num_prompt_tokens: int
    max_tokens: int = 0
    priority: int = 0
    index: int = 0
    """Index among the `n` completions of the same prompt."""
    adapter: str = ""
    """Name of the request's LoRA adapter; empty if it uses none, or if it is unknown."""
    client: int = 0
    """Number of the client that sent the request, from 1 within an epoch in the order of first requests; 0 if unknown.

    Telemetry contains no names or addresses of clients.
    """


class RequestRows(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """Changed requests, packed little-endian, with one entry per row in each column.

    A request's block table becomes `table[:table_start]` followed by its next `table_count` ids of `table_blocks`.
    Optional columns (the last four) are empty if they are 0 for all rows. With several KV groups, each row describes
    the block table of one group (`table_group`), and a request has one row per changed table, with equal values in the
    other columns.
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
    num_draft_tokens: OptionalCounts = b""  # speculative tokens verified
    num_accepted_tokens: OptionalCounts = b""  # speculative tokens accepted
    table_group: OptionalCounts = b""  # KV group of the block table
    waits_for: OptionalCounts = b""  # WaitsFor


NO_REQUESTS: Final = RequestRows()
"""Empty rows. msgspec omits this object on the wire, like all default values."""


class Batch(msgspec.Struct, frozen=True, gc=False):
    """Requests that ran in a step, and the number of tokens computed for each. Packed little-endian."""

    number: RowNumbers = b""
    num_tokens: RowCounts = b""
    num_prefill_tokens: int = 0
    num_decode_tokens: int = 0


class Moves(msgspec.Struct, frozen=True, gc=False):
    """Blocks that were evicted, copied, or moved between tiers in a step: packed little-endian u4 ids in no particular
    order.
    """

    evicted: Ids = b""
    """Blocks that lost their cached prefix, because they are reused for another request or for a newer prefix."""
    copied: Ids = b""
    """Destination blocks of copy-on-write."""
    saved: Ids = b""
    """Ledger rows of a lower tier that were written, by swapping out or offloading from the tier above."""
    loaded: Ids = b""
    """Ledger rows that were filled with blocks or states from a lower tier."""


class Timings(msgspec.Struct, frozen=True, gc=False):
    schedule_ns: int = 0
    run_ns: int = 0
    forward_ns: int = 0
    """Device time of the model's forward pass. It is part of `run_ns`; with async scheduling, it overlaps other parts.
    """
    commit_ns: int = 0
    record_ns: int = 0
    """Time spent on recording the previous step, because recording of this step is still in progress."""


NO_TIMINGS: Final = Timings()
"""Timings of a step that was not measured."""


class Work(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """Minimum work of a step's forward pass, independent of its implementation; all 0 if not reported."""

    flops: int = 0
    """Additions and multiplications, counted separately."""
    attention_flops: int = 0
    """Part of `flops` that grows with the context length."""
    weights_bytes: int = 0
    """Bytes of weights read, counted once for the whole batch."""
    kv_read_bytes: int = 0
    kv_written_bytes: int = 0
    other_bytes: int = 0
    """Bytes of activations and logits read and written."""
    graph_size: int = 0
    """Number of requests for which the replayed CUDA graph was captured; 0 if none was replayed."""
    wait_ns: int = 0
    """Time for which the host waited until the device had finished and the sampled tokens were copied back."""
    copy_ns: int = 0
    """Duration of copies to and from lower tiers that completed since the previous step, if it was reported."""
    launches: int = 0
    """Number of kernel launches by the host; 0 if they were not counted."""
    streamed_bytes: int = 0
    """Bytes of weights that were copied from host memory, because they do not stay on the device."""
    graph_tokens: int = 0
    """Capacity in tokens of the replayed piecewise CUDA graphs (captured between attention layers); 0 if none was
    replayed.
    """

    @property
    def num_bytes(self) -> int:
        """Bytes transferred between the device and its memory, read and written."""
        return self.weights_bytes + self.kv_read_bytes + self.kv_written_bytes + self.other_bytes


NO_WORK: Final = Work()
"""Work of a step that was not measured."""


class Counters(msgspec.Struct, frozen=True, gc=False):
    """Totals since the start of the epoch. Only `num_running` and `num_waiting` are current values."""

    prompt_tokens: int = 0
    """Prompt tokens that had to be computed when their request first ran, without recomputation after a preemption."""
    cached_tokens: int = 0
    """Prompt tokens that did not have to be computed, because they were in the prefix cache or shared by a fork."""
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
    """Messages of any kind that the engine dropped, because its publisher was too slow."""
    swapped_blocks: int = 0
    """Blocks of preempted requests that were swapped to a lower tier instead of being dropped for recomputation."""
    offloaded_blocks: int = 0
    """Cached blocks that were offloaded to a lower tier instead of being dropped."""
    loaded_blocks: int = 0
    copied_blocks: int = 0
    lost_blocks: int = 0
    """Blocks of a lower tier that could not be read back intact and are recomputed."""
    draft_tokens: int = 0
    """Speculative tokens that were verified; `accepted_tokens` of them were accepted."""
    accepted_tokens: int = 0
    restored_tokens: int = 0
    """Tokens of resumed requests that did not have to be recomputed, because they were in the prefix cache or a lower
    tier.
    """
    recomputed_tokens: int = 0
    """Tokens of resumed requests that were recomputed."""
    swapped_states: int = 0
    """Recurrent states of preempted requests that were swapped to host memory with their blocks."""
    offloaded_states: int = 0
    """Cached recurrent states that were offloaded to host memory instead of being dropped."""
    loaded_states: int = 0


class EventData(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """Structured cause of an event. `kind` determines which fields are used; `event_kinds` converts it to text.

    Each field's documentation starts with the kinds that use it. A later version may have other kinds and fields.
    Readers that do not support them use the text in `Event.cause`.
    """

    kind: str
    """"started" (admitted or resumed), "forked", "preempted", "made_way" (preempted for a client or a batch that had no
    running request), "asked" (preempted by a user), "restarted" (preempted after the failure of a step that had begun
    to change the request's recurrent state), "evicted", "states_evicted" (recurrent states cached for shared prefixes),
    "ended" (finished), or a kind of pause or suspension.
    """
    waited_ns: int = 0
    """started: running time (`RunningTime`) since the request arrived or was preempted."""
    num_known_tokens: int = 0
    """started: prompt tokens plus generated tokens. `Event.num_tokens` of them need not be computed."""
    num_pool_blocks: int = 0
    """started: number of blocks with which the request starts that were in the pool already.
    `num_loaded_blocks` is the number of blocks loaded from lower tiers.
    """
    num_loaded_blocks: int = 0
    num_lost_tokens: int = 0
    """started: tokens that could not be read back intact."""
    missed: str = ""
    """started: reason why the prefix hit was not longer. "evicted": the next block was evicted. "differs":
    cached prefixes continue with other tokens. "unseen": no cached prefix continues. "new": no cached prefix
    matches at all. "salt", "adapter": the same text is cached under another cache salt or LoRA adapter.
    "state": blocks are cached, but no recurrent state with them. "": nothing was missed.
    """
    missed_token: int = 0
    """started: index of the prompt token at which the prefix hit ended."""
    missed_step: int = 0
    """started: step in which the block missing for a longer prefix hit was evicted."""
    num_needed: int = 0
    """preempted: blocks that request `Event.other` needed; `num_available` of them were available."""
    num_available: int = 0
    choice: str = ""
    """preempted: why this request was chosen: "itself", "priority", "share" (its client held the most tokens), "spared"
    (it had fewer preemptions) or "newest". made_way: whether it was preempted for another "client" or another "batch"
    of the same client.
    """
    choice_number: int = 0
    """preempted: the priority or number of preemptions that decided, depending on `choice`."""
    is_swapped: bool = False
    """preempted: whether the blocks were swapped to a lower tier instead of being recomputed later."""
    swap_ns: int = -1
    """preempted: measured cost in nanoseconds of swapping the blocks out and in again; -1 if unknown.
    `recompute_ns` is the cost of recomputing them.
    """
    recompute_ns: int = -1
    num_offloaded: int = 0
    """evicted, states_evicted: number of the evicted blocks or states that were offloaded to host memory."""
    num_states: int = 0
    """states_evicted: number of cached states evicted. started: 1 if the request continues from a cached state or from
    its own. preempted: 1 if a state was swapped or dropped together with the blocks.
    """
    by: str = ""
    """asked, engine_paused, single_step: name of the user who requested it. engine_resumed: name of the user who had
    paused the engine.

    For asked, the fields with the costs of a preemption (such as `swap_ns`) are set too.
    """
    finish_reason: str = ""
    """ended: a `FinishReason`, or a value introduced by a later version."""
    num_set_aside: int = 0
    """started: contiguous blocks reserved for the request at its start, even if it does not fill them; 0 if blocks are
    allocated as tokens arrive.
    """
    stopped_ns: int = 0
    """started: time for which the engine was paused or suspended while the request waited. Not part of `waited_ns`."""
    lasted_ns: int = 0
    """engine_resumed: duration of the pause. single_step: duration of the step. process_suspended: duration of the
    suspension.
    """
    slept_ns: int = 0
    """process_suspended: part of `lasted_ns` in which the machine slept, so that the monotonic clock also stopped."""
    why: str = ""
    """engine_resumed: why the pause ended. restarted: why the step failed; the fields with the costs of a
    preemption (such as `swap_ns`) are set too.
    """
    num_loaded_states: int = 0
    """started: 1 if the state from which the request continues was loaded from host memory."""


class Event(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """A change of a request or of the engine, with its cause."""

    kind: str
    """Name of an `EventKind`. Decoding removes events of unknown kinds (`unknown`)."""
    time_ns: int
    number: int = 0
    """Number of the affected request; 0 if there is none."""
    other: int = 0
    """Number of the request that caused the event, for example by needing a block; 0 if there is none."""
    cause: str = ""
    """Text of the cause, for events without data and for readers that do not support `data`."""
    num_blocks: int = 0
    num_tokens: int = 0
    data: EventData | None = None


PAUSED: Final = "paused"
SUSPENDED: Final = "suspended"


class Stop(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """Time span in which the engine was paused or suspended, on the clock of its sender."""

    begin_ns: int
    end_ns: int = 0
    """End of the span; 0 if it has not ended yet."""
    kind: str = PAUSED
    """`PAUSED` (by a user) or `SUSPENDED` (the process was stopped, or the machine slept)."""
    by: str = ""
    """Name of the user who paused the engine; empty for a suspension."""


class Frame(_Message, frozen=True, kw_only=True):
    """All changes since the previous frame, usually those of one step of the engine."""

    epoch: int
    seq: int
    """Number of the frame in its epoch, from 1. Receivers request a snapshot when a number is missing."""
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
    """Time from arrival to first token of each request that got its first token in this step; u8 each."""
    inter_token_ns: Times = b""
    """Time since the previous token of each request that got a later token in this step; u8 each."""
    moves: Moves = Moves()
    work: Work = NO_WORK


class DeltaCheckpoint(Frame, frozen=True, kw_only=True):
    """Several frames merged into one, with the last value of everything that changed after frame `since_seq`.

    Written to recordings only; no engine sends it. `seq`, `step` and `time_ns` are those of the last frame. Transient
    data of the frames in between (batches, timings, events, moves) is not included.
    """

    since_seq: int = 0
    """Sequence number of the frame before the first merged frame."""


class Snapshot(_Message, frozen=True, kw_only=True):
    """The complete state after frame `seq`. Receivers drop frames up to `seq` and apply later ones."""

    hello: Hello
    seq: int
    step: int
    time_ns: int
    blocks: BlockRows
    """All ledger rows in order of block id; `ids` is empty."""
    requests_info: tuple[RequestInfo, ...] = ()
    """Unfinished requests."""
    requests: RequestRows = NO_REQUESTS
    counters: Counters = Counters()
    tag: int = 0
    """Tag of the `GetSnapshot` command that this message answers."""
    stops: tuple[Stop, ...] = ()
    """Pauses and suspensions since the arrival of the oldest request in the snapshot. The newest one may still
    be in progress.
    """


class Heartbeat(_Message, frozen=True, kw_only=True):
    """Sign of life, sent every half second even while a step runs. It distinguishes an idle engine from a hung one."""

    epoch: int
    time_ns: int
    seq: int
    """Sequence number of the last published frame. A subscriber whose last frame has a lower number has missed
    frames.
    """
    step: int
    num_unfinished: int = 0
    step_started_ns: int = 0
    """Start of the step in progress; 0 between steps."""
    paused_by: str = ""
    """Names of the users who paused the engine, separated by commas; empty if the engine is not paused."""
    pinned: bytes = b""
    """Ids of the blocks that are pinned, and so not evicted; ascending, u4 each."""
    pinned_by: str = ""
    """Names of the users who pinned the blocks; empty if no blocks are pinned."""
    max_num_seqs: int = 0
    """Maximum number of running requests that the scheduler currently allows. This field and
    `max_num_batched_tokens` are 0 if the engine does not publish its limits.
    """
    max_num_batched_tokens: int = 0


class DeviceSample(_Message, frozen=True, kw_only=True):
    """Measurements of the device and the engine's process. -1 means unknown, never zero."""

    epoch: int
    time_ns: int
    memory_total_bytes: int = -1
    memory_used_bytes: int = -1
    """Memory used by all processes on the device (host memory if the device is a CPU)."""
    process_bytes: int = -1
    """Memory used by the engine: device memory on a GPU, resident set on a CPU."""
    utilization: float = -1.0
    """Utilization of the GPU, or the engine's share of all CPUs, 0 to 1. If there is no engine, the utilization of all
    CPUs.
    """
    power_watts: float = -1.0
    temperature_celsius: float = -1.0


class ModuleBytes(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes of weights in one kind of module. All kinds add up to the model's weights."""

    name: str
    num_bytes: int


class RankMemory(msgspec.Struct, frozen=True, kw_only=True):
    rank: int
    device: str
    weights_bytes: int
    kv_bytes: int
    uuid: str = ""
    """UUID of the rank's GPU, as in `DeviceInfo.uuids`; empty if unknown, or without a GPU."""


class MemoryBreakdown(_Message, frozen=True, kw_only=True):
    """Memory use in bytes by purpose. Used, cached and free KV bytes are derived from the ledger."""

    epoch: int
    time_ns: int
    weights_bytes: int = 0
    kv_bytes: int = 0
    """Bytes of the whole pool: num_blocks x block_bytes, or all pages (allocator `virtual`)."""
    workspace_bytes: int = -1
    """Bytes of activations, graphs and buffers, if the allocator reports them; -1 if unknown."""
    kv_resident_bytes: int = -1
    """Part of `kv_bytes` that is currently mapped to physical memory (allocator `virtual`); -1 if not measured."""
    step_bytes: int = -1
    """Bytes reserved for the largest step (activations, logits, partial attention results); -1 if none were planned."""
    graphs_bytes: int = -1
    """Bytes reserved for CUDA graphs and their inputs; 0 without graphs, -1 if unknown."""
    staging_bytes: int = -1
    """Bytes of the staging buffers for transfers of blocks to host memory."""
    modules: tuple[ModuleBytes, ...] = ()
    """`weights_bytes` by kind of module (embeddings, attention, MLP, ...); empty if unknown."""
    allocated_bytes: int = -1
    """Bytes in tensors (`torch.cuda.memory_allocated`). This field and the next three are -1 on a CPU."""
    reserved_bytes: int = -1
    """Bytes that torch's allocator has reserved on the device, in tensors and cached."""
    split_bytes: int = -1
    """Cached bytes in segments that are partly in use. They cannot be returned to the device before the whole segment
    is free.
    """
    peak_bytes: int = -1
    """Peak of `allocated_bytes` since the engine began to serve."""
    context_bytes: int = -1
    """Bytes that the process used outside torch's allocator when the engine began to serve (driver context, kernels,
    libraries); -1 if the driver did not report them.
    """
    ranks: tuple[RankMemory, ...] = ()
    """Memory of each rank, in order, if there are several. All other fields are those of rank 0."""
    host_weights_bytes: int = 0
    """Bytes of weights that stay in host memory and are streamed to the device. Not part of `weights_bytes`."""


class Progress(_Message, frozen=True, kw_only=True):
    """Progress of a download or of loading a model, before the engine is ready."""

    stage: str
    """Stage of the start: "compile", "download", "convert", "wait" (for another engine), "load", "warm up", or "ready".
    """
    detail: str = ""
    done: int = 0
    total: int = 0
    """Total in `unit`; 0 if unknown."""
    unit: str = ""
    """Unit of the progress: "bytes", "tensors", or ""."""


class Goodbye(_Message, frozen=True, kw_only=True):
    """Last message of an engine. `reason` is empty after a normal shutdown, else one line with the error."""

    epoch: int
    reason: str = ""


class Histogram(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """Latencies as counts per interval, packed little-endian."""

    kind: str
    """"first_token", "inter_token" or "queued". Readers skip other kinds."""
    bounds_ns: bytes = b""
    """Upper bounds of all intervals except the last, which is unbounded; ascending, u8 each."""
    counts: bytes = b""
    """Number of latencies per interval since the previous `Reading`, u8 each, with one entry more than `bounds_ns`."""


class MetricFigure(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """Metric of an external engine that kvscope displays unchanged, with a label from kvscope's module for that
    engine.
    """

    name: str
    """Label for users, such as "Sliding-window pool in use"."""
    value: float
    unit: str = ""
    """"share" (0 to 1), "tokens", "bytes", "blocks", "s", or a unit introduced by a later version."""
    metric: str = ""
    """Name of the metric on the server's metrics page."""


class Reading(_Message, frozen=True, kw_only=True):
    """Values of an engine's metrics page. Sent if `Capabilities` lacks `free_rows` or `latencies`."""

    epoch: int
    time_ns: int
    used_share: float = -1.0
    """Used share of the pool's blocks, 0 to 1, as the engine counts them; -1 if unknown."""
    latencies: tuple[Histogram, ...] = ()
    figures: tuple[MetricFigure, ...] = ()


class Fingerprints(_Message, frozen=True, kw_only=True):
    """Hashes of the results of a deterministic engine's step, which can be compared between runs with different
    schedules.

    There is one hash per layer of each block that became full, and one of the logits of each sampled token.
    """

    epoch: int
    step: int
    time_ns: int
    num_layers: int = 0
    """Number of layers with keys and values."""
    number: RowNumbers = b""
    """Number of each block's request, u4 each. Blocks found in the prefix cache are not repeated."""
    place: RowCounts = b""
    """Index of each block in its request's block table, from 0, u4 each."""
    digests: bytes = b""
    """Hashes of each layer, block after block, u8 each: BLAKE2b of 8 bytes over the keys, then the values, slot after
    slot. 0 if the layer uses another layer's KV, or has freed the block.
    """
    sampled_number: bytes = b""
    """Number of each sampled token's request, u4 each. Rejected speculative tokens are not included."""
    sampled_place: bytes = b""
    """Number of output tokens of the request before each sampled token, u4 each."""
    logit_sums: bytes = b""
    """Sum modulo 2^64 of the bit patterns of each token's logits as integers, u8 each."""


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
