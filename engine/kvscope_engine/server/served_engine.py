"""The interface that the server needs of an engine: `kvscope_engine.engine.Engine` in service, a small fake
in tests.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Protocol, TypeAlias

from kvscope_telemetry.messages.commands import (
    Accepted,
    AllocatorMap,
    BlockContent,
    Finished,
    LoadedAdapter,
    Submit,
    Tokens,
)
from kvscope_telemetry.messages.telemetry import Hello, MemoryBreakdown, Progress, Snapshot, TelemetryMessage
from kvscope_telemetry.texts.block_texts import RecordedText

OnProgress: TypeAlias = Callable[[Progress], None]
Publish: TypeAlias = Callable[[TelemetryMessage], None]


class ServedInterventions(Protocol):
    """What can be done to an engine between two steps. Each raises BadInput with the reason where it is not done."""

    @property
    def limits(self) -> tuple[int, int]:
        """`max_num_seqs` and `max_num_batched_tokens` as they are now."""

    @property
    def adapters(self) -> tuple[LoadedAdapter, ...]:
        """LoRA adapters that requests may ask for."""

    @property
    def takes_adapters(self) -> bool:
        """Whether adapters are loaded and unloaded while it serves."""

    @property
    def pinned(self) -> list[int]:
        """Blocks that are not evicted, ascending."""

    def preempt(self, number: int, how: str, by: str) -> str:
        """A running request gives up its blocks; what was done, in one line."""

    def pin(self, blocks: Sequence[int], by: str, *, with_prefix: bool) -> list[int]:
        """Keep blocks from being evicted; those that are pinned by this."""

    def unpin(self, blocks: Sequence[int], by: str) -> None:
        """They may be evicted again; does nothing for those that are not pinned."""

    def evict(self, blocks: Sequence[int], by: str) -> str:
        """Cached blocks lose their prefix; what was done, in one line."""

    def set_limits(self, max_num_seqs: int, max_num_batched_tokens: int, by: str) -> str:
        """For the steps from now on, 0 leaves one as it is; what was done, in one line."""

    def load_adapter(self, name: str, path: str, by: str) -> str:
        """Requests may ask for a LoRA adapter; what was done, in one line."""

    def unload_adapter(self, name: str, by: str) -> str:
        """They may no more; what was done, in one line."""


class ServedStops(Protocol):
    """When the engine stands still, told to everybody who watches."""

    def pause(self, by: str) -> None:
        """No step is run from now on, since `by` asked for it."""

    def resume(self, why: str) -> None:
        """Steps are run again, for the reason `why`."""

    def single_step(self, by: str) -> AbstractContextManager[None]:
        """A step that `by` asked for is run inside, though the engine is paused."""

    def beat(self) -> bool:
        """The process is alive, every half second, on any thread; whether there is a suspension to tell of."""

    def report_suspensions(self) -> None:
        """Tell of suspensions of the process that are over."""


class ServedEngine(Protocol):
    """An engine that is loaded.

    All methods are called on one thread; `prompt_token_ids`, `has_form`, `memory` and the attributes on any.
    """

    @property
    def hello(self) -> Hello:
        """Who it is."""

    @property
    def interventions(self) -> ServedInterventions:
        """What a person may do to it."""

    @property
    def stops(self) -> ServedStops:
        """When it stands still."""

    @property
    def failure(self) -> str:
        """Why it cannot go on, whether a step runs or not, as a line; empty while it can."""

    @property
    def has_unfinished(self) -> bool:
        """Whether `step` has something to do or to hand out."""

    @property
    def num_unfinished(self) -> int:
        """Requests in the queue or running."""

    @property
    def step_count(self) -> int:
        """Steps so far."""

    @property
    def step_started_ns(self) -> int:
        """When the step in progress began (monotonic), 0 between steps."""

    @property
    def last_seq(self) -> int:
        """The last frame's number."""

    def prompt_token_ids(self, submit: Submit, is_wanted: Callable[[], bool]) -> list[int]:
        """Tokens of the prompt; may take long, and may end early once it is not wanted any more. Raises BadInput."""

    def has_form(self, submit: Submit) -> bool:
        """Whether the form of its answers, if it is to have one, is compiled already."""

    def submit(self, submit: Submit, token_ids: Callable[[], list[int]] | None = None) -> Accepted:
        """Take a request; raises BadInput and leaves nothing behind.

        `token_ids` gives what `prompt_token_ids` gave before, or raises what it raised.
        """

    def abort(self, request_id: str) -> None:
        """End a request; does nothing for an unknown or finished one."""

    def list_aborted(self, submit: Submit) -> None:
        """Tell of a request that was aborted before its prompt was read: it was sent, and is listed."""

    def step(self, *, ahead: bool = True) -> list[Tokens | Finished]:
        """Run one step; empty when idle. Without `ahead` no other is begun before it is over."""

    def while_idle(self) -> bool:
        """What is better done while nobody waits for it: called where it has nothing unfinished. Whether there is more
        to be done in a while."""

    def settle(self) -> list[Tokens | Finished]:
        """End a step that was begun ahead; what it says."""

    def snapshot(self, tag: int) -> Snapshot:
        """The whole state after the last frame."""

    def take_ended(self) -> list[RecordedText]:
        """Requests that ended since it was asked before, whole; none the first time."""

    def block_text(self, blocks: Sequence[int]) -> tuple[BlockContent, ...]:
        """What the blocks hold; raises BadInput for a block that does not exist."""

    def allocator_map(self, tag: int) -> AllocatorMap:
        """How torch's allocator divides the GPU's memory; raises BadInput where it has none."""

    def reset_prefix_cache(self) -> None:
        """Forget what no request holds."""

    def memory(self) -> MemoryBreakdown:
        """Where the memory went."""

    def close(self) -> None:
        """Give everything back."""


MessagesDropped: TypeAlias = Callable[[], int]
BuildEngine: TypeAlias = Callable[[OnProgress, Publish, MessagesDropped], ServedEngine]
"""Loads a model and publishes its hello. Called once the sockets are up; imports torch only then."""
