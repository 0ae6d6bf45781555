"""Where `kvscope` begins: before anything is imported that takes time."""

from __future__ import annotations

from kvscope_app.interrupts import leaving_on_interrupt


def main() -> int:
    """The command line of this process."""
    with leaving_on_interrupt("kvscope"):
        from kvscope_app.main import main as run
    return run()
