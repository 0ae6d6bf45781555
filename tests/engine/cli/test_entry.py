"""The first moments of the process: Ctrl-C, and terminals without Unicode."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

IMPORT = """
import os, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # the process that started the tests may ignore SIGINT
from kvscope_engine.cli.entry import main

class Interrupting:
    def find_spec(self, name, path=None, target=None):
        if name == {name!r}:
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Interrupting())
sys.argv[1:] = ["generate", "--prompt", "x", "--model", "dummy:nowhere.json"]
sys.exit(main())
"""


@pytest.mark.storm({"name": "transformers"})
@pytest.mark.parametrize("name", ["kvscope_engine.cli.main", "msgspec", "torch", "transformers"])
def test_ctrl_c_while_importing_prints_one_line(name: str) -> None:
    done = subprocess.run([sys.executable, "-c", IMPORT.format(name=name)], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (130, "kvscope-engine: interrupted\n")


def test_character_that_the_terminal_lacks_is_printed_as_its_code() -> None:
    program = (
        "from kvscope_engine.cli import main; main.build_parser = lambda _: print('é 😀') or exit(0); main.main([])"
    )
    environment = os.environ | {"PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment)
    assert (done.returncode, done.stdout.strip()) == (0, r"\xe9 \U0001f600")
