"""Manages the grammars of structured output. Each is compiled and tested in a separate process before it is accepted.

C++ code cannot be interrupted, and a regex of twenty characters can keep it busy forever, during compilation or at its
hundredth token. So the engine's process computes nothing of a grammar: a grammar process that takes too long is killed
without affecting other requests (docs/internals/decisions/0024-grammars-run-in-their-own-processes.md).

Owns the fork server, which is started for the first grammar, and the cache of grammars. `get` may be called on any
thread, `request_masks` and `await_masks` only on the engine's thread.
"""

from __future__ import annotations

import re
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable, Collection
from concurrent.futures import Future
from typing import Final

from kvscope_engine.structured_output.grammar_matcher import Grammar, GrammarMatcher
from kvscope_engine.structured_output.grammar_messages import TrialResult
from kvscope_engine.structured_output.grammar_process import (
    MAX_STEP_WAIT_S,
    POLL_S,
    ForkServerProcess,
    GrammarProcess,
    wait_for_any,
)
from kvscope_engine.structured_output.vocabulary import vocabulary_of
from kvscope_engine.tokenization.tokenizer import Tokenizer
from kvscope_telemetry.errors import BadInput, KvscopeError
from kvscope_telemetry.messages.structured import Structured
from kvscope_telemetry.printable import valid_text

MAX_COMPILE_S: Final = 5.0
"""Maximum CPU seconds to compile and test a grammar."""
MAX_WAIT_S: Final = 60.0
"""Maximum seconds (wall-clock time) to wait for a grammar on a machine that is busy with other work."""
MAX_GRAMMARS: Final = 64
"""Maximum number of grammars, each with a process: in use, being compiled, and cached."""
MAX_BYTES: Final = 1 << 30
"""Total bytes of memory of all grammar processes above which no further grammar is accepted."""
MAX_CACHED: Final = 32
MAX_CACHED_BYTES: Final = 64 << 20
"""Maximum bytes of memory of all cached grammars. A larger grammar exists only while it is in use."""
MAX_DEPTH: Final = 128
"""Maximum nesting depth of objects and arrays in a JSON schema.

XGrammar's time grows with the cube of the depth: 0.2 s at 128, 8 s and more at 500. Other grammars of the same client
wait during that time.
"""
_STRING: Final = re.compile(r'"(?:[^"\\]|\\.)*"', re.DOTALL)
_BRACKET: Final = re.compile(r"[][{}]")
UNWANTED: Final = "no client waits for this grammar any more"

IsWanted = Callable[[], bool]


def always_wanted() -> bool:
    return True


class _Compilation:
    """A grammar that is being compiled. `is_wanted_callbacks` contains the `is_wanted` argument of each caller
    of `get` that waits for this grammar.
    """

    def __init__(self) -> None:
        self.is_wanted_callbacks: list[IsWanted] = []
        self.grammar: Future[Grammar] = Future()


