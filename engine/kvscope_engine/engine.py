"""The engine: each `step()` schedules, runs, commits and records one step.

Owns the components and the output streams of the requests. Scheduling policy is in `policy`, tensors are in `model`,
and the overlap of steps is in `step_loop`. Not thread-safe: a server passes its clients' commands to the engine's
thread between steps.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import zip_longest
from types import TracebackType
from typing import TYPE_CHECKING, Final, Self

import msgspec

from kvscope_engine.cache_events import make_cache_events
from kvscope_engine.completion import Completion, collect
from kvscope_engine.components import EngineComponents, build_components
from kvscope_engine.engine_pauses import EnginePauses
from kvscope_engine.fingerprints import FingerprintRecorder, recorded_request
from kvscope_engine.inputs import prompt_token_ids
from kvscope_engine.interventions import Interventions
from kvscope_engine.model.device_memory.torch_allocator import allocator_map
from kvscope_engine.outputs import OutputStream
from kvscope_engine.policy.adapter import Adapter
from kvscope_engine.policy.kv_cache.block_contents import block_content
from kvscope_engine.policy.kv_cache.cache_log import CacheLog
from kvscope_engine.policy.kv_cache.measured_attention import store_attention, store_skips
from kvscope_engine.policy.request import Request
from kvscope_engine.policy.scheduling.reduced_limits import ReducedLimits
from kvscope_engine.policy.step_plan import StepPlan, StepResult, keep_emitted
from kvscope_engine.prompt_estimate import estimate_prompt
from kvscope_engine.roofline.weights_line import weights_line
from kvscope_engine.step_loop import CompletedStep, OverlapCounts, StepLoop
from kvscope_engine.step_recorder import StepRecorder
from kvscope_engine.structured_output.structured_output_manager import always_wanted, matcher_for, prepare_prompt
from kvscope_engine.submission import child_requests
from kvscope_engine.tokenization.tokenizer import Tokenizer
from kvscope_telemetry.block_texts.block_texts import RecordedText
from kvscope_telemetry.engine_config import EngineConfig
from kvscope_telemetry.errors import BadInput, EngineDead, KvscopeError
from kvscope_telemetry.messages.commands import (
    Accepted,
    AllocatorMap,
    BlockContent,
    Finished,
    FinishReason,
    PromptEstimate,
    Submit,
    TokenLogprobs,
    Tokens,
)
from kvscope_telemetry.messages.sampling_params import SamplingParams
from kvscope_telemetry.messages.telemetry import (
    MemoryBreakdown,
    Progress,
    Snapshot,
    TelemetryMessage,
    Timings,
)

if TYPE_CHECKING:
    from kvscope_engine.answer_calls import AnswerCallReader

ProgressCallback = Callable[[Progress], None]
Publish = Callable[[TelemetryMessage], None]

FAILURE_NOTE_INTERVAL_NS: Final = 60_000_000_000


class Engine:
    """A model, its paged KV cache, and the requests that run on it.

    Args:
        config: Model, device, limits and features.
        progress: Called with each stage of loading.
        publish: Called with each telemetry message; must not block.
        messages_dropped: Returns how many messages `publish` has dropped.
        on_note: Called with one line for each feature that is disabled after loading.

    Raises:
        BadInput: for a configuration or model that is not supported.
        KvscopeError: when loading fails.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        progress: ProgressCallback | None = None,
        publish: Publish | None = None,
        messages_dropped: Callable[[], int] = lambda: 0,
        on_note: Callable[[str], object] | None = None,
    ) -> None:
        self._on_note = on_note or _discard
        self._config = config
        self._epoch = secrets.randbits(63)
        self._publish = publish or _discard
        self.cache_events = make_cache_events(config)
        try:
            self.components: EngineComponents = build_components(
                config, self._epoch, progress or _discard, self._cache_log
            )
        except BaseException:
            self._close_cache_events()
            raise
        if self.cache_events is not None:
            self.components.notes.append(self.cache_events.note)
            self.cache_events.publish()  # the blocks of a kept file
        self.step_recorder = StepRecorder(
            self._epoch,
            self.components.pool,
            self.components.scheduler,
            self._publish,
            messages_dropped=messages_dropped,
        )
        self._fingerprints: FingerprintRecorder | None = None
        if config.fingerprints:
            self._fingerprints = FingerprintRecorder(self.components.storage, self._epoch, self._publish)
        self._ended_requests: list[Request] | None = None
        self._loop = StepLoop(
            self.components.scheduler,
            self.components.runner,
            # a lambda, not the bound method: `close` replaces the components, and the old ones hold the weights
            lambda plan: self.components.explain_shortage(plan),
            overlaps=self.components.overlaps,
        )
        self._reduced_limits = ReducedLimits(self.components.scheduler.limits)
        self._next_failure_note_ns = 0
        self._num_unreported_failures = 0
        self.interventions = Interventions(
            self.components.pool,
            self.components.scheduler,
            self._record_idle,
            self._finish_in_flight,
            self.components.lora,
        )
        self.pauses = EnginePauses(self.components.scheduler, self._record_idle)
        self.streams: dict[int, OutputStream] = {}
        self._streams_with_output: dict[int, OutputStream] = {}
        """Streams with outputs to return, by request number, so that a step does not visit thousands of waiting
        requests.
        """
        self._requests_by_client_id: dict[str, list[Request]] = {}
        self._num_published_notes = len(self.components.notes)
        self._copied_s = self.components.copied_seconds
        self._next_number = 1
        self._was_idle = False
        self._record_ns = 0
        self.is_closed = False
        self.step_count = 0
        self.step_started_ns = 0
        self.hello = self.components.hello
        self._publish(self.hello)
        self._publish(self.memory())

    def prompt_token_ids(self, submit: Submit, is_wanted: Callable[[], bool] = always_wanted) -> list[int]:
        """Return the prompt's token ids. If `submit` requests structured output, the returned list also holds the
        compiled grammar (`PreparedPrompt`).

        Thread-safe. Slow if a grammar has to be compiled; compilation is abandoned once `is_wanted` returns False.

        Raises:
            BadInput: for a prompt or grammar that is not accepted.
        """
        loaded = self.components.loaded
        ids = prompt_token_ids(submit, loaded.tokenizer, loaded.info.vocab_size, self.components.limits.max_model_len)
        return prepare_prompt(ids, submit.sampling.structured, self.components.structured_output, is_wanted)

    def num_text_tokens(self, text: str) -> int:
        """Return the number of tokens of `text` without special tokens. Thread-safe. Raises BadInput without a
        tokenizer.
        """
        if self.tokenizer is None:
            raise BadInput("this model has no tokenizer: a text has no tokens")
        return len(self.tokenizer.encode(text, add_special_tokens=False))

    def estimate_prompt(
        self, submit: Submit, token_ids: list[int], num_draft_tokens: int | None = None, tag: int = 0
    ) -> PromptEstimate:
        """Return what a prompt with these tokens would cost now, without running it and without changing anything.

        Raises BadInput for a LoRA adapter that is not loaded.
        """
        self._check_open()
        estimate = estimate_prompt(self.components.scheduler, submit, token_ids, self._adapter(submit.adapter))
        return msgspec.structs.replace(estimate, num_draft_tokens=num_draft_tokens, tag=tag)

    def has_grammar(self, submit: Submit) -> bool:
        """Whether the grammar of `submit` is already compiled, or none is needed. Thread-safe."""
        spec, structured_output = submit.sampling.structured, self.components.structured_output
        return spec is None or structured_output is None or structured_output.is_compiled(spec)

    def submit(self, submit: Submit, token_ids: Callable[[], list[int]] | None = None) -> Accepted:
        """Queue a request.

        Args:
            submit: The request and its options.
            token_ids: Returns token ids that were computed before; default: `prompt_token_ids(submit)`.

        Raises:
            BadInput: if the prompt or an option is not accepted, the request can never fit, or its id is in use.
                Nothing is queued then.
            EngineDead: after `close`.
        """
        self._check_open()
        requests = self._requests_of(submit, token_ids or partial(self.prompt_token_ids, submit))
        call_reader = self._call_reader(submit)
        for request in requests:
            self.components.scheduler.add_request(request)
            self.streams[request.number] = self._stream(request, submit)
            self.streams[request.number].read_calls = call_reader.read if call_reader is not None else None
        self._requests_by_client_id[submit.request_id] = requests
        return Accepted(
            request_id=submit.request_id,
            numbers=tuple(request.number for request in requests),
            num_prompt_tokens=requests[0].num_prompt_tokens,
        )

    def abort(self, request_id: str, index: int | None = None) -> None:
        """Abort a request in any state, or only its completion `index`. Unknown and finished requests are ignored. The
        next step returns the `Finished` of each aborted completion.
        """
        now_ns = time.monotonic_ns()
        for request in self._requests_by_client_id.get(request_id, ()):
            if not request.is_finished and index in (None, request.index):
                self.components.scheduler.abort(request, now_ns)
                stream = self._streams_with_output[request.number] = self.streams[request.number]
                stream.finish("abort", now_ns)

    def record_aborted(self, submit: Submit) -> None:
        """Record the completions of a request that was aborted before its prompt was tokenized, for telemetry only.

        The client gets no message. Requests whose options would have been refused are ignored.
        """
        self._check_open()
        limits, model = self.components.limits, self.components.loaded.info.sampling
        try:
            requests = child_requests(submit, [], limits, self._next_number, self._config.seed, model)
        except BadInput:
            return
        self._next_number += len(requests)
        for request in requests:
            self.components.scheduler.record_aborted(request, time.monotonic_ns())

    def step(self, *, ahead: bool = True) -> list[Tokens | Finished]:
        """Schedule, run, commit and record one step. Returns the outputs for clients, oldest first.

        If `ahead` is False, no further step is launched before this one is complete.
        """
        self._check_open()
        self.step_started_ns = time.monotonic_ns()
        if self.components.guard is not None:
            self.components.guard.poll(self._finish_in_flight)
        if self.components.structured_output is not None:
            self.components.structured_output.await_masks(is_idle=self._was_idle)
        completed = self._loop.next(self.step_count + 1, ahead=ahead)
        self._was_idle = completed is None
        if completed is None:
            return self._idle()
        self._commit_and_record(completed)
        self.step_started_ns = 0
        return self._drain_outputs()

    def while_idle(self) -> bool:
        """Do deferred maintenance, which may take as long as several steps. Call it only while no request is
        unfinished.

        Returns whether to call it again later.
        """
        self._check_open()
        guard = self.components.guard
        if guard is not None:
            guard.poll(self._finish_in_flight)
        has_more = self.components.runner.do_idle_work()
        self._add_note(self._reduced_limits.update(time.monotonic_ns()))
        if self._publish_notes(time.monotonic_ns()):
            self._record_idle()
        if self.components.lora is not None:
            self.components.lora.release_unused(())
        return has_more or self._reduced_limits.is_reduced or (guard is not None and guard.is_lowered)

    def finish_in_flight(self) -> list[Tokens | Finished]:
        """Wait for the step in flight, commit it and return its outputs. No step is in flight afterwards."""
        self._check_open()
        self._finish_in_flight()
        return self._drain_outputs()

    def generate(self, prompts: Sequence[str | Submit], sampling: SamplingParams | None = None) -> Iterator[Completion]:
        """Run prompts together and yield completions in the order of the prompts.

        A string is formatted with the model's chat template. A refused prompt yields a completion with `finish_reason`
        "error" and the reason in `error`; all other prompts continue. Leaving the loop early aborts the remaining
        requests.

        Raises:
            BadInput: while the engine has other requests, whose outputs would be lost.
        """
        return collect(self, prompts, sampling or SamplingParams())

    def snapshot(self, tag: int = 0) -> Snapshot:
        """Return the complete state as of the last published frame, after publishing pending changes. `tag` is copied
        to the reply.
        """
        return self.step_recorder.snapshot(self.hello, tag, time.monotonic_ns())

    def block_text(self, blocks: Sequence[int]) -> tuple[BlockContent, ...]:
        """Return the contents of the blocks, in the given order. Ids outside the pool are returned as empty blocks."""
        pool, scheduler = self.components.pool, self.components.scheduler
        contents = (block_content(block, pool, scheduler.requests, scheduler.prefix_of) for block in blocks)
        return tuple(with_text(content, self.tokenizer) for content in contents)

    def drain_ended(self) -> list[RecordedText]:
        """Return the requests that ended since the last call, with their tokens and options, for recordings that can be
        replayed.

        The first call starts the collection and returns an empty list.
        """
        ended, self._ended_requests = self._ended_requests, []
        return [recorded_request(request, self._epoch) for request in ended or ()]

    def allocator_map(self, tag: int = 0) -> AllocatorMap:
        """Return how torch's allocator currently divides the GPU's memory. Raises BadInput on a CPU."""
        return allocator_map(self.components.loaded.device, tag)

    def reset_prefix_cache(self) -> None:
        """Drop all cached blocks that no request holds."""
        self.components.scheduler.reset_prefix_cache(time.monotonic_ns())
        self._record_idle()

    def memory(self) -> MemoryBreakdown:
        return self.components.memory_breakdown()

    @property
    def failure(self) -> str:
        """Reason why the engine cannot continue (a lost rank, or blocks that could not be copied); empty if it can."""
        leader, mover = self.components.leader, self.components.mover
        lost_rank = "" if leader is None else leader.failure
        return lost_rank or ("" if mover is None else mover.copy_failure)

    @property
    def overlaps(self) -> OverlapCounts:
        """Counts of steps that overlapped with the previous step, and the reasons why other steps did not."""
        return self._loop.counts

    @property
    def tokenizer(self) -> Tokenizer | None:
        return self.components.loaded.tokenizer

    @property
    def memory_plan(self) -> str:
        """One-line plan of the GPU's memory; empty on a CPU, and if the pool's size was configured."""
        plan = self.components.plan
        return "" if plan is None else plan.summary(str(self.components.loaded.device))

    @property
    def weights(self) -> str:
        """One-line description of the weights: quantization, fusion, and bytes that a step reads."""
        return weights_line(self.components.loaded, self.components.runner.fused, self.components.work)

    @property
    def notes(self) -> tuple[str, ...]:
        """Deviations from the configuration, one line each. After `close`, also failures of closing, and data that
        could not be saved.
        """
        return tuple(self.components.notes)

    @property
    def has_unfinished(self) -> bool:
        """Whether a request is unfinished or has outputs that were not returned yet."""
        return self.num_unfinished > 0 or bool(self.streams)

    @property
    def num_unfinished(self) -> int:
        return self.components.scheduler.num_running + self.components.scheduler.num_waiting

    @property
    def last_seq(self) -> int:
        return self.step_recorder.seq

    def close(self) -> None:
        """Free the memory of the engine, which cannot be used afterwards. Idempotent."""
        if self.is_closed:
            return
        self.is_closed = True
        self.streams.clear()
        self._streams_with_output.clear()
        self._requests_by_client_id.clear()
        self._close_cache_events()
        self._loop.close()
        self.components = self.components.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _check_open(self) -> None:
        if self.is_closed:
            raise EngineDead("the engine is closed")

    def _requests_of(self, submit: Submit, token_ids: Callable[[], list[int]]) -> list[Request]:
        """Create the numbered requests of a submission without queueing them. All have the same size, so either all or
        none of them fit.
        """
        try:
            if submit.request_id in self._requests_by_client_id:
                raise BadInput(f"request id {submit.request_id!r} is in use: an id is free once its request ended")
            if submit.sampling.prompt_logprobs is not None and (why := self.components.runner.why_no_prompt_logprobs):
                raise BadInput(f"prompt_logprobs={submit.sampling.prompt_logprobs} is not accepted: {why}")
            ids = prepare_prompt(token_ids(), submit.sampling.structured, self.components.structured_output)
            requests = child_requests(
                submit,
                ids,
                self.components.limits,
                self._next_number,
                self._config.seed,
                self.components.loaded.info.sampling,
                self._adapter(submit.adapter),
            )
            for request in requests:
                request.matcher = matcher_for(ids)
        except BadInput as refusal:
            self.components.scheduler.record_refusal(str(refusal), time.monotonic_ns())
            raise
        self._next_number += len(requests)
        return requests

    def _adapter(self, name: str) -> Adapter | None:
        """Return the named adapter, or None for "". Raises BadInput if it is not loaded."""
        if not name:
            return None
        if self.components.lora is None:
            raise BadInput(f"LoRA adapter {name!r:.140} is not accepted: this engine was started without any")
        return self.components.lora.find(name)

    def _call_reader(self, submit: Submit) -> AnswerCallReader | None:
        tokenizer = self.components.loaded.tokenizer
        if not submit.tools or tokenizer is None:
            return None
        from kvscope_engine.answer_calls import AnswerCallReader  # imports starlette, which takes 0.2 s

        return AnswerCallReader(submit, tokenizer)

    def _stream(self, request: Request, submit: Submit) -> OutputStream:
        loaded = self.components.loaded
        detokenizer = None
        if loaded.tokenizer is not None:
            prompt_context = request.prompt_token_ids if submit.raw and submit.messages is None else ()
            detokenizer = loaded.tokenizer.detokenizer(submit.sampling.stop, prompt_context)
        token_text = loaded.tokenizer.token_text if loaded.tokenizer is not None else None
        running_time = self.components.scheduler.running_time
        return OutputStream(request, submit.request_id, detokenizer, loaded.eos_token_ids, token_text, running_time)

    def _finish_in_flight(self) -> None:
        """Commit and record the step in flight, if there is one. Its outputs are returned with those of the next
        step.
        """
        completed = self._loop.finish_in_flight()
        if completed is not None:
            self._commit_and_record(completed)

    def _commit_and_record(self, completed: CompletedStep) -> None:
        """Commit and record a completed step. In between, launch the next step if that is possible."""
        self.step_count += 1
        self.pauses.record_suspensions()  # suspensions must be known before latencies are measured
        if self.components.threads is not None:
            self.components.threads.refresh()
        if self.components.guard is not None:
            self.components.guard.record_step(completed.plan, completed.result)
        if completed.result.block_shares is not None:
            store_attention(self.components.pool, completed.plan, completed.result.block_shares, self.step_count)
        if completed.result.block_skips is not None:
            store_skips(self.components.pool, completed.plan, completed.result.block_skips)
        ended = self._end_or_restart(completed)
        if completed.failure:
            self._report_failure(completed, ended)
        self._add_note(
            self._reduced_limits.update(
                completed.ended_ns, completed.fitting_tokens, "failed" if completed.failure else "ran out of memory"
            )
        )
        self._publish_notes(completed.ended_ns)
        self.components.scheduler.prefill_rate.observe(completed.plan, completed.result.forward_ns / 1e9)
        plan, result = self._commit(completed.plan, completed.result, completed.ended_ns)
        committed_ns = time.monotonic_ns()
        schedule_ns, launch_ns = self._loop.launch_next(self.step_count)
        begun_ns = time.monotonic_ns()
        timings = Timings(
            schedule_ns=completed.schedule_ns + schedule_ns,
            run_ns=completed.run_ns + launch_ns,
            forward_ns=completed.result.forward_ns,
            commit_ns=committed_ns - completed.ended_ns,
            record_ns=self._record_ns,
        )
        copied_s, before_s = self.components.copied_seconds, self._copied_s
        self._copied_s = copied_s
        work = self.components.work_of(completed.plan, completed.result, copied_s - before_s)
        self.step_recorder.record(plan, result, timings, self.step_count, completed.ended_ns, work)
        self._publish_cache_events()
        self._record_ns = time.monotonic_ns() - begun_ns
        self._loop.step_recorded(completed.ended_ns)

    def _end_or_restart(self, completed: CompletedStep) -> int:
        """Requeue the failed requests that may be retried, and finish all other failed requests. Returns the number
        finished.
        """
        num_ended = 0
        for request, reason in zip(completed.failed, completed.reasons, strict=True):
            if not self.components.scheduler.restart(request, reason, completed.ended_ns):
                self._finish(request, self.streams[request.number], "error", completed.ended_ns, reason)
                num_ended += 1
        return num_ended

    def _report_failure(self, completed: CompletedStep, num_ended: int) -> None:
        if completed.ended_ns < self._next_failure_note_ns:
            self._num_unreported_failures += 1
            return
        restarted = (
            (f"{len(completed.failed)} of its requests are computed again") if completed.failed else "was run again"
        )
        outcome = f"{num_ended} of its requests ended" if num_ended else restarted
        suffix = (
            f"; {self._num_unreported_failures} more steps failed since the last such note"
            if self._num_unreported_failures
            else ""
        )
        self._add_note(f"a step failed and {outcome}: {completed.failure}{suffix}")
        self._num_unreported_failures, self._next_failure_note_ns = 0, completed.ended_ns + FAILURE_NOTE_INTERVAL_NS

    def _add_note(self, note: str) -> None:
        if note:
            self.components.notes.append(note)

    def _publish_notes(self, now_ns: int) -> bool:
        """Publish the lines that were added to `components.notes` since the last call as events.

        Each line reports that the engine does not run as configured. Returns whether there were any.
        """
        new_notes = self.components.notes[self._num_published_notes :]
        self._num_published_notes += len(new_notes)
        for note in new_notes:
            self.components.scheduler.changes.record_notice(note, now_ns)
            self._on_note(note)
        return bool(new_notes)

    def _commit(self, plan: StepPlan, result: StepResult, now_ns: int) -> tuple[StepPlan, StepResult]:
        """Emit the sampled tokens, commit blocks up to the last emitted token, then finish the requests that ended.

        Returns the plan and the result without draft tokens that were not emitted.
        """
        logprobs = result.logprobs or ((),) * len(plan.scheduled)
        for item, scores in zip(plan.scheduled, result.prompt_logprobs, strict=False):
            if scores:
                stream = self._streams_with_output[item.request.number] = self.streams[item.request.number]
                stream.add_prompt_logprobs(item.start, scores)
        num_emitted: list[int] = []
        ends: list[tuple[Request, FinishReason, str]] = []
        for item, token_ids, details in zip(plan.scheduled, result.token_ids, logprobs, strict=True):
            count, reason, error = (
                self._emit_tokens(item.request, token_ids, details, now_ns) if token_ids else (0, None, "")
            )
            num_emitted.append(count)
            if reason is not None:
                ends.append((item.request, reason, error))
        if self.components.structured_output is not None:
            self.components.structured_output.request_masks()
        if plan.has_drafts:
            plan, result = keep_emitted(plan, result, num_emitted)
        if self._fingerprints is not None:  # before ended requests free their blocks
            self._fingerprints.record(plan, result, self.step_count, now_ns)
        self.components.scheduler.commit(plan, self.step_count, now_ns)
        for request, reason, error in ends:
            self._finish(request, self.streams[request.number], reason, now_ns, error)
        return plan, result

    def _emit_tokens(
        self, request: Request, token_ids: tuple[int, ...], details: tuple[TokenLogprobs, ...], now_ns: int
    ) -> tuple[int, FinishReason | None, str]:
        """Add the tokens sampled for a request to its stream, until one of them ends the request.

        Returns the number of tokens emitted, the finish reason (None while the request continues), and the error if it
        failed.
        """
        stream = self._streams_with_output[request.number] = self.streams[request.number]
        for num_emitted, (token_id, token_logprobs) in enumerate(zip_longest(token_ids, details), 1):
            error = ""
            try:
                reason = stream.add_token(token_id, token_logprobs, now_ns)
            except KvscopeError as failure:
                reason, error = "error", str(failure)
            except Exception as failure:  # its text cannot be decoded: only this request fails
                reason, error = "error", f"its output could not be written: {failure!r:.200}"
            if reason is not None:
                return num_emitted, reason, error
        return len(token_ids), None, ""

    def _finish(
        self, request: Request, stream: OutputStream, reason: FinishReason, now_ns: int, error: str = ""
    ) -> None:
        self.components.scheduler.finish(request, reason, now_ns)
        self._streams_with_output[request.number] = stream  # its last message is due even if it sampled nothing
        stream.finish(reason, now_ns, error)

    def _idle(self) -> list[Tokens | Finished]:
        self._record_idle()
        self.step_started_ns = 0
        return self._drain_outputs()

    def _record_idle(self) -> None:
        self.pauses.record_suspensions()
        self.step_recorder.record_idle(self.step_count, time.monotonic_ns())
        self._publish_cache_events()

    @property
    def _cache_log(self) -> CacheLog | None:
        return self.cache_events.log if self.cache_events is not None else None

    def _publish_cache_events(self) -> None:
        if self.cache_events is not None:
            self.cache_events.publish()

    def _close_cache_events(self) -> None:
        if self.cache_events is not None:
            self.cache_events.close()

    def _drain_outputs(self) -> list[Tokens | Finished]:
        outputs: list[Tokens | Finished] = []
        streams, self._streams_with_output = self._streams_with_output, {}
        for number, stream in streams.items():
            outputs += stream.drain()
            if stream.request.is_finished:
                if self._ended_requests is not None:
                    self._ended_requests.append(stream.request)
                del self.streams[number]
                self._release_request_id(stream)
        return outputs

    def _release_request_id(self, stream: OutputStream) -> None:
        """Free the client's request id once all its completions have ended and their outputs were returned."""
        requests = self._requests_by_client_id.get(stream.client_id, [])
        if all(request.is_finished and request.number not in self.streams for request in requests):
            self._requests_by_client_id.pop(stream.client_id, None)


def _discard(message: object) -> None: ...


def with_text(content: BlockContent, tokenizer: Tokenizer | None) -> BlockContent:
    """Return `content` with its tokens decoded; unchanged if the model has no tokenizer.

    Block texts are sent only in reply to a query for specific blocks, never on the telemetry socket.
    """
    if tokenizer is None or not content.token_ids:
        return content
    return msgspec.structs.replace(content, text=tokenizer.decode(list(content.token_ids)))
