"""Process from which grammar processes are forked. It has loaded XGrammar and the vocabulary, and no torch.

The fork server only waits for requests of the engine, and forks. When the engine ends, the fork server and all grammar
processes end too, even in the middle of a computation. See
docs/internals/decisions/0024-grammars-run-in-their-own-processes.md.
"""

from __future__ import annotations

import array
import ctypes
import gc
import importlib.machinery
import os
import signal
import socket
import sys
import types
from typing import Any, Final

import msgspec

from kvscope_engine.structured_output.grammar_messages import FORK, Vocabulary, receive_long
from kvscope_engine.structured_output.grammar_worker import run_worker
from kvscope_engine.structured_output.vocabulary import json_token_mask, tokenizer_info

READY: Final = b"r"
_PR_SET_PDEATHSIG: Final = 1


def main() -> None:
    """Run the fork server. The only command-line argument is the file descriptor of its socket."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # signals of a terminal are for the engine, with which this ends
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    connection = socket.socket(fileno=int(sys.argv[1]))
    _import_xgrammar_without_torch()
    vocabulary = msgspec.msgpack.decode(receive_long(connection), type=Vocabulary)
    info = tokenizer_info(vocabulary)
    ends, json_mask = tuple(vocabulary.ends), json_token_mask(info, len(vocabulary.tokens))
    num_logits = len(vocabulary.tokens)
    del vocabulary
    gc.collect()
    gc.freeze()  # so that collections do not write to pages shared with the forked processes
    connection.send(READY)
    server_pid = os.getpid()
    while descriptor := _next_connection(connection):
        if os.fork():
            os.close(descriptor)
            continue
        connection.close()
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() == server_pid:
            run_worker(socket.socket(fileno=descriptor), info, num_logits, ends, json_mask)
        os._exit(0)


def _next_connection(connection: socket.socket) -> int:
    """Wait for a request and return the file descriptor of the new grammar process's socket; 0 if the engine
    has ended.
    """
    while True:
        try:
            data, ancillary, _, _ = connection.recvmsg(len(FORK), socket.CMSG_SPACE(array.array("i").itemsize))
        except OSError:
            return 0
        if not data:
            return 0
        for level, kind, content in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                return int.from_bytes(content[:4], sys.byteorder)


class _StubClass(type):
    """Metaclass of classes that stand in for those of a library that is not imported. Any attribute of such a
    class is the class itself.
    """

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return cls


class _StubModule(types.ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _StubClass("Nothing", (), {"__init__": lambda self, *args, **kwargs: None})


def _import_xgrammar_without_torch() -> None:
    """Replace torch and transformers by stubs, and import XGrammar.

    XGrammar uses them only in signatures and in functions that are not called here. Importing them takes 200 MB and two
    seconds.
    """
    os.environ["TVM_FFI_DISABLE_TORCH_C_DLPACK"] = "1"
    for name in ("torch", "transformers"):
        stub = _StubModule(name)
        stub.__spec__ = importlib.machinery.ModuleSpec(name, None)
        sys.modules[name] = stub
    import xgrammar  # noqa: F401


if __name__ == "__main__":
    main()
