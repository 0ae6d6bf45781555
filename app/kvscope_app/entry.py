"""Where `kvscope` begins: before anything is imported that takes time."""

from __future__ import annotations

from kvscope_telemetry.termination import leaving_while_importing


def main() -> int:
    """The command line of this process."""
    with leaving_while_importing("kvscope"):
        from kvscope_app.main import main as run
    return run()
