"""Where `kvscope-engine` begins: before anything is imported that takes time."""

from __future__ import annotations

from kvscope_telemetry.termination import leaving_while_importing


def main() -> int:
    """The command line of this process."""
    with leaving_while_importing("kvscope-engine"):
        from kvscope_engine.cli.main import main as run
    return run()
