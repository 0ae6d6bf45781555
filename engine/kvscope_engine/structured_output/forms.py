"""Compiled grammars of structured output: each is compiled and tried in a separate process before it is accepted.

C++ code cannot be interrupted, and a regex of twenty characters can keep it busy forever, during compilation or at its
hundredth token. So nothing of a grammar is computed in the engine: a process that takes too long is killed without
affecting other requests (docs/internals/decisions/0024-grammars-run-in-their-own-processes.md).

Owns the keeper process, which is started for the first grammar, and the cache of grammars. `get` may be called on any
thread, `await_masks` only on the engine's.
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

from kvscope_engine.structured_output.matcher import Form, FormMatcher
from kvscope_engine.structured_output.processes import (
    POLL_S,
    SLOW_S,
    FormProcess,
    KeeperProcess,
    wait_for_any,
)
from kvscope_engine.structured_output.vocabulary import vocabulary_of
from kvscope_engine.structured_output.wire import Proof
from kvscope_engine.tokenization.tokenizer import Tokenizer
from kvscope_telemetry.errors import BadInput, KvscopeError
from kvscope_telemetry.messages.structured import Structured

MAX_COMPILE_S: Final = 5.0
"""Maximum CPU time to compile and try a grammar, in seconds."""
MAX_WAIT_S: Final = 60.0
"""Maximum time to wait for a grammar, in seconds, on a machine that is busy with other work."""
MAX_FORMS: Final = 64
"""Maximum number of grammars, each with a process: in use, being compiled, and cached."""
MAX_BYTES: Final = 1 << 30
"""Memory of all grammar processes above which no further grammar is accepted, in bytes."""
MAX_KEPT: Final = 32
MAX_KEPT_BYTES: Final = 64 << 20
"""Maximum memory of the cached grammars, in bytes. A larger grammar only exists while it is in use."""
MAX_DEPTH: Final = 128
"""Maximum nesting depth of objects and arrays in a JSON schema. XGrammar's time grows with the cube of the depth: 0.2 s
at 128, 8 s and more at 500, during which other grammars of the same client wait."""
_STRING: Final = re.compile(r'"(?:[^"\\]|\\.)*"', re.DOTALL)
_BRACKET: Final = re.compile(r"[][{}]")
UNWANTED: Final = "no client waits for this form any more"

Wanted = Callable[[], bool]


def always() -> bool:
    return True


class _Trial:
    """A grammar that is being compiled; `wanted` are the callbacks of all callers that wait for it."""

    def __init__(self) -> None:
        self.wanted: list[Wanted] = []
        self.form: Future[Form] = Future()


class Forms:
    """Compiles and caches the grammars of one model.

    Args:
        tokenizer: Tokenizer of the model.
        num_logits: Width of the model's logits.
        ends: Token ids that may end a text.
        max_s: Maximum CPU time to compile and try a grammar, in seconds.
    """

    def __init__(
        self, tokenizer: Tokenizer, num_logits: int, ends: Collection[int], max_s: float = MAX_COMPILE_S
    ) -> None:
        self._tokenizer = tokenizer
        self._num_logits = num_logits
        self._ends = tuple(token for token in sorted(ends) if token < num_logits)
        self._max_s = max_s
        self._alive: weakref.WeakValueDictionary[Structured, Form] = weakref.WeakValueDictionary()
        self._kept: OrderedDict[Structured, Form] = OrderedDict()
        self._trials: dict[Structured, _Trial] = {}
        self._lock = threading.Lock()
        self._keeper: KeeperProcess | None = None
        self._keeper_lock = threading.Lock()
        self._busy: set[FormProcess] = set()
        """Processes that owe the engine's thread an answer, or must be informed of completions that ended. Any thread
        adds to this set, so it must be copied before iterating."""
        self._is_closed = False

    def has(self, asked: Structured) -> bool:
        """Whether the grammar is compiled already, so that `get` returns immediately."""
        with self._lock:
            form = self._alive.get(asked)
            return form is not None and not form.process.failure

    def get(self, asked: Structured, is_wanted: Wanted = always) -> Form:
        """Return the grammar, compiled and tried if it is new. Compilation is cancelled once no caller wants it.

        Raises BadInput with one line that names the grammar if it cannot be compiled, no text can match it, it takes
        more than `max_s` of CPU time, or too many grammars are in use.
        """
        _check_text(asked)
        keeper = self._ready_keeper(asked)
        if not self.has(asked):
            self._measure()
        with self._lock:
            form = self._alive.get(asked)
            if form is not None and not form.process.failure:
                self._keep(asked, form)
                return form
            trial = self._trials.get(asked)
            is_first = trial is None
            if trial is None:
                self._make_room(asked)
                trial = self._trials[asked] = _Trial()
            trial.wanted.append(is_wanted)
        if is_first:
            self._run(keeper, asked, trial)
        while True:
            try:
                return trial.form.result(POLL_S)
            except TimeoutError:
                if not is_wanted():
                    raise BadInput(UNWANTED) from None

    def send(self) -> None:
        """Ask the processes for the masks after all accepted tokens, with one packet per process."""
        for process in list(self._busy):
            process.send()

    def await_masks(self, *, is_idle: bool) -> None:
        """Receive masks from the processes, and wait briefly for those that will answer soon.

        With `is_idle` the engine has nothing to do until a process answers, so it waits for any of them.
        """
        deadline_s = time.monotonic() + SLOW_S
        while self._busy:
            heard = [process.pump() for process in list(self._busy)]
            awaited = [process for process in list(self._busy) if is_idle or process.is_waited_for]
            left_s = deadline_s - time.monotonic()
            if not awaited or left_s <= 0 or (is_idle and any(heard)):
                return
            wait_for_any(awaited, left_s)

    def close(self) -> None:
        self._is_closed = True
        if (keeper := self._keeper) is not None:
            keeper.kill()  # a thread that waits for it to start holds the lock
        with self._keeper_lock, self._lock:
            for form in list(self._alive.values()):
                form.process.end()
            self._kept.clear()
            if self._keeper is not None:
                self._keeper.close()

    def _run(self, keeper: KeeperProcess, asked: Structured, trial: _Trial) -> None:
        try:
            form = self._tried(keeper, asked, trial)
        except Exception as error:  # raised in all waiting callers; the next caller compiles it again
            with self._lock:
                self._trials.pop(asked, None)
            trial.form.set_exception(error)
            return
        with self._lock:
            del self._trials[asked]
            self._alive[asked] = form
            self._keep(asked, form)
        trial.form.set_result(form)

    def _tried(self, keeper: KeeperProcess, asked: Structured, trial: _Trial) -> Form:
        try:
            process = keeper.fork(self._busy)
        except KvscopeError as error:
            raise BadInput(f"{asked.kind} is not accepted: {error}") from None
        try:
            proof = self._proof(process, asked, trial)
            if proof.reason:
                raise BadInput(proof.reason)
            return Form(process, proof, self._ends)
        except BaseException:
            process.end()
            raise

    def _proof(self, process: FormProcess, asked: Structured, trial: _Trial) -> Proof:
        process.begin(asked)
        deadline_s = time.monotonic() + MAX_WAIT_S
        while True:
            try:
                proof = process.proof()
            except EOFError:
                raise BadInput(
                    f"{asked.kind} is too costly: its compiler ran out of memory or recursion depth"
                ) from None
            if proof is not None:
                return proof
            if process.computed_s > self._max_s:
                raise BadInput(
                    f"{asked.kind} is too costly: it takes more than {self._max_s:g} s to compile and try; "
                    "use a simpler one"
                )
            if time.monotonic() > deadline_s:
                raise BadInput(f"the engine is behind: {asked.kind} was not compiled within {MAX_WAIT_S:g} s")
            with self._lock:
                if self._is_closed or not any(wanted() for wanted in trial.wanted):
                    self._trials.pop(asked, None)  # later callers start another compilation
                    raise BadInput(UNWANTED)

    def _ready_keeper(self, asked: Structured) -> KeeperProcess:
        with self._keeper_lock:
            if self._is_closed:
                raise BadInput(f"{asked.kind} is not accepted: the engine is closed")
            if self._keeper is None or not self._keeper.is_alive:
                if self._keeper is not None:
                    self._keeper.close()
                    self._keeper = None
                try:
                    self._keeper = keeper = KeeperProcess()
                    if self._is_closed:
                        keeper.kill()
                    keeper.introduce(vocabulary_of(self._tokenizer, self._num_logits, self._ends))
                except KvscopeError as error:
                    raise BadInput(f"{asked.kind} is not accepted: {error}") from None
            return self._keeper

    def _make_room(self, asked: Structured) -> None:
        """Evict cached grammars until there is capacity for another. Must be called with the lock held.

        Raises BadInput if the remaining ones are all in use.
        """
        while self._kept and (len(self._alive) + len(self._trials) >= MAX_FORMS or self._num_bytes() > MAX_BYTES):
            self._kept.popitem(last=False)  # its process ends, unless it is in use
        if len(self._alive) + len(self._trials) >= MAX_FORMS:
            reason = f"{MAX_FORMS} forms are in use already, and {asked.kind} is another one"
            raise BadInput(f"the engine is behind: {reason}")
        if self._num_bytes() > MAX_BYTES:
            reason = f"forms in use take {MAX_BYTES >> 20} MiB already, and {asked.kind} is another one"
            raise BadInput(f"the engine is behind: {reason}")

    def _measure(self) -> None:
        """Update the memory used by all grammars, which grows with use."""
        with self._lock:
            forms = list(self._alive.values())
        for form in forms:
            form.num_bytes = form.process.own_bytes

    def _num_bytes(self) -> int:
        return sum(form.num_bytes for form in list(self._alive.values()))

    def _keep(self, asked: Structured, form: Form) -> None:
        if _num_bytes(asked, form) > MAX_KEPT_BYTES:
            self._kept.pop(asked, None)
            return
        self._kept[asked] = form
        self._kept.move_to_end(asked)
        while len(self._kept) > 1 and (len(self._kept) > MAX_KEPT or self._kept_bytes() > MAX_KEPT_BYTES):
            self._kept.popitem(last=False)

    def _kept_bytes(self) -> int:
        return sum(_num_bytes(asked, form) for asked, form in self._kept.items())


class PreparedPrompt(list[int]):
    """Token ids of a prompt with the grammar of its answer, so that nothing has to be compiled between two steps."""

    def __init__(self, token_ids: list[int], form: Form) -> None:
        super().__init__(token_ids)
        self.form = form


def prepared(
    token_ids: list[int], asked: Structured | None, forms: Forms | None, is_wanted: Wanted = always
) -> list[int]:
    """Return `token_ids` with the compiled grammar, if one is requested.

    Raises BadInput as `Forms.get` does, and for a model without a tokenizer.
    """
    if asked is None or isinstance(token_ids, PreparedPrompt):
        return token_ids
    if forms is None:
        raise BadInput("structured is not accepted: this model has no tokenizer, so no text to have a form")
    return PreparedPrompt(token_ids, forms.get(asked, is_wanted))


def matcher_for(token_ids: list[int]) -> FormMatcher | None:
    """Return a matcher for one completion of a prompt; None if no structured output is requested."""
    return token_ids.form.matcher() if isinstance(token_ids, PreparedPrompt) else None


def _num_bytes(asked: Structured, form: Form) -> int:
    return form.num_bytes + 4 * len(asked.text)


def _check_text(asked: Structured) -> None:
    try:
        asked.text.encode()
    except UnicodeEncodeError as error:
        raise BadInput(f"{asked.kind} is not accepted: {asked.text[error.start]!r} is no character") from None
    if asked.kind in ("json_schema", "structural_tag") and (depth := _json_depth(asked.text)) > MAX_DEPTH:
        raise BadInput(f"{asked.kind} is not accepted: {depth} levels are nested, at most {MAX_DEPTH} are accepted")


def _json_depth(text: str) -> int:
    """Return how deeply objects and arrays of a JSON text are nested, in one pass and without recursion."""
    depth = deepest = 0
    for bracket in _BRACKET.findall(_STRING.sub("", text)):
        depth += 1 if bracket in "[{" else -1
        deepest = max(deepest, depth)
    return deepest
