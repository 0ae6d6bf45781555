"""The messages of the command socket: what a client asks, and what the engine answers.

Same rules of evolution as `messages`. A client is a ZeroMQ DEALER that sends one frame a message; the engine
answers each on the same socket. Everything is bounded before it is believed.
"""

from __future__ import annotations

from typing import Annotated, Final, Literal, TypeAlias

import msgspec

from kvscope_telemetry.messages.sampling_params import SamplingParams
from kvscope_telemetry.messages.telemetry import Hello, Progress, Snapshot

MAX_COMMAND_BYTES: Final = 8 << 20
MAX_PROMPT_CHARACTERS: Final = 4 << 20
MAX_CHAT_MESSAGES: Final = 4096
MAX_PROMPT_TOKENS: Final = 2 << 20
MAX_TOOL_CALLS: Final = 128
"""Of one turn."""
MAX_SALT_CHARACTERS: Final = 1024
MAX_ADAPTER_CHARACTERS: Final = 256
MAX_PATH_CHARACTERS: Final = 4096
MAX_TEXT_BLOCKS: Final = 4096
MAX_AWAITED: Final = 10_000
MAX_STEPS: Final = 1000
"""That one command asks for."""

RequestId = Annotated[str, msgspec.Meta(min_length=1, max_length=128)]
Tag = Annotated[int, msgspec.Meta(ge=0, le=(1 << 53))]
Blocks = Annotated[tuple[Annotated[int, msgspec.Meta(ge=0)], ...], msgspec.Meta(max_length=MAX_TEXT_BLOCKS)]
ClientName = Annotated[str, msgspec.Meta(max_length=64)]
PromptText = Annotated[str, msgspec.Meta(max_length=MAX_PROMPT_CHARACTERS)]
AdapterName = Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_ADAPTER_CHARACTERS)]


class _Command(msgspec.Struct, frozen=True, kw_only=True, tag=True, omit_defaults=True):
    pass


class ToolCall(msgspec.Struct, frozen=True, kw_only=True):
    """A function that the model called in a turn."""

    id: Annotated[str, msgspec.Meta(max_length=256)] = ""
    name: Annotated[str, msgspec.Meta(min_length=1, max_length=256)]
    arguments: PromptText = "{}"
    """A JSON object, as text."""


