#!/usr/bin/env bash
# Makes a virtual environment with everything kvscope and its checks need.
# Usage: scripts/setup.sh VENV   (PYTHON chooses the interpreter)
set -euo pipefail
cd "$(dirname "$0")/.."
venv=${1:?usage: scripts/setup.sh VENV}
python=${PYTHON:-python3}

"$python" - <<'PY' || exit 1
import sys
if not (3, 11) <= sys.version_info[:2] <= (3, 14):
    sys.exit(f"kvscope needs Python 3.11 to 3.14; {sys.executable} is {sys.version.split()[0]}."
             " Name another: make PYTHON=python3.12 …")
try:
    import ensurepip, venv
except ImportError:
    sys.exit("kvscope needs the venv module: sudo apt-get install python3-venv")
PY

# System libraries that Qt's wheels need, and the Debian package of each.
missing=()
while read -r library package; do
    "$python" -c "import ctypes,sys; ctypes.CDLL(sys.argv[1])" "$library" 2>/dev/null || missing+=("$package")
done <resources/kvscope_resources/qt_libraries.txt
if ((${#missing[@]})); then
    if command -v apt-get >/dev/null && [ "$(id -u)" = 0 ]; then
        echo "Installing Qt's system libraries: ${missing[*]}"
        apt-get -o DPkg::Lock::Timeout=120 update -qq
        DEBIAN_FRONTEND=noninteractive apt-get -o DPkg::Lock::Timeout=120 install -y -qq "${missing[@]}" fonts-dejavu-core >/dev/null
    else
        echo "The desktop needs these system libraries: ${missing[*]}" >&2
        echo "On Debian or Ubuntu: sudo apt-get install ${missing[*]}" >&2
        exit 1
    fi
fi

command -v cc >/dev/null || command -v gcc >/dev/null || command -v clang >/dev/null ||
    echo "No C compiler found: the engine will use slower kernels on the CPU (on Debian or Ubuntu: sudo apt-get install gcc)"
echo "Setting up $venv (downloads torch, Qt and more the first time: 2.6 GB on disk, or 6 GB with torch's CUDA build)"
[ -x "$venv/bin/python" ] || "$python" -m venv "$venv"
"$venv/bin/python" -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[app,engine,dev,docs]'