class StructuredOutputManager:
    """Compiles and caches the grammars of one model.

    Args:
        tokenizer: Tokenizer of the model.
        num_logits: Width of the model's logits.
        ends: Token ids that may end a text.
        max_s: Maximum CPU seconds to compile and test a grammar.
    """

    def __init__(
        self, tokenizer: Tokenizer, num_logits: int, ends: Collection[int], max_s: float = MAX_COMPILE_S
    ) -> None:
        self._tokenizer = tokenizer
        self._num_logits = num_logits
        self._ends = tuple(token for token in sorted(ends) if token < num_logits)
        self._max_s = max_s
        self._live: weakref.WeakValueDictionary[Structured, Grammar] = weakref.WeakValueDictionary()
        """All grammars that exist: those that requests use, and the cached ones."""
        self._cached: OrderedDict[Structured, Grammar] = OrderedDict()
        self._compilations: dict[Structured, _Compilation] = {}
        self._lock = threading.Lock()
        self._fork_server: ForkServerProcess | None = None
        self._fork_server_lock = threading.Lock()
        self._busy: set[GrammarProcess] = set()
        """Processes that owe an answer, or that have not received the list of dropped completions yet.

        Any thread adds to this set, so it must be copied before iterating.
        """
        self._is_closed = False

    def is_compiled(self, spec: Structured) -> bool:
        with self._lock:
            grammar = self._live.get(spec)
            return grammar is not None and not grammar.process.failure

    def get(self, spec: Structured, is_wanted: IsWanted = always_wanted) -> Grammar:
        """Return the grammar of `spec`. A new grammar is compiled and tested first.

        Compilation is cancelled when `is_wanted` returns False for all callers that wait for it.

        Raises BadInput with one line that names the grammar if it cannot be compiled, no text can match it, it takes
        more than `max_s` of CPU time, or too many grammars are in use.
        """
        _check_text(spec)
        fork_server = self._ready_fork_server(spec)
        if not self.is_compiled(spec):
            self._measure_memory()
        with self._lock:
            grammar = self._live.get(spec)
            if grammar is not None and not grammar.process.failure:
                self._add_to_cache(spec, grammar)
                return grammar
            compilation = self._compilations.get(spec)
            is_first = compilation is None
            if compilation is None:
                self._evict_cached(spec)
                compilation = self._compilations[spec] = _Compilation()
            compilation.is_wanted_callbacks.append(is_wanted)
        if is_first:
            self._run(fork_server, spec, compilation)
        while True:
            try:
                return compilation.grammar.result(POLL_S)
            except TimeoutError:
                if not is_wanted():
                    raise BadInput(UNWANTED) from None

    def request_masks(self) -> None:
        """Send the accepted tokens to the grammar processes to request the next masks, with one packet per process."""
        for process in list(self._busy):
            process.send()

    def await_masks(self, *, is_idle: bool) -> None:
        """Receive masks from the grammar processes, waiting up to `MAX_STEP_WAIT_S` for those that are expected soon.

        If `is_idle`, no request can run until a mask arrives. The method then also waits for slow processes, and
        returns when the first answer arrives.
        """
        deadline_s = time.monotonic() + MAX_STEP_WAIT_S
        while self._busy:
            received = [process.receive() for process in list(self._busy)]
            awaited = [process for process in list(self._busy) if is_idle or process.is_answer_expected]
            remaining_s = deadline_s - time.monotonic()
            if not awaited or remaining_s <= 0 or (is_idle and any(received)):
                return
            wait_for_any(awaited, remaining_s)

    def close(self) -> None:
        self._is_closed = True
        if (fork_server := self._fork_server) is not None:
            fork_server.kill()  # a thread that waits for it to start holds the lock
        with self._fork_server_lock, self._lock:
            for grammar in list(self._live.values()):
                grammar.process.kill()
            self._cached.clear()
            if self._fork_server is not None:
                self._fork_server.close()

    def _run(self, fork_server: ForkServerProcess, spec: Structured, compilation: _Compilation) -> None:
        try:
            grammar = self._compiled(fork_server, spec, compilation)
        except Exception as error:  # raised in all waiting callers; the next caller compiles it again
            with self._lock:
                self._compilations.pop(spec, None)
            compilation.grammar.set_exception(error)
            return
        with self._lock:
            del self._compilations[spec]
            self._live[spec] = grammar
            self._add_to_cache(spec, grammar)
        compilation.grammar.set_result(grammar)

    def _compiled(self, fork_server: ForkServerProcess, spec: Structured, compilation: _Compilation) -> Grammar:
        try:
            process = fork_server.fork(self._busy)
        except KvscopeError as error:
            raise BadInput(f"{spec.kind} is not accepted: {error}") from None
        try:
            trial_result = self._await_result(process, spec, compilation)
            if trial_result.reason:
                raise BadInput(trial_result.reason)
            return Grammar(process, trial_result, self._ends)
        except BaseException:
            process.kill()
            raise

    def _await_result(self, process: GrammarProcess, spec: Structured, compilation: _Compilation) -> TrialResult:
        process.start_trial(spec)
        deadline_s = time.monotonic() + MAX_WAIT_S
        while True:
            try:
                trial_result = process.poll_result()
            except EOFError:
                raise BadInput(
                    f"{spec.kind} is too costly: its compiler ran out of memory or recursion depth"
                ) from None
            if trial_result is not None:
                return trial_result
            if process.cpu_s > self._max_s:
                raise BadInput(
                    f"{spec.kind} is too costly: it takes more than {self._max_s:g} s to compile and try; "
                    "use a simpler one"
                )
            if time.monotonic() > deadline_s:
                raise BadInput(f"the engine is behind: {spec.kind} was not compiled within {MAX_WAIT_S:g} s")
            with self._lock:
                if self._is_closed or not any(is_wanted() for is_wanted in compilation.is_wanted_callbacks):
                    self._compilations.pop(spec, None)  # later callers start another compilation
                    raise BadInput(UNWANTED)

    def _ready_fork_server(self, spec: Structured) -> ForkServerProcess:
        with self._fork_server_lock:
            if self._is_closed:
                raise BadInput(f"{spec.kind} is not accepted: the engine is closed")
            if self._fork_server is None or not self._fork_server.is_alive:
                if self._fork_server is not None:
                    self._fork_server.close()
                    self._fork_server = None
                try:
                    self._fork_server = fork_server = ForkServerProcess()
                    if self._is_closed:
                        fork_server.kill()
                    fork_server.send_vocabulary(vocabulary_of(self._tokenizer, self._num_logits, self._ends))
                except KvscopeError as error:
                    raise BadInput(f"{spec.kind} is not accepted: {error}") from None
            return self._fork_server

    def _evict_cached(self, spec: Structured) -> None:
        """Evict cached grammars until another one can be added. Must be called with the lock held.

        Raises BadInput if the remaining grammars are all in use.
        """
        while self._cached and (
            len(self._live) + len(self._compilations) >= MAX_GRAMMARS or self._live_bytes() > MAX_BYTES
        ):
            self._cached.popitem(last=False)  # its process ends, unless it is in use
        if len(self._live) + len(self._compilations) >= MAX_GRAMMARS:
            reason = f"{MAX_GRAMMARS} grammars are already in use, so another one ({spec.kind}) is not accepted now"
            raise BadInput(f"the engine is behind: {reason}")
        if self._live_bytes() > MAX_BYTES:
            reason = (
                f"the grammars in use already take {MAX_BYTES >> 20} MiB, so another one ({spec.kind}) is not "
                "accepted now"
            )
            raise BadInput(f"the engine is behind: {reason}")

    def _measure_memory(self) -> None:
        with self._lock:
            grammars = list(self._live.values())
        for grammar in grammars:
            grammar.num_bytes = grammar.process.own_bytes

    def _live_bytes(self) -> int:
        return sum(grammar.num_bytes for grammar in list(self._live.values()))

    def _add_to_cache(self, spec: Structured, grammar: Grammar) -> None:
        if _bytes_in_cache(spec, grammar) > MAX_CACHED_BYTES:
            self._cached.pop(spec, None)
            return
        self._cached[spec] = grammar
        self._cached.move_to_end(spec)
        while len(self._cached) > 1 and (len(self._cached) > MAX_CACHED or self._cached_bytes() > MAX_CACHED_BYTES):
            self._cached.popitem(last=False)

    def _cached_bytes(self) -> int:
        return sum(_bytes_in_cache(spec, grammar) for spec, grammar in self._cached.items())