class ChatMessage(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One turn of a conversation. What is empty is not shown to the chat template, `content` apart."""

    role: Literal["system", "user", "assistant", "tool"]
    content: PromptText
    tool_calls: Annotated[tuple[ToolCall, ...], msgspec.Meta(max_length=MAX_TOOL_CALLS)] = ()
    """Of an assistant's turn."""
    tool_call_id: Annotated[str, msgspec.Meta(max_length=256)] = ""
    """Of a tool's turn: which call it answers."""
    name: Annotated[str, msgspec.Meta(max_length=256)] = ""
    """Who speaks, or which tool."""


class Submit(_Command, frozen=True, kw_only=True):
    """Run a request. Exactly one of `prompt`, `messages` and `prompt_token_ids` is given.

    `prompt` goes through the chat template as one user message unless `raw`.
    """

    request_id: RequestId
    prompt: PromptText | None = None
    messages: Annotated[tuple[ChatMessage, ...], msgspec.Meta(max_length=MAX_CHAT_MESSAGES)] | None = None
    prompt_token_ids: Annotated[tuple[int, ...], msgspec.Meta(max_length=MAX_PROMPT_TOKENS)] | None = None
    raw: bool = False
    sampling: SamplingParams = SamplingParams()
    priority: Annotated[int, msgspec.Meta(ge=-1000, le=1000)] = 0
    cache_salt: Annotated[str, msgspec.Meta(max_length=MAX_SALT_CHARACTERS)] = ""
    """Cached prefixes are shared only among requests of the same salt."""
    tools: PromptText = ""
    """A JSON array of the functions that the model may call, as OpenAI writes them; for the chat template."""
    client: ClientName = ""
    """For whom a client of this socket asks that serves several, as the HTTP API does; they take turns and are limited
    each. Empty: for itself."""
    batch: Annotated[str, msgspec.Meta(max_length=128)] = ""
    """What belongs together of what was asked for at once; a client's batches take turns. Empty: this request alone."""
    adapter: Annotated[str, msgspec.Meta(max_length=MAX_ADAPTER_CHARACTERS)] = ""
    """The name of the LoRA adapter that it is computed with. Empty: the model alone."""


class Abort(_Command, frozen=True, kw_only=True):
    """Stop a request of this client; unknown and finished ones are answered with `Done` all the same.

    Another client's is refused, unless `anyones` says that it is meant.
    """

    request_id: RequestId
    anyones: bool = False
    client: ClientName = ""
    """As in its `Submit`, the next too: it is carried out after that one."""
    batch: Annotated[str, msgspec.Meta(max_length=128)] = ""


class GetSnapshot(_Command, frozen=True, kw_only=True):
    """Ask for the whole state, answered with `Snapshot`."""

    tag: Tag = 0


class Awaited(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A request whose end a client has not heard, as it tells after a reconnection."""

    request_id: RequestId
    heard: Annotated[tuple[int, ...], msgspec.Meta(max_length=1024)] = ()
    """For each completion how many `Tokens` came, -1 once its `Finished` came; empty: not even `Accepted`."""


class GetStatus(_Command, frozen=True, kw_only=True):
    """Ask how the engine is, answered with `Status` at once, also while a model loads.

    With a `session` it also introduces the client: the same one presented on another connection gets the
    client's requests, and what was said about those it still awaits.
    """

    tag: Tag = 0
    session: Annotated[str, msgspec.Meta(max_length=64)] = ""
    """The client's own secret: 128 random bits in hexadecimal."""
    awaited: Annotated[tuple[Awaited, ...], msgspec.Meta(max_length=MAX_AWAITED)] = ()


class GetBlockText(_Command, frozen=True, kw_only=True):
    """Ask for the tokens and text in blocks, answered with `BlockText`."""

    blocks: Blocks
    tag: Tag = 0


class GetAllocatorMap(_Command, frozen=True, kw_only=True):
    """Ask how torch's allocator divides the GPU's memory now, answered with `AllocatorMap` between two steps."""

    tag: Tag = 0


class Control(_Command, frozen=True, kw_only=True):
    """Engine control, answered with `Done` or `Failed`."""

    action: Literal["shutdown", "reset_prefix_cache", "pause", "resume", "step"]
    """"step" runs `num_steps` while the engine is paused, and is answered when they ran."""
    tag: Tag = 0
    lease_s: Annotated[float, msgspec.Meta(ge=0, le=3600)] = 0.0
    """A pause ends when nothing is heard of its client for so long; 0: when its connection ends."""
    num_steps: Annotated[int, msgspec.Meta(ge=1, le=MAX_STEPS)] = 1


class Preempt(_Command, frozen=True, kw_only=True):
    """A running request gives up its blocks and waits again; answered with `Done` or `Failed`."""

    number: Annotated[int, msgspec.Meta(ge=1, le=(1 << 32) - 1)]
    """The engine's own, as in `RequestInfo`."""
    how: Literal["", "swap", "recompute"] = ""
    """Empty: as the engine does when it is short of blocks."""
    tag: Tag = 0


class Pin(_Command, frozen=True, kw_only=True):
    """Full, hashed blocks are not evicted until this client lets them, or goes; answered with `Done` or `Failed`."""

    blocks: Blocks
    tag: Tag = 0
    with_prefix: bool = False
    """Also the blocks before each in its text, as far as they are cached."""


class Unpin(_Command, frozen=True, kw_only=True):
    """This client's pins on `blocks` end, all its pins where none are given; answered with `Done` or `Failed`."""

    blocks: Blocks = ()
    tag: Tag = 0
    anyones: bool = False
    """The pins of all clients."""


class Evict(_Command, frozen=True, kw_only=True):
    """Idle cached blocks that are not pinned lose their prefix; answered with `Done` or `Failed`."""

    blocks: Blocks
    tag: Tag = 0


class SetLimits(_Command, frozen=True, kw_only=True):
    """Change the limits of the batch, up to those the engine started with; answered with `Done` or `Failed`."""

    max_num_seqs: Annotated[int, msgspec.Meta(ge=0, le=1 << 20)] = 0
    """0: as it is; the next too."""
    max_num_batched_tokens: Annotated[int, msgspec.Meta(ge=0, le=1 << 31)] = 0
    tag: Tag = 0


class LoadAdapter(_Command, frozen=True, kw_only=True):
    """Load a LoRA adapter from a folder that the engine can read; answered with `Done` or `Failed`."""

    name: AdapterName
    path: Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_PATH_CHARACTERS)]
    tag: Tag = 0


