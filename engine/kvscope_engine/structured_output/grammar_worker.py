"""Process of one grammar: compiles and tests it, and then computes the allowed next tokens of its completions.

All costs of a grammar arise in this process, which the engine kills if they are too high. Compiling and testing run on
a thread with low priority. Token masks are computed with normal priority, because the engine waits for them. The
requests of a step arrive in one packet and are answered in one packet. If the answer takes long, the masks that are
ready are sent first.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import random
import resource
import socket
import threading
import time
from collections.abc import Collection
from typing import Any, Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvscope_engine.structured_output import grammar_messages
from kvscope_engine.structured_output.grammar_compiler import OUT_OF_MEMORY, compile_grammar
from kvscope_telemetry.errors import BadInput
from kvscope_telemetry.messages.structured import Structured

JSON_KINDS: Final = ("json_schema", "json_object", "structural_tag")
"""Values of `Structured.kind` whose texts are JSON or contain it."""
MAX_MASK_S: Final = 0.02
"""Maximum CPU seconds per token while a grammar is tested; slower grammars are refused. On a busy machine,
single tokens may take longer, so a slow test is repeated before the grammar is refused.
"""
TOO_SLOW_FACTOR: Final = 5
"""Multiple of `MAX_MASK_S` above which a slow test is not repeated, because the load of the machine cannot
explain it.
"""
NUM_WALKS: Final = 6
MAX_WALK_TOKENS: Final = 24
"""Maximum number of tokens of each random walk that tests a grammar."""
MAX_TRIAL_S: Final = 0.25
MAX_ADDED_BYTES: Final = 256 << 20
"""Maximum bytes of address space that a grammar process may use in addition to that of the fork server."""
MAX_UNSENT_NS: Final = 1_000_000
"""CPU time in nanoseconds after which the masks that are ready are sent without waiting for the other masks."""
LOW_PRIORITY_NICE: Final = 19
MIB: Final = 1 << 20


def run_worker(
    line: socket.socket, info: Any, num_logits: int, ends: Collection[int], json_mask: NDArray[np.int32]
) -> None:
    """Run the process of one grammar until the engine closes the socket `line`.

    Receives a grammar, compiles and tests it, and sends the result of the test. If the grammar was accepted, then
    computes the token masks of all completions that use it.
    """
    descriptors = [os.pidfd_open(os.getpid()), os.memfd_create("masks")]
    masks = grammar_messages.map_masks(descriptors[1], num_logits)
    socket.send_fds(line, [os.getpid().to_bytes(4, "little")], descriptors)
    for descriptor in descriptors:
        os.close(descriptor)
    try:
        spec = msgspec.msgpack.decode(grammar_messages.receive_long(line), type=Structured)
        _limit_memory()
        trial = _Trial(spec, info, masks, ends, json_mask)
        thread = threading.Thread(target=trial.run)
        thread.start()
        thread.join()
        _release_memory()
        grammar_messages.send_long(line, msgspec.msgpack.encode(trial.trial_result))
        if trial.grammar is not None:
            _serve(line, trial.grammar)
    except (EOFError, OSError):
        return


class _WorkerGrammar:
    def __init__(
        self, compiled: Any, masks: NDArray[np.int32], ends: Collection[int], allowed_tokens: NDArray[np.int32] | None
    ) -> None:
        """`masks` is the array to whose rows masks are written. `allowed_tokens` is a mask of the tokens that
        may ever be allowed; None if all may.
        """
        self._compiled = compiled
        self._ends = ends
        self._allowed_tokens = allowed_tokens
        self._masks = masks

    def matcher(self) -> Any:
        import xgrammar

        return xgrammar.GrammarMatcher(self._compiled, terminate_without_stop_token=not self._ends)

    def mask(self, matcher: Any, row: int = 0) -> NDArray[np.int32]:
        mask: NDArray[np.int32] = self._masks[row]
        mask.fill(-1)  # XGrammar writes nothing if all tokens are allowed
        matcher.fill_next_token_bitmask(self._masks, row)
        if self._allowed_tokens is not None:
            mask &= self._allowed_tokens
        return mask


class _Trial:
    """Compiles and tests a grammar. Sets `trial_result`, and `grammar` if the grammar is accepted."""

    def __init__(
        self,
        spec: Structured,
        info: Any,
        masks: NDArray[np.int32],
        ends: Collection[int],
        json_mask: NDArray[np.int32],
    ) -> None:
        self.grammar: _WorkerGrammar | None = None
        self.trial_result = grammar_messages.TrialResult(reason=f"{spec.kind} is not accepted: its compiler failed")
        self._spec = spec
        self._info = info
        self._masks = masks
        self._ends = ends
        self._allowed_tokens = json_mask if spec.kind in JSON_KINDS else None

    def run(self) -> None:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), LOW_PRIORITY_NICE)
        kind = self._spec.kind
        try:
            self._try()
        except BadInput as error:
            self.trial_result = grammar_messages.TrialResult(reason=str(error))
        except Exception as error:
            reason = f"{kind} is not accepted: {type(error).__name__}: {error!s:.200}"
            if isinstance(error, MemoryError) or OUT_OF_MEMORY in str(error):
                reason = f"{kind} is too costly: it takes more than {MAX_ADDED_BYTES // MIB} MiB of memory"
            self.trial_result = grammar_messages.TrialResult(reason=reason)

    def _try(self) -> None:
        import xgrammar

        compiler = xgrammar.GrammarCompiler(self._info, max_threads=1, cache_enabled=False)
        grammar = _WorkerGrammar(compile_grammar(compiler, self._spec), self._masks, self._ends, self._allowed_tokens)
        first = grammar.mask(grammar.matcher()).copy()
        if not first.any():
            raise BadInput(f"{self._spec.kind} is not accepted: no text of this model's tokens matches it")
        self._walk(grammar)
        self.trial_result = grammar_messages.TrialResult(mask=first.tobytes())
        self.grammar = grammar

    def _walk(self, grammar: _WorkerGrammar) -> None:
        """Test the grammar on several random walks, whose tokens are drawn from the allowed ones.

        Raises BadInput if a token takes too long.
        """
        started_s = time.thread_time()
        for seed in range(NUM_WALKS):
            if time.thread_time() - started_s > MAX_TRIAL_S:
                return
            longest_s = _longest_token_s(grammar, seed)
            if MAX_MASK_S < longest_s < TOO_SLOW_FACTOR * MAX_MASK_S:
                longest_s = _longest_token_s(grammar, seed)
            if longest_s > MAX_MASK_S:
                raise BadInput(
                    f"{self._spec.kind} is too costly: one token takes {longest_s * 1e3:.0f} ms "
                    f"of computing, at most {MAX_MASK_S * 1e3:.0f} ms are accepted; use a simpler one"
                )


def _longest_token_s(grammar: _WorkerGrammar, seed: int) -> float:
    """Return the longest CPU time in seconds for a token on a random walk through the grammar.

    The walk ends if a token is too slow.
    """
    matcher, rng, longest_s, started_s = grammar.matcher(), random.Random(seed), 0.0, time.thread_time()
    for _ in range(MAX_WALK_TOKENS):
        token_started_s = time.thread_time()
        allowed = np.flatnonzero(np.unpackbits(grammar.mask(matcher).view(np.uint8), bitorder="little"))
        if not len(allowed) or not matcher.accept_token(int(allowed[rng.randrange(len(allowed))])):
            break
        now_s = time.thread_time()
        longest_s = max(longest_s, now_s - token_started_s)
        if longest_s > MAX_MASK_S or now_s - started_s > MAX_TRIAL_S or matcher.is_terminated():
            break
    return longest_s


def _serve(line: socket.socket, grammar: _WorkerGrammar) -> None:
    matchers: dict[int, Any] = {}
    while data := line.recv(grammar_messages.PACKET_BYTES):
        answers, longest_ns, sent_ns = bytearray(), 0, time.thread_time_ns()
        started_ns, any_dropped = sent_ns, False
        for request_kind, row, number, token in grammar_messages.REQUEST.iter_unpack(data):
            if request_kind == grammar_messages.DROP:
                any_dropped |= matchers.pop(number, None) is not None
                continue
            matcher = matchers.get(number)
            if matcher is None:
                matcher = matchers[number] = grammar.matcher()
            answers += grammar_messages.ANSWER.pack(number, _next_mask(grammar, matcher, row, token))
            now_ns = time.thread_time_ns()
            longest_ns, started_ns = max(longest_ns, now_ns - started_ns), now_ns
            if now_ns - sent_ns > MAX_UNSENT_NS:
                line.sendall(grammar_messages.ANSWERS_HEADER.pack(longest_ns) + answers)
                answers, longest_ns, sent_ns = bytearray(), 0, now_ns
        if answers:
            line.sendall(grammar_messages.ANSWERS_HEADER.pack(longest_ns) + answers)
        if any_dropped and not matchers:
            _release_memory()


def _next_mask(grammar: _WorkerGrammar, matcher: Any, row: int, token: int) -> int:
    if not matcher.accept_token(token):
        return grammar_messages.REFUSED
    if matcher.is_terminated():
        return grammar_messages.ENDED
    return grammar_messages.CONTINUES if grammar.mask(matcher, row).any() else grammar_messages.STUCK


def _release_memory() -> None:
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # only glibc has it
    if trim is not None:
        trim(0)


def _limit_memory() -> None:
    with contextlib.suppress(FileNotFoundError):  # without /proc the size is unknown, and there is no limit
        with open("/proc/self/statm", encoding="ascii") as file:
            num_bytes = int(file.read().split()[0]) * resource.getpagesize() + MAX_ADDED_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (num_bytes, num_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
