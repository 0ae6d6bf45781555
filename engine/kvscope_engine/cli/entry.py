"""Where `kvscope-engine` begins: before anything is imported that takes time."""

from __future__ import annotations

from kvscope_engine.cli.interrupts import leaving_on_interrupt


def main() -> int:
    """The command line of this process."""
    with leaving_on_interrupt():
        from kvscope_engine.cli.main import main as run
    return run()
