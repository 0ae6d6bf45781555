"""The forms that clients ask for, compiled: beside the engine's steps, within a time, and kept for the next request.

Owns the compiler, which is made when the first one asks (XGrammar takes a second to import), the threads that compile,
and what is kept. Called on any thread.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Collection
from concurrent.futures import Future
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from kvscope_engine.model.structured.compiling import compile_form
from kvscope_engine.model.structured.matcher import WORD_BITS, FormMatcher
from kvscope_engine.model.structured.vocabulary import json_tokens, tokenizer_info
from kvscope_engine.model.text.tokenizer import Tokenizer
from kvscope_telemetry.errors import BadInput
from kvscope_telemetry.messages.structured import Structured

MAX_COMPILE_S: Final = 30.0
MAX_COMPILING: Final = 4
"""At once; one that takes too long goes on without anybody who waits for it, and nothing can end it."""
MAX_KEPT_BYTES: Final = 256 << 20
MAX_KEPT: Final = 256
HOLDS_JSON: Final = ("json_schema", "json_object", "structural_tag")
"""Kinds whose texts are, or have in them, JSON."""


class Form:
    """A compiled form. `matcher` makes one completion's way through it."""

    def __init__(self, compiled: Any, ends: Collection[int], within: NDArray[np.int32] | None) -> None:
        self._compiled = compiled
        self._ends = ends
        self._within = within
        self.num_bytes = int(compiled.memory_size_bytes)

    def matcher(self) -> FormMatcher:
        """From its beginning."""
        return FormMatcher(self._compiled, self._ends, self._within)


class Forms:
    """For a model with `tokenizer`, whose logits are `num_logits` wide and whose texts end with one of `ends`."""

    def __init__(
        self, tokenizer: Tokenizer, num_logits: int, ends: Collection[int], max_s: float = MAX_COMPILE_S
    ) -> None:
        self._tokenizer = tokenizer
        self._num_logits = num_logits
        self._ends = tuple(token for token in sorted(ends) if token < num_logits)
        self._max_s = max_s
        self._kept: OrderedDict[Structured, Form] = OrderedDict()
        self._compiling: dict[Structured, Future[Form]] = {}
        self._lock = threading.Lock()
        self._compiler: Any = None
        self._json_tokens: NDArray[np.int32] | None = None
        self._compiler_lock = threading.Lock()

    def get(self, asked: Structured) -> Form:
        """The form, compiled if it is not yet.

        Raises BadInput, in a line that names it, for what cannot be compiled, what no text can be of, and what takes
        more than `max_s`.
        """
        self._ready_compiler()  # not a part of anybody's time
        with self._lock:
            if (kept := self._kept.get(asked)) is not None:
                self._kept.move_to_end(asked)
                return kept
            future = self._compiling.get(asked) or self._begin(asked)
        try:
            return future.result(self._max_s)
        except TimeoutError:
            reason = f"{asked.kind} takes more than {self._max_s:g} s to compile: a simpler one is accepted"
            raise BadInput(reason) from None

    def _begin(self, asked: Structured) -> Future[Form]:
        """Under the lock."""
        if len(self._compiling) >= MAX_COMPILING:
            raise BadInput(f"{asked.kind} is not accepted now: {MAX_COMPILING} others are being compiled")
        future = self._compiling[asked] = Future[Form]()
        threading.Thread(target=self._run, args=(asked, future), name="kvscope-forms", daemon=True).start()
        return future

    def _run(self, asked: Structured, future: Future[Form]) -> None:
        try:
            form = self._compile(asked)
        except Exception as error:  # told to who waits, and to who asks next: it is tried again
            with self._lock:
                del self._compiling[asked]
            future.set_exception(error)
            return
        with self._lock:
            del self._compiling[asked]
            self._keep(asked, form)
        future.set_result(form)

    def _compile(self, asked: Structured) -> Form:
        compiled = compile_form(self._ready_compiler(), asked)
        form = Form(compiled, self._ends, self._json_tokens if asked.kind in HOLDS_JSON else None)
        words = np.zeros((1, -(-self._num_logits // WORD_BITS)), np.int32)
        if not form.matcher().can_begin(words):
            raise BadInput(f"{asked.kind} is not accepted: no text of this model's tokens is of that form")
        return form

    def _ready_compiler(self) -> Any:
        with self._compiler_lock:
            if self._compiler is None:
                import xgrammar

                info = tokenizer_info(self._tokenizer, self._num_logits, self._ends)
                self._json_tokens = json_tokens(info, self._num_logits)
                self._compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)
            return self._compiler

    def _keep(self, asked: Structured, form: Form) -> None:
        self._kept[asked] = form
        while len(self._kept) > 1 and (len(self._kept) > MAX_KEPT or self._kept_bytes() > MAX_KEPT_BYTES):
            self._kept.popitem(last=False)

    def _kept_bytes(self) -> int:
        return sum(form.num_bytes + 4 * len(asked.text) for asked, form in self._kept.items())


class PreparedPrompt(list[int]):
    """Token ids of a prompt, and the form of its answer: so that nothing has to be compiled between two steps."""

    def __init__(self, token_ids: list[int], form: Form) -> None:
        super().__init__(token_ids)
        self.form = form


def prepared(token_ids: list[int], asked: Structured | None, forms: Forms | None) -> list[int]:
    """With the form, where one is asked for. Raises BadInput as `Forms.get` does, and for a model without text."""
    if asked is None or isinstance(token_ids, PreparedPrompt):
        return token_ids
    if forms is None:
        raise BadInput("structured is not accepted: this model has no tokenizer, so no text to have a form")
    return PreparedPrompt(token_ids, forms.get(asked))


def matcher_for(token_ids: list[int]) -> FormMatcher | None:
    """Of one completion of a prompt; None where no form is asked for."""
    return token_ids.form.matcher() if isinstance(token_ids, PreparedPrompt) else None
