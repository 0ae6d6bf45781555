"""Messages of the command socket: commands from clients, and the engine's replies.

The rules of schema evolution are those of `messages.telemetry`. A client is a ZeroMQ DEALER that sends one frame per
message; the engine replies on the same socket. Each field from a client has a bound that is checked during decoding.
"""

from __future__ import annotations

from typing import Annotated, Final, Literal, TypeAlias

import msgspec
from msgspec import UNSET, UnsetType

from kvscope_telemetry.messages.sampling_params import MAX_COMPLETIONS, SamplingParams
from kvscope_telemetry.messages.telemetry import Hello, Progress, Snapshot

MAX_COMMAND_BYTES: Final = 8 << 20
MAX_PROMPT_CHARACTERS: Final = 4 << 20
MAX_CHAT_MESSAGES: Final = 4096
MAX_PROMPT_TOKENS: Final = 2 << 20
MAX_TOOL_CALLS: Final = 128
"""Maximum number of tool calls per chat message."""
MAX_SALT_CHARACTERS: Final = 1024
MAX_ADAPTER_CHARACTERS: Final = 256
MAX_PATH_CHARACTERS: Final = 4096
MAX_TEXT_BLOCKS: Final = 4096
MAX_AWAITED: Final = 10_000
MAX_STEPS: Final = 1000

RequestId = Annotated[str, msgspec.Meta(min_length=1, max_length=128)]
Tag = Annotated[int, msgspec.Meta(ge=0, le=(1 << 53))]
Blocks = Annotated[tuple[Annotated[int, msgspec.Meta(ge=0)], ...], msgspec.Meta(max_length=MAX_TEXT_BLOCKS)]
ClientName = Annotated[str, msgspec.Meta(max_length=64)]
PromptText = Annotated[str, msgspec.Meta(max_length=MAX_PROMPT_CHARACTERS)]
AdapterName = Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_ADAPTER_CHARACTERS)]


class _Command(msgspec.Struct, frozen=True, kw_only=True, tag=True, omit_defaults=True):
    pass


class ToolCall(msgspec.Struct, frozen=True, kw_only=True):
    id: Annotated[str, msgspec.Meta(max_length=256)] = ""
    name: Annotated[str, msgspec.Meta(min_length=1, max_length=256)]
    arguments: PromptText = "{}"
    """JSON object as text."""


