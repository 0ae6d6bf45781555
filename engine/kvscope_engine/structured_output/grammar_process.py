"""The engine's side of the grammar processes: handles for the fork server and for each process forked from it.

Owns their sockets and their termination. A process can be killed at any time, even within C++ code.
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

from kvscope_engine.structured_output import grammar_messages
from kvscope_engine.structured_output.grammar_messages import TrialResult, Vocabulary
from kvscope_telemetry.errors import KvscopeError
from kvscope_telemetry.messages.structured import Structured

START_S: Final = 120.0
"""Timeout in seconds for the fork server to import its libraries and process the vocabulary on a busy machine."""
MAX_STEP_WAIT_S: Final = 0.005
"""Maximum seconds that a step waits for a grammar's mask. Requests whose masks are late run in a later step."""
MAX_TOKEN_S: Final = 0.25
"""Maximum CPU seconds for one token. A process that takes longer is killed, and the requests that use its
grammar end.
"""
MAX_SILENCE_S: Final = 60.0
"""Maximum seconds without an answer from a process that uses no CPU time, because it was stopped or gets no
CPU. Such a process is then killed.
"""
LOW_PRIORITY_NICE: Final = 19
"""`nice` value that a process gets when it needs more than `MAX_STEP_WAIT_S` of CPU time for an answer."""
POLL_S: Final = 0.1


class MaskReceiver(Protocol):
    def receive_mask(self, state: int, mask: NDArray[np.int32]) -> None:
        """Receive the mask after the last token. It is meaningless unless `state` is `grammar_messages.CONTINUES`."""


