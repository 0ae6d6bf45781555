"""Modules, functions and constants that Unix or Linux has and Windows lacks."""

from __future__ import annotations

from typing import Final

MODULES: Final = ("curses", "fcntl", "grp", "pwd", "resource", "syslog", "termios", "tty")
OS_NAMES: Final = (
    *("fchmod", "fork", "getegid", "geteuid", "getgid", "getpgid", "getuid", "killpg", "mkfifo", "nice", "pread"),
    *("pwrite", "sched_getaffinity", "sched_setaffinity", "setsid", "statvfs", "sysconf", "uname", "writev"),
    *("O_CLOEXEC", "O_DIRECTORY", "O_NOCTTY", "O_NOFOLLOW", "O_NONBLOCK"),
)
SIGNALS: Final = ("SIGALRM", "SIGCHLD", "SIGCONT", "SIGHUP", "SIGKILL", "SIGPIPE", "SIGQUIT", "SIGSTOP", "SIGTSTP")
SOCKET_NAMES: Final = ("SO_PEERCRED", "TCP_INFO")
