"""The engine's side of its forms' processes: the keeper that they are forked from, and each of them.

Owns their sockets and their end: whatever is to be killed is, also in the middle of C++.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import select
import signal
import socket
import subprocess
import sys
import time
import weakref
from collections import deque
from typing import Final, Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvscope_engine.model.structured import wire
from kvscope_engine.model.structured.wire import Proof, Vocabulary
from kvscope_telemetry.errors import KvscopeError
from kvscope_telemetry.messages.structured import Structured

START_S: Final = 120.0
"""For the keeper to import and take the vocabulary in, on a machine that does much else."""
SLOW_S: Final = 0.005
"""A form whose token takes longer is not waited for in a step: its requests go on in the step after it is there."""
MAX_TOKEN_S: Final = 0.25
"""Of computing for one token: the process is killed then, and its form's requests end."""
MAX_SILENT_S: Final = 60.0
"""The same for one that does not compute either: it was stopped, or the machine has no time for it."""
YIELDING: Final = 19
"""`nice` of a process that is slow."""
POLL_S: Final = 0.1


class Awaiting(Protocol):
    """Who is told the masks of one completion."""

    def answered(self, state: int, mask: NDArray[np.int32]) -> None:
        """The mask after the last token; of no meaning unless `state` is `wire.GOES_ON`."""


class Keeper:
    """Made with the first form. Raises KvscopeError, with the reason, where it cannot run."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        if importlib.util.find_spec("xgrammar") is None:
            raise KvscopeError("xgrammar is not installed here")
        self._line, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        words = [sys.executable, "-m", "kvscope_engine.model.structured.keeper", str(theirs.fileno())]
        environment = os.environ | {"MALLOC_ARENA_MAX": "1", "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
        with theirs:
            try:
                self._process = subprocess.Popen(
                    words, pass_fds=[theirs.fileno()], env=environment, stdin=subprocess.DEVNULL
                )
            except OSError as error:
                self._line.close()
                raise KvscopeError(f"its process does not start: {error}") from error
        try:
            self._line.settimeout(START_S)
            wire.send_long(self._line, msgspec.msgpack.encode(vocabulary))
            if not self._line.recv(1):
                raise EOFError("it ended at once")
            self._line.settimeout(None)
        except (OSError, EOFError) as error:
            self.close()
            raise KvscopeError(f"its process does not start: {error}") from error

    @property
    def is_alive(self) -> bool:
        """Whether it can fork."""
        return self._process.poll() is None

    def fork(self, busy: set[FormProcess]) -> FormProcess:
        """A new process without a form yet; it is in `busy` while an answer is to come. Raises KvscopeError."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            try:
                socket.send_fds(self._line, [wire.FORK], [theirs.fileno()])
            except OSError as error:
                ours.close()
                raise KvscopeError(f"the process of forms has ended: {error}") from error
        try:
            ours.settimeout(START_S)
            data, descriptors, _, _ = socket.recv_fds(ours, 4, 1)
            if not data:
                raise EOFError("it ended at once")
            ours.settimeout(None)
        except (OSError, EOFError) as error:
            ours.close()
            raise KvscopeError(f"a form's process does not start: {error}") from error
        return FormProcess(ours, int.from_bytes(data, "little"), descriptors[0], busy)

    def close(self) -> None:
        """It ends, and all that it forked."""
        self._line.close()
        self._process.kill()
        self._process.wait()