class ForkServerProcess:
    """Handle of the fork server, from which grammar processes are forked. Call `send_vocabulary` before `fork`.

    Raises KvscopeError with the reason if it cannot be started.
    """

    def __init__(self) -> None:
        if importlib.util.find_spec("xgrammar") is None:
            raise KvscopeError("xgrammar is not installed here")
        self._line, child_socket = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        command = [sys.executable, "-m", "kvscope_engine.structured_output.fork_server", str(child_socket.fileno())]
        environment = os.environ | {"MALLOC_ARENA_MAX": "1", "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
        with child_socket:
            try:
                self._process = subprocess.Popen(
                    command, pass_fds=[child_socket.fileno()], env=environment, stdin=subprocess.DEVNULL
                )
            except OSError as error:
                self._line.close()
                raise KvscopeError(f"its process does not start: {error}") from error

    def send_vocabulary(self, vocabulary: Vocabulary) -> None:
        """Send the vocabulary, and wait until the fork server is ready. Raises KvscopeError on failure, also
        after `kill`.
        """
        try:
            self._line.settimeout(START_S)
            grammar_messages.send_long(self._line, msgspec.msgpack.encode(vocabulary))
            if not self._line.recv(1):
                raise EOFError("it stopped immediately")
            self._line.settimeout(None)
        except (OSError, EOFError) as error:
            self.close()
            raise KvscopeError(f"its process does not start: {error}") from error

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def fork(self, busy: set[GrammarProcess]) -> GrammarProcess:
        """Fork a new process that has no grammar yet. Raises KvscopeError if it cannot be started.

        The process adds itself to `busy` while an answer is pending or dropped completions must be sent to it.
        """
        own_socket, child_socket = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with child_socket:
            try:
                socket.send_fds(self._line, [grammar_messages.FORK], [child_socket.fileno()])
            except OSError as error:
                own_socket.close()
                raise KvscopeError(f"the fork server of grammars has ended: {error}") from error
        descriptors: list[int] = []
        try:
            own_socket.settimeout(START_S)
            data, descriptors, _, _ = socket.recv_fds(own_socket, 4, 2)
            if len(descriptors) != 2:
                raise EOFError("it stopped immediately" if not data else "no file can be opened any more")
            own_socket.settimeout(None)
            masks = grammar_messages.map_masks(descriptors[1])
            os.close(descriptors.pop())
        except (OSError, EOFError) as error:
            own_socket.close()
            for descriptor in descriptors:
                os.close(descriptor)
            raise KvscopeError(f"a grammar's process does not start: {error}") from error
        return GrammarProcess(own_socket, int.from_bytes(data, "little"), descriptors[0], masks, busy)

    def kill(self) -> None:
        """Kill the process without waiting for its end. May be called on any thread."""
        self._process.kill()

    def close(self) -> None:
        """Kill the process and wait for its end. All processes forked from it end as well."""
        self._line.close()
        self._process.kill()
        self._process.wait()


class GrammarProcess:
    """Handle of the process of one grammar. Once the grammar has been tested, methods other than `kill` may be
    called only on the engine's thread.
    """

    def __init__(
        self, line: socket.socket, pid: int, descriptor: int, masks: NDArray[np.int32], busy: set[GrammarProcess]
    ) -> None:
        self.failure = ""
        self._line = line
        self._pid = pid
        self._descriptor = descriptor
        self._masks = masks
        self._busy = busy
        self._rows: dict[int, int] = {}
        """Map from the number of a completion to its row in `masks`, which is assigned at the completion's
        first token.
        """
        self._free_rows: list[int] = []
        self._awaiting: weakref.WeakValueDictionary[int, MaskReceiver] = weakref.WeakValueDictionary()
        self._dropped: deque[int] = deque()
        self._outgoing = bytearray()
        self._num_unanswered = 0
        self._last_number = 0
        self._since_ns = 0
        self._since_cpu_ns = 0
        self._is_slow = self._has_low_priority = False
        self._is_ended = False

    # Methods for the trial of the grammar, on any thread.

    def start_trial(self, spec: Structured) -> None:
        with contextlib.suppress(OSError):  # then no proof arrives, which is detected
            grammar_messages.send_long(self._line, msgspec.msgpack.encode(spec))

    def poll_result(self) -> TrialResult | None:
        """Wait up to `POLL_S` seconds for the result of compiling and testing the grammar; None if there is none yet.

        Raises EOFError if the process has ended.
        """
        if not _can_be_read(self._line, POLL_S):
            return None
        try:
            return msgspec.msgpack.decode(grammar_messages.receive_long(self._line), type=TrialResult)
        except OSError as error:
            raise EOFError(str(error)) from error

    @property
    def own_bytes(self) -> int:
        """Private memory of the process (not shared with any other process) in bytes; 0 if the process has ended."""
        try:
            with open(f"/proc/{self._pid}/smaps_rollup", encoding="ascii") as file:
                lines = [line.split() for line in file]
        except OSError:
            return 0  # it has ended
        return sum(int(words[1]) << 10 for words in lines if words[0] in ("Private_Dirty:", "Swap:"))

    @property
    def cpu_s(self) -> float:
        return self._cpu_ns() / 1e9

    # Methods for completions, on the engine's thread.

    def add_completion(self, completion: MaskReceiver) -> int:
        """Register a completion that starts at the beginning of the grammar. Returns its number."""
        self._last_number += 1
        self._awaiting[self._last_number] = completion
        weakref.finalize(completion, self._drop, self._last_number).atexit = False
        return self._last_number

    def accept(self, number: int, token: int) -> None:
        """Queue a request to accept `token` for completion `number` and compute the next mask. `send` sends it.

        Raises KvscopeError if there are too many completions.
        """
        row = self._rows.get(number)
        if row is None:
            row = self._rows[number] = self._free_row()
        if not self._num_unanswered:
            self._since_ns, self._since_cpu_ns = time.monotonic_ns(), self._cpu_ns()
        self._num_unanswered += 1
        self._busy.add(self)
        self._outgoing += grammar_messages.REQUEST.pack(grammar_messages.ACCEPT, row, number, token)

    @property
    def is_answer_expected(self) -> bool:
        """Whether an answer is pending and the process is not slow, so that it is worth waiting for."""
        return bool(self._num_unanswered) and not self._is_slow and not self.failure

    def fileno(self) -> int:
        """Return the file descriptor that becomes readable when an answer arrives."""
        return self._line.fileno()

    def receive(self) -> bool:
        """Receive answers without waiting. Returns whether there were any. Kills the process if an answer takes too
        long.
        """
        self.send()
        any_received = False
        while self._num_unanswered and not self.failure:
            try:
                data = self._line.recv(grammar_messages.PACKET_BYTES, socket.MSG_DONTWAIT)
            except BlockingIOError:
                break
            except OSError as error:
                self._fail(f"the process of its structured output stopped unexpectedly: {error}")
                break
            if not data:
                self._fail("the process of its structured output stopped unexpectedly")
                break
            self._handle_answers(data)
            any_received = True
        if self._num_unanswered and not self.failure:
            self._check_progress()
        else:
            self._busy.discard(self)
        return any_received

    def kill(self) -> None:
        """Kill the process. Idempotent; may be called on any thread."""
        if not self._is_ended:
            self._is_ended = True
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._descriptor, signal.SIGKILL)
            os.close(self._descriptor)
            self._line.close()

    def send(self) -> None:
        self._release_dropped()
        try:
            while self._outgoing:
                self._line.send(self._outgoing[: grammar_messages.MAX_REQUEST_BYTES], socket.MSG_DONTWAIT)
                del self._outgoing[: grammar_messages.MAX_REQUEST_BYTES]
        except BlockingIOError:
            return  # the process is busy: the rest is sent later
        except OSError:
            self._outgoing.clear()  # the process has ended, as the next recv will report

    def _handle_answers(self, data: bytes) -> None:
        (longest_ns,) = grammar_messages.ANSWERS_HEADER.unpack_from(data)
        self._is_slow = longest_ns > MAX_STEP_WAIT_S * 1e9
        self._since_ns, self._since_cpu_ns = time.monotonic_ns(), self._cpu_ns()
        for number, state in grammar_messages.ANSWER.iter_unpack(
            memoryview(data)[grammar_messages.ANSWERS_HEADER.size :]
        ):
            self._num_unanswered -= 1
            completion = self._awaiting.get(number)
            if completion is not None:
                completion.receive_mask(state, self._masks[self._rows[number]])

    def _drop(self, number: int) -> None:
        """Queue completion `number` for removal, because it has ended. Called on any thread."""
        self._dropped.append(number)
        self._busy.add(self)

    def _release_dropped(self) -> None:
        while self._dropped:
            number = self._dropped.popleft()
            row = self._rows.pop(number, None)
            if row is not None:
                self._outgoing += grammar_messages.REQUEST.pack(grammar_messages.DROP, row, number, 0)
                self._free_rows.append(row)

    def _free_row(self) -> int:
        self._release_dropped()
        if self._free_rows:
            return self._free_rows.pop()
        if len(self._rows) == grammar_messages.MAX_ROWS:
            raise KvscopeError(f"{grammar_messages.MAX_ROWS} completions of its grammar are running already")
        return len(self._rows)

    def _check_progress(self) -> None:
        """If the pending answer takes long, lower the priority of the process; kill it if the answer exceeds
        `MAX_TOKEN_S` or `MAX_SILENCE_S`.
        """
        silent_s = (time.monotonic_ns() - self._since_ns) / 1e9
        if silent_s <= MAX_STEP_WAIT_S:
            return
        self._is_slow = True
        computed_ns = self._cpu_ns() - self._since_cpu_ns
        if computed_ns > MAX_STEP_WAIT_S * 1e9 and not self._has_low_priority:
            self._has_low_priority = True
            with contextlib.suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, self._pid, LOW_PRIORITY_NICE)
        if computed_ns > MAX_TOKEN_S * 1e9:
            self._fail(f"its structured output took more than {MAX_TOKEN_S:g} s of computing for one token")
        elif silent_s > MAX_SILENCE_S:
            self._fail(f"the process of its structured output did not respond for {MAX_SILENCE_S:g} s")

    def _fail(self, reason: str) -> None:
        self.failure = reason
        self._num_unanswered = 0
        self._busy.discard(self)
        self.kill()

    def _cpu_ns(self) -> int:
        try:
            return time.clock_gettime_ns(~self._pid << 3 | 2)  # Linux's clock id of a process's CPU time
        except OSError:
            return 0


def wait_for_any(processes: list[GrammarProcess], max_s: float) -> None:
    poll = select.poll()
    for process in processes:
        if process.fileno() >= 0:
            poll.register(process, select.POLLIN)
    poll.poll(max(0.0, max_s) * 1e3)


def _can_be_read(line: socket.socket, max_s: float) -> bool:
    poll = select.poll()
    poll.register(line, select.POLLIN)
    return bool(poll.poll(max_s * 1e3))
