"""The process of one grammar: compiles it, tries it, and then computes the allowed next tokens of its completions.

All costs of a grammar arise here: the engine kills this process if they are too high. Compiling and trying run on a
thread with low priority; computing a token's mask does not, because the engine waits for it. The requests of a step
arrive in one packet and are answered in one, unless that takes long: then the masks that are ready are sent first.
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

from kvscope_engine.structured_output import wire
from kvscope_engine.structured_output.compiling import OUT_OF_MEMORY, compile_form
from kvscope_telemetry.errors import BadInput
from kvscope_telemetry.messages.structured import Structured

HOLDS_JSON: Final = ("json_schema", "json_object", "structural_tag")
"""Kinds of grammars whose texts are or contain JSON."""
MAX_MASK_S: Final = 0.02
"""Maximum CPU time per token while a grammar is tried, in seconds; slower grammars are refused. On a busy machine
single tokens may take longer, so a walk is repeated before it counts."""
FAR_TOO_LONG: Final = 5
"""Factor of `MAX_MASK_S` above which a walk is not repeated, because it cannot be chance."""
NUM_WALKS: Final = 6
MAX_WALK: Final = 24
"""Maximum number of tokens of each trial walk through a grammar."""
MAX_TRYING_S: Final = 0.25
MAX_MORE_BYTES: Final = 256 << 20
"""Maximum address space in addition to the keeper's, in bytes."""
MAX_UNTOLD_NS: Final = 1_000_000
"""CPU time after which the masks that are ready are sent, in nanoseconds."""
YIELDING: Final = 19
"""`nice` value of the compiling thread."""
MIB: Final = 1 << 20


def run_form(
    line: socket.socket, info: Any, num_logits: int, ends: Collection[int], no_controls: NDArray[np.int32]
) -> None:
    """Serve one grammar until the engine closes `line`: first receive and try the grammar, then answer for its
    completions.
    """
    descriptors = [os.pidfd_open(os.getpid()), os.memfd_create("masks")]
    masks = wire.masks_in(descriptors[1], num_logits)
    socket.send_fds(line, [os.getpid().to_bytes(4, "little")], descriptors)
    for descriptor in descriptors:
        os.close(descriptor)
    try:
        asked = msgspec.msgpack.decode(wire.receive_long(line), type=Structured)
        _bound_memory()
        trial = _Trial(asked, info, masks, ends, no_controls)
        thread = threading.Thread(target=trial.run)
        thread.start()
        thread.join()
        _give_back()
        wire.send_long(line, msgspec.msgpack.encode(trial.proof))
        if trial.form is not None:
            _serve(line, trial.form)
    except (EOFError, OSError):
        return


class _Form:
    def __init__(
        self, compiled: Any, masks: NDArray[np.int32], ends: Collection[int], within: NDArray[np.int32] | None
    ) -> None:
        """Masks are written into the rows of `masks`; `within` is a mask of the only tokens ever allowed; None: all."""
        self._compiled = compiled
        self._ends = ends
        self._within = within
        self._masks = masks

    def matcher(self) -> Any:
        """Return an XGrammar matcher at the beginning of the grammar."""
        import xgrammar

        return xgrammar.GrammarMatcher(self._compiled, terminate_without_stop_token=not self._ends)

    def mask(self, matcher: Any, row: int = 0) -> NDArray[np.int32]:
        """Write the mask of the allowed next tokens into the row and return it."""
        mask: NDArray[np.int32] = self._masks[row]
        mask.fill(-1)  # XGrammar writes nothing if all tokens are allowed
        matcher.fill_next_token_bitmask(self._masks, row)
        if self._within is not None:
            mask &= self._within
        return mask


