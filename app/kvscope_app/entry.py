"""Entry point of `kvscope`, which imports nothing slow."""

from __future__ import annotations

from kvscope_telemetry.termination import leaving_while_importing


def main() -> int:
    with leaving_while_importing("kvscope"):
        from kvscope_app.main import main as run
    return run()
