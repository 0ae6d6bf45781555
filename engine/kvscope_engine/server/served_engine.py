"""Interface that the server needs of an engine: `kvscope_engine.engine.Engine` in service, a small fake in tests.

Methods without a docstring are described in `Engine` and in `kvscope_engine.interventions`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Protocol, TypeAlias

from kvscope_telemetry.block_texts.block_texts import RecordedText
from kvscope_telemetry.messages.commands import (
    Accepted,
    AllocatorMap,
    BlockContent,
    Finished,
    LoadedAdapter,
    PromptEstimate,
    Submit,
    Tokens,
)
from kvscope_telemetry.messages.telemetry import Hello, MemoryBreakdown, Progress, Snapshot, TelemetryMessage

OnProgress: TypeAlias = Callable[[Progress], None]
Publish: TypeAlias = Callable[[TelemetryMessage], None]


class ServedInterventions(Protocol):
    """Interventions between two steps (`kvscope_engine.interventions`).

    Methods return a one-line description of what was done, and raise BadInput with the reason if nothing was done.
    """

    @property
    def limits(self) -> tuple[int, int]: ...

    @property
    def adapters(self) -> tuple[LoadedAdapter, ...]: ...

    @property
    def can_update_adapters(self) -> bool:
        """Whether LoRA adapters can be loaded and unloaded at runtime."""

    @property
    def pinned(self) -> list[int]: ...

    def preempt(self, number: int, how: str, by: str) -> str: ...

    def pin(self, blocks: Sequence[int], by: str, *, with_prefix: bool) -> list[int]: ...

    def unpin(self, blocks: Sequence[int], by: str) -> None:
        """Make blocks evictable again. Blocks that are not pinned are ignored."""

    def evict(self, blocks: Sequence[int], by: str) -> str: ...

    def set_limits(self, max_num_seqs: int, max_num_batched_tokens: int, by: str) -> str: ...

    def load_adapter(self, name: str, path: str, by: str) -> str: ...

    def unload_adapter(self, name: str, by: str) -> str: ...


class ServedPauses(Protocol):
    def pause(self, by: str) -> None: ...

    def resume(self, why: str) -> None: ...

    def single_step(self, by: str) -> AbstractContextManager[None]: ...

    def beat(self) -> bool:
        """Record that the process runs. Called every half second, on any thread.

        Returns whether suspensions of the process are pending, for `report_suspensions`.
        """

    def report_suspensions(self) -> None: ...


class ServedEngine(Protocol):
    """A loaded engine.

    All methods are called on one thread, except `prompt_token_ids`, `num_text_tokens`, `has_grammar`, `memory` and the
    attributes, which may be used on any thread.
    """

    @property
    def hello(self) -> Hello: ...

    @property
    def interventions(self) -> ServedInterventions: ...

    @property
    def pauses(self) -> ServedPauses: ...

    @property
    def failure(self) -> str: ...

    @property
    def has_unfinished(self) -> bool:
        """Whether `step` has something to compute or outputs to return."""

    @property
    def num_unfinished(self) -> int: ...

    @property
    def step_count(self) -> int: ...

    @property
    def step_started_ns(self) -> int:
        """Monotonic time at which the current step began; 0 between steps."""

    @property
    def last_seq(self) -> int: ...

    def prompt_token_ids(self, submit: Submit, is_wanted: Callable[[], bool]) -> list[int]:
        """Return the prompt's token ids. May be slow, and may end early once `is_wanted` returns False. Raises
        BadInput.
        """

    def num_text_tokens(self, text: str) -> int:
        """Return the number of tokens of `text` without special tokens. Raises BadInput without a tokenizer."""

    def estimate_prompt(
        self, submit: Submit, token_ids: list[int], num_draft_tokens: int, tag: int
    ) -> PromptEstimate: ...

    def has_grammar(self, submit: Submit) -> bool: ...

    def submit(self, submit: Submit, token_ids: Callable[[], list[int]] | None = None) -> Accepted:
        """Queue a request. Raises BadInput, and queues nothing, if it is not accepted.

        `token_ids` is a function that returns the prompt's token ids, or raises the BadInput with which an earlier call
        of `prompt_token_ids` on another thread failed, so that this method raises it like any other error. If None, the
        prompt is tokenized here.
        """

    def abort(self, request_id: str, index: int | None = None) -> None:
        """Abort a request, or only its completion `index`."""

    def record_aborted(self, submit: Submit) -> None: ...

    def step(self, *, ahead: bool = True) -> list[Tokens | Finished]:
        """Run one step and return its outputs; empty if nothing can run.

        If `ahead` is False, no further step is launched before this one is complete.
        """

    def while_idle(self) -> bool:
        """Do deferred maintenance. Called only while there is no unfinished request. Returns whether to call it
        again later.
        """

    def finish_in_flight(self) -> list[Tokens | Finished]: ...

    def snapshot(self, tag: int) -> Snapshot: ...

    def drain_ended(self) -> list[RecordedText]: ...

    def block_text(self, blocks: Sequence[int]) -> tuple[BlockContent, ...]: ...

    def allocator_map(self, tag: int) -> AllocatorMap: ...

    def reset_prefix_cache(self) -> None: ...

    def memory(self) -> MemoryBreakdown: ...

    def close(self) -> None: ...


MessagesDropped: TypeAlias = Callable[[], int]
BuildEngine: TypeAlias = Callable[[OnProgress, Publish, MessagesDropped], ServedEngine]
"""Function that loads a model, publishes its `Hello` and returns the engine.

Called once the sockets are bound; it imports torch only then.
"""
