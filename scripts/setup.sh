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

# Qt's libraries that wheels do not bring, and the Debian package of each.
qt_libraries="libEGL.so.1:libegl1 libGL.so.1:libgl1 libxkbcommon-x11.so.0:libxkbcommon-x11-0
libdbus-1.so.3:libdbus-1-3 libfontconfig.so.1:libfontconfig1 libxcb-cursor.so.0:libxcb-cursor0
libxcb-icccm.so.4:libxcb-icccm4 libxcb-keysyms.so.1:libxcb-keysyms1 libxcb-shape.so.0:libxcb-shape0
libxcb-xinerama.so.0:libxcb-xinerama0 libxcb-image.so.0:libxcb-image0
libxcb-render-util.so.0:libxcb-render-util0 libxcb-xkb.so.1:libxcb-xkb1"
missing=()
for entry in $qt_libraries; do
    "$python" -c "import ctypes,sys; ctypes.CDLL(sys.argv[1])" "${entry%%:*}" 2>/dev/null || missing+=("${entry##*:}")
done
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

echo "Setting up $venv (the first time downloads several hundred megabytes)"
[ -x "$venv/bin/python" ] || "$python" -m venv "$venv"
"$venv/bin/python" -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[app,engine,dev,docs]'