class PreparedPrompt(list[int]):
    """Token ids of a prompt with the compiled grammar of its answer."""

    def __init__(self, token_ids: list[int], grammar: Grammar) -> None:
        super().__init__(token_ids)
        self.grammar = grammar


def prepare_prompt(
    token_ids: list[int],
    spec: Structured | None,
    grammars: StructuredOutputManager | None,
    is_wanted: IsWanted = always_wanted,
) -> list[int]:
    """Return `token_ids`, as a `PreparedPrompt` with the compiled grammar if `spec` is given.

    Raises BadInput as `StructuredOutputManager.get` does, and for a model without a tokenizer.
    """
    if spec is None or isinstance(token_ids, PreparedPrompt):
        return token_ids
    if grammars is None:
        raise BadInput(
            "structured is not accepted: this model has no tokenizer, so no text that a grammar could apply to"
        )
    return PreparedPrompt(token_ids, grammars.get(spec, is_wanted))


def matcher_for(token_ids: list[int]) -> GrammarMatcher | None:
    """Return a matcher for one completion of a prompt; None if the prompt is no `PreparedPrompt`."""
    return token_ids.grammar.matcher() if isinstance(token_ids, PreparedPrompt) else None


def _bytes_in_cache(spec: Structured, grammar: Grammar) -> int:
    """Return the bytes of a cached grammar: those of its process, and 4 for each character of its text."""
    return grammar.num_bytes + 4 * len(spec.text)


def _check_text(spec: Structured) -> None:
    valid_text(spec.text, name=spec.kind)
    if spec.kind in ("json_schema", "structural_tag") and (depth := _json_depth(spec.text)) > MAX_DEPTH:
        raise BadInput(f"{spec.kind} is not accepted: {depth} levels are nested, at most {MAX_DEPTH} are accepted")


def _json_depth(text: str) -> int:
    """Return the nesting depth of objects and arrays in a JSON text, in one pass and without recursion."""
    depth = max_depth = 0
    for bracket in _BRACKET.findall(_STRING.sub("", text)):
        depth += 1 if bracket in "[{" else -1
        max_depth = max(max_depth, depth)
    return max_depth