class ChatMessage(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One message of a conversation. Empty fields other than `content` are not passed to the chat template."""

    role: Literal["system", "user", "assistant", "tool"]
    content: PromptText
    tool_calls: Annotated[tuple[ToolCall, ...], msgspec.Meta(max_length=MAX_TOOL_CALLS)] = ()
    tool_call_id: Annotated[str, msgspec.Meta(max_length=256)] = ""
    name: Annotated[str, msgspec.Meta(max_length=256)] = ""
    token_ids: Annotated[tuple[int, ...], msgspec.Meta(max_length=MAX_PROMPT_TOKENS)] = ()
    """Tokens of an earlier answer, as the engine generated them. They replace the tokens of `content` if they have the
    same text, so that the prompt's blocks are found in the prefix cache.
    """


class Submit(_Command, frozen=True, kw_only=True):
    """Run a request. Exactly one of `prompt`, `messages` and `prompt_token_ids` must be given.

    Unless `raw`, `prompt` is passed through the chat template as one user message.
    """

    request_id: RequestId
    prompt: PromptText | None = None
    messages: Annotated[tuple[ChatMessage, ...], msgspec.Meta(max_length=MAX_CHAT_MESSAGES)] | None = None
    prompt_token_ids: Annotated[tuple[int, ...], msgspec.Meta(max_length=MAX_PROMPT_TOKENS)] | None = None
    raw: bool = False
    sampling: SamplingParams = SamplingParams()
    priority: Annotated[int, msgspec.Meta(ge=-1000, le=1000)] = 0
    cache_salt: Annotated[str, msgspec.Meta(max_length=MAX_SALT_CHARACTERS)] = ""
    """Requests share cached prefixes only with requests that have the same salt."""
    tools: PromptText = ""
    """JSON array of the functions that the model may call, in OpenAI's format; passed to the chat template."""
    client: ClientName = ""
    """Name of the client for which the request is submitted. If empty, it is the client of the socket.

    Used by programs that serve several clients, such as the HTTP API. Scheduling is fair among these names, and limits
    apply to each.
    """
    batch: Annotated[str, msgspec.Meta(max_length=128)] = ""
    """Id of a group of requests that were submitted together. If empty, the request is a group by itself.

    Scheduling is fair among a client's batches.
    """
    adapter: Annotated[str, msgspec.Meta(max_length=MAX_ADAPTER_CHARACTERS)] = ""
    """Name of the LoRA adapter; empty for the base model."""


class Abort(_Command, frozen=True, kw_only=True):
    """Abort a request of this client. `Done` is also the reply for unknown and finished requests.

    A request of another client is aborted only if `anyones` is set; otherwise, the command is refused.
    """

    request_id: RequestId
    anyones: bool = False
    client: ClientName = ""
    """Value of `Submit.client` of the request, for programs that serve several clients. If `client` and `batch`
    equal those of the Submit, both commands are in the same queue, so the Abort is executed after the Submit.
    """
    batch: Annotated[str, msgspec.Meta(max_length=128)] = ""
    index: Annotated[int, msgspec.Meta(ge=0, le=MAX_COMPLETIONS - 1)] | None = None
    """Index of the only completion to abort; None aborts all. Requires `Capabilities.completion_aborts`: other engines
    ignore the index and abort all completions.
    """


class EstimatePrompt(_Command, frozen=True, kw_only=True):
    """Ask what a prompt would cost, without running it; answered with `PromptEstimate` or `Failed`.

    Requires `Capabilities.prompt_estimates`. The estimate changes no block, no queue and no statistics. The fields have
    the meaning of those of `Submit`.
    """

    messages: Annotated[tuple[ChatMessage, ...], msgspec.Meta(min_length=1, max_length=MAX_CHAT_MESSAGES)]
    """Messages of the prompt. The last one is the draft, whose tokens are also counted separately."""
    cache_salt: Annotated[str, msgspec.Meta(max_length=MAX_SALT_CHARACTERS)] = ""
    tools: PromptText = ""
    adapter: Annotated[str, msgspec.Meta(max_length=MAX_ADAPTER_CHARACTERS)] = ""
    tag: Tag = 0


class GetSnapshot(_Command, frozen=True, kw_only=True):
    """Request the complete state, answered with `Snapshot`."""

    tag: Tag = 0


class Awaited(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A request whose end the client has not received. After a reconnection, the client lists such requests in
    `GetStatus.awaited`.
    """

    request_id: RequestId
    heard: Annotated[tuple[int, ...], msgspec.Meta(max_length=1024)] = ()
    """Number of `Tokens` messages received for each completion, or -1 once its `Finished` was received.

    Empty if not even `Accepted` was received.
    """


class GetStatus(_Command, frozen=True, kw_only=True):
    """Request the engine's status, answered immediately with `Status`, even while a model loads.

    A `session` also identifies the client. If it was connected before, the new connection takes over the client's
    requests, and the replies that the client missed for the requests in `awaited` are sent again.
    """

    tag: Tag = 0
    session: Annotated[str, msgspec.Meta(max_length=64)] = ""
    """Secret generated by the client: 128 random bits in hexadecimal."""
    awaited: Annotated[tuple[Awaited, ...], msgspec.Meta(max_length=MAX_AWAITED)] = ()


class GetBlockText(_Command, frozen=True, kw_only=True):
    """Request the tokens and text of blocks, answered with `BlockText`."""

    blocks: Blocks
    tag: Tag = 0


class GetAllocatorMap(_Command, frozen=True, kw_only=True):
    """Request the segments and memory blocks (not KV blocks) of torch's GPU allocator, answered with
    `AllocatorMap` between two steps.
    """

    tag: Tag = 0


class Control(_Command, frozen=True, kw_only=True):
    """Control the engine; answered with `Done` or `Failed`."""

    action: Literal["shutdown", "reset_prefix_cache", "pause", "resume", "step"]
    """"step" runs `num_steps` steps while the engine is paused, and is answered once they have run."""
    tag: Tag = 0
    lease_s: Annotated[float, msgspec.Meta(ge=0, le=3600)] = 0.0
    """The client's pause ends when the client has sent no message for this many seconds. If 0, the pause ends
    when the connection closes.
    """
    num_steps: Annotated[int, msgspec.Meta(ge=1, le=MAX_STEPS)] = 1


class Preempt(_Command, frozen=True, kw_only=True):
    """Preempt a running request, which then waits again; answered with `Done` or `Failed`."""

    number: Annotated[int, msgspec.Meta(ge=1, le=(1 << 32) - 1)]
    """Number of the request as in `RequestInfo`."""
    how: Literal["", "swap", "recompute"] = ""
    """How to free the request's blocks. If empty, the engine's preemption mode decides."""
    tag: Tag = 0


class Pin(_Command, frozen=True, kw_only=True):
    """Protect full, hashed blocks from eviction until this client unpins them or disconnects.

    Answered with `Done` or `Failed`.
    """

    blocks: Blocks
    tag: Tag = 0
    with_prefix: bool = False
    """Whether to also pin the cached blocks that precede each block in its prefix."""


class Unpin(_Command, frozen=True, kw_only=True):
    """Remove this client's pins on `blocks`, or all of its pins if `blocks` is empty; answered with `Done` or
    `Failed`.
    """

    blocks: Blocks = ()
    tag: Tag = 0
    anyones: bool = False
    """Whether to remove the pins of all clients."""


class Evict(_Command, frozen=True, kw_only=True):
    """Drop the cached prefix of idle blocks that are not pinned; answered with `Done` or `Failed`."""

    blocks: Blocks
    tag: Tag = 0


class SetLimits(_Command, frozen=True, kw_only=True):
    """Change the batch limits, up to those with which the engine was started; answered with `Done` or `Failed`."""

    max_num_seqs: Annotated[int, msgspec.Meta(ge=0, le=1 << 20)] = 0
    """New maximum number of running requests. 0 leaves the limit unchanged; the same holds for
    `max_num_batched_tokens`.
    """
    max_num_batched_tokens: Annotated[int, msgspec.Meta(ge=0, le=1 << 31)] = 0
    tag: Tag = 0


class LoadAdapter(_Command, frozen=True, kw_only=True):
    """Load a LoRA adapter from a directory that the engine can read; answered with `Done` or `Failed`."""

    name: AdapterName
    path: Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_PATH_CHARACTERS)]
    tag: Tag = 0


class UnloadAdapter(_Command, frozen=True, kw_only=True):
    """Accept no more requests for a LoRA adapter. Requests that use it continue. Answered with `Done` or `Failed`."""

    name: AdapterName
    tag: Tag = 0


Intervention: TypeAlias = Preempt | Pin | Unpin | Evict | SetLimits | LoadAdapter | UnloadAdapter
"""Commands with which a user interferes with scheduling and caching, to observe the effect."""
Command: TypeAlias = (
    Submit | Abort | EstimatePrompt | GetSnapshot | GetStatus | GetBlockText | GetAllocatorMap | Control | Intervention
)


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0


class RequestTiming(msgspec.Struct, frozen=True, kw_only=True):
    """Durations of one completion in seconds of the engine's monotonic clock. A duration is None if its end was not
    reached.
    """

    queue_s: float | None = None
    """Time in the queue. Like `ttft_s`, it is running time (`RunningTime`), without pauses and suspensions."""
    ttft_s: float | None = None
    total_s: float = 0.0
    """Total time including pauses and suspensions."""
    stopped_s: float = 0.0
    """Part of `total_s` in which the engine was paused or suspended."""


FinishReason: TypeAlias = Literal["stop", "length", "abort", "error"]


class TokenLogprobs(msgspec.Struct, frozen=True, kw_only=True):
    """Natural logarithms of the probabilities of tokens at one position, in the model's distribution before
    sampling options are applied.
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    """(token id, log-probability) pairs, most likely first."""
    rank: int | UnsetType = UNSET
    """Rank of the token among all, 1 for the most likely one. Only tokens of prompts have it."""


class Accepted(_Command, frozen=True, kw_only=True):
    """The request is queued. `numbers` are the engine's request numbers, one per completion."""

    request_id: str
    numbers: tuple[int, ...]
    num_prompt_tokens: int


class Refused(_Command, frozen=True, kw_only=True):
    """The request was not accepted. The engine retains nothing of it."""

    request_id: str
    reason: str
    is_too_long: bool = False
    """Whether a shorter prompt, or a smaller limit of its output, would have been accepted. Engines that do not report
    why they refuse leave it False.
    """


class PromptEstimate(_Command, frozen=True, kw_only=True):
    """Answer to EstimatePrompt: what the prompt would cost if it were submitted now. None means unknown."""

    num_prompt_tokens: int
    num_draft_tokens: int | None = None
    """Number of tokens of the last message's text, without those that the chat template adds."""
    num_cached_tokens: int | None = None
    """Number of prompt tokens that would be reused from the prefix cache, including its lower tiers."""
    max_request_tokens: int | None = None
    """Maximum number of tokens of one request, prompt and answer."""
    ttft_s: float | None = None
    """Estimated seconds to the first token: the time to compute the prompt's other tokens, and before them those of
    the prompts that are waiting or being computed. None before the engine has measured its prefill speed, and if all
    places among the running requests are taken.
    """
    num_waiting: int | None = None
    """Number of waiting requests."""
    tag: int = 0


class Tokens(_Command, frozen=True, kw_only=True):
    """New tokens of a completion.

    `text` is the text that these tokens add. Text that may be the beginning of a stop string is sent with a later
    message.
    """

    request_id: str
    token_ids: tuple[int, ...]
    text: str
    index: int = 0
    logprobs: tuple[TokenLogprobs, ...] = ()
    num_missed: int = 0
    """Number of preceding `Tokens` messages that the client cannot get any more. They were sent while it was
    disconnected.
    """
    logprob_texts: tuple[tuple[str, ...], ...] = ()
    """For each of `logprobs`, the text of its token, then of each of its `top`; empty without a tokenizer."""
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    """Log-probabilities of the next prompt tokens, from the second one on, if `SamplingParams.prompt_logprobs` is
    set. They are sent while the prompt is computed, before the first new token.
    """
    prompt_logprob_texts: tuple[tuple[str, ...], ...] = ()
    """For each entry of `prompt_logprobs`, the text of its token, then the text of each of its `top` tokens.

    Empty without a tokenizer.
    """


class Finished(_Command, frozen=True, kw_only=True):
    """A completion ended. All its tokens and text were sent before in `Tokens` messages."""

    request_id: str
    finish_reason: str
    """A `FinishReason`, or a value introduced by a later version."""
    usage: Usage
    timing: RequestTiming
    index: int = 0
    error: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    """Calls of functions in the answer, if the request had `Submit.tools`."""
    content: str | None = None
    """Text of the answer without its calls, with reasoning between `<think>` tags; None if it is the text of the
    `Tokens` messages.
    """


class BlockContent(msgspec.Struct, frozen=True, kw_only=True):
    """Contents of a block: tokens `start` to `start + len(token_ids)` of a request or of a cached prefix."""

    block: int
    number: int = 0
    start: int = 0
    token_ids: tuple[int, ...] = ()
    text: str = ""
    notes: tuple[tuple[str, str], ...] = ()
    """Further (name, value) pairs, such as ("LoRA", "sql")."""


class BlockText(_Command, frozen=True, kw_only=True):
    """Answer to GetBlockText in the requested order. Empty blocks have no tokens."""

    contents: tuple[BlockContent, ...]
    tag: int = 0


class AllocatorMap(_Command, frozen=True, kw_only=True):
    """Answer to GetAllocatorMap: the segments of torch's allocator, largest first, and their memory blocks, as columns
    of little-endian numbers.

    Totals and counts cover all segments and blocks, even if adjacent small blocks are merged in the columns or segments
    are left out.
    """

    tag: int = 0
    device: str = ""
    took_ns: int = 0
    """Nanoseconds of the engine's thread spent on creating the map."""
    segment_address: bytes = b""
    """Address of each segment, u64."""
    segment_bytes: bytes = b""
    """Size of each segment in bytes, u64."""
    segment_stream: bytes = b""
    """CUDA stream on which each segment's blocks are used, u64; 0 is the default stream."""
    segment_pool: bytes = b""
    """Pool of each segment, u8: 0 for small blocks, 1 for large blocks, 2 for a private pool (captured graphs)."""
    segment_num_blocks: bytes = b""
    """Number of entries of each segment in the block columns, u32."""
    block_offset: bytes = b""
    """Offset of each block from the start of its segment in bytes, u64, ascending."""
    block_bytes: bytes = b""
    """Size of each block in bytes, u64."""
    block_state: bytes = b""
    """State of each block, u8: 0 allocated, 1 freed but still used by a stream, 2 cached, 3 several small blocks of
    different states.
    """
    num_segments: int = 0
    num_blocks: int = 0
    total_bytes: int = 0
    allocated_bytes: int = 0
    pending_bytes: int = 0
    cached_bytes: int = 0
    split_bytes: int = 0
    """Cached bytes in segments that are partly in use, which torch cannot return to the device."""
    largest_cached_bytes: int = 0
    """Size of torch's largest cached memory block, which is the largest allocation that needs no new memory
    from the device.
    """


class LoadedAdapter(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    path: str


Phase: TypeAlias = Literal["loading", "ready", "failed"]


class Status(_Command, frozen=True, kw_only=True):
    phase: str
    """A `Phase`, or a value introduced by a later version."""
    telemetry_endpoint: str
    progress: Progress | None = None
    hello: Hello | None = None
    """Set once the engine is ready."""
    reason: str = ""
    paused: bool = False
    tag: int = 0
    paused_by: str = ""
    """Names of the users who paused the engine; empty if it is not paused."""
    role: str = ""
    """Role of the client: "viewer" or "operator"; empty from engines without roles."""
    name: str = ""
    """Name by which the engine identifies the client."""
    intervenes: bool = False
    """Whether the engine supports stepping, preempting, pinning, evicting and changing limits."""
    paused_s: float = 0.0
    """Seconds since the current pause began; 0 if the engine is not paused."""
    busy_s: float = 0.0
    """Seconds since the step or command in progress began; 0 if there is none."""
    adapters: tuple[LoadedAdapter, ...] = ()
    takes_adapters: bool = False
    """Whether the engine loads and unloads LoRA adapters on request."""


class Done(_Command, frozen=True, kw_only=True):
    """The command succeeded. `request_id` is set in the answer to Abort."""

    tag: int = 0
    request_id: str = ""
    what: str = ""
    """One line on what was done, if that is not obvious from the command."""


class Failed(_Command, frozen=True, kw_only=True):
    """A command could not be decoded or executed. `reason` is one line."""

    reason: str
    tag: int = 0
    request_id: str = ""
    """Id of the request that could not be aborted; empty for other commands."""
    is_unanswered: bool = False
    """Whether the command was not judged, for example because no server answered: another try could succeed."""


Reply: TypeAlias = (
    Accepted
    | Refused
    | PromptEstimate
    | Tokens
    | Finished
    | BlockText
    | AllocatorMap
    | Status
    | Done
    | Failed
    | Snapshot
)


def refuse(command: Command, reason: str, *, is_temporary: bool = False) -> Reply:
    """Return the negative reply for the type of `command`. `is_temporary`: it was not judged, because of a limit."""
    if isinstance(command, Submit):
        return Refused(request_id=command.request_id, reason=reason)
    if isinstance(command, Abort):
        return Failed(reason=reason, request_id=command.request_id)
    is_unanswered = is_temporary and isinstance(command, EstimatePrompt)
    return Failed(reason=reason, tag=command.tag, is_unanswered=is_unanswered)
