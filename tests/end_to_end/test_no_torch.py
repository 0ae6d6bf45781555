"""No torch is imported by the app, by the telemetry library, or for `--help`."""

from __future__ import annotations

import subprocess
import sys

import pytest

HEAVY = ("torch", "triton", "transformers", "kvscope_engine.engine", "kvscope_kernels")


def _loaded_after(code: str) -> set[str]:
    probe = f"{code}\nimport sys\nprint('\\n'.join(sys.modules))"
    run = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=True)
    return set(run.stdout.split())


@pytest.mark.parametrize(
    "code",
    [
        "import kvscope_app.main",
        "import kvscope_telemetry, kvscope_telemetry.sources.live_source, kvscope_telemetry.transport.server_sockets",
        "import kvscope_app.commands.record, kvscope_app.commands.segmented_writer, kvscope_telemetry.exports.export",
        "import kvscope_engine, kvscope_engine.cli.main",
        "import kvscope_engine.policy.scheduling.scheduler, kvscope_engine.step_recorder",
    ],
)
def test_light_modules_import_nothing_heavy(code: str) -> None:
    assert _loaded_after(code).isdisjoint(HEAVY)


def test_import_check_itself_detects_an_imported_torch() -> None:
    assert "torch" in _loaded_after("import sys; sys.modules['torch'] = sys")