class UnloadAdapter(_Command, frozen=True, kw_only=True):
    """Take no more requests for a LoRA adapter; those that have it go on. Answered with `Done` or `Failed`."""

    name: AdapterName
    tag: Tag = 0


Intervention: TypeAlias = Preempt | Pin | Unpin | Evict | SetLimits | LoadAdapter | UnloadAdapter
"""What a person does to a running engine, to see what happens."""
Command: TypeAlias = Submit | Abort | GetSnapshot | GetStatus | GetBlockText | GetAllocatorMap | Control | Intervention


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens of one completion."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0


class RequestTiming(msgspec.Struct, frozen=True, kw_only=True):
    """Times of one completion in seconds of the engine's monotonic clock; None: never got that far."""

    queue_s: float | None = None
    """Running time, without what the engine was paused or suspended (`RunningTime`); so is the next."""
    ttft_s: float | None = None
    total_s: float = 0.0
    """All of the time, that one included."""
    stopped_s: float = 0.0
    """How much of `total_s` the engine stood still."""


FinishReason: TypeAlias = Literal["stop", "length", "abort", "error"]


class TokenLogprobs(msgspec.Struct, frozen=True, kw_only=True):
    """Log-probabilities (natural, of the model's own distribution) at one position."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    """(token id, log-probability), most likely first."""


class Accepted(_Command, frozen=True, kw_only=True):
    """The request is in the queue. `numbers` are the engine's, one a completion."""

    request_id: str
    numbers: tuple[int, ...]
    num_prompt_tokens: int


class Refused(_Command, frozen=True, kw_only=True):
    """The request was not taken; nothing of it is left."""

    request_id: str
    reason: str


class Tokens(_Command, frozen=True, kw_only=True):
    """New tokens of a completion; `text` is what they add to it (held back at a possible stop string)."""

    request_id: str
    token_ids: tuple[int, ...]
    text: str
    index: int = 0
    logprobs: tuple[TokenLogprobs, ...] = ()
    num_missed: int = 0
    """How many `Tokens` before this one were said while the client was away, and not kept."""
    logprob_texts: tuple[tuple[str, ...], ...] = ()
    """For each of `logprobs` the text of its token, then of each of its `top`; none from a model without text."""


class Finished(_Command, frozen=True, kw_only=True):
    """A completion ended; all its tokens and text came before in `Tokens`."""

    request_id: str
    finish_reason: str
    """A `FinishReason`, or a word of a later version."""
    usage: Usage
    timing: RequestTiming
    index: int = 0
    error: str = ""


class BlockContent(msgspec.Struct, frozen=True, kw_only=True):
    """What a block holds: tokens `start` to `start + len(token_ids)` of a request, or of a cached prefix."""

    block: int
    number: int = 0
    start: int = 0
    token_ids: tuple[int, ...] = ()
    text: str = ""
    notes: tuple[tuple[str, str], ...] = ()
    """What else is told of it: names and values, as ("LoRA", "sql")."""


