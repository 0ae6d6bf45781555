"""Build the wheel and the sdist, check them, and try what the README promises in a clean environment per extra.

Usage: python scripts/check_release.py [base] [export] [app] [engine] [tutorials] [vllm] [--out FOLDER]

Needs the packages of the extra `release`. Each environment is installed from the wheel alone, without
constraints.txt, as a user would. `tutorials` runs the commands of docs/tutorials, except those on a server. `vllm`
resolves vLLM's requirements with and without kvscope and compares them.
Exits with 1 if any check fails.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tarfile
import tempfile
import time
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[1]
PACKAGES: Final = (
    "app/kvscope_app",
    "engine/kvscope_engine",
    "engine/kvscope_inside",
    "engine/kvscope_telemetry",
    "kernels/kvscope_kernels",
    "resources/kvscope_resources",
)
MAX_WHEEL_BYTES: Final = 8_000_000
MAX_SDIST_BYTES: Final = 16_000_000


@dataclass(frozen=True, slots=True)
class Trial:
    """A command of the README or of a guide, and what it must print on standard output or standard error."""

    command: str
    expected: str
    exit_code: int = 0


@dataclass(frozen=True, slots=True)
class Environment:
    """An environment with one extra, the packages that it must not contain, and the commands to try in it."""

    extra: str
    absent: tuple[str, ...]
    trials: tuple[Trial, ...]


def tutorial_trials() -> Iterator[Trial]:
    """Yield the commands of the tutorials in order. A window closes itself once it is shown."""
    for page in sorted((ROOT / "docs" / "tutorials").glob("*.md")):
        for block in re.findall(r"```sh\n(.*?)```", page.read_text("utf-8"), re.DOTALL):
            for command in () if block.startswith("# server:") else block.splitlines():
                opens_window = command.startswith("kvscope --open")
                yield Trial(
                    f"KVSCOPE_STARTUP_PROBE=1 {command}" if opens_window else command,
                    "first_expose_s" if opens_window else "",
                )


_WATCHING: Final = (
    Trial("kvscope --version", "kvscope {version}"),
    Trial("kvscope info sample", "allocator paged"),
    Trial("kvscope export sample --to html --out report.html", "report.html"),
    Trial("kvscope export sample --to csv --out table.csv", "table.csv"),
    Trial("kvscope compare sample sample --table", "Preemptions"),
    Trial("kvscope top tcp://127.0.0.1:9 --once", "127.0.0.1:9", exit_code=1),
    Trial("""python -c 'from kvscope_telemetry import Mirror; import kvscope_inside; print("imported")'""", "imported"),
)
ENVIRONMENTS: Final = {
    "base": Environment(
        "",
        ("torch", "transformers", "pyside6-essentials", "pyqtgraph", "pyarrow", "vllm", "sglang"),
        (
            *_WATCHING,
            Trial("kvscope export sample --to parquet --out table.parquet", "kvscope[export]", exit_code=2),
            Trial("kvscope-engine generate --prompt hi", "kvscope[engine]", exit_code=1),
            Trial("DISPLAY= QT_QPA_PLATFORM=offscreen kvscope --open sample", "kvscope[app]", exit_code=1),
        ),
    ),
    "export": Environment(
        "export",
        ("torch", "pyside6-essentials"),
        (Trial("kvscope export sample --to parquet --out table.parquet", "table.parquet"),),
    ),
    "app": Environment(
        "app",
        ("torch", "transformers"),
        (
            *_WATCHING,
            Trial("kvscope export sample --to png --view page-map --out map.png", "map.png"),
            Trial("KVSCOPE_STARTUP_PROBE=1 kvscope --open sample", "first_expose_s"),
            Trial("kvscope replay sample", "kvscope[engine]", exit_code=1),
        ),
    ),
    "engine": Environment(
        "engine",
        ("pyside6-essentials", "pyqtgraph"),
        (
            Trial("kvscope-engine --version", "kvscope-engine {version}"),
            Trial("kvscope-engine doctor", "Triton"),
            Trial("kvscope-engine plan --model default --gpu-memory 24GiB", "GiB"),
            Trial("kvscope-engine simulate sample --max-num-seqs 8", "preempt"),
            Trial(
                "kvscope-engine generate --raw --prompt 'The capital of France is' --max-tokens 4 --temperature 0",
                "Paris",
            ),
        ),
    ),
    "tutorials": Environment("app,engine", (), tuple(tutorial_trials())),
}


class Failures:
    """Counts failed checks and prints each check as it is made."""

    def __init__(self) -> None:
        self.count = 0

    def check(self, is_ok: bool, text: str, detail: str = "") -> None:
        print(f"{'ok  ' if is_ok else 'FAIL'} {text}", flush=True)
        if not is_ok:
            self.count += 1
            if detail:
                print(detail.rstrip(), flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("environments", nargs="*", metavar="ENVIRONMENT", help=f"{', '.join(ENVIRONMENTS)} or vllm")
    parser.add_argument("--out", type=Path, help="keep the wheel and the sdist in this folder")
    options = parser.parse_args(arguments)
    chosen: list[str] = options.environments or list(ENVIRONMENTS)
    if unknown := [name for name in chosen if name not in (*ENVIRONMENTS, "vllm")]:
        parser.error(f"{unknown[0]!r} must be one of {', '.join(ENVIRONMENTS)} or vllm")
    failures = Failures()
    with tempfile.TemporaryDirectory(prefix="kvscope-release-") as work:
        folder = options.out or Path(work) / "dist"
        wheel, sdist = _build(folder)
        _check_files(wheel, sdist, failures)
        for name in chosen:
            if name == "vllm":
                _check_vllm_versions(wheel, Path(work), failures)
            else:
                _try(ENVIRONMENTS[name], wheel, Path(work) / f"trial-{name}", failures)
    print(f"{failures.count} checks failed" if failures.count else "all checks passed")
    return 1 if failures.count else 0


def _run(command: Sequence[str], **options: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, check=True, text=True, capture_output=True, cwd=ROOT, **options)  # type: ignore[call-overload,no-any-return]


def _build(folder: Path) -> tuple[Path, Path]:
    """Build the sdist, and the wheel from the sdist. Returns both paths."""
    folder.mkdir(parents=True, exist_ok=True)
    started_s = time.monotonic()
    _run([sys.executable, "-m", "build", "--outdir", str(folder), str(ROOT)])
    wheel, sdist = next(folder.glob("kvscope-*.whl")), next(folder.glob("kvscope-*.tar.gz"))
    for path in (wheel, sdist):
        print(f"     {path.name}: {path.stat().st_size / 1e6:.1f} MB")
    print(f"     built in {time.monotonic() - started_s:.0f} s")
    return wheel, sdist


def _check_files(wheel: Path, sdist: Path, failures: Failures) -> None:
    checked = subprocess.run(
        [sys.executable, "-m", "twine", "check", "--strict", wheel, sdist], text=True, capture_output=True, check=False
    )
    failures.check(checked.returncode == 0, "twine check --strict", checked.stdout + checked.stderr)
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
    expected = set(_package_files())
    failures.check(
        names == expected,
        f"the wheel has the {len(expected)} files of the packages in git, and no others",
        f"missing: {sorted(expected - names)[:9]}\nnot in git: {sorted(names - expected)[:9]}",
    )
    with tarfile.open(sdist) as archive:
        unwanted = [
            name for name in archive.getnames() if "__pycache__" in name or "/.venv" in name or "_build/" in name
        ]
    failures.check(not unwanted, "the sdist has no caches", f"{unwanted[:9]}")
    failures.check(
        wheel.stat().st_size < MAX_WHEEL_BYTES and sdist.stat().st_size < MAX_SDIST_BYTES,
        f"the wheel is smaller than {MAX_WHEEL_BYTES / 1e6:.0f} MB and the sdist than {MAX_SDIST_BYTES / 1e6:.0f} MB",
    )


def _package_files() -> Iterator[str]:
    """Yield the path in the wheel of each file of the packages that git tracks."""
    for path in _run(["git", "ls-files", "-z", *PACKAGES]).stdout.split("\0"):
        if path:
            yield path.split("/", 1)[1]


def _try(environment: Environment, wheel: Path, folder: Path, failures: Failures) -> None:
    """Install the wheel with one extra into a new environment, and run its trials there, in an empty home folder."""
    requirement = f"{wheel}[{environment.extra}]" if environment.extra else str(wheel)
    print(f"\n{environment.extra or 'no extra'}")
    started_s = time.monotonic()
    uv = Path(sys.executable).with_name("uv")
    _run([str(uv), "venv", "--quiet", "--python", sys.executable, str(folder / "env")])
    python = folder / "env" / "bin" / "python"
    _run([str(uv), "pip", "install", "--quiet", "--python", str(python), requirement])
    num_bytes = sum(path.stat().st_size for path in (folder / "env").rglob("*") if path.is_file())
    print(f"     installed in {time.monotonic() - started_s:.0f} s, {num_bytes / 1e6:.0f} MB")
    installed = _run([str(uv), "pip", "freeze", "--python", str(python)]).stdout.lower()
    names = {line.split("==")[0].split(" @ ")[0] for line in installed.splitlines()}
    found = names & set(environment.absent)
    if environment.absent:
        failures.check(not found, f"not installed: {', '.join(environment.absent)}", f"found: {found}")
    home = folder / "home"
    home.mkdir()
    variables = {
        name: value for name, value in os.environ.items() if not name.startswith(("KVSCOPE", "XDG_", "PYTHON"))
    }
    variables |= {
        "HOME": str(home),
        "PATH": f"{folder / 'env' / 'bin'}:{os.environ['PATH']}",
        "QT_QPA_PLATFORM": "offscreen",
    }
    version = _version(wheel)
    for trial in environment.trials:
        started_s = time.monotonic()
        done = subprocess.run(
            trial.command, shell=True, cwd=home, env=variables, text=True, capture_output=True, check=False, timeout=600
        )
        printed = done.stdout + done.stderr
        is_ok = done.returncode == trial.exit_code and trial.expected.format(version=version) in printed
        detail = (
            f"exit code {done.returncode}, expected {trial.exit_code} and {trial.expected!r} in:\n{printed[-2000:]}"
        )
        failures.check(is_ok and "Traceback" not in printed, f"{trial.command} ({_seconds_since(started_s)})", detail)


def _check_vllm_versions(wheel: Path, folder: Path, failures: Failures) -> None:
    """Check that installing kvscope next to the newest vLLM and SGLang moves none of their packages."""
    for server in ("vllm", "sglang"):
        without = _resolved([server], folder)
        together = _resolved([server, str(wheel)], folder)
        moved = {
            name: (version, together.get(name)) for name, version in without.items() if together.get(name) != version
        }
        failures.check(not moved, f"kvscope moves none of the {len(without)} packages of {server}", f"{moved}")


def _resolved(requirements: Sequence[str], folder: Path) -> dict[str, str]:
    """Return the version of each package that an installation of `requirements` would install."""
    lines = folder / "requirements.in"
    lines.write_text("\n".join(requirements) + "\n")
    uv = Path(sys.executable).with_name("uv")
    quiet = ("--quiet", "--no-annotate", "--no-header")
    command = [str(uv), "pip", "compile", *quiet, "--prerelease=allow", "--python-version=3.12", str(lines)]
    compiled = _run(command).stdout
    pairs = (line.split(";")[0].strip().partition("==") for line in compiled.splitlines() if "==" in line)
    return {name: version for name, _, version in pairs}


def _version(wheel: Path) -> str:
    return wheel.name.split("-")[1]


def _seconds_since(started_s: float) -> str:
    return f"{time.monotonic() - started_s:.1f} s"


if __name__ == "__main__":
    sys.exit(main())
