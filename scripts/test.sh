#!/usr/bin/env bash
# Runs every check: style and imports first, which take seconds; then the tests, and types beside them.
# Usage: scripts/test.sh VENV_BIN WORKERS [PYTEST OPTIONS]
# Fails if any of them does; what mypy says comes last.
set -uo pipefail
cd "$(dirname "$0")/.."
bin=$1 workers=$2
shift 2
[[ $workers != auto ]] || workers=$(($(nproc) + 1)) # half of the time a test waits for another process or a socket

"$bin/ruff" format --check . || exit
"$bin/ruff" check . || exit
"$bin/lint-imports" || exit

said=$(mktemp)
"$bin/mypy" >"$said" 2>&1 &
mypy=$!
trap 'kill "$mypy" 2>/dev/null; rm -f "$said"' EXIT

"$bin/python" -m pytest -n "$workers" --maxprocesses 4 --dist worksteal "$@"
tests=$?
((tests == 2)) && exit 2 # interrupted: nobody waits for the types
wait "$mypy"
types=$?
echo "== mypy"
cat "$said"
((tests == 0 && types == 0))