class BlockText(_Command, frozen=True, kw_only=True):
    """Answer to GetBlockText, in the order asked; blocks that hold nothing have no tokens."""

    contents: tuple[BlockContent, ...]
    tag: int = 0


class AllocatorMap(_Command, frozen=True, kw_only=True):
    """Answer to GetAllocatorMap: segments, the largest first, and their blocks, as columns of little-endian numbers.

    Sums and counts are of all there is, also where small neighbours are told as one block, or segments not at all.
    """

    tag: int = 0
    device: str = ""
    took_ns: int = 0
    """How long it took on the engine's thread."""
    segment_address: bytes = b""
    """u64 a segment."""
    segment_bytes: bytes = b""
    """u64 a segment."""
    segment_stream: bytes = b""
    """u64 a segment: the CUDA stream that its blocks are for; 0 is the default one."""
    segment_pool: bytes = b""
    """u8 a segment: 0 small blocks, 1 large ones, 2 a private pool (captured graphs)."""
    segment_num_blocks: bytes = b""
    """u32 a segment: how many of the blocks below are its."""
    block_offset: bytes = b""
    """u64 a block: from the start of its segment, ascending."""
    block_bytes: bytes = b""
    """u64 a block."""
    block_state: bytes = b""
    """u8 a block: 0 allocated, 1 freed and waiting for a stream, 2 cached, 3 small ones of several states, joined."""
    num_segments: int = 0
    num_blocks: int = 0
    total_bytes: int = 0
    allocated_bytes: int = 0
    pending_bytes: int = 0
    cached_bytes: int = 0
    split_bytes: int = 0
    """Of those cached, in segments that are partly in use: torch cannot give them back to the device."""
    largest_cached_bytes: int = 0
    """The largest cached block: the most that can be allocated without asking the device for more."""


class LoadedAdapter(msgspec.Struct, frozen=True, kw_only=True):
    """A LoRA adapter that requests may ask for."""

    name: str
    path: str


Phase: TypeAlias = Literal["loading", "ready", "failed"]


class Status(_Command, frozen=True, kw_only=True):
    """How the engine is."""

    phase: str
    """A `Phase`, or a word of a later version."""
    telemetry_endpoint: str
    progress: Progress | None = None
    hello: Hello | None = None
    """Given once the engine is ready."""
    reason: str = ""
    paused: bool = False
    tag: int = 0
    paused_by: str = ""
    """Names of those who paused the engine."""
    role: str = ""
    """What the asker may do here: "viewer" or "operator"; empty from engines that know no roles."""
    name: str = ""
    """What the engine calls the asker."""
    intervenes: bool = False
    """Whether it knows how to step, preempt, pin, evict and change its limits."""
    paused_s: float = 0.0
    """How long it has been paused; 0 while it is not."""
    busy_s: float = 0.0
    """How long the step, or the command, in progress has taken; 0 between them."""
    adapters: tuple[LoadedAdapter, ...] = ()
    takes_adapters: bool = False
    """Whether it loads and unloads LoRA adapters when asked."""


class Done(_Command, frozen=True, kw_only=True):
    """It was done. `request_id` is set in the answer to Abort."""

    tag: int = 0
    request_id: str = ""
    what: str = ""
    """What was done, in one line, where there is more to say than that it was."""


class Failed(_Command, frozen=True, kw_only=True):
    """A command that could not be read or done; `reason` is one line."""

    reason: str
    tag: int = 0
    request_id: str = ""
    """Of the request that could not be aborted."""


Reply: TypeAlias = Accepted | Refused | Tokens | Finished | BlockText | AllocatorMap | Status | Done | Failed | Snapshot


def refuse(command: Command, reason: str) -> Reply:
    """The negative answer that fits the command."""
    if isinstance(command, Submit):
        return Refused(request_id=command.request_id, reason=reason)
    if isinstance(command, Abort):
        return Failed(reason=reason, request_id=command.request_id)
    return Failed(reason=reason, tag=command.tag)
