"""Ctrl-C while the desktop is still importing: one line, and its engine ends first."""

from __future__ import annotations

import subprocess
import sys

import pytest

IMPORT = """
import os, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # whoever started the tests may ignore it
from kvscope_app.entry import main

class Interrupting:
    def find_spec(self, name, path=None, target=None):
        if name == {name!r}:
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Interrupting())
sys.argv[1:] = ["--attach", "ipc:///tmp/nowhere"]
main()
"""
FIRST = """
import os, signal
signal.signal(signal.SIGINT, signal.default_int_handler)  # as above
from kvscope_app.interrupts import leaving_on_interrupt
with leaving_on_interrupt("x", lambda: print("the engine stopped", flush=True)):
    os.kill(os.getpid(), signal.SIGINT)
"""


def run(program):
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize("name", ["kvscope_app.main", "zmq", "kvscope_app.desktop"])
def test_ctrl_c_while_importing_is_one_line(name):
    done = run(IMPORT.format(name=name))
    assert (done.returncode, done.stderr) == (130, "kvscope: interrupted\n")


def test_what_must_be_put_away_is_first():
    done = run(FIRST)
    assert (done.returncode, done.stdout, done.stderr) == (130, "the engine stopped\n", "x: interrupted\n")
