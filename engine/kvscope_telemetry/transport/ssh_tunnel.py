"""Connects to an engine on another machine through OpenSSH: `ssh://[USER@]HOST[:PORT][/ENDPOINT]`.

Owns the `ssh` process that forwards the engine's two sockets to a private directory on this machine, and restarts `ssh`
when it ends. `ssh` never prompts (BatchMode): a key with a passphrase must be in an agent. `ssh` ends when this process
ends, even if it is killed.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kvscope_telemetry import operating_system
from kvscope_telemetry.errors import BadInput
from kvscope_telemetry.printable import printable
from kvscope_telemetry.transport.bind_address import IpcAddress, folder_for_sockets, parse_bind_address

SCHEME: Final = "ssh"
_PREFIX: Final = "kvscope-ssh-"
SYNTAX: Final = "ssh://[USER@]HOST[:PORT][/ENDPOINT]"
_NO_TROUBLE: Final = ("Warning:", "**")
AGAIN_S: Final = (1.0, 15.0)
"""Shortest and longest pause between attempts to start ssh; the pause doubles each time."""
_PARTS: Final = re.compile(r"ssh://((?:[\w.+-]+@)?)(\[[\da-fA-F:.]+\]|[\w.-]+)(?::(\d{1,5}))?(?:/(.*))?", re.ASCII)
_PLAIN: Final = re.compile(r"[\w./@+-]+", re.ASCII)
"""Matches paths without characters that are special in ssh's option -L."""
_OPTIONS: Final = (
    *("-T", "-S", "none", "-o", "BatchMode=yes", "-o", "ConnectTimeout=10", "-o", "ServerAliveInterval=5"),
    *("-o", "ServerAliveCountMax=2", "-o", "ForwardAgent=no", "-o", "ForwardX11=no"),
)
_SSH_WRAPPER_SCRIPT: Final = (
    'exec 3<&0; "$@" </dev/null 3<&- & ssh=$!; { read -r _ <&3; rm -rf "$0"; kill $ssh; } 2>/dev/null & keeper=$!;'
    " wait $ssh; code=$?; kill $keeper 2>/dev/null; exit $code"
)
"""Shell script that runs ssh, and ends it and deletes the directory `$0` when the script's standard input is
closed. The input is closed when kvscope's process ends, even if it is killed.
"""
_FIND: Final = (
    'for d in "$XDG_RUNTIME_DIR/kvscope" "/run/user/$(id -u)/kvscope" "/tmp/kvscope-$(id -u)"; do'
    ' if [ -S "$d/telemetry" ]; then echo "$d"; exit 0; fi; done; echo none'
)
"""Shell script that prints the default endpoint of an engine of the remote user."""


@dataclass(frozen=True, slots=True)
class SshAddress:
    host: str
    """Host in ssh's notation, with the user if there is one."""
    port: str
    endpoint: str
    """Endpoint on the remote machine; empty for the remote user's default endpoint."""

    @classmethod
    def parse(cls, text: str) -> SshAddress:
        """Parse an address. Raises BadInput, which names the accepted form."""
        match = _PARTS.fullmatch(text)
        if match is None or text.startswith("ssh://-") or "@-" in text or not 0 < int(match[3] or 22) < 65536:
            raise BadInput(f"address {text!r:.200} is not accepted: {SYNTAX}")
        endpoint = match[4] or ""
        if endpoint and "://" not in endpoint:
            endpoint = f"ipc:///{endpoint}"
        address = cls(match[1] + match[2].strip("[]"), match[3] or "", endpoint)
        if endpoint:
            for forwarded in _forwards(endpoint):
                if not _PLAIN.fullmatch(forwarded.replace(":", "").replace("[", "").replace("]", "")) or (
                    endpoint.startswith("ipc") and ":" in forwarded
                ):
                    raise BadInput(f"address {text!r:.200} is not accepted: letters, digits and ./@+_- in its path")
        return address

    @property
    def command(self) -> list[str]:
        """Beginning of the ssh command line, which the caller extends by the host and the remote command."""
        port = ["-p", self.port] if self.port else []
        return [SCHEME, *_OPTIONS, *port]


def require_ssh() -> None:
    """Raise BadInput if ssh is not installed, or if the system has no Unix sockets, which the tunnel ends in."""
    if not operating_system.HAS_UNIX_SOCKETS:
        raise BadInput("ssh:// needs Unix sockets, which Windows lacks: use tcp://HOST:PORT through `ssh -L`")
    if shutil.which(SCHEME) is None:
        raise BadInput("ssh:// needs the OpenSSH client: no `ssh` on PATH (Debian: apt install openssh-client)")


