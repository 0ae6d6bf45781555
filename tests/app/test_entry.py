"""Test of Ctrl-C while the desktop is still being imported."""

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


def run_program(program):
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize("name", ["kvscope_app.main", "zmq", "kvscope_app.desktop"])
def test_ctrl_c_while_importing_prints_one_line(name):
    done = run_program(IMPORT.format(name=name))
    assert (done.returncode, done.stderr) == (130, "kvscope: interrupted\n")
