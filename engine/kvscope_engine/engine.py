"""The engine: `step()` is schedule, run, commit, record.

On a GPU the next step is scheduled and runs while this one is committed and recorded (`step_loop`).

Owns the parts and the streams of the requests; the policy is in `policy`, the tensors in `model`. One thread
drives an engine; whoever serves several clients hands it their commands between steps.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import zip_longest
from types import TracebackType
from typing import Final, Self

import msgspec
import torch

from kvscope_engine.cache_events import make_cache_events
from kvscope_engine.completion import Completion, collect
from kvscope_engine.components import EngineComponents, build_components
from kvscope_engine.fingerprints import FingerprintRecorder, recorded_request
from kvscope_engine.inputs import prompt_token_ids
from kvscope_engine.interventions import Interventions
from kvscope_engine.model.device_memory.torch_allocator import allocator_map
from kvscope_engine.model.executor.leader import Leader
from kvscope_engine.model.kv_cache.kv_offload.tier_stats import TierStats
from kvscope_engine.outputs import OutputStream
from kvscope_engine.policy.adapter import Adapter
from kvscope_engine.policy.blocks.block_contents import block_content
from kvscope_engine.policy.blocks.cache_log import CacheLog
from kvscope_engine.policy.blocks.measured_attention import store_attention, store_skips
from kvscope_engine.policy.plan import StepPlan, StepResult, keep_emitted
from kvscope_engine.policy.request import Request
from kvscope_engine.policy.scheduling.eased_limits import EasedLimits
from kvscope_engine.roofline.weights_line import weights_line
from kvscope_engine.step_loop import CompletedStep, OverlapCounts, StepLoop
from kvscope_engine.step_recorder import StepRecorder
from kvscope_engine.stops import EngineStops
from kvscope_engine.structured_output.forms import always, matcher_for, prepared
from kvscope_engine.submission import child_requests
from kvscope_engine.tokenization.tokenizer import Tokenizer
from kvscope_telemetry.engine_config import EngineConfig
from kvscope_telemetry.errors import BadInput, EngineDead, KvscopeError
from kvscope_telemetry.messages.commands import (
    Accepted,
    AllocatorMap,
    BlockContent,
    Finished,
    FinishReason,
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
from kvscope_telemetry.texts.block_texts import RecordedText

ProgressCallback = Callable[[Progress], None]
Publish = Callable[[TelemetryMessage], None]

FAILURE_NS: Final = 60_000_000_000
"""Between two notes about steps in which a library failed."""


class Engine:
    """A model, its paged KV cache, and the requests that run on it.

    `publish` takes each telemetry message and must not block, `messages_dropped` says how many it threw away;
    `progress` is told how far the load is, `on_note` what is given up in service, on one line, at once.
    Raises BadInput for a configuration or model that cannot be accepted, KvscopeError when the load fails.
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
            self.cache_events.publish()  # what a kept file holds
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
        self._ended: list[Request] | None = None
        self._loop = StepLoop(
            self.components.scheduler,
            self.components.runner,
            lambda plan: self.components.explain_shortage(plan),  # of those it has then: once closed, no weights
            overlaps=self.components.overlaps,
        )
        self._eased = EasedLimits(self.components.scheduler)
        self._next_failure_ns = 0
        self._untold_failures = 0
        self.interventions = Interventions(
            self.components.pool, self.components.scheduler, self._record_idle, self._settle, self.components.lora
        )
        self.stops = EngineStops(self.components.scheduler, self._record_idle)
        self.streams: dict[int, OutputStream] = {}
        self._spoken: dict[int, OutputStream] = {}
        """Those of them with something to hand out: thousands may wait in the queue and say nothing."""
        self._clients: dict[str, list[Request]] = {}
        self._num_noted = len(self.components.notes)
        self._copied_s = self.components.copied_seconds
        self._next_number = 1
        self._ran_nothing = False
        self._record_ns = 0
        self.is_closed = False
        self.step_count = 0
        self.step_started_ns = 0
        self.hello = self.components.hello
        self._publish(self.hello)
        self._publish(self.memory())

    def prompt_token_ids(self, submit: Submit, is_wanted: Callable[[], bool] = always) -> list[int]:
        """Tokens of the prompt of `submit`, with what it needs of the form of its answer.

        May take long, and may be called on any thread; a form is given up once it is not wanted any more. Raises
        BadInput when the prompt or the form cannot be accepted.
        """
        loaded = self.components.loaded
        ids = prompt_token_ids(submit, loaded.tokenizer, loaded.info.vocab_size, self.components.limits.max_model_len)
        return prepared(ids, submit.sampling.structured, self.components.forms, is_wanted)

    def has_form(self, submit: Submit) -> bool:
        """Whether the form that `submit` asks for takes no time any more, or it asks for none. On any thread."""
        asked, forms = submit.sampling.structured, self.components.forms
        return asked is None or forms is None or forms.has(asked)

    def submit(self, submit: Submit, token_ids: Callable[[], list[int]] | None = None) -> Accepted:
        """Take a request into the queue. `token_ids` gives its prompt's tokens where they were made before.

        Raises BadInput, leaving nothing behind, when the prompt or an option cannot be accepted, when the
        request can never fit, or when its id is in use; EngineDead after `close`.
        """
        self._check_open()
        requests = self._requests_of(submit, token_ids or partial(self.prompt_token_ids, submit))
        for request in requests:
            self.components.scheduler.add_request(request)
            self.streams[request.number] = self._stream(request, submit)
        self._clients[submit.request_id] = requests
        return Accepted(
            request_id=submit.request_id,
            numbers=tuple(request.number for request in requests),
            num_prompt_tokens=requests[0].num_prompt_tokens,
        )

    def abort(self, request_id: str) -> None:
        """End a request wherever it is; unknown and finished ones are left alone. Its last message follows."""
        now_ns = time.monotonic_ns()
        for request in self._clients.get(request_id, ()):
            if not request.is_finished:
                self.components.scheduler.abort(request, now_ns)
                stream = self._spoken[request.number] = self.streams[request.number]
                stream.finish("abort", now_ns)

    def list_aborted(self, submit: Submit) -> None:
        """Tell of a request that was aborted before its prompt was read: its completions are listed, without tokens.

        Nothing is said to its client. Does nothing for options that would have been refused.
        """
        self._check_open()
        limits, model = self.components.limits, self.components.loaded.info.sampling
        try:
            requests = child_requests(submit, [], limits, self._next_number, self._config.seed, model)
        except BadInput:
            return
        self._next_number += len(requests)
        for request in requests:
            self.components.scheduler.list_aborted(request, time.monotonic_ns())

    def step(self, *, ahead: bool = True) -> list[Tokens | Finished]:
        """One step: schedule, run, commit, record. Returns what clients are to be told, oldest first.

        Without `ahead` no other step is begun before this one is over.
        """
        self._check_open()
        self.step_started_ns = time.monotonic_ns()
        if self.components.guard is not None:
            self.components.guard.look(self._settle)
        if self.components.forms is not None:
            self.components.forms.await_masks(is_idle=self._ran_nothing)
        ran = self._loop.next(self.step_count + 1, ahead=ahead)
        self._ran_nothing = ran is None
        if ran is None:
            return self._idle()
        self._write_down(ran)
        self.step_started_ns = 0
        return self._take_outputs()

    def while_idle(self) -> bool:
        """What is better done while nobody waits; may take as long as some steps. Nothing is to be unfinished.

        Whether it is to be called again in a while.
        """
        self._check_open()
        guard = self.components.guard
        if guard is not None:
            guard.look(self._settle)
        has_more = self.components.runner.while_idle()
        self._note(self._eased.look(time.monotonic_ns()))
        if self._tell_notes(time.monotonic_ns()):
            self._record_idle()
        if self.components.lora is not None:
            self.components.lora.forget_unused(())
        return has_more or self._eased.is_eased or (guard is not None and guard.is_lowered)

    def settle(self) -> list[Tokens | Finished]:
        """What a step that was begun ahead has to say, once it is over: the engine stands still afterwards."""
        self._check_open()
        self._settle()
        return self._take_outputs()

    def generate(self, prompts: Sequence[str | Submit], sampling: SamplingParams | None = None) -> Iterator[Completion]:
        """Run prompts together; completions come in the order of the prompts.

        A text goes through the model's chat template. A prompt that is refused gives a completion with
        `finish_reason` "error" and the reason in `error`; the others go on. Leaving the loop early aborts them.
        Raises BadInput while the engine has other requests: their outputs would be lost.
        """
        return collect(self, prompts, sampling or SamplingParams())

    def snapshot(self, tag: int = 0) -> Snapshot:
        """The whole state, exact after the last published frame."""
        return self.step_recorder.snapshot(self.hello, tag, time.monotonic_ns())

    def block_text(self, blocks: Sequence[int]) -> tuple[BlockContent, ...]:
        """What blocks hold, in the order asked. Ids outside the pool hold nothing."""
        pool, scheduler = self.components.pool, self.components.scheduler
        contents = (block_content(block, pool, scheduler.requests, scheduler.prefix_of) for block in blocks)
        return tuple(with_text(content, self.tokenizer) for content in contents)

    def take_ended(self) -> list[RecordedText]:
        """Requests that ended since it was asked before, with their tokens and options; none the first time.

        For a recording with texts, which can be run again.
        """
        ended, self._ended = self._ended, []
        return [recorded_request(request, self._epoch) for request in ended or ()]

    def allocator_map(self, tag: int = 0) -> AllocatorMap:
        """How torch's allocator divides the GPU's memory now. Raises BadInput on a CPU."""
        return allocator_map(self.components.loaded.device, tag)

    def reset_prefix_cache(self) -> None:
        """Forget every idle cached block."""
        self.components.scheduler.reset_prefix_cache(time.monotonic_ns())
        self._record_idle()

    def memory(self) -> MemoryBreakdown:
        """Where the memory went, in bytes."""
        return self.components.memory_breakdown()

    @property
    def tier_stats(self) -> TierStats | None:
        """What the lower tiers did since the start; None without any."""
        mover = self.components.mover
        return None if mover is None else mover.stats

    def drain_tiers(self) -> bool:
        """Wait until all that went to the disk tier is on the drive; whether it is. Only measurements need it."""
        mover = self.components.mover
        return mover is None or mover.drain()

    @property
    def ranks(self) -> Leader | None:
        """The other ranks of tensor parallel; None without any."""
        return self.components.leader

    @property
    def failure(self) -> str:
        """Why it cannot go on: which rank is lost, and how, or that blocks could not be copied; empty while it can."""
        leader, mover = self.components.leader, self.components.mover
        lost_rank = "" if leader is None else leader.failure
        return lost_rank or ("" if mover is None else mover.copy_failure)

    @property
    def overlaps(self) -> OverlapCounts:
        """How often a step was begun while another ran, and why not."""
        return self._loop.counts

    @property
    def dtype(self) -> torch.dtype:
        """Of weights and activations."""
        return self.components.loaded.dtype

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The model's, None when it has none."""
        return self.components.loaded.tokenizer

    @property
    def memory_plan(self) -> str:
        """Where a GPU's memory went, on one line; empty where the size of the pool was given, and on a CPU."""
        plan = self.components.plan
        return "" if plan is None else plan.summary(str(self.components.loaded.device))

    @property
    def weights(self) -> str:
        """How the weights are held, and how much of them a step reads, on one line."""
        return weights_line(self.components.loaded, self.components.runner.fused, self.components.work)

    @property
    def attention(self) -> str:
        """Whose attention runs prompts on a GPU, and why, on one line; empty on a CPU."""
        return self.components.hello.device.attention

    @property
    def notes(self) -> tuple[str, ...]:
        """What is not as it was asked for, a line each; after `close` also what failed and what could not be kept."""
        return tuple(self.components.notes)

    @property
    def has_unfinished(self) -> bool:
        """Whether a step has something to do, or something to say."""
        return self.num_unfinished > 0 or bool(self.streams)

    @property
    def num_unfinished(self) -> int:
        """Requests waiting or running."""
        return self.components.scheduler.num_running + self.components.scheduler.num_waiting

    @property
    def last_seq(self) -> int:
        """The last frame published."""
        return self.step_recorder.seq

    def close(self) -> None:
        """Give the memory back; the engine is of no use afterwards. Idempotent."""
        if self.is_closed:
            return
        self.is_closed = True
        self.streams.clear()
        self._spoken.clear()
        self._clients.clear()
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
        """The requests of a submission, numbered, not yet in the queue. They are alike: all fit, or none."""
        try:
            if submit.request_id in self._clients:
                raise BadInput(f"request id {submit.request_id!r} is in use: an id is free once its request ended")
            ids = prepared(token_ids(), submit.sampling.structured, self.components.forms)
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
            self.components.scheduler.refuse(str(refusal), time.monotonic_ns())
            raise
        self._next_number += len(requests)
        return requests

    def _adapter(self, name: str) -> Adapter | None:
        """Raises BadInput for one that is not loaded."""
        if not name:
            return None
        if self.components.lora is None:
            raise BadInput(f"LoRA adapter {name!r:.140} is not accepted: this engine was started without any")
        return self.components.lora.find(name)

    def _stream(self, request: Request, submit: Submit) -> OutputStream:
        loaded = self.components.loaded
        detokenizer = None
        if loaded.tokenizer is not None:
            continued = request.prompt_token_ids if submit.raw and submit.messages is None else ()
            detokenizer = loaded.tokenizer.detokenizer(submit.sampling.stop, continued)
        token_text = loaded.tokenizer.token_text if loaded.tokenizer is not None else None
        running_time = self.components.scheduler.running_time
        return OutputStream(request, submit.request_id, detokenizer, loaded.eos_token_ids, token_text, running_time)

    def _settle(self) -> None:
        """What was begun ahead is over and written down; its words are handed out with the next."""
        ran = self._loop.settle()
        if ran is not None:
            self._write_down(ran)

    def _write_down(self, ran: CompletedStep) -> None:
        """Commit and record a step that was run."""
        self.step_count += 1
        self.stops.notice()  # before its latencies are measured
        if self.components.threads is not None:
            self.components.threads.look()
        if self.components.guard is not None:
            self.components.guard.ran(ran.plan, ran.result)
        if ran.result.block_shares is not None:
            store_attention(self.components.pool, ran.plan, ran.result.block_shares, self.step_count)
        if ran.result.block_skips is not None:
            store_skips(self.components.pool, ran.plan, ran.result.block_skips)
        ended = self._end_or_restart(ran)
        if ran.failure:
            self._tell_failure(ran, ended)
        self._note(self._eased.look(ran.ended_ns, ran.room_tokens, "failed" if ran.failure else "had no memory"))
        self._tell_notes(ran.ended_ns)
        self.components.scheduler.rate.observe(ran.plan, ran.result.forward_ns / 1e9)
        plan, result = self._commit(ran.plan, ran.result, ran.ended_ns)
        committed_ns = time.monotonic_ns()
        schedule_ns, launch_ns = self._loop.begin(self.step_count)
        begun_ns = time.monotonic_ns()
        timings = Timings(
            schedule_ns=ran.schedule_ns + schedule_ns,
            run_ns=ran.run_ns + launch_ns,
            forward_ns=ran.result.forward_ns,
            commit_ns=committed_ns - ran.ended_ns,
            record_ns=self._record_ns,
        )
        copied_s, before_s = self.components.copied_seconds, self._copied_s
        self._copied_s = copied_s
        work = self.components.work_of(ran.plan, ran.result, copied_s - before_s)
        self.step_recorder.record(plan, result, timings, self.step_count, ran.ended_ns, work)
        self._tell_cache_events()
        self._record_ns = time.monotonic_ns() - begun_ns
        self._loop.wrote_down(ran.ended_ns)

    def _end_or_restart(self, ran: CompletedStep) -> int:
        """Of the requests that were not run, how many ended."""
        ended = 0
        for request, reason in zip(ran.failed, ran.reasons, strict=True):
            if not self.components.scheduler.restart(request, reason, ran.ended_ns):
                self._finish(request, self.streams[request.number], "error", ran.ended_ns, reason)
                ended += 1
        return ended

    def _tell_failure(self, ran: CompletedStep, num_ended: int) -> None:
        """Of a step in which a library failed: once a minute."""
        if ran.ended_ns < self._next_failure_ns:
            self._untold_failures += 1
            return
        again = f"{len(ran.failed)} of its requests begin again" if ran.failed else "was run again"
        ended = f"{num_ended} of its requests ended" if num_ended else again
        more = f"; so did {self._untold_failures} since the last such note" if self._untold_failures else ""
        self._note(f"a step failed and {ended}: {ran.failure}{more}")
        self._untold_failures, self._next_failure_ns = 0, ran.ended_ns + FAILURE_NS

    def _note(self, what: str) -> None:
        if what:
            self.components.notes.append(what)

    def _tell_notes(self, now_ns: int) -> bool:
        """What was noted since it was last told, as events too; whether there was anything."""
        new_notes = self.components.notes[self._num_noted :]
        self._num_noted += len(new_notes)
        for note in new_notes:
            self.components.scheduler.note(note, now_ns)
            self._on_note(note)
        return bool(new_notes)

    def _commit(self, plan: StepPlan, result: StepResult, now_ns: int) -> tuple[StepPlan, StepResult]:
        """Tokens are said, blocks written down up to the last of them, and then requests end; returns what was run."""
        logprobs = result.logprobs or ((),) * len(plan.scheduled)
        num_emitted: list[int] = []
        ends: list[tuple[Request, FinishReason, str]] = []
        for item, token_ids, details in zip(plan.scheduled, result.token_ids, logprobs, strict=True):
            count, reason, error = self._say(item.request, token_ids, details, now_ns) if token_ids else (0, None, "")
            num_emitted.append(count)
            if reason is not None:
                ends.append((item.request, reason, error))
        if self.components.forms is not None:
            self.components.forms.send()
        if plan.has_drafts:
            plan, result = keep_emitted(plan, result, num_emitted)
        if self._fingerprints is not None:  # while the blocks of requests that end are theirs
            self._fingerprints.record(plan, result, self.step_count, now_ns)
        self.components.scheduler.commit(plan, self.step_count, now_ns)
        for request, reason, error in ends:
            self._finish(request, self.streams[request.number], reason, now_ns, error)
        return plan, result

    def _say(
        self, request: Request, token_ids: tuple[int, ...], details: tuple[TokenLogprobs, ...], now_ns: int
    ) -> tuple[int, FinishReason | None, str]:
        """What a request sampled goes to its stream, up to its end: how many tokens, why it ends and what failed."""
        stream = self._spoken[request.number] = self.streams[request.number]
        for num_emitted, (token_id, token_logprobs) in enumerate(zip_longest(token_ids, details), 1):
            error = ""
            try:
                reason = stream.add_token(token_id, token_logprobs, now_ns)
            except KvscopeError as failure:
                reason, error = "error", str(failure)
            except Exception as failure:  # its text cannot be made: nobody else's is, and the step's state is whole
                reason, error = "error", f"its output could not be written: {failure!r:.200}"
            if reason is not None:
                return num_emitted, reason, error
        return len(token_ids), None, ""

    def _finish(
        self, request: Request, stream: OutputStream, reason: FinishReason, now_ns: int, error: str = ""
    ) -> None:
        self.components.scheduler.finish(request, reason, now_ns)
        self._spoken[request.number] = stream  # it has a last word, if no token in this step
        stream.finish(reason, now_ns, error)

    def _idle(self) -> list[Tokens | Finished]:
        self._record_idle()
        self.step_started_ns = 0
        return self._take_outputs()

    def _record_idle(self) -> None:
        self.stops.notice()
        self.step_recorder.record_idle(self.step_count, time.monotonic_ns())
        self._tell_cache_events()

    @property
    def _cache_log(self) -> CacheLog | None:
        return self.cache_events.log if self.cache_events is not None else None

    def _tell_cache_events(self) -> None:
        if self.cache_events is not None:
            self.cache_events.publish()

    def _close_cache_events(self) -> None:
        if self.cache_events is not None:
            self.cache_events.close()

    def _take_outputs(self) -> list[Tokens | Finished]:
        outputs: list[Tokens | Finished] = []
        spoken, self._spoken = self._spoken, {}
        for number, stream in spoken.items():
            outputs += stream.drain()
            if stream.request.is_finished:
                if self._ended is not None:
                    self._ended.append(stream.request)
                del self.streams[number]
                self._forget(stream)
        return outputs

    def _forget(self, stream: OutputStream) -> None:
        """Free the client's id once its last completion ended."""
        requests = self._clients.get(stream.client_id, [])
        if all(request.is_finished and request.number not in self.streams for request in requests):
            self._clients.pop(stream.client_id, None)


def _discard(message: object) -> None:
    """Where messages go that nobody asked for."""


def with_text(content: BlockContent, tokenizer: Tokenizer | None) -> BlockContent:
    """What blocks hold as text, asked for by a person who points at one. Never on the telemetry socket.

    The same content with its tokens decoded; a model without a tokenizer has no text.
    """
    if tokenizer is None or not content.token_ids:
        return content
    return msgspec.structs.replace(content, text=tokenizer.decode(list(content.token_ids)))
