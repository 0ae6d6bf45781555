"""The engine interface of the server for a simulated engine: `ServedEngine`, at a given rate of steps."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Final

from msgspec import structs
from tests.simulated_engine.allocator_map import simulated_allocator_map
from tests.simulated_engine.engine import MAX_REQUEST_TOKENS, SimulatedEngine
from tests.simulated_engine.words import text_of, tokens_of

from kvscope_engine.engine_pauses import EnginePauses
from kvscope_engine.policy.kv_cache.block_contents import block_content
from kvscope_engine.policy.request import Request
from kvscope_engine.submission import SubmissionLimits, child_requests
from kvscope_telemetry.block_texts.block_texts import RecordedText
from kvscope_telemetry.errors import BadInput
from kvscope_telemetry.messages.commands import Accepted, AllocatorMap, BlockContent, Finished, Submit, Tokens
from kvscope_telemetry.messages.telemetry import MemoryBreakdown, Snapshot

MAX_NEW_TOKENS: Final = 256
"""Output tokens of a request without a limit."""
MAX_NAP_S: Final = 0.005
"""Longest time in seconds that a command waits for the next step."""
MAX_BEHIND_S: Final = 0.1
"""Longest delay in seconds for which missed steps are run later."""


class ServedSimulation:
    """Run `rate` steps of `engine` a second, and none while `is_held`."""

    def __init__(self, engine: SimulatedEngine, rate: float) -> None:
        self.engine = engine
        self.is_held = False
        self.is_served = threading.Event()
        """Set once a server with all its threads asks for steps."""
        self.between_steps = threading.Lock()
        """Held while a step runs."""
        self.hello = engine.hello
        self.interventions = engine.interventions
        self.pauses = EnginePauses(engine.scheduler, engine.record_idle)
        self.failure: Final = ""
        self.step_started_ns: Final = 0
        self._step_s = 1 / rate
        self._due_s = time.monotonic()
        self._numbers: dict[str, tuple[int, ...]] = {}  # of client requests, by id

    @property
    def has_unfinished(self) -> bool:
        """Whether `step` is to be called."""
        self.is_served.set()
        return not self.is_held

    @property
    def num_unfinished(self) -> int:
        """Requests in the queue or running."""
        return self.engine.num_unfinished

    @property
    def step_count(self) -> int:
        """Number of the last step."""
        return self.engine.step

    @property
    def last_seq(self) -> int:
        """Number of the last frame."""
        return self.engine.seq

    def prompt_token_ids(self, submit: Submit, is_wanted: Callable[[], bool]) -> list[int]:
        """Return tokens of a prompt, which are the same for texts that begin alike."""
        if submit.prompt_token_ids:
            return list(submit.prompt_token_ids)
        texts = [str(message.content) for message in submit.messages or ()] + [submit.prompt or ""]
        return tokens_of("\n".join(texts))

    def has_grammar(self, submit: Submit) -> bool:
        """No answer has a form."""
        return True

    def submit(self, submit: Submit, token_ids: Callable[[], list[int]] | None = None) -> Accepted:
        """Queue the completions of a prompt."""
        assert token_ids is not None, "prompts are made into tokens on other threads"
        if submit.request_id in self._numbers:
            raise BadInput(f"request id {submit.request_id!r} is in use: an id is free once its request ended")
        requests = self._requests_of(submit, token_ids())
        self.engine.add_requests(requests)
        self._numbers[submit.request_id] = tuple(request.number for request in requests)
        return Accepted(
            request_id=submit.request_id,
            numbers=self._numbers[submit.request_id],
            num_prompt_tokens=requests[0].num_prompt_tokens,
        )

    def abort(self, request_id: str, index: int | None = None) -> None:
        """End a request, or its completion `index`; do nothing for an unknown one."""
        for completion, number in enumerate(self._numbers.get(request_id, ())):
            if index in (None, completion):
                self.engine.abort(number)

    def record_aborted(self, submit: Submit) -> None:
        """Tell of requests that were aborted before their prompts were read."""
        for request in self._requests_of(submit, []):
            self.engine.scheduler.record_aborted(request, time.monotonic_ns())

    def step(self, *, ahead: bool = True) -> list[Tokens | Finished]:
        """Run a step if one is due or requested alone (not `ahead`); otherwise publish what changed without one."""
        wait_s = self._due_s - time.monotonic()
        if ahead and not self.is_held and wait_s > 0:
            time.sleep(min(wait_s, MAX_NAP_S))
        with self.between_steps:
            now_s = time.monotonic()
            if not ahead or (not self.is_held and now_s >= self._due_s):
                self.pauses.record_suspensions()
                self.engine.advance()
                self._due_s = max(self._due_s + self._step_s, now_s - MAX_BEHIND_S)
            else:
                self.engine.record_idle()
        return self.finish_in_flight()

    def while_idle(self) -> bool:
        """Return false: there is no delayed work."""
        return False

    def finish_in_flight(self) -> list[Tokens | Finished]:
        """Return what clients are to be told; no step is ever in flight."""
        outputs, self.engine.outputs = self.engine.outputs, []
        for request_id in {output.request_id for output in outputs if isinstance(output, Finished)}:
            if not any(number in self.engine.scheduler.requests for number in self._numbers.get(request_id, ())):
                self._numbers.pop(request_id, None)
        return outputs

    def snapshot(self, tag: int) -> Snapshot:
        """Return the whole state after the last frame."""
        return self.engine.snapshot(tag)

    def drain_ended(self) -> list[RecordedText]:
        """The server does not record."""
        return []

    def block_text(self, blocks: Sequence[int]) -> tuple[BlockContent, ...]:
        """Return the contents of blocks, with text."""
        scheduler = self.engine.scheduler
        contents = (block_content(block, self.engine.pool, scheduler.requests, scheduler.prefix_of) for block in blocks)
        return tuple(structs.replace(content, text=text_of(content.token_ids)) for content in contents)

    def allocator_map(self, tag: int) -> AllocatorMap:
        """Return a made-up map."""
        return simulated_allocator_map(tag)

    def reset_prefix_cache(self) -> None:
        """Drop every unused cached block."""
        self.engine.scheduler.reset_prefix_cache(time.monotonic_ns())
        self.engine.record_idle()

    def memory(self) -> MemoryBreakdown:
        """Return the memory that a small model would use."""
        cache = self.hello.cache
        kv_bytes = cache.num_blocks * cache.block_bytes
        return MemoryBreakdown(
            epoch=self.hello.epoch, time_ns=time.monotonic_ns(), weights_bytes=270 << 20, kv_bytes=kv_bytes
        )

    def close(self) -> None:
        """Do nothing: there is nothing to free."""

    def _requests_of(self, submit: Submit, token_ids: list[int]) -> list[Request]:
        pool = self.engine.pool
        limits = SubmissionLimits(MAX_REQUEST_TOKENS, pool.num_usable * pool.block_size)
        if submit.sampling.max_tokens is None:
            submit = structs.replace(submit, sampling=structs.replace(submit.sampling, max_tokens=MAX_NEW_TOKENS))
        return child_requests(submit, token_ids, limits, self.engine.next_number(submit.sampling.n), 0)