class SshTunnel:
    """Keeps a tunnel open from construction to `close`."""

    def __init__(self, address: SshAddress) -> None:
        require_ssh()
        self._address = address
        self._folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=folder_for_sockets(_PREFIX)))
        self.endpoint = f"ipc://{self._folder}"
        """Endpoint of the forwarded sockets on this machine."""
        self.has_complained = False
        """Whether the current or latest ssh process printed an error."""
        self._error_lines = ""
        self._closing = threading.Event()
        self._lock = threading.Lock()
        self._ssh: subprocess.Popen[str] | None = None
        self._thread = threading.Thread(target=self._run, name="kvscope-ssh", daemon=True)
        self._thread.start()

    @property
    def why(self) -> str:
        """Sentence saying why there may be no connection, with ssh's message."""
        host = self._address.host
        if not self.has_complained and (self._folder / "telemetry").exists():
            return f"ssh to {host} is connected, but nobody answers at {self._address.endpoint or 'its default place'}"
        return self._error_lines or f"connecting to {host} by ssh"

    def close(self) -> None:
        with self._lock:
            self._closing.set()
            if self._ssh is not None and self._ssh.stdin is not None:
                self._ssh.stdin.close()
        self._thread.join()
        shutil.rmtree(self._folder, ignore_errors=True)

    # Methods of the tunnel's thread.

    def _run(self) -> None:
        pause_s = AGAIN_S[0]
        while not self._closing.is_set():
            begun_s = time.monotonic()
            try:
                self._forward()
            except OSError as error:
                self._complain(f"ssh cannot be started: {(error.strerror or str(error)).lower()}")
            if time.monotonic() - begun_s > AGAIN_S[1]:  # it worked for a while
                pause_s = AGAIN_S[0]
            self._closing.wait(pause_s)
            pause_s = min(2 * pause_s, AGAIN_S[1])

    def _forward(self) -> None:
        endpoint = self._address.endpoint or self._find()
        if not endpoint:
            return
        forwards: list[str] = []
        for name, there in zip(("telemetry", "command"), _forwards(endpoint), strict=True):
            forwards += ["-L", f"{self._folder}/{name}:{there}"]
        options = ["-N", "-o", "ExitOnForwardFailure=yes", "-o", "StreamLocalBindUnlink=yes", *forwards]
        self._start([*self._address.command, *options, "--", self._address.host])
        self._end()
        for name in ("telemetry", "command"):
            (self._folder / name).unlink(missing_ok=True)

    def _find(self) -> str:
        """Return the default endpoint of the engine on the remote machine; empty if there is none."""
        found = self._start([*self._address.command, "--", self._address.host, _FIND])
        code = self._end()
        if code or self._closing.is_set():
            return ""
        if not _PLAIN.fullmatch(found) or not found.startswith("/"):
            host = self._address.host
            self._complain(f"no engine listens at its default place on {host}: name its ENDPOINT, as in {SYNTAX}")
            return ""
        self._error_lines = ""
        return f"ipc://{found}"

    def _start(self, command: list[str]) -> str:
        """Run a command until it ends, recording its errors as they are printed. Returns the last line of its
        output.
        """
        with self._lock:
            if self._closing.is_set():
                return ""
            self.has_complained = False
            self._ssh = subprocess.Popen(
                ["/bin/sh", "-c", _SSH_WRAPPER_SCRIPT, str(self._folder), *command],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                **operating_system.own_session(),
            )
        assert self._ssh.stdout is not None, "a pipe was asked for"
        said = ""
        for line in self._ssh.stdout:
            words = printable(line.strip(), replacement="")
            if words and not words.startswith(_NO_TROUBLE):
                said = words
                self._complain(f"ssh to {self._address.host}: {words[:300]}")
        return said

    def _complain(self, words: str) -> None:
        self._error_lines, self.has_complained = words, True

    def _end(self) -> int:
        with self._lock:
            ssh, self._ssh = self._ssh, None
        if ssh is None:
            return 1
        for pipe in (ssh.stdin, ssh.stdout):
            if pipe is not None:
                pipe.close()
        return ssh.wait()


def _forwards(endpoint: str) -> tuple[str, str]:
    """Return the remote addresses of the telemetry and command sockets in the notation of ssh's -L."""
    address = parse_bind_address(endpoint)
    if isinstance(address, IpcAddress):
        return f"{address.folder}/telemetry", f"{address.folder}/command"
    if not address.port:
        raise BadInput(f"endpoint {endpoint!r} is not accepted: must be a port from 1 to 65534 to connect to")
    return f"{address.host}:{address.port}", f"{address.host}:{address.port + 1}"