class _Trial:
    """Compiles and tries a grammar. Sets `form`, None if it is not accepted, and `proof`."""

    def __init__(
        self,
        asked: Structured,
        info: Any,
        masks: NDArray[np.int32],
        ends: Collection[int],
        no_controls: NDArray[np.int32],
    ) -> None:
        self.form: _Form | None = None
        self.proof = wire.Proof(reason=f"{asked.kind} is not accepted: its compiler failed")
        self._asked = asked
        self._info = info
        self._masks = masks
        self._ends = ends
        self._within = no_controls if asked.kind in HOLDS_JSON else None

    def run(self) -> None:
        """Compile and try the grammar, on a separate thread with low priority."""
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), YIELDING)
        kind = self._asked.kind
        try:
            self._try()
        except BadInput as error:
            self.proof = wire.Proof(reason=str(error))
        except Exception as error:
            reason = f"{kind} is not accepted: {type(error).__name__}: {error!s:.200}"
            if isinstance(error, MemoryError) or OUT_OF_MEMORY in str(error):
                reason = f"{kind} is too costly: it takes more than {MAX_MORE_BYTES // MIB} MiB of memory"
            self.proof = wire.Proof(reason=reason)

    def _try(self) -> None:
        import xgrammar

        compiler = xgrammar.GrammarCompiler(self._info, max_threads=1, cache_enabled=False)
        form = _Form(compile_form(compiler, self._asked), self._masks, self._ends, self._within)
        first = form.mask(form.matcher()).copy()
        if not first.any():
            raise BadInput(f"{self._asked.kind} is not accepted: no text of this model's tokens is of that form")
        self._walk(form)
        self.proof = wire.Proof(mask=first.tobytes())
        self.form = form

    def _walk(self, form: _Form) -> None:
        """Try the grammar on several walks, whose tokens are drawn from the allowed ones.

        Raises BadInput if a token takes too long.
        """
        began = time.thread_time()
        for seed in range(NUM_WALKS):
            if time.thread_time() - began > MAX_TRYING_S:
                return
            longest_s = _longest_token_s(form, seed)
            if MAX_MASK_S < longest_s < FAR_TOO_LONG * MAX_MASK_S:
                longest_s = _longest_token_s(form, seed)
            if longest_s > MAX_MASK_S:
                raise BadInput(
                    f"{self._asked.kind} is too costly: one token takes {longest_s * 1e3:.0f} ms "
                    f"of computing, at most {MAX_MASK_S * 1e3:.0f} ms are accepted; use a simpler one"
                )


def _longest_token_s(form: _Form, seed: int) -> float:
    """Return the longest CPU time of a token, in seconds, on a walk through the grammar.

    The walk ends if a token is too slow.
    """
    matcher, drawn, longest_s, began = form.matcher(), random.Random(seed), 0.0, time.thread_time()
    for _ in range(MAX_WALK):
        started = time.thread_time()
        allowed = np.flatnonzero(np.unpackbits(form.mask(matcher).view(np.uint8), bitorder="little"))
        if not len(allowed) or not matcher.accept_token(int(allowed[drawn.randrange(len(allowed))])):
            break
        now = time.thread_time()
        longest_s = max(longest_s, now - started)
        if longest_s > MAX_MASK_S or now - began > MAX_TRYING_S or matcher.is_terminated():
            break
    return longest_s


def _serve(line: socket.socket, form: _Form) -> None:
    matchers: dict[int, Any] = {}
    while data := line.recv(wire.PACKET_BYTES):
        answers, longest_ns, told_ns = bytearray(), 0, time.thread_time_ns()
        started_ns, any_dropped = told_ns, False
        for what, row, number, token in wire.ASK.iter_unpack(data):
            if what == wire.DROP:
                any_dropped |= matchers.pop(number, None) is not None
                continue
            matcher = matchers.get(number)
            if matcher is None:
                matcher = matchers[number] = form.matcher()
            answers += wire.ANSWER.pack(number, _next_mask(form, matcher, row, token))
            now_ns = time.thread_time_ns()
            longest_ns, started_ns = max(longest_ns, now_ns - started_ns), now_ns
            if now_ns - told_ns > MAX_UNTOLD_NS:
                line.sendall(wire.LONGEST.pack(longest_ns) + answers)
                answers, longest_ns, told_ns = bytearray(), 0, now_ns
        if answers:
            line.sendall(wire.LONGEST.pack(longest_ns) + answers)
        if any_dropped and not matchers:
            _give_back()


def _next_mask(form: _Form, matcher: Any, row: int, token: int) -> int:
    """Accept the token and write the next mask into `row`. Returns the state of the completion."""
    if not matcher.accept_token(token):
        return wire.REFUSED
    if matcher.is_terminated():
        return wire.ENDED
    return wire.GOES_ON if form.mask(matcher, row).any() else wire.STUCK


def _give_back() -> None:
    """Return to the system the memory that compiling or answering no longer needs."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # only glibc has it
    if trim is not None:
        trim(0)


def _bound_memory() -> None:
    with contextlib.suppress(FileNotFoundError):  # without /proc the size is unknown, and there is no limit
        with open("/proc/self/statm", encoding="ascii") as file:
            num_bytes = int(file.read().split()[0]) * resource.getpagesize() + MAX_MORE_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (num_bytes, num_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
