"""A form's own process: compiles it, tries it, and then says which tokens may come next for each of its completions.

Whatever a form costs, it costs here: the engine kills this process when that is too much. Compiling and trying are on a
thread that yields to everybody's; a token's mask is not, it is waited for. What a step asks for comes in one packet and
is answered in one, unless it takes long: then those that are there are told first.
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
"""Kinds whose texts are, or have in them, JSON."""
MAX_MASK_S: Final = 0.02
"""Of computing for a token while a form is tried: longer ones are too costly. A busy machine lets one take longer now
and then, so a way is gone twice before it counts."""
FAR_TOO_LONG: Final = 5
"""Times as long is no chance."""
NUM_WALKS: Final = 6
MAX_WALK: Final = 24
"""Tokens of a way through a form that it is tried on."""
MAX_TRYING_S: Final = 0.25
MAX_MORE_BYTES: Final = 256 << 20
"""Of address space beyond what the keeper has."""
MAX_UNTOLD_NS: Final = 1_000_000
"""Of computing, after which the masks that are there are told."""
YIELDING: Final = 19
"""`nice`."""
MIB: Final = 1 << 20


def run_form(
    line: socket.socket, info: Any, num_logits: int, ends: Collection[int], no_controls: NDArray[np.int32]
) -> None:
    """Until the engine closes `line`: first the form, then its completions."""
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
    """Compiled."""

    def __init__(
        self, compiled: Any, masks: NDArray[np.int32], ends: Collection[int], within: NDArray[np.int32] | None
    ) -> None:
        """Masks are written into the rows of `masks`; `within` has the only tokens that may ever come; None: all."""
        self._compiled = compiled
        self._ends = ends
        self._within = within
        self._masks = masks

    def matcher(self) -> Any:
        """XGrammar's, at the beginning of the form."""
        import xgrammar

        return xgrammar.GrammarMatcher(self._compiled, terminate_without_stop_token=not self._ends)

    def mask(self, matcher: Any, row: int = 0) -> NDArray[np.int32]:
        """Which tokens may come next, written into this row."""
        mask: NDArray[np.int32] = self._masks[row]
        mask.fill(-1)  # what is not written when everything may
        matcher.fill_next_token_bitmask(self._masks, row)
        if self._within is not None:
            mask &= self._within
        return mask


class _Trial:
    """Makes `form`, None where it is not accepted, and `proof`."""

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
        """On a thread of its own."""
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
        """Along some ways through the form, each token drawn from those that may come."""
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
    """Of computing, on a way through the form; what is too long ends it."""
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
    """Written into `row`; what has become of the completion."""
    if not matcher.accept_token(token):
        return wire.REFUSED
    if matcher.is_terminated():
        return wire.ENDED
    return wire.GOES_ON if form.mask(matcher, row).any() else wire.STUCK


def _give_back() -> None:
    """To the system, what compiling or answers took and need no more."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's alone
    if trim is not None:
        trim(0)


def _bound_memory() -> None:
    with contextlib.suppress(FileNotFoundError):  # without /proc the size is unknown, and there is no limit
        with open("/proc/self/statm", encoding="ascii") as file:
            num_bytes = int(file.read().split()[0]) * resource.getpagesize() + MAX_MORE_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (num_bytes, num_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
