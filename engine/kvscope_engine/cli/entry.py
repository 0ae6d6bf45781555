"""Entry point of `kvscope-engine`, which handles Ctrl-C before any slow import."""

from __future__ import annotations

from kvscope_telemetry.termination import leaving_while_importing


def main() -> int:
    with leaving_while_importing("kvscope-engine"):
        from kvscope_engine.cli.main import main as run
    return run()