class FormProcess:
    """One form's. After `prove` its methods are the engine's thread's, but `end`."""

    def __init__(self, line: socket.socket, pid: int, descriptor: int, busy: set[FormProcess]) -> None:
        self.failure = ""
        """Why it answers no more."""
        self._line = line
        self._pid = pid
        self._descriptor = descriptor
        self._busy = busy
        self._awaiting: weakref.WeakValueDictionary[int, Awaiting] = weakref.WeakValueDictionary()
        self._dropped: deque[int] = deque()
        self._outgoing: deque[bytes] = deque()
        self._num_unanswered = 0
        self._last_number = 0
        self._since_ns = 0
        self._since_cpu_ns = 0
        self._is_slow = self._is_yielding = False
        self._is_ended = False

    # While it is tried, on any thread.

    def begin(self, asked: Structured) -> None:
        """Hand it its form."""
        with contextlib.suppress(OSError):  # it is noticed when the proof does not come
            wire.send_long(self._line, msgspec.msgpack.encode(asked))

    def proof(self) -> Proof | None:
        """What came of it; None when nothing has after a moment. Raises EOFError when the process has ended."""
        if not _can_be_read(self._line, POLL_S):
            return None
        try:
            return msgspec.msgpack.decode(wire.receive_long(self._line), type=Proof)
        except OSError as error:
            raise EOFError(str(error)) from error

    @property
    def computed_s(self) -> float:
        """Of a processor's time, so far."""
        return self._cpu_ns() / 1e9

    # Its completions, on the engine's thread.

    def follow(self, completion: Awaiting) -> int:
        """The number of a new completion, which is at the beginning of the form."""
        self._last_number += 1
        self._awaiting[self._last_number] = completion
        weakref.finalize(completion, self._dropped.append, self._last_number).atexit = False
        return self._last_number

    def accept(self, number: int, token: int) -> None:
        """Ask for the mask after one more token."""
        if not self._num_unanswered:
            self._since_ns, self._since_cpu_ns = time.monotonic_ns(), self._cpu_ns()
        self._num_unanswered += 1
        self._busy.add(self)
        while self._dropped:
            self._outgoing.append(wire.ASK.pack(wire.DROP, self._dropped.popleft(), 0))
        self._outgoing.append(wire.ASK.pack(wire.ACCEPT, number, token))
        self._send()

    @property
    def is_waited_for(self) -> bool:
        """Whether its answer will be here in a moment, from how long the last ones took."""
        return bool(self._num_unanswered) and not self._is_slow and not self.failure

    def fileno(self) -> int:
        """Of what can be read when an answer is here."""
        return self._line.fileno()

    def pump(self) -> bool:
        """Take in what it said, without waiting; whether there was anything. One that takes too long is killed."""
        self._send()
        any_heard = False
        while not self.failure:
            try:
                data = self._line.recv(wire.MAX_ANSWER_BYTES, socket.MSG_DONTWAIT)
            except BlockingIOError:
                break
            except OSError as error:
                self._fail(f"its form's process is lost: {error}")
                break
            if not data:
                self._fail("its form's process ended before its time")
                break
            self._hear(data)
            any_heard = True
        if self._num_unanswered:
            self._look()
        else:
            self._busy.discard(self)
        return any_heard

    def end(self) -> None:
        """Kill it, from any thread. Idempotent."""
        if not self._is_ended:
            self._is_ended = True
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._descriptor, signal.SIGKILL)
            os.close(self._descriptor)
            self._line.close()

    def _send(self) -> None:
        try:
            while self._outgoing:
                self._line.send(self._outgoing[0], socket.MSG_DONTWAIT)
                self._outgoing.popleft()
        except BlockingIOError:
            return  # it computes: what it has not read goes later
        except OSError:
            self._outgoing.clear()  # it has ended, as will be read

    def _hear(self, data: bytes) -> None:
        number, state, took_ns = wire.ANSWER.unpack_from(data)
        self._num_unanswered -= 1
        self._is_slow = took_ns > SLOW_S * 1e9
        self._since_ns, self._since_cpu_ns = time.monotonic_ns(), self._cpu_ns()
        completion = self._awaiting.get(number)
        if completion is not None:
            completion.answered(state, np.frombuffer(data, np.int32, offset=wire.ANSWER.size))

    def _look(self) -> None:
        """How long the answer that is due takes."""
        silent_s = (time.monotonic_ns() - self._since_ns) / 1e9
        if silent_s <= SLOW_S:
            return
        self._is_slow = True
        if not self._is_yielding:
            self._is_yielding = True
            with contextlib.suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, self._pid, YIELDING)
        if self._cpu_ns() - self._since_cpu_ns > MAX_TOKEN_S * 1e9:
            self._fail(f"its form took more than {MAX_TOKEN_S:g} s of computing for a token")
        elif silent_s > MAX_SILENT_S:
            self._fail(f"its form's process said nothing for {MAX_SILENT_S:g} s")

    def _fail(self, reason: str) -> None:
        self.failure = reason
        self._num_unanswered = 0
        self._busy.discard(self)
        self.end()

    def _cpu_ns(self) -> int:
        try:
            return time.clock_gettime_ns(~self._pid << 3 | 2)  # the processor's time of a process, as Linux numbers it
        except OSError:
            return 0


def wait_for_any(processes: list[FormProcess], max_s: float) -> None:
    """Until one of them has something to say."""
    poll = select.poll()
    for process in processes:
        if process.fileno() >= 0:
            poll.register(process, select.POLLIN)
    poll.poll(max(0.0, max_s) * 1e3)


def _can_be_read(line: socket.socket, max_s: float) -> bool:
    poll = select.poll()
    poll.register(line, select.POLLIN)
    return bool(poll.poll(max_s * 1e3))
